"""Whose loop, which thread, and what is left when a device or its loop ends (R11, R12)."""

import asyncio
import gc
import sys
import threading
import warnings
import weakref
from functools import partial
from pathlib import Path

import anyio
import numpy as np
import pytest
import uvloop
from anyio.lowlevel import checkpoint

import streamflow as sf
from streamflow.backends.sim import host_memory

sys.path.append(str(Path(__file__).parent))
from public_calls import nothing, public_calls

BIG = np.ones(1 << 18, np.float32)  # 1 MiB: staged

native = pytest.mark.parametrize("runner", [asyncio.Runner, None], ids=["asyncio", "uvloop"])


def make_runner(runner):
    return runner() if runner else asyncio.Runner(loop_factory=uvloop.new_event_loop)


def in_threads(*targets):
    """Run each in a thread of its own, all at once; a bounded wait. What they raised."""
    errors = []

    def guarded(target):
        try:
            target()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(target,), daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "hangs"
    return errors


# -- threads and loops -------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["another thread", "another loop"])
def test_public_calls_from_elsewhere_raise_at_once(run, open_device, where):
    """Found by introspection: whatever is public and new is asked too."""

    async def main():
        async with open_device() as dev:
            x, stream = dev.zeros(8, np.float32), dev.stream()
            stall = open_device.stall(dev, stream)
            op = dev.launch(nothing, x, stream=stream)
            calls, wrong = list(public_calls(dev, op, x, stream)), []

            def ask():
                for name, call in calls:
                    try:
                        call()
                    except sf.WrongThread:
                        continue
                    except Exception as error:
                        wrong.append((name, error))
                    else:
                        wrong.append((name, "returned"))

            async def ask_there():
                ask()

            target = ask if where == "another thread" else partial(asyncio.run, ask_there())
            errors = await anyio.to_thread.run_sync(in_threads, target)
            stall.release()
            await op
            assert (wrong, errors) == ([], [])
            assert len(calls) > 40
            assert (await dev.get(x) == 0).all()  # nothing of it has happened

    run(main)


def test_what_is_fixed_may_be_read_anywhere(run, open_device):
    async def main():
        async with open_device() as dev:
            x = dev.zeros(8, np.float32)
            op = await_op = dev.get(x)
            await await_op

            def read():
                assert dev.is_healthy
                assert dev.backend == open_device.backend
                assert (op.state, op.name) == (sf.OpState.DONE, op.name)
                assert (x.shape, x.nbytes) == ((8,), 32)
                assert all(repr(each) for each in (dev, x, op))

            assert await anyio.to_thread.run_sync(in_threads, read) == []

    run(main)


def test_c14_objects_made_without_a_loop_serve_two_threads(run, open_device, add_one):
    clock = open_device.clock if open_device.backend == "sim" else "wall"
    settings = sf.Settings(sim=sf.SimOptions(clock=clock))
    devices = [sf.Device(0, backend=open_device.backend, settings=settings) for _ in range(2)]
    together = threading.Barrier(2)

    async def main(dev):
        async with dev:
            for _ in range(20):
                x = dev.zeros(64, np.float32)
                dev.launch(add_one, x, 64)
                dev.launch(add_one, x, 64)
                assert (await dev.get(x) == 2).all()

    def thread(dev):
        together.wait(20)
        run(partial(main, dev))

    assert in_threads(*(partial(thread, dev) for dev in devices)) == []


def test_c14_one_device_for_two_threads_is_refused_in_the_second(run, open_device):
    dev = open_device()
    entered, left = threading.Event(), threading.Event()
    seen = []

    async def first():
        async with dev:
            entered.set()
            await anyio.to_thread.run_sync(left.wait, 20)
            assert (await dev.get(dev.zeros(4)) == 0).all()

    async def second():
        with pytest.raises(RuntimeError, match="entered once"):
            await dev.__aenter__()
        with pytest.raises(sf.WrongThread):
            dev.zeros(4)
        seen.append(True)

    def late():
        try:
            assert entered.wait(20)
            run(second)
        finally:
            left.set()

    assert in_threads(lambda: run(first), late) == []
    assert seen


def test_c14_of_many_threads_that_enter_one_device_at_once_one_does(open_device):
    dev, num = open_device(), 8
    together, outcomes = threading.Barrier(num), []

    async def main():
        together.wait(20)
        try:
            async with dev:
                await dev.zeros(4)
                outcomes.append("entered")
        except RuntimeError as error:
            outcomes.append(str(error))

    assert in_threads(*[lambda: asyncio.run(main())] * num) == []
    assert outcomes.count("entered") == 1
    assert sum("entered once" in each for each in outcomes) == num - 1


def test_loops_in_several_threads_open_the_same_device_again_and_again(run, open_device, add_one):
    async def main():
        async with open_device() as dev, open_device() as other:
            x, y = dev.put(BIG), other.zeros(64, np.float32)
            other.launch(add_one, y, 64)
            assert (await dev.get(x) == 1).all()
            assert (await other.get(y) == 1).all()

    def thread():
        for _ in range(4):
            run(main)

    assert in_threads(*[thread] * 4) == []


# -- tasks -------------------------------------------------------------------------------------


def test_entered_in_one_task_used_in_others_and_left_in_another(run, open_device, add_one):
    """As the lifespan of a web framework does."""

    async def main():
        dev = open_device()
        x = None

        async def start():
            nonlocal x
            await dev.__aenter__()
            x = dev.zeros(64, np.float32)

        async def serve():
            nonlocal x
            with anyio.CancelScope():
                await dev.launch(add_one, x, 64)

        async def stop():
            nonlocal x
            assert (await dev.get(x) == 8).all()
            x = None
            await dev.__aexit__(None, None, None)

        for step, num in ((start, 1), (serve, 8), (stop, 1)):
            async with anyio.create_task_group() as group:
                for _ in range(num):
                    group.start_soon(step)
        with pytest.raises(sf.Closed):
            dev.zeros(4)

    run(main)


def test_a_lifespan_task_that_is_cancelled_leaves_the_device_whole(run, open_device, add_one):
    async def main():
        dev = open_device()
        ready, done = anyio.Event(), anyio.Event()

        async def lifespan():
            async with dev:
                ready.set()
                await done.wait()

        async with anyio.create_task_group() as group:
            group.start_soon(lifespan)
            await ready.wait()
            x = dev.zeros(64, np.float32)
            await dev.launch(add_one, x, 64)
            group.cancel_scope.cancel()
        with pytest.raises(sf.Closed):
            dev.zeros(4)

    run(main)


@native
def test_a_fixture_on_a_runner_serves_calls_of_run_one_after_the_other(
    runner, open_device, add_one
):
    """As pytest-asyncio does: set-up, test and tear-down are calls of ``run`` of their own."""

    async def fixture():
        async with open_device() as dev:
            yield dev

    async def use(dev):
        x = dev.zeros(64, np.float32)
        dev.launch(add_one, x, 64)
        return await dev.get(x)

    with make_runner(runner) as running:
        generator = fixture()

        async def step():
            return await anext(generator, None)

        dev = running.run(step())
        for _ in range(3):
            assert (running.run(use(dev)) == 1).all()
        with pytest.raises(sf.WrongThread):  # the loop does not run here
            dev.zeros(4)
        assert running.run(step()) is None
        assert dev._core.is_closed


# -- what is still alive -----------------------------------------------------------------------


def leave(run, body):
    """The ``ResourceWarning`` of leaving a device after ``body(dev)``."""

    async def main():
        async with sf.Device(
            backend="sim",
            settings=sf.Settings(sim=sf.SimOptions(clock="virtual"), close_timeout_s=0.05),
        ) as dev:
            kept.append(body(dev))
            await dev.synchronize()
        return dev

    kept = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        dev = run(main)
    assert dev._core.is_closed
    return [str(each.message) for each in caught if "still alive" in str(each.message)]


def test_leaving_with_live_arrays_says_so_once(run):
    (message,) = leave(run, lambda dev: [dev.zeros(256, np.float32), dev.zeros(8, np.float64)])
    assert "device 0 was closed with 2 arrays of 1088 bytes still alive" in message
    (message,) = leave(run, lambda dev: dev.put(BIG)[3:])  # a view keeps it too
    assert "with 1 array of 1048576 bytes" in message


def test_leaving_with_nothing_alive_says_nothing(run):
    def body(dev):
        dropped, freed = dev.zeros(256), dev.zeros(256)
        freed.free()
        del dropped
        return [dev.get(dev.zeros(4)), freed, dev.stream(), dev.empty(0)]

    assert leave(run, body) == []


async def fail_in_the_body(dev, kept):
    async with dev:
        kept.append(dev.zeros(8))
        raise KeyError


def test_the_warning_as_an_error_comes_when_everything_is_closed(run, open_device):
    async def main():
        dev = open_device()
        with warnings.catch_warnings():
            warnings.simplefilter("error", ResourceWarning)
            with pytest.raises(ResourceWarning, match="1 array of 32 bytes"):
                async with dev:
                    kept.append(dev.zeros(8, np.float32))
            with pytest.raises(KeyError):  # an error of the body's comes first
                await fail_in_the_body(open_device(), kept)
        assert dev._core.is_closed
        assert dev.live() == {}

    kept = []
    run(main)


# -- loops that end first ----------------------------------------------------------------------


class Ended:
    """A device that its loop left open, with stalled work of every kind."""

    def __init__(self, clock="virtual"):
        self.clock = clock
        self.ops = self.task = None

    def device(self, index=0):
        return sf.Device(
            index, backend="sim", settings=sf.Settings(sim=sf.SimOptions(clock=self.clock))
        )

    async def main(self, ending):
        self.dev = dev = self.device()
        await dev.__aenter__()
        other = self.device(1)
        await other.__aenter__()
        self.worlds = weakref.ref(dev._core.backend.world)
        self.cores = [weakref.ref(dev._core), weakref.ref(other._core)]
        self.array = x = dev.zeros(64, np.float32)
        big, peer = dev.put(BIG), other.zeros(64, np.float32)
        self.result = await dev.get(big)
        stream = dev.stream()
        self.gate = dev.sim.gate(stream)
        self.out = np.zeros(64, np.float32)
        op = dev.launch(nothing, x, stream=stream)
        self.ops = [
            op,
            dev.put(BIG, after=[op]).ready,  # parked, with a need on the host
            dev.get(big, after=[op]),
            dev.get(x, out=self.out, stream=stream),
            other.copy(peer, x),  # another device waits for this one
            other.get(peer),
            dev.copy(np.empty(4), np.ones(4), after=[op]),
        ]
        self.ops[0].add_done_callback(self.ops.append)
        if ending == "raises":
            raise KeyError("main")
        if ending == "unfinished":
            await self.ops[2]

    async def has_begun(self):
        while not self.ops:
            await checkpoint()
        for _ in range(20):
            await checkpoint()

    def enter_another(self, run, num=1):
        async def main():
            for _ in range(num):
                async with self.device() as dev:
                    assert (await dev.get(dev.put(BIG)) == 1).all()

        run(main)

    def threads(self):
        return [t.name for t in threading.enumerate() if t.name.startswith("streamflow")]


@pytest.mark.parametrize("ending", ["returns", "raises"])
@pytest.mark.parametrize("clock", ["virtual", "wall"])
def test_c12_a_loop_that_ends_first_gives_all_back_at_the_next_entering(
    run, monkeypatch, ending, clock
):
    ended = Ended(clock)
    if ending == "raises":
        with pytest.raises(KeyError, match="main"):
            run(partial(ended.main, ending))
    else:
        run(partial(ended.main, ending))
    check_reclaim(ended, run, monkeypatch)


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("clock", ["virtual", "wall"])
def test_c12_a_loop_closed_over_a_pending_task_gives_all_back(make_loop, monkeypatch, clock):
    """Whoever awaits is never cancelled, and can't be woken."""
    ended, loop = Ended(clock), make_loop()
    ended.task = loop.create_task(ended.main("unfinished"))
    ended.task._log_destroy_pending = False  # asyncio would say so, and be right
    loop.run_until_complete(ended.has_begun())
    loop.close()
    check_reclaim(ended, lambda main: asyncio.run(main()), monkeypatch)


def check_reclaim(ended, run, monkeypatch):
    uncaught = []
    monkeypatch.setattr(threading, "excepthook", uncaught.append)
    core = ended.dev._core
    assert core.backend.world.gpus[0].memory.free_nbytes < 4 << 30
    ended.enter_another(run)  # stalled: nothing is given back, and nobody waits for it
    assert not core.backend._is_closed
    ended.gate.release()
    ended.enter_another(run, 3)
    assert core.backend._is_closed
    assert core.pinned.num_live == 1  # the result below
    assert (ended.result == 1).all()
    assert not ended.out.any()  # the caller's memory is left alone once its loop is over
    assert all(op.state in (sf.OpState.DONE, sf.OpState.FAILED) for op in ended.ops)
    with pytest.raises(sf.WrongThread):
        ended.dev.zeros(4)
    del core
    ended.dev = ended.ops = ended.array = ended.gate = ended.task = None
    num_pinned = host_memory.num_blocks()
    ended.result = None  # left to the reaper: the device that is entered next unpins it
    ended.enter_another(run)
    assert host_memory.num_blocks() < num_pinned
    gc.collect()
    assert [core() for core in ended.cores] == [None, None]
    assert ended.worlds() is None
    assert not uncaught


def test_c12_a_lost_device_of_a_loop_that_ended_is_given_back(run):
    async def main():
        ended.dev = dev = ended.device()
        await dev.__aenter__()
        x, stream = dev.zeros(64, np.float32), dev.stream()
        ended.gate = dev.sim.gate(stream)
        dev.sim.fail("launch")
        ended.ops = [dev.launch(nothing, x, stream=stream), dev.put(BIG, after=[x.ready]).ready]

    ended = Ended()
    run(main)
    ended.gate.release()
    ended.enter_another(run, 2)
    assert ended.dev._core.backend._is_closed
    assert not ended.dev.is_healthy


def test_c12_a_staged_copy_that_a_loop_left_half_way_is_given_back(run):
    """Workers report to nobody; jobs that none had begun are forgotten."""

    async def main():
        ended.dev = dev = sf.Device(
            backend="sim",
            settings=sf.Settings(sim=sf.SimOptions(clock=ended.clock), staging_threads=1),
        )
        await dev.__aenter__()
        arrays = [dev.put(BIG) for _ in range(6)]
        outs = [np.zeros_like(BIG) for _ in arrays]
        ended.ops = [dev.get(x, out=out) for x, out in zip(arrays, outs, strict=True)]
        ended.ops += [x.staged for x in arrays]

    ended = Ended()
    run(main)
    core = ended.dev._core
    for _ in range(100):
        ended.enter_another(run)
        if core.backend._is_closed:
            break
    assert core.backend._is_closed
    assert core.pinned.num_live == 0
    assert all(op.state in (sf.OpState.DONE, sf.OpState.FAILED) for op in ended.ops)
    for thread in (*core.background.threads, *core.stagers.threads):
        thread.join(20)
        assert not thread.is_alive()


def test_c12_ops_that_wait_for_room_of_a_loop_that_ended_are_let_go(run, add_one):
    """Ending one op makes another look for room, and asks for a turn that never comes."""

    async def main():
        ended.dev = dev = sf.Device(
            backend="sim",
            settings=sf.Settings(sim=sf.SimOptions(clock=ended.clock), window=2, compute_lanes=1),
        )
        await dev.__aenter__()
        x, y = dev.zeros(64, np.float32), dev.put(BIG)
        await sf.gather(x.ready, y.ready)
        ended.gate = dev.sim.gate("compute0")
        ended.ops = [dev.get(y)]  # waits for a block to be pinned
        ended.ops += [dev.launch(add_one, x, 64) for _ in range(4)]  # some wait for room
        ended.ops += [dev.launch(add_one, y, 64)]  # after the get, in the same lane
        assert [op.state for op in ended.ops][-2:] == [sf.OpState.PARKED] * 2

    ended = Ended()
    run(main)
    ended.gate.release()
    ended.enter_another(run, 2)
    assert ended.dev._core.backend._is_closed
    assert all(op.state in (sf.OpState.DONE, sf.OpState.FAILED) for op in ended.ops)


def test_the_ledger_counts_what_is_held_by_kind_and_line(run):
    async def main():
        async with sf.Device(
            0, backend="sim", settings=sf.Settings(sim=sf.SimOptions(clock="virtual"))
        ) as dev:
            assert dev.live() == {}
            line = sys._getframe().f_lineno
            held = [dev.zeros(4) for _ in range(3)]
            stream = dev.stream()
            await dev.synchronize()
            where = [f"test_lifetimes.py:{line + n}" for n in (1, 2)]
            assert dev.live() == {"array": {where[0]: 3}, "stream": {where[1]: 1}}
            result = await dev.get(held[0])
            assert list(dev.live()["pinned block"].values()) == [1]
            del held, result
            stream.close()
            await dev.synchronize()
            await dev.synchronize()
            assert dev.live() == {}

    run(main)


def test_an_array_in_a_cycle_with_who_frees_it_is_freed_once(run, open_device):
    refused = []

    class Owner:
        def __init__(self, array):
            self.array, self.cycle = array, self

        def __del__(self):  # after the array's own, which is older
            try:
                self.array.free()
            except sf.Closed as error:
                refused.append(error)

    async def main():
        async with open_device() as dev:
            gc.disable()  # not by itself, in the midst of another thread
            try:
                for _ in range(3):
                    Owner(dev.zeros(64, np.float32))
                await dev.synchronize()
                gc.collect()
            finally:
                gc.enable()
            assert len(refused) == 3
            await dev.synchronize()
            assert dev.stats().memory.used_nbytes == 0

    run(main)
