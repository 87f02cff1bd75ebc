"""R7: what launches of a graph take of a stream's queue never holds their caller up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support import SPIN, error_of, turns, until, virtual

import streamflow as sf
from streamflow.errors import DeviceLost, OpCancelled, UpstreamFailed

N = 16
SUBMITTED = sf.OpState.SUBMITTED
PARKED = sf.OpState.PARKED


async def of_fills(dev: sf.Device, y: Any, num: int, name: str = "fills") -> Any:
    """A graph that fills ``y`` so often, with 0, 1, .."""
    with dev.capture(name=name) as graph:
        for value in range(num):
            dev.fill(y, value)
    await graph.ready
    return graph


async def idle(dev: sf.Device) -> None:
    """All has ended, and what holds a stream is compiled."""
    await dev.launch(SPIN, 0.0, grid=1, block=1)
    await dev.synchronize()


def num_blocks(dev: sf.Device) -> int:
    """How often a driver would have held its caller up."""
    return dev.sim.counters["would_block"]


def test_r7_launches_of_many_fills_park_where_they_would_fill_the_queue(run, open_device):
    async def main():
        async with open_device() as dev:
            y = dev.zeros(N, np.float32)
            graph = await of_fills(dev, y, 50)
            stream = dev.stream()
            await idle(dev)
            stall = open_device.stall(dev, stream)
            ops = [graph.launch(stream=stream) for _ in range(200)]
            num = sum(op.state is SUBMITTED for op in ops)
            assert 9 <= num <= 11  # what holds the stream counts, too
            assert {op.state for op in ops[num:]} == {PARKED}
            stall.release()
            await ops[-1]
            assert (await dev.get(y) == 49).all()
            if dev.backend == "sim":
                assert num_blocks(dev) == 0

    run(main)


def test_a_chain_of_kernels_counts_as_one_launch(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            y = dev.zeros(N, np.float32)
            with dev.capture() as graph:
                for _ in range(50):
                    dev.launch(add_one, y, N)
            await graph.ready
            stream = dev.stream()
            await idle(dev)
            stall = open_device.stall(dev, stream)
            ops = [graph.launch(stream=stream) for _ in range(200)]
            assert {op.state for op in ops} == {SUBMITTED}
            stall.release()
            assert (await dev.get(y) == 200 * 50).all()

    run(main)


@pytest.mark.parametrize("num", [600, 1100])
def test_r7_a_graph_that_may_not_fit_waits_until_all_before_it_has_ended(
    run, open_device, add_one, num
):
    async def main():
        async with open_device() as dev:
            x, y = dev.zeros(N, np.float32), dev.zeros(N, np.float32)
            graph = await of_fills(dev, y, num)
            stream = dev.stream()
            await idle(dev)
            stall = open_device.stall(dev, stream)
            before = dev.launch(add_one, x, N, stream=stream)
            op = graph.launch(after=before)
            last = dev.launch(add_one, y, N)
            assert op.state is last.state is PARKED
            if dev.backend == "sim":
                await turns()
                assert op.state is PARKED
            stall.release()
            assert (await dev.get(y) == num).all()
            assert before.done()
            assert op.stream == "graphs"
            if dev.backend == "sim":
                assert num_blocks(dev) == 0

    run(main)


def test_511_places_fit_above_a_window_and_no_more(run):
    async def main():
        async with virtual() as dev:
            x, y, z = (dev.zeros(N, np.float32) for _ in range(3))
            fits, is_large = await of_fills(dev, y, 511), await of_fills(dev, z, 512)
            streams = [dev.stream(), dev.stream()]
            await dev.synchronize()
            gates = [dev.sim.gate(stream) for stream in streams]
            full = [dev.fill(x, 1, stream=streams[0]) for _ in range(255)]  # 510 calls
            first = fits.launch(stream=streams[0])
            dev.fill(dev.zeros(N, np.float32, stream=streams[1]), 1, stream=streams[1])
            second = is_large.launch(stream=streams[1])
            states = {op.state for op in full}, first.state, second.state
            for gate in gates:
                gate.release()
            assert states == ({SUBMITTED}, SUBMITTED, PARKED)
            await second
            assert num_blocks(dev) == 0

    run(main)


def test_a_large_graph_waits_for_its_own_stream_only(run, add_one):
    """Ops before it there, though nothing else orders them; ops behind it follow."""

    async def main():
        async with virtual() as dev:
            x, y, z = (dev.zeros(N, np.float32) for _ in range(3))
            graph = await of_fills(dev, y, 1100)
            stream, other = dev.stream(), dev.stream()
            await dev.synchronize()
            held = dev.sim.gate(other)
            lanes = [dev.sim.gate(name) for name in dev.lanes if name.startswith("compute")]
            for name in (None, *(f"compute{n}" for n in range(4))):
                where = other if name is None else None
                dev.launch(add_one, z, N, stream=where)
            gate = dev.sim.gate(stream)
            before = dev.launch(add_one, x, N, stream=stream)
            op = graph.launch(stream=stream)
            behind = dev.launch(add_one, x, N, stream=stream)
            await turns()
            assert op.state is behind.state is PARKED
            assert "an empty stream" in str(dev.report())
            gate.release()
            await op
            assert before.done()
            await behind
            assert num_blocks(dev) == 0
            for gate in (held, *lanes):
                gate.release()

    run(main)


def test_a_large_graph_does_not_wait_for_busy_lanes(run, add_one):
    async def main():
        async with virtual() as dev:
            y = dev.zeros(N, np.float32)
            arrays = [dev.zeros(N, np.float32) for _ in range(8)]
            graph = await of_fills(dev, y, 1100)
            await dev.synchronize()
            gates = [dev.sim.gate(f"compute{n}") for n in range(4)]
            others = [dev.launch(add_one, x, N) for x in arrays]
            await graph.launch()
            assert not any(op.done() for op in others)
            for gate in gates:
                gate.release()
            await dev.synchronize()

    run(main)


def test_large_graphs_go_one_by_one(run):
    async def main():
        async with virtual() as dev:
            arrays = [dev.zeros(N, np.float32) for _ in range(4)]
            graphs = [await of_fills(dev, y, 1100) for y in arrays]
            ops = [graph.launch() for graph in graphs for _ in range(2)]
            assert sum(op.state is SUBMITTED for op in ops) <= 1
            await dev.synchronize()
            assert all(op.done() for op in ops)
            assert num_blocks(dev) == 0

    run(main)


def test_launches_of_a_large_graph_on_two_streams_go_one_by_one(run):
    """What their functions use isn't told, so only the executable itself orders them."""

    async def main():
        async with virtual() as dev:
            with dev.capture() as graph:
                for _ in range(1100):
                    dev.call(lambda stream: None)
            await graph.ready
            await dev.synchronize()
            first, second = (graph.launch(stream=dev.stream()) for _ in range(2))
            await until(lambda: first.state is not PARKED)
            assert second.state is PARKED
            await second
            assert first.done()
            assert num_blocks(dev) == 0

    run(main)


def test_a_window_as_large_as_the_queue_lets_chains_through(run, add_one):
    async def main():
        async with virtual(window=5000) as dev:
            y = dev.zeros(N, np.float32)
            with dev.capture() as graph:
                dev.launch(add_one, y, N)
                dev.launch(add_one, y, N)
            await graph.ready
            fills = await of_fills(dev, y, 2)
            await dev.synchronize()
            stream = dev.stream()
            gate = dev.sim.gate(stream)
            op, other = graph.launch(stream=stream), fills.launch(stream=stream)
            assert (op.state, other.state) == (SUBMITTED, PARKED)
            gate.release()
            await other

    run(main)


def test_a_large_graph_that_is_launched_before_it_is_built(run):
    async def main():
        async with virtual() as dev:
            y = dev.zeros(N, np.float32)
            stream = dev.stream()
            await dev.synchronize()
            gate = dev.sim.gate(stream)
            held = dev.fill(y, 7, stream=stream)
            with dev.capture() as graph:
                for _ in range(1100):
                    dev.fill(y, 1)
            op = graph.launch()
            await graph.ready
            await turns()
            assert not held.done()
            assert op.state is PARKED
            gate.release()
            await op
            assert num_blocks(dev) == 0

    run(main)


def test_an_update_has_the_places_of_what_runs_then(run):
    async def main():
        async with virtual() as dev:
            y = dev.zeros(N, np.float32)
            graph = await of_fills(dev, y, 1100)
            with graph.update():
                for _ in range(1100):
                    dev.fill(y, 3)
            op = graph.launch()
            await op
            assert op.stream == "graphs"
            assert (await dev.get(y) == 3).all()
            assert num_blocks(dev) == 0

    run(main)


# -- while it waits ------------------------------------------------------------------------


class Waiting:
    """A large graph that waits for an op on a stream that is held, and an op behind it."""

    def __init__(self, dev: sf.Device) -> None:
        self.dev = dev
        self.y = dev.zeros(N, np.float32)

    async def begin(self) -> None:
        dev, y = self.dev, self.y
        graph = await of_fills(dev, y, 1100)
        stream, x = dev.stream(), dev.zeros(N, np.float32)
        await dev.synchronize()
        self.gate = dev.sim.gate(stream)
        self.before = dev.fill(x, 1, stream=stream)
        self.op = graph.launch(after=self.before)
        self.behind = dev.fill(y, 9)
        await turns()
        assert self.op.state is self.behind.state is PARKED


def test_a_large_graph_can_be_cancelled_while_it_waits(run):
    async def main():
        async with virtual() as dev:
            waiting = Waiting(dev)
            await waiting.begin()
            assert waiting.op.cancel()
            assert isinstance(await error_of(waiting.op), OpCancelled)
            waiting.gate.release()
            await waiting.behind
            assert (await dev.get(waiting.y) == 9).all()

    run(main)


def test_a_large_graph_that_waits_fails_with_a_lost_device(run):
    async def main():
        async with virtual() as dev:
            waiting = Waiting(dev)
            await waiting.begin()
            z = dev.empty(N, np.float32)
            with dev.sim.fail(kind="fill"):
                assert isinstance(await error_of(dev.fill(z, 2)), DeviceLost)
            assert isinstance(await error_of(waiting.op), DeviceLost)
            waiting.gate.release()

    run(main)


def test_a_large_graph_that_waits_when_its_device_is_closed_is_never_launched(run):
    async def main():
        dev = virtual(close_timeout_s=0.01)
        with pytest.raises(TimeoutError):
            async with dev:
                waiting = Waiting(dev)
                await waiting.begin()
        assert waiting.op.exception() is not None
        waiting.gate.release()

    run(main)


def test_a_large_graph_fails_with_what_it_waits_for(run):
    async def main():
        async with virtual() as dev:
            y = dev.zeros(N, np.float32)
            graph = await of_fills(dev, y, 1100)
            failing = dev.call(lambda stream: 1 // 0)
            op = graph.launch(after=failing)
            assert isinstance(await error_of(op), UpstreamFailed)
            assert isinstance(await error_of(failing), ZeroDivisionError)

    run(main)


def test_a_large_graph_takes_its_share_of_a_limit_when_it_goes(run):
    async def main():
        async with virtual() as dev:
            arrays = [dev.zeros(1 << 14, np.float32) for _ in range(3)]
            large, other = [await of_fills(dev, array, 1100) for array in arrays[:2]]
            small = await of_fills(dev, arrays[2], 1)
            await dev.synchronize()
            async with dev.scope(limit=1 << 16):
                ops = [graph.launch() for graph in (large, small, other)]
                assert [op.state for op in ops] == [SUBMITTED, PARKED, PARKED]
            assert all(op.done() for op in ops)
            assert num_blocks(dev) == 0

    run(main)


def test_a_large_graph_that_was_cancelled_takes_no_share(run):
    async def main():
        async with virtual() as dev:
            x, y, z = (dev.zeros(1 << 14, np.float32) for _ in range(3))
            large, small = await of_fills(dev, y, 1100), await of_fills(dev, z, 1)
            stream = dev.stream()
            await dev.synchronize()
            gate = dev.sim.gate(stream)
            before = dev.fill(x, 1, stream=stream)
            async with dev.scope(limit=1 << 16):
                op = large.launch(after=before)
                assert op.cancel()
                gate.release()
                await before
                await turns()
                assert await error_of(small.launch()) is None

    run(main)
