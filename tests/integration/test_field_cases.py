"""Field cases, by id (docs/reference/cases)."""

import gc
import subprocess
import sys

import numpy as np
import pytest

import streamflow as sf

ROUND_TRIPS = {
    "broadcast rows": np.broadcast_to(np.arange(4), (2, 4)),
    "broadcast 3-d": np.broadcast_to(np.arange(6.0).reshape(1, 6, 1), (3, 6, 5)),
    "broadcast scalar": np.broadcast_to(np.float32(3), (7,)),
    "size-1 source": np.broadcast_to(np.array([2]), (100_000,)),
    "fortran": np.asfortranarray(np.arange(60_000.0).reshape(200, 300)),
    "strided": np.arange(300_000)[::3],
    "strided columns": np.arange(90_000.0).reshape(300, 300)[:, 10:200:7],
    "read-only": np.frombuffer(np.arange(50, dtype=np.int64).tobytes(), np.int64),
    "big": np.arange(1 << 21, dtype=np.int64).reshape(2, -1)[:, ::-1],
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_c30_any_layout_round_trips(run, open_device, name):
    source = ROUND_TRIPS[name]

    async def main():
        async with open_device() as dev:
            x = dev.put(source)
            into = np.full(source.shape, -1, source.dtype, order="F")
            await dev.get(x, out=into)
            return await dev.get(x), into

    back, into = run(main)
    np.testing.assert_array_equal(back, source)
    np.testing.assert_array_equal(into, source)
    assert back.dtype == source.dtype


def test_c30_get_writes_only_the_selected_elements(run, open_device):
    async def main():
        async with open_device() as dev:
            canvas = np.zeros((400, 400))
            await dev.get(dev.put(np.ones((200, 100))), out=canvas[::2, 50:250:2])
            return canvas

    canvas = run(main)
    expected = np.zeros((400, 400))
    expected[::2, 50:250:2] = 1
    np.testing.assert_array_equal(canvas, expected)


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2)])
def test_c33_empty_arrays_are_successful_no_ops(run, open_device, saxpy, shape):
    async def main():
        async with open_device() as dev:
            x = dev.put(np.empty(shape, np.float32))
            y = dev.zeros(shape, np.float32)
            assert (x.address, x.nbytes, x.shape) == (0, 0, shape)
            dev.fill(x, 1)
            launched = dev.launch(saxpy, 2.0, x, y, 0)
            dev.copy(y, x)
            back = await dev.get(y)
            out = np.empty(shape, np.float32)
            assert await dev.get(y, out=out) is out
            assert launched.done()  # order still held through the empty launch
            await x.free()
            return back

    back = run(main)
    assert back.shape == shape
    assert back.dtype == np.float32


def test_c33_empty_slices(run, open_device):
    async def main():
        async with open_device() as dev:
            x = dev.put(np.arange(10))
            return await dev.get(x[4:4]), await dev.get(x[8:2]), await dev.get(x.split(20)[15])

    for part in run(main):
        assert part.shape == (0,)
        assert part.dtype == np.int64


def test_c33_order_holds_through_empty_arrays(run, open_device, saxpy, spin):
    async def main():
        async with open_device() as dev:
            stream = dev.stream()
            await dev.launch(spin, 0.0, grid=1, block=1)
            x = dev.empty(0, np.float32)
            stall = open_device.stall(dev, stream)
            first = dev.launch(saxpy, 1.0, x, x, 0, stream=stream)
            second = dev.get(x)
            ended_early = first.done() or second.done()
            stall.release()
            await second
            return ended_early, first.done()

    ended_early, first_done = run(main)
    assert not ended_early
    assert first_done


def test_c34_zero_d_stays_zero_d(run, open_device):
    async def main():
        async with open_device() as dev:
            x = dev.put(np.array(5, np.int32))
            assert (x.shape, x.size, x.nbytes) == ((), 1, 4)
            y = dev.full((), 2.5)
            dev.copy(x, np.array(7, np.int32))
            out = np.zeros((), np.int32)
            await dev.get(x, out=out)
            with pytest.raises(ValueError, match=r"shape"):
                dev.get(x, out=np.zeros(1, np.int32))
            with pytest.raises(ValueError, match=r"shape"):
                dev.put(np.zeros(1, np.int32), out=x)
            return await dev.get(x), out, await dev.get(y), await dev.get(x.reshape(1))

    back, out, full, one = run(main)
    assert back.shape == out.shape == full.shape == ()
    assert (int(back), int(out), float(full)) == (7, 7, 2.5)
    assert one.shape == (1,)


@pytest.mark.parametrize("nbytes", [2**31 - 1, 2**31, 2**32, 2**32 + 4])
def test_c37_large_sizes_reach_the_backend_exactly(run, nbytes):
    seen = []

    async def main():
        settings = sf.Settings(sim=sf.SimOptions(clock="virtual", memory_nbytes=1 << 34))
        async with sf.Device(backend="sim", settings=settings) as dev:
            backend = dev._core.backend
            allocate, fill = backend.allocate, backend.fill
            backend.allocate = lambda pool, n, s: seen.append(n) or allocate(pool, n, s)
            backend.fill = lambda dst, pattern, n, s: seen.append((len(pattern), n)) or 1
            x = dev.empty((np.int32(1), nbytes), np.uint8)
            assert (x.nbytes, x.size) == (nbytes, nbytes)
            dev.fill(x, 3)
            y = x.reshape(nbytes)[np.int64(nbytes - 4) : nbytes]
            assert y.address == x.address + nbytes - 4
            await dev.synchronize()
            backend.allocate, backend.fill = allocate, fill

    run(main)
    assert seen == [nbytes, (1, nbytes)]


@pytest.mark.gpu
@pytest.mark.timeout(60)
def test_c37_more_than_four_gib_on_a_gpu(run):
    async def main():
        async with sf.Device(backend="cuda") as dev:
            x = dev.zeros(2**32 + 4, np.uint8)
            dev.fill(x[2**32 :], 7)
            return await dev.get(x[2**32 - 4 :])

    np.testing.assert_array_equal(run(main), [0, 0, 0, 0, 7, 7, 7, 7])


def test_c37_overflow_and_negative_shapes_are_refused(run, open_device):
    async def main():
        async with open_device() as dev:
            for shape in [(2**32, 2**31), (2**62, 2), 2**63]:
                with pytest.raises(ValueError, match=r"2\*\*63"):
                    dev.empty(shape, np.uint8)
            for shape in [-1, (3, -2), (np.int32(-5),)]:
                with pytest.raises(ValueError, match="negative"):
                    dev.empty(shape)
            for shape in [True, 2.0, (np.float32(3),), "3"]:
                with pytest.raises(TypeError):
                    dev.empty(shape)
            assert "array" not in dev.live()
            return (await dev.get(dev.zeros(np.int32(3)))).shape

    assert run(main) == (3,)


def test_cr1_a_new_stream_inherits_nothing_from_a_destroyed_one(run, open_device, add_one):
    """Streams come and go; waits are decided by our own timelines, never by handles."""

    async def main():
        async with open_device() as dev:
            y = dev.zeros(64, np.float32)
            handles, lines = set(), []
            for _ in range(20):
                stream = dev.stream()
                handles.add(int(stream.backend_stream.handle))
                assert stream._line not in lines
                assert stream._line.clock == {}
                assert stream._line.position == 0
                lines.append(stream._line)
                dev.launch(add_one, y, 64, stream=stream)
                stream.close()
                with pytest.raises(sf.Closed):
                    dev.launch(add_one, y, 64, stream=stream)
            assert len({line.uid for line in lines}) == 20
            return await dev.get(y)

    assert (run(main) == 20).all()


def test_cr1_dropped_streams_are_destroyed(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            y = dev.zeros(64, np.float32)
            for _ in range(50):
                dev.launch(add_one, y, 64, stream=dev.stream())
            gc.collect()
            await dev.get(y)
            dev.empty(1)  # any submission drains what finalisers left
            return sum(dev.live().get("stream", {}).values())

    assert run(main) == 0


def test_c18_an_op_with_no_record_yet_is_not_done(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            stream = dev.stream()
            y = dev.zeros(64, np.float32, stream=stream)
            await dev.launch(add_one, y, 64, stream=stream)
            stall = open_device.stall(dev, stream)
            staged = dev.put(np.zeros(1 << 18), stream=stream)  # parked: it has no event yet
            waiting = stream.record()
            early = (staged.ready.done(), waiting.done())
            stall.release()
            await waiting
            return early, staged.ready.done()

    early, ended = run(main)
    assert early == (False, False)
    assert ended


def test_c18_a_pooled_event_with_a_pending_record_is_not_handed_out(run, add_one):
    async def main():
        async with sf.Device(
            backend="sim", settings=sf.Settings(sim=sf.SimOptions(clock="virtual"))
        ) as dev:
            stream = dev.stream()
            y = dev.zeros(64, np.float32, stream=stream)
            for _ in range(5):
                dev.launch(add_one, y, 64, stream=stream)
            await dev.synchronize()
            gate = dev.sim.gate(stream)
            core, held = dev._core, []
            for _ in range(20):
                op = dev.launch(add_one, y, 64, stream=stream)
                held.append(op.ticket.event)
                assert len(set(map(id, held))) == len(held)
                assert op.ticket.event not in core.events
            gate.release()
            await dev.synchronize()
            return len(core.events) >= len(held)

    assert run(main)


def test_cr16_a_size_one_dimension_with_any_stride_is_contiguous(run, open_device):
    base = np.arange(1 << 18, dtype=np.float32)
    odd = np.lib.stride_tricks.as_strided(base, (1, 1 << 18, 1), (12_345, 4, 777))
    assert odd.flags.c_contiguous

    async def main():
        async with open_device() as dev:
            out = np.lib.stride_tricks.as_strided(
                np.zeros(1 << 18, np.float32), (1, 1 << 18, 1), (999, 4, 3)
            )
            await dev.get(dev.put(odd), out=out)
            small = odd[:, :7]
            return out, await dev.get(dev.put(small))

    out, small = run(main)
    np.testing.assert_array_equal(out, odd)
    np.testing.assert_array_equal(small, odd[:, :7])


def test_cr13_importing_makes_no_context_and_touches_no_driver():
    code = (
        "import sys, streamflow; "
        "loaded = [n for n in sys.modules if n == 'cuda' or n.startswith('cuda.')]; "
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_cr13_only_the_device_asked_for_is_opened(run):
    async def main():
        async with sf.Device(
            1, backend="sim", settings=sf.Settings(sim=sf.SimOptions(clock="virtual"))
        ) as dev:
            await dev.get(dev.put(np.arange(4)))
            return list(dev._core.backend.world.gpus)

    assert run(main) == [1]
