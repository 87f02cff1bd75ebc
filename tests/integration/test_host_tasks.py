"""dev.host: the user's own functions as ops, on worker threads or on the loop."""

from __future__ import annotations

import contextvars
import threading
from functools import partial

import anyio
import numpy as np
import pytest
from support import turns, virtual

import streamflow as sf


def test_a_host_task_gets_ndarrays_and_its_result_feeds_later_ops(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            x = dev.put(np.arange(8, dtype=np.float32))
            dev.launch(add_one, x, 8)
            total = dev.host(np.sum, x)
            scaled = dev.host(lambda a, factor: (a * factor).astype(np.float32), x, 2.0)
            both = dev.host(lambda a, t: a - t, scaled, total)
            out = dev.zeros(8, np.float32)
            dev.launch(add_one, out, dev.host(lambda: 4))  # a scalar that an op brings
            assert await total == 36
            assert (await both == 2.0 * np.arange(1, 9) - 36).all()
            assert (await dev.get(out))[:5].tolist() == [1, 1, 1, 1, 0]
            assert total.stream is None
            assert total.name == "sum"

    run(main)


def test_the_result_of_a_host_task_is_put_once_it_is_there(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            x, y = dev.zeros(4, np.float32), dev.zeros(1 << 16, np.float32)
            dev.put(dev.host(lambda n: np.arange(n, dtype=np.float32), 4), out=x)
            dev.put(dev.host(lambda: np.ones(1 << 16, np.float32)), out=y)
            dev.launch(add_one, x, 4)
            assert (await dev.get(x)).tolist() == [1, 2, 3, 4]
            assert (await dev.get(y)).all()
            with pytest.raises(ValueError, match="pass out="):
                dev.put(dev.host(int))
            for bad, kind in ((np.zeros(3, np.float32), ValueError), (np.zeros(4), TypeError)):
                dev.put(dev.host(lambda bad=bad: bad), out=x)
                with pytest.raises(kind, match="the destination has"):
                    await x
            dev.put(dev.host(lambda: 1 / 0), out=x)
            with pytest.raises(sf.UpstreamFailed, match="division by zero"):
                await dev.get(x)
            dev.fill(x, 7)
            assert (await dev.get(x)).tolist() == [7, 7, 7, 7]

    run(main)


def test_a_host_task_runs_on_a_worker_thread_after_its_inputs_in_the_callers_context(run, add_one):
    variable = contextvars.ContextVar("variable", default="nobody")

    async def main():
        async with virtual() as dev:
            variable.set("caller")
            stream, x = dev.stream(), dev.zeros(4, np.float32)
            gate = dev.sim.gate(stream)
            dev.launch(add_one, x, 4, stream=stream)
            seen = []

            def look(a):
                seen.append((threading.current_thread().name, variable.get(), a.tolist()))

            op = dev.host(look, x)
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
            assert not seen
            assert op.state is sf.OpState.PARKED
            gate.release()
            await op
            (name, value, contents) = seen[0]
            assert name.startswith("streamflow-host")
            assert (value, contents) == ("caller", [1, 1, 1, 1])

    run(main)


def test_what_follows_a_host_task_waits_for_it(run, add_one):
    async def main():
        async with virtual() as dev:
            y, order = dev.zeros(4, np.float32), []
            op = dev.host(order.append, "host")
            kernel = dev.launch(add_one, y, 4, after=op)
            last = dev.host(order.append, "last", after=[kernel])
            assert kernel.state is sf.OpState.PARKED
            await last
            assert order == ["host", "last"]
            assert (await dev.get(y)).tolist() == [1, 1, 1, 1]

    run(main)


def test_a_coroutine_function_runs_on_the_loop(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            x = dev.put(np.zeros(4, np.float32))
            main_thread, event = threading.get_ident(), anyio.Event()

            async def step(a, *, bonus):
                await event.wait()
                assert threading.get_ident() == main_thread
                dev.launch(add_one, x, 4)  # it may submit
                return float(a.sum()) + bonus

            op = dev.host(partial(step, bonus=5.0), x)
            later = dev.host(str, op)
            event.set()
            assert await later == "5.0"
            assert (await dev.get(x)).tolist() == [1, 1, 1, 1]

    run(main)


@pytest.mark.parametrize("is_async", [False, True])
def test_an_error_of_a_host_task_is_the_ops_and_says_where_it_was_raised(run, is_async):
    def fails():
        raise KeyError("mine")

    async def fails_async():
        fails()

    async def main():
        async with virtual() as dev:
            op = dev.host(fails_async if is_async else fails)
            after = dev.host(int, op)
            with pytest.raises(KeyError, match="mine") as caught:
                await op
            told = "\n".join(caught.value.__notes__)
            assert "in fails" in told
            assert 'raise KeyError("mine")' in told
            assert "submitted at test_host_tasks.py" in told
            assert "workers.py" not in told
            assert not {"fails", "_run"} & {entry.name for entry in caught.traceback}  # C23
            with pytest.raises(sf.UpstreamFailed) as upstream:
                await after
            assert isinstance(upstream.value.__cause__, KeyError)
            assert dev.is_healthy

    run(main)


def test_host_tasks_are_bounded_and_cancelling_drops_what_has_not_started(run):
    async def main():
        async with sf.Device(
            0, backend="sim", settings=sf.Settings(sim=sf.SimOptions(clock="wall"), host_workers=2)
        ) as dev:
            started, go = threading.Semaphore(0), threading.Event()
            num = []

            def work(n):
                num.append(n)
                started.release()
                assert go.wait(20)
                return n

            ops = [dev.host(work, n) for n in range(6)]
            for _ in range(2):
                await anyio.to_thread.run_sync(started.acquire)
            assert [op.state for op in ops[:2]] == [sf.OpState.STAGING] * 2
            assert [op.state for op in ops[2:]] == [sf.OpState.PARKED] * 4
            assert not ops[0].cancel()
            assert ops[3].cancel()
            assert ops[4].cancel()
            assert "a worker thread" in str(dev.report())
            go.set()
            assert await sf.gather(ops[0], ops[1], ops[2], ops[5]) == [0, 1, 2, 5]
            assert sorted(num) == [0, 1, 2, 5]
            with pytest.raises(sf.OpCancelled):
                await ops[3]

    run(main)


def test_host_tasks_take_turns_between_scopes(run):
    async def main():
        settings = sf.Settings(sim=sf.SimOptions(clock="virtual"), host_workers=1)
        async with sf.Device(0, backend="sim", settings=settings) as dev:
            order = []
            async with dev.scope(name="greedy"):
                for n in range(4):
                    dev.host(order.append, ("greedy", n))
                async with dev.scope(name="modest"):
                    dev.host(order.append, ("modest", 0))
            assert order.index(("modest", 0)) == 2  # greedy 0 had the thread, greedy 1 the turn

    run(main)


def test_bad_host_tasks_are_refused_at_once(run):
    async def main():
        async with virtual() as dev:
            x = dev.zeros(4)
            for bad in (None, 3, "print", x):
                with pytest.raises(TypeError, match="takes a function to call"):
                    dev.host(bad)
            await x.free()
            with pytest.raises(sf.Closed, match="was freed"):
                dev.host(np.sum, x)
            with pytest.raises(TypeError, match="after= takes"):
                dev.host(print, after=3)
            assert "op" not in dev.live()

    run(main)


def test_a_host_copy_between_ndarrays_is_a_host_task(run):
    async def main():
        async with virtual() as dev:
            a, b = np.arange(5.0), np.zeros(5)
            assert (await dev.copy(b, a)) is b
            assert (b == a).all()

    run(main)


def test_r15_results_arrive_in_the_order_of_their_ops_however_the_threads_end(run):
    async def main():
        async with virtual(host_workers=3) as dev:
            ended = [threading.Event() for _ in range(4)]
            ended[3].set()

            def after_the_next(place):
                assert ended[place + 1].wait(10)
                ended[place].set()

            order = []
            ops = [dev.host(after_the_next, place) for place in range(3)]
            for place, op in enumerate(ops):
                op.add_done_callback(lambda _, place=place: order.append(place))
            await sf.gather(*ops)
            await turns()
            assert order == [0, 1, 2]

    run(main)
