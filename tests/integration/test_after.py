"""after= with ops, arrays and futures; cycles (rule R7, C26)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading

import anyio
import numpy as np
import pytest
import trio
from support import turns, virtual

import streamflow as sf

KINDS = ["anyio", "event", "native", "pool"]
EVENTS = ("event", "trio")


class Promise:
    """A future of one of the libraries, resolved in that library's way."""

    def __init__(self, kind):
        self.kind = kind
        make = {
            "anyio": lambda: anyio.Future(),
            "event": lambda: anyio.Event(),
            "trio": trio.Event,
            "asyncio": lambda: asyncio.get_running_loop().create_future(),
            "pool": concurrent.futures.Future,
        }
        self.future = make[kind]()

    def resolve(self, value=None):
        if self.kind == "anyio":
            self.future.return_value = value
        elif self.kind in EVENTS:
            self.future.set()
        elif self.kind == "pool":
            thread = threading.Thread(target=self.future.set_result, args=(value,))
            thread.start()
            thread.join()
        else:
            self.future.set_result(value)

    def fail(self, error):
        if self.kind == "anyio":
            self.future.exception = error
        else:
            self.future.set_exception(error)


@pytest.fixture(params=KINDS)
def kind(request, run):
    if request.param == "native":
        return "trio" if run.__name__ == "_trio" else "asyncio"
    return request.param


def test_an_op_after_a_future_goes_when_it_is_resolved(run, kind, add_one):
    async def main():
        async with virtual() as dev:
            x, stream = dev.zeros(4, np.float32), dev.stream()
            promise = Promise(kind)
            ops = [
                dev.launch(add_one, x, 4, after=promise.future, stream=stream),
                dev.launch(add_one, x, 4, stream=stream),  # program order behind it
                dev.host(int, 3, after=[promise.future, x]),
            ]
            big = dev.put(np.ones(1 << 16, np.float32), after=[promise.future])
            await turns()
            assert {op.state for op in (*ops, big.ready)} == {sf.OpState.PARKED}
            promise.resolve()
            await sf.gather(*ops, big.ready)
            assert (await dev.get(x)).tolist() == [2, 2, 2, 2]
            assert (await dev.get(big)).all()

    run(main)


def test_a_future_that_is_resolved_already_is_no_wait(run, kind, add_one):
    async def main():
        async with virtual() as dev:
            promise = Promise(kind)
            promise.resolve()
            await dev.launch(add_one, dev.zeros(4, np.float32), 4, after=promise.future)

    run(main)


def test_a_failed_future_fails_what_waits_and_surfaces_once(run, kind, add_one):
    if kind in EVENTS:  # which have no result
        return

    async def main():
        dev = virtual()
        with pytest.raises(ExceptionGroup) as caught:
            async with dev:
                x, y = dev.zeros(4, np.float32), dev.zeros(4, np.float32)
                promises = Promise(kind), Promise(kind)
                seen = dev.launch(add_one, x, 4, after=promises[0].future)
                promises[0].fail(ValueError("no data"))
                with pytest.raises(sf.UpstreamFailed, match="no data") as failure:
                    await seen
                assert isinstance(failure.value.__cause__, ValueError)
                dev.launch(add_one, y, 4, after=promises[1].future)  # nobody asks
                promises[1].fail(ValueError("nor here"))
                await turns()
        assert [str(error) for error in caught.value.exceptions] == ["nor here"]

    run(main)


def test_a_cancelled_future_cancels_what_waits(run, kind, add_one):
    if kind in EVENTS:  # which have no result
        return

    async def main():
        async with virtual() as dev:
            promise = Promise(kind)
            op = dev.launch(add_one, dev.zeros(4, np.float32), 4, after=promise.future)
            promise.future.cancel()
            with pytest.raises(sf.OpCancelled, match="cancelled"):
                await op

    run(main)


def test_cancelling_a_parked_op_forgets_its_future(run, kind, add_one):
    async def main():
        async with virtual() as dev:
            promise = Promise(kind)
            op = dev.launch(add_one, dev.zeros(4, np.float32), 4, after=promise.future)
            assert op.cancel()
            assert "op" not in dev.live() or await dev.synchronize() is None
            promise.resolve()
            await turns()
            assert op.state is sf.OpState.CANCELLED

    run(main)


# -- ops that come later (C26) ---------------------------------------------------------------


def test_c26_an_op_scheduled_before_its_dependency_waits_until_that_exists(run, kind, add_one):
    if kind in EVENTS:  # which have no result
        return

    async def main():
        async with virtual() as dev:
            x, y = dev.zeros(4, np.float32), dev.zeros(4, np.float32)
            stream = dev.stream()
            promise = Promise(kind)
            c = dev.launch(add_one, x, 4, after=promise.future, name="c")
            await turns()
            assert c.state is sf.OpState.PARKED  # no record counts as none, not as satisfied
            gate = dev.sim.gate(stream)
            d = dev.launch(add_one, y, 4, stream=stream, name="d")
            promise.resolve(d)
            await turns()
            assert not c.done()
            gate.release()
            await c
            assert d.done()

    run(main)


@pytest.mark.parametrize("on_stream", [False, True], ids=["lanes", "one stream"])
def test_c26_a_cycle_is_refused_with_the_path(run, kind, add_one, on_stream):
    if kind in EVENTS:  # which have no result
        return

    async def main():
        async with virtual() as dev:
            x, y = dev.zeros(4, np.float32), dev.zeros(4, np.float32)
            await sf.gather(x.ready, y.ready)
            stream = dev.stream("only") if on_stream else None
            promise = Promise(kind)
            c = dev.launch(add_one, x, 4, after=promise.future, name="c", stream=stream)
            between = dev.launch(add_one, x, 4, name="b", stream=stream)
            after = () if on_stream else (between,)
            d = dev.launch(add_one, y, 4, after=after, name="d", stream=stream)
            promise.resolve(d)
            with pytest.raises(sf.CycleFound, match=r"c -> d .*-> b .*-> c") as caught:
                await c
            assert isinstance(caught.value, ValueError)
            if on_stream:
                assert "earlier on stream only" in str(caught.value)
                await d  # it did not need c's result, only its place
            else:
                with pytest.raises(sf.UpstreamFailed):
                    await d

    run(main)


def test_after_takes_the_tasks_of_anyio(run, add_one):
    async def main():
        async with virtual() as dev, anyio.create_task_group() as group:
            x = dev.zeros(4, np.float32)

            async def prepare():
                await turns()
                return dev.host(int, 7)

            task = group.start_soon(prepare)
            op = dev.launch(add_one, x, 4, after=[task, x])
            await op

    run(main)


@pytest.mark.parametrize("bad", [3, "x", threading.Event(), object(), np.zeros(3), print])
def test_after_refuses_what_is_nothing_to_wait_for(run, add_one, bad):
    async def main():
        async with virtual() as dev:
            x = dev.zeros(4, np.float32)
            for call in (
                lambda: dev.launch(add_one, x, 4, after=[bad]),
                lambda: dev.put(np.zeros(4), after=[bad]),
                lambda: dev.get(x, after=[bad]),
                lambda: dev.host(print, after=[bad]),
            ):
                with pytest.raises(TypeError, match="after= takes"):
                    call()
            await dev.synchronize()
            assert "op" not in dev.live()

    run(main)


def test_after_refuses_a_future_of_another_loop(add_one):
    async def main():
        other = asyncio.new_event_loop()
        try:
            async with virtual() as dev:
                with pytest.raises(ValueError, match="another event loop"):
                    dev.host(print, after=other.create_future())
        finally:
            other.close()

    asyncio.run(main())
