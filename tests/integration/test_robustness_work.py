"""Order and bytes where parked ops are cancelled and staged copies fail half way (R3, R6, R9)."""

import anyio
import numpy as np
import pytest
from support import turns, virtual

import streamflow as sf

BIG = np.ones(1 << 18, np.float32)  # 1 MiB: staged

set_to = sf.Kernel.from_source(
    'extern "C" __global__ void set_to(float* x, float value) { x[threadIdx.x] = value; }',
    access={"x": "write"},
    body=lambda x, value: x.fill(value),
)


# -- cancelling what is parked -----------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1, 2])
def test_cancelling_one_of_several_parked_writes_keeps_the_order_of_the_rest(run, add_one, which):
    async def main():
        async with virtual() as dev:
            x, stream = dev.zeros(1 << 18, np.float32), dev.stream()
            await x
            gates = [dev.sim.gate(stream), dev.sim.gate("compute0")]
            stalled = dev.launch(add_one, x, 4, stream=stream)
            writes = [
                dev.copy(x, BIG),
                dev.launch(set_to, x, 2.0),
                dev.launch(set_to, x, 3.0),
            ]
            result = dev.get(x)
            assert writes[which].cancel()
            rest = [op for op in writes if op is not writes[which]]
            await turns()
            assert not any(op.done() for op in rest)
            for gate in gates:
                gate.release()
            with anyio.fail_after(20):
                await sf.gather(stalled, *rest)
                with pytest.raises(sf.OpCancelled):
                    await writes[which]
                if which == 2:
                    with pytest.raises(sf.UpstreamFailed):
                        await result
                else:
                    assert (await result == 3).all()
        assert "op" not in dev.live()

    run(main)


def test_cancelling_a_parked_op_keeps_the_program_order_of_its_stream(run, add_one):
    async def main():
        async with virtual() as dev:
            source, stream = dev.stream("source"), dev.stream("stream")
            x, z = dev.zeros(1 << 18, np.float32, stream=source), dev.zeros(4, np.float32)
            await sf.gather(x.ready, z.ready)
            gate = dev.sim.gate(source)
            dev.launch(add_one, x, 4, stream=source)
            first = dev.get(x, out=np.empty_like(BIG), stream=stream)
            dropped = [dev.launch(add_one, z, 4, stream=stream) for _ in range(3)]
            assert dropped[1].cancel()
            assert dropped[2].cancel()
            assert dropped[0].cancel()
            last = stream.record()
            await turns()
            assert not last.done()
            ended = []
            for op in (last, first):
                op.add_done_callback(ended.append)
            gate.release()
            with anyio.fail_after(20):
                await last
            await turns()
            assert ended == [first, last]

    run(main)


# -- staging -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [1, 4])
def test_a_staged_copy_that_fails_half_way_is_over_before_its_array_is_freed(run, num_threads):
    """Other chunks are in flight when one is refused: no use after the free."""

    async def main():
        async with virtual(staging_in_nbytes=1 << 16, staging_threads=num_threads) as dev:
            for nth in (1, 2, 9):
                dev.sim.fail("copy_h2d", sticky=False, nth=nth)
                x = dev.put(np.ones(1 << 20, np.float32))
                with anyio.fail_after(20):
                    with pytest.raises(sf.DeviceError, match="staging"):
                        await x
                    await x.free()
                    del x
                    y = dev.full(1 << 20, 7, np.float32)
                    assert (await dev.get(y) == 7).all()
                    await dev.synchronize()
            assert dev.is_healthy
            del y
            await dev.synchronize()
            assert dev.memory.used_nbytes == 0

    run(main)


def test_a_staged_copy_that_fails_and_nobody_looked_at_surfaces_at_synchronize(run):
    async def main():
        async with virtual() as dev:
            x = dev.zeros(1 << 18, np.float32)
            await x
            for submit in (lambda: dev.put(BIG), lambda: dev.get(x, out=np.empty_like(BIG))):
                dev.sim.fail("copy_h2d", sticky=False)
                dev.sim.fail("copy_d2h", sticky=False)
                submit()
                with anyio.fail_after(20), pytest.raises(ExceptionGroup, match="1 op failed") as e:
                    await dev.synchronize()
                assert isinstance(e.value.exceptions[0], sf.DeviceError)
                await dev.synchronize()  # said once
                for rule in list(dev.sim.rules):
                    rule.clear()

    run(main)


def test_a_host_copy_that_is_cancelled_or_fails_upstream_leaves_its_destination(run, add_one):
    async def main():
        async with virtual() as dev:
            x, y, stream = dev.zeros(4, np.float32), dev.zeros(4, np.float32), dev.stream()
            await sf.gather(x.ready, y.ready)
            gate = dev.sim.gate(stream)
            stalled = dev.launch(add_one, x, 4, stream=stream)
            dev.sim.fail("launch", sticky=False)
            bad = dev.launch(add_one, y, 4)
            z = dev.put(BIG, after=[stalled])
            late = dev.launch(add_one, z, 4)
            outs = [np.zeros(8) for _ in range(5)]
            ones = np.ones(8)
            cancelled = dev.copy(outs[0], ones, after=[stalled])
            failing = dev.copy(outs[1], ones, after=[bad])
            both = dev.copy(outs[2], ones, after=[bad, stalled])
            good = dev.copy(outs[3], ones, after=[stalled, stalled])
            too_late = dev.copy(outs[4], ones, after=[stalled, late])
            assert cancelled.cancel()
            assert late.cancel()
            await turns()
            assert not good.done()
            assert not outs[3].any()
            gate.release()
            with anyio.fail_after(20):
                await good
                for op in (failing, both, too_late):
                    with pytest.raises(sf.UpstreamFailed):
                        await op
                with pytest.raises(sf.OpCancelled):
                    await cancelled
                with pytest.raises(sf.LaunchFailed):
                    await bad
                await dev.synchronize()
            assert [out.any() for out in outs] == [False, False, False, True, False]

    run(main)


def test_after_a_host_step_is_refused_with_what_to_pass_instead(run, add_one):
    async def main():
        async with virtual() as dev:
            x = dev.put(BIG)
            before = dev.stats().num_submitted
            for submit in (
                lambda: dev.launch(add_one, x, 4, after=[x.staged]),
                lambda: dev.put(BIG, out=x, after=[x.staged]),
                lambda: dev.copy(np.empty(1), np.ones(1), after=x.staged),
            ):
                with pytest.raises(ValueError, match="pass the array instead"):
                    submit()
            assert dev.stats().num_submitted == before
            await dev.launch(add_one, x, 4, after=[x])
            return await dev.get(x)

    assert (run(main)[:4] == 2).all()


DTYPES = {
    "reordered": {"names": ["a", "b"], "formats": ["i4", "i4"], "offsets": [4, 0]},
    "padded": {"names": ["a", "b"], "formats": ["i1", "f8"], "offsets": [0, 8]},
    "trailing": {"names": ["a", "b"], "formats": ["i4", "u2"], "offsets": [0, 4], "itemsize": 16},
    "leading": {"names": ["a", "b"], "formats": ["i2", "u2"], "offsets": [6, 10]},
    "overlapping": {"names": ["a", "b"], "formats": ["u4", "u2"], "offsets": [0, 2]},
}


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("num", [5, 1 << 17])
def test_c35_structured_dtypes_of_any_layout_round_trip(run, name, num):
    dtype = np.dtype(DTYPES[name])
    source = np.zeros(num, dtype)
    source["a"] = np.arange(num) % 100
    source["b"] = 7 + np.arange(num) % 90

    async def main():
        async with virtual() as dev:
            x, out = dev.put(source), np.zeros(num, dtype)
            await dev.get(x, out=out)
            filled = await dev.get(dev.full(num, source[3], dtype))
            return x.dtype, await dev.get(x), out, filled

    on_device, back, out, filled = run(main)
    assert on_device == back.dtype == filled.dtype == dtype
    for field in ("a", "b"):
        np.testing.assert_array_equal(back[field], source[field])
        np.testing.assert_array_equal(out[field], source[field])
        assert (filled[field] == source[field][3]).all()


def test_c35_a_subarray_dtype_is_refused_before_anything_is_allocated(run):
    async def main():
        async with virtual() as dev:
            for make in (dev.empty, dev.zeros, lambda n, dtype: dev.full(n, 1, dtype)):
                with pytest.raises(TypeError, match="cannot be moved"):
                    make(4, np.dtype(("i4", (2,))))
            with pytest.raises(TypeError, match="cannot be moved"):
                dev.zeros(4).view(np.dtype(("i4", (2,))))
            await dev.synchronize()
            return dev.live(), dev.sim.counters["allocate"]

    live, num_allocated = run(main)
    assert live == {}
    assert num_allocated == 1
