"""``dev.mapped``: memory of the host that kernels use where it is."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import anyio
import numpy as np
import pytest
from support import error_of, native, turns, until, virtual

import streamflow as sf
from streamflow.memory.page_locked import find

NUM = 1000


async def num_live(dev: sf.Device) -> int:
    """Pinned blocks in use once what was dropped has been freed."""
    gc.collect()
    await dev.synchronize()
    return dev.pinned.stats().num_live


# -- kernels and the host -------------------------------------------------------------------------


def test_a_kernel_reads_what_the_host_wrote(run, open_device, saxpy) -> None:
    async def main() -> None:
        async with open_device() as dev:
            y = dev.zeros(NUM, np.float32)
            m = await dev.mapped(NUM, np.float32)
            for value in (1, 2, 3):
                m.host[:] = value
                dev.launch(saxpy, 1.0, m, y, NUM)
                await m.idle()
            assert (await dev.get(y) == 6).all()
            m.free()
            y.free()

    run(main)


def test_a_kernel_reads_the_hosts_bytes_when_it_runs(run, open_device, saxpy) -> None:
    async def main() -> None:
        async with open_device() as dev:
            y = dev.zeros(NUM, np.float32)
            m = await dev.mapped(NUM, np.float32)
            stream = dev.stream()
            m.host[:] = 1
            dev.launch(saxpy, 0.0, m, y, NUM, stream=stream)  # loads the kernel
            await stream.synchronize()
            held = open_device.stall(dev, stream)
            dev.launch(saxpy, 1.0, m, y, NUM, stream=stream)
            m.host[:] = 2
            held.release()
            assert (await dev.get(y) == 2).all()
            m.free()
            y.free()

    run(main)


def test_the_host_reads_what_a_kernel_wrote(run, open_device, add_one) -> None:
    async def main() -> None:
        async with open_device() as dev:
            m = await dev.mapped((10, 100), np.float32)
            m.host[:] = np.arange(NUM).reshape(10, 100)
            for _ in range(3):
                dev.launch(add_one, m, NUM)
            await m
            np.testing.assert_array_equal(m.host, 3 + np.arange(NUM).reshape(10, 100))
            m.free()

    run(main)


def test_it_stands_wherever_a_device_array_does(run, open_device, add_one, saxpy) -> None:
    async def main() -> None:
        async with open_device() as dev:
            m = await dev.mapped(NUM, np.float32)
            data = np.arange(NUM, dtype=np.float32)
            dev.put(data, out=m)
            np.testing.assert_array_equal(await dev.get(m), data)
            other = dev.full(NUM, 7, np.float32)
            await dev.copy(m, other)
            assert (m.host == 7).all()
            dev.fill(m, 2)
            dev.copy(other, m)
            dev.launch(add_one, m[10:20], 10)
            dev.launch(saxpy, 1.0, m.reshape(10, 100).reshape(NUM), other, NUM)
            low, high = m.split(2)
            dev.fill(low, 0)
            await dev.host(np.sum, high, after=m)
            await m.idle()
            assert (m.host[:500] == 0).all()
            assert (m.host[500:] == 2).all()
            assert (await dev.get(other))[10:20].tolist() == [5.0] * 10
            m.free()
            other.free()

    run(main)


def test_foreign_code_takes_it(run) -> None:
    async def main() -> None:
        async with virtual() as dev:
            m = await dev.mapped(NUM, np.float32)
            m.host[:] = 3
            total = await dev.call(lambda stream, a: float(a.sum()), m, reads=[m])
            assert total == 3 * NUM
            m.free()

    run(main)


def test_copies_of_the_hosts_side_are_ordered_with_kernels(run, open_device, add_one) -> None:
    """Both sides have the same hazards."""

    async def main() -> None:
        async with open_device() as dev:
            m = await dev.mapped(NUM, np.float32)
            usable = find(m.host)
            assert usable is not None
            assert usable.region is m._region
            m.free()

    run(main)


@pytest.mark.parametrize("dtype", [np.float64, "?", ">i4", [("a", "i1"), ("b", "f8")]])
@pytest.mark.parametrize("shape", [(), (3,), (2, 5)])
def test_any_shape_and_dtype(run, open_device, shape: tuple[int, ...], dtype: Any) -> None:
    async def main() -> None:
        kind = np.dtype(dtype)
        async with open_device() as dev:
            m = await dev.mapped(shape, kind)
            assert (m.host.shape, m.host.dtype) == (m.shape, m.dtype) == (shape, kind)
            data = np.arange(m.nbytes, dtype=np.uint8)
            if kind == "?":
                data &= 1
            m.host[...] = data.view(kind).reshape(shape)
            result = await dev.get(m)
            assert result.tobytes() == data.tobytes()
            assert (result.shape, result.dtype) == (shape, kind)
            m.free()

    run(main)


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2)])
def test_c33_an_empty_one_does_nothing(run, open_device, add_one, shape: tuple[int, ...]) -> None:
    async def main() -> None:
        async with open_device() as dev:
            before = await num_live(dev)
            m = await dev.mapped(shape, np.float32)
            assert m.host.shape == m.shape == shape
            assert await num_live(dev) == before
            dev.launch(add_one, m, 0)
            await m.idle()
            assert (await dev.get(m)).shape == shape
            m.free()

    run(main)


# -- idle -----------------------------------------------------------------------------------------


def test_idle_waits_for_reads_and_writes_and_for_parked_ops(run, add_one, saxpy) -> None:
    async def main() -> None:
        async with virtual() as dev:
            m, y = await dev.mapped(NUM, np.float32), dev.zeros(NUM, np.float32)
            assert m.idle().done()
            stream, event = dev.stream(), anyio.Event()
            with dev.sim.gate(stream):
                read = dev.launch(saxpy, 1.0, m, y, NUM, stream=stream)
                idle = m.idle()
                await turns()
                assert not idle.done()
            await idle
            assert read.done()
            parked = dev.launch(add_one, m, NUM, after=event)
            idle, part = m.idle(), m[:3]
            await turns()
            assert not idle.done()
            event.set()
            await idle
            assert parked.done()
            del part
            m.free()
            y.free()

    run(main)


def test_idle_only_tells_of_the_end_of_ops_that_failed(run, add_one) -> None:
    async def main() -> None:
        async with virtual() as dev:
            m = await dev.mapped(NUM, np.float32)
            dev.sim.fail("launch", sticky=False)
            failed = dev.launch(add_one, m, NUM)
            await m.idle()
            assert isinstance(await error_of(failed), sf.LaunchFailed)
            dev.fill(m, 0)  # a full overwrite clears it
            await m
            m.free()

    run(main)


# -- the end --------------------------------------------------------------------------------------


def test_r6_the_memory_returns_when_no_op_uses_it_any_more(run, open_device, saxpy) -> None:
    async def main() -> None:
        async with open_device() as dev:
            y, stream = dev.zeros(NUM, np.float32), dev.stream()
            before = await num_live(dev)
            m = await dev.mapped(NUM, np.float32)
            m.host[:] = 5
            dev.launch(saxpy, 0.0, m, y, NUM, stream=stream)
            await stream.synchronize()
            held = open_device.stall(dev, stream)
            read = dev.launch(saxpy, 1.0, m, y, NUM, stream=stream)
            del m
            gc.collect()
            dev.zeros(1).free()  # drains what was dropped
            await turns()
            assert read.done() or dev.pinned.stats().num_live == before + 1
            held.release()
            assert (await dev.get(y) == 5).all()
            assert await num_live(dev) == before
            y.free()

    run(main)


def test_the_hosts_side_keeps_the_memory(run, open_device) -> None:
    async def main() -> None:
        async with open_device() as dev:
            before = await num_live(dev)
            m = await dev.mapped(NUM, np.float32)
            part = m.host[3:5]
            part[:] = 4
            del m
            assert await num_live(dev) == before + 1
            assert (part == 4).all()
            del part
            assert await num_live(dev) == before

    run(main)


def test_a_view_keeps_the_memory(run, open_device, add_one) -> None:
    async def main() -> None:
        async with open_device() as dev:
            before = await num_live(dev)
            m = await dev.mapped(NUM, np.float32)
            m.host[:] = 1
            part = m[3:5]
            del m
            assert await num_live(dev) == before + 1
            dev.launch(add_one, part, 2)
            assert (await dev.get(part) == 2).all()
            del part
            assert await num_live(dev) == before

    run(main)


def test_freed_by_hand_its_host_side_is_revoked(run, open_device, add_one) -> None:
    async def main() -> None:
        async with open_device() as dev:
            before = await num_live(dev)
            m = await dev.mapped(NUM, np.float32)
            host = m.host
            dev.fill(m, 1)
            await m.free()
            assert m.is_freed
            with pytest.raises(ValueError, match="read-only"):
                host[0] = 1
            with pytest.raises(ValueError, match="released"):
                find(host)
            for use in (m.idle, m.free, lambda: dev.launch(add_one, m, NUM), lambda: dev.get(m)):
                with pytest.raises(sf.Closed, match="was freed"):
                    use()
            assert await num_live(dev) == before

    run(main)


def test_a_view_frees_all_of_it_and_revokes_the_hosts_side(run, open_device) -> None:
    async def main() -> None:
        async with open_device() as dev:
            m = await dev.mapped(NUM, np.float32)
            await m[3:5].free()
            with pytest.raises(ValueError, match="read-only"):
                m.host[0] = 1

    run(main)


def test_r9_its_free_names_the_line_that_called_for_it(run) -> None:
    async def main() -> None:
        async with virtual() as dev:
            m = await dev.mapped(NUM, np.float32)
            assert m.free().where.startswith("test_mapped.py:")

    run(main)


def test_memory_is_handed_on_with_hazards_of_its_own(run, open_device) -> None:
    async def main() -> None:
        async with open_device() as dev:
            for value in range(20):
                m = await dev.mapped(NUM, np.float32)
                dev.fill(m, value)
                assert (await dev.get(m) == value).all()
                del m
            assert await num_live(dev) <= 1

    run(main)


def test_a_device_closed_with_one_warns_and_the_host_may_still_read(run, open_device) -> None:
    async def main() -> None:
        with pytest.warns(ResourceWarning, match="1 array of 4000 bytes"):  # noqa: PT031
            async with open_device() as dev:
                m = await dev.mapped(NUM, np.float32)
                host = m.host
                dev.fill(m, 3)
        gc.collect()
        host.copy()  # it is there, whatever it holds
        with pytest.raises(sf.Closed):
            m.idle()

    run(main)


def test_c12_one_of_a_loop_that_ended_is_given_back(run, add_one) -> None:
    async def first() -> None:
        dev = virtual()
        await dev.__aenter__()
        m = await dev.mapped(NUM, np.float32)
        kept.extend([dev, m])
        await dev.launch(add_one, m, NUM)

    async def second() -> None:
        async with virtual():
            pass
        blocks = kept[0]._core.pinned
        assert blocks.num_live == 0

    kept: list[Any] = []
    run(first)
    run(second)


def test_a_lost_device_gives_nothing_back_and_closes(run, add_one) -> None:
    async def main() -> None:
        async with virtual() as dev:
            m = await dev.mapped(NUM, np.float32)
            dev.sim.fail("launch", sticky=True)
            assert isinstance(await error_of(dev.launch(add_one, m, NUM)), sf.DeviceLost)
            with pytest.raises(sf.DeviceLost):
                m.idle()
            with pytest.raises(sf.DeviceLost):
                await dev.mapped(3)

    run(main)


# -- waiting, and bad input -----------------------------------------------------------------------

MIB = 1 << 20


def test_it_waits_for_pinned_memory_in_its_turn(run) -> None:
    async def main() -> None:
        async with virtual(pinned_budget_nbytes=2 * MIB) as dev:
            first = await dev.mapped(2 * MIB, np.uint8)
            with pytest.raises(sf.DeadlineExceeded):
                await dev.mapped(2 * MIB, np.uint8, timeout=1.0)
            got: list[sf.MappedArray] = []

            async def wait() -> None:
                got.append(await dev.mapped(2 * MIB, np.uint8))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait)
                await turns()
                assert not got
                first.free()
            assert got[0].host.nbytes == 2 * MIB
            got.pop().free()
            assert await num_live(dev) == 0

    run(main)


@pytest.mark.parametrize("num_turns", range(6))
def test_cancelled_at_any_turn_it_leaves_nothing(run, num_turns: int) -> None:
    async def main() -> None:
        async with virtual() as dev:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(dev.mapped, MIB, np.uint8)
                await turns(num_turns)
                tasks.cancel_scope.cancel()
            with anyio.fail_after(20):
                while await num_live(dev):
                    await turns(1)
            assert not dev.live()

    run(main)


@native
def test_natively_cancelled_it_leaves_nothing(run) -> None:
    import asyncio

    async def main() -> None:
        async with virtual() as dev:
            task = asyncio.get_running_loop().create_task(dev.mapped(MIB, np.uint8))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            del task
            await until(lambda: dev.pinned.stats().num_live == 0)

    run(main)


@pytest.mark.parametrize("num_turns", range(6))
def test_one_that_comes_after_its_device_was_closed_is_none(run, num_turns: int) -> None:
    async def main() -> None:
        dev = virtual()
        await dev.__aenter__()
        ended: list[Any] = []

        async def ask() -> None:
            try:
                m = await dev.mapped(MIB, np.uint8)
            except sf.Closed as error:
                ended.append(error)
            else:
                ended.append(dev._core.is_closing)
                del m

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                await turns(num_turns)
                await dev.__aexit__(None, None, None)
        assert len(ended) == 1
        assert ended[0] is not True
        gc.collect()
        assert dev._core.pinned.num_live == 0

    run(main)


def test_a_failure_to_map_gives_the_block_back(run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with virtual() as dev:
            backend = dev._core.backend

            def refuse(address: int, nbytes: int) -> int:
                raise sf.DeviceError("no such thing")

            with monkeypatch.context() as patch:
                patch.setattr(backend, "map_pinned", refuse)
                with pytest.raises(sf.DeviceError, match="mapping 4000 bytes: no such thing"):
                    await dev.mapped(NUM, np.float32)
            assert await num_live(dev) == 0

    run(main)


def test_where_the_device_sees_it_is_asked_of_the_backend(
    run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with virtual() as dev:
            backend = dev._core.backend
            m = await dev.mapped(NUM, np.float32)
            assert m.address == m.host.ctypes.data
            assert dev.sim.counters["map_pinned"] == 1
            m.free()
            assert dev.sim.counters["unmap_pinned"] == 1
            seen = backend.map_pinned
            with monkeypatch.context() as patch:
                patch.setattr(backend, "map_pinned", lambda *args: seen(*args) + 512)
                m = await dev.mapped(NUM, np.float32)
            assert m.address == m.host.ctypes.data + 512
            m.free()

    run(main)


@pytest.mark.parametrize(
    ("args", "timeout", "kind"),
    [
        ((3, object), None, TypeError),
        ((-1,), None, ValueError),
        ((1.5,), None, TypeError),
        ((True,), None, TypeError),
        ((3,), -1, ValueError),
        ((3,), True, ValueError),
        ((9 * MIB, np.uint8), None, ValueError),
        ((1 << 62, np.float64), None, ValueError),
    ],
)
def test_bad_input_is_a_clear_error(run, args: Any, timeout: Any, kind: type[Exception]) -> None:
    async def main() -> None:
        async with virtual(pinned_budget_nbytes=8 * MIB) as dev:
            with pytest.raises(kind):
                await dev.mapped(*args, timeout=timeout)
            assert await num_live(dev) == 0

    run(main)


def test_it_belongs_to_its_device(run, add_one) -> None:
    async def main() -> None:
        async with virtual(devices=2) as one, virtual(1, devices=2) as other:
            m = await one.mapped(NUM, np.float32)
            with pytest.raises(ValueError, match="another device"):
                other.launch(add_one, m, NUM)
            half = await one.mapped(NUM, np.float16)
            with pytest.raises(TypeError, match="takes float32, found float16"):
                one.launch(add_one, half, NUM)
            m.free()
            half.free()
        with pytest.raises(sf.Closed):
            await one.mapped(3)

    run(main)
