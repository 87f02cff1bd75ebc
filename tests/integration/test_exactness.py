"""Exact waits (R4), the window (R7) and real overlap, on both backends."""

import anyio.lowlevel
import numpy as np
import pytest

import streamflow as sf


def test_awaiting_an_op_does_not_wait_for_what_is_queued_behind_it(run, open_device, spin):
    async def main():
        async with open_device() as dev:
            stream = dev.stream()
            await dev.launch(spin, 0.0, grid=1, block=1, stream=stream)  # compiled and loaded
            ops = [
                dev.launch(spin, 0.01, grid=1, block=1, stream=stream, name=f"op{k}")
                for k in range(20)
            ]
            await ops[4]
            after_four = [op.done() for op in ops]
            await ops[-1]
            return after_four, [op.done() for op in ops]

    after_four, at_the_end = run(main)
    assert after_four[:5] == [True] * 5
    assert not any(after_four[8:])  # a GPU may have gone on a little meanwhile
    assert all(at_the_end)


def test_r4_one_wait_for_a_chain_across_two_streams(run, add_one):
    async def main():
        settings = sf.Settings(sim=sf.SimOptions(clock="virtual"))
        async with sf.Device(backend="sim", settings=settings) as dev:
            y = dev.zeros(64, np.float32)
            first, second = dev.stream(), dev.stream()
            dev.launch(add_one, y, 64, stream=first)
            before = dev.sim.counters["wait"]
            for _ in range(10):
                dev.launch(add_one, y, 64, stream=second)
            return dev.sim.counters["wait"] - before

    assert run(main) == 1


def test_r5_free_goes_on_the_stream_of_its_only_outstanding_use(run, add_one):
    async def main():
        settings = sf.Settings(sim=sf.SimOptions(clock="virtual"))
        async with sf.Device(backend="sim", settings=settings) as dev:
            stream = dev.stream("own")
            y = dev.zeros(64, np.float32, stream=stream)
            dev.launch(add_one, y, 64, stream=stream)
            before = dev.sim.counters["wait"]
            only = y.free()
            z = dev.zeros(64, np.float32)
            await dev.get(z)
            dev.launch(add_one, z, 64, stream=stream)
            gate = dev.sim.gate(stream)
            dev.get(z, stream=dev.stream("other"))
            used_twice = z.free()
            gate.release()
            return only.stream, used_twice.stream, before, dev.sim.counters["wait"]

    only, used_twice, _, _ = run(main)
    assert only == "own"
    assert used_twice in {"other", "free"}  # after both uses, on no copy or compute lane


def test_r7_launches_behind_a_stalled_kernel_never_block_the_loop(run, open_device, add_one):
    """5 000 launches: the window parks them, and the loop's heart goes on beating."""

    async def main():
        async with open_device() as dev:
            stream = dev.stream()
            y = dev.zeros(64, np.float32, stream=stream)
            await dev.launch(add_one, y, 64, stream=stream)
            stall = open_device.stall(dev, stream, 0.3)
            clock_s = dev._core.backend.clock_s  # virtual, or the host's: whatever blocks shows
            gaps, last = [], clock_s()
            ops = []
            for _ in range(50):
                ops += [dev.launch(add_one, y, 64, stream=stream) for _ in range(100)]
                await anyio.lowlevel.checkpoint()
                now = clock_s()
                gaps.append(now - last)
                last = now
            parked = sum(op.state is sf.OpState.PARKED for op in ops)
            outstanding = stream._line.num_outstanding
            stall.release()
            await ops[-1]
            return parked, outstanding, max(gaps), (await dev.get(y)).tolist()

    parked, outstanding, gap_s, values = run(main)
    assert values == [5001.0] * 64
    if open_device.clock == "virtual":
        assert gap_s == 0.0  # nothing waited for the device's clock
    if open_device.backend == "cuda":  # a blocked submission: a gap of the stall's length
        assert gap_s < 0.25
    else:  # on the wall clock a blocked submission would never come back: the gate is closed
        assert parked > 4000
        assert outstanding <= 512 + 2


@pytest.mark.parametrize(
    ("lanes", "n"),
    # Staged copies go through private streams, so they overlap whatever stream they end on.
    [("own", 1 << 13), ("own", 1 << 17), ("one", 1 << 13)],
    ids=["own-small", "own-staged", "one-small"],
)
def test_overlap_of_equal_stages_on_the_virtual_clock(run, lanes, n):
    """N items over three equal stages span at most N + 2 of them; on one stream, no overlap."""
    n_items = 12
    settings = sf.Settings(sim=sf.SimOptions(clock="virtual"))

    async def main():
        async with sf.Device(backend="sim", settings=settings) as dev:
            with dev.trace() as probe:
                x = dev.put(np.zeros(n, np.float32))
                await dev.get(x)
            stage_s = max(op.duration_s for op in probe.ops if op.kind in {"put", "get"})
            work = sf.Kernel.from_source(
                'extern "C" __global__ void work(float* x) { x[0] += 0.f; }',
                body=lambda x: np.add(x, 1, out=x),
                cost=lambda x: stage_s,
            )
            stream = dev.stream() if lanes == "one" else None
            for _ in range(2):  # the first round pins what both need
                results = []
                with dev.trace() as trace:
                    for k in range(n_items):
                        x = dev.put(np.full(n, k, np.float32), stream=stream)
                        dev.launch(work, x, stream=stream)
                        results.append(dev.get(x, stream=stream))
                        x.free()
                    arrays = [(await op).copy() for op in results]
                    del results
                    await dev.synchronize()
            return stage_s, trace.overlap(), arrays

    stage_s, overlap, arrays = run(main)
    for k, array in enumerate(arrays):
        assert (array == k + 1).all()
    if lanes == "own":
        assert overlap.span_s <= (n_items + 2) * stage_s * 1.001
        assert overlap.ratio > 0.9
    else:
        assert overlap.ratio <= 0.05


def test_small_ops_and_their_idle_cost_no_queries(run):
    async def main():
        settings = sf.Settings(sim=sf.SimOptions(clock="virtual"))
        async with sf.Device(backend="sim", settings=settings) as dev:
            await dev.get(dev.put(np.arange(10)))
            await dev.synchronize()
            before = dev.sim.counters["is_done"]
            for _ in range(200):
                await anyio.lowlevel.checkpoint()
            return dev.sim.counters["is_done"] - before

    assert run(main) == 0


def test_many_parked_ops_leave_at_once_without_recursion(run, add_one):
    """Seen on a GPU first: one poll retired a whole window, and its followers recursed."""

    async def main():
        settings = sf.Settings(sim=sf.SimOptions(clock="virtual"), window=1022)
        async with sf.Device(backend="sim", settings=settings) as dev:
            stream = dev.stream()
            y = dev.zeros(64, np.float32, stream=stream)
            gate = dev.sim.gate(stream)
            ops = [dev.launch(add_one, y, 64, stream=stream) for _ in range(2000)]
            gate.release()
            while dev._core.backend.advance(0):  # the device goes on; nobody looks
                pass
            await ops[-1]
            return await dev.get(y)

    assert (run(main) == 2000).all()
