"""``dev.pin``: the program's own memory, page-locked for as long as it says."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from direct_copies import copy_in, copy_out, is_direct
from support import error_of, turns, virtual

import streamflow as sf
from streamflow.memory.registered import num_registered

NUM = 1 << 18


@pytest.fixture(autouse=True)
def no_pin_is_left() -> Any:
    before = num_registered()
    yield
    gc.collect()
    assert num_registered() == before


def floats(num: int = NUM) -> Any:
    return np.arange(num, dtype=np.float32)


# -- pin and unpin ------------------------------------------------------------------------------


def test_copies_use_the_memory_as_it_is_while_it_is_pinned(run, open_device) -> None:
    async def main() -> None:
        x, back = floats(), np.zeros(NUM, np.float32)
        async with open_device() as dev:
            assert not is_direct(x)
            async with dev.pin(x) as pin, dev.pin(back):
                assert pin.is_pinned
                assert pin.nbytes == x.nbytes
                assert is_direct(x)
                assert is_direct(x[100:200:3])
                y, _ = copy_in(dev, x)
                await copy_out(dev, y, back)
                np.testing.assert_array_equal(back, x)
            assert not pin.is_pinned
            assert not is_direct(x)
            np.testing.assert_array_equal(await dev.get(dev.put(x)), x)

    run(main)


def test_a_pin_is_awaited_and_unpinned_by_hand(run, open_device) -> None:
    async def main() -> None:
        x = floats()
        async with open_device() as dev:
            pin = dev.pin(x)
            assert await pin is pin
            assert await pin is pin  # again: it is
            assert is_direct(x)
            await pin.unpin()
            assert not is_direct(x)
            assert not dev.live().get("pin")
            with pytest.raises(sf.Closed, match="was unpinned already"):
                pin.unpin()

    run(main)


def test_leaving_the_block_after_unpinning_by_hand_does_nothing(run, open_device) -> None:
    async def main() -> None:
        async with open_device() as dev, dev.pin(floats()) as pin:
            await pin.unpin()

    run(main)


def test_what_is_pinned_is_seen_by_its_line(run, open_device) -> None:
    async def main() -> None:
        async with open_device() as dev, dev.pin(floats()):
            ((line, num),) = dev.live()["pin"].items()
            assert line.startswith("test_pin.py:")
            assert num == 1

    run(main)


def test_a_block_left_by_an_error_unpins(run, open_device) -> None:
    async def main() -> None:
        x = floats()
        async with open_device() as dev:
            with pytest.raises(ZeroDivisionError):
                async with dev.pin(x):
                    raise ZeroDivisionError
            assert not is_direct(x)

    run(main)


# -- CR11 -----------------------------------------------------------------------------------------


def test_cr11_pin_unpin_and_pin_again(run, open_device) -> None:
    async def main() -> None:
        x = floats()
        async with open_device() as dev:
            for value in range(4):
                async with dev.pin(x):
                    x[:] = value
                    y, _ = copy_in(dev, x)
                    assert (await dev.get(y) == value).all()

    run(main)


@pytest.mark.parametrize("part", [slice(None), slice(64, 1024), slice(None, None, 2), slice(0, 1)])
@pytest.mark.parametrize("outer_first", [False, True])
def test_cr11_nested_pins_count_and_the_last_one_unpins(
    run, open_device, part: slice, outer_first: bool
) -> None:
    async def main() -> None:
        x = floats()
        async with open_device() as dev:
            outer = await dev.pin(x)
            inner = await dev.pin(x[part])
            assert num_registered() == 1
            first, last = (outer, inner) if outer_first else (inner, outer)
            await first.unpin()
            assert num_registered() == 1
            assert is_direct(x[part])
            y, _ = copy_in(dev, x)
            await last.unpin()
            assert not is_direct(x)
            np.testing.assert_array_equal(await dev.get(y), x)

    run(main)


@pytest.mark.parametrize("other", [slice(0, NUM // 2), slice(NUM // 4 + 1, NUM), slice(None)])
def test_cr11_overlapping_slices_are_refused_by_name(run, open_device, other: slice) -> None:
    async def main() -> None:
        x = floats()
        middle = x[NUM // 4 : 3 * NUM // 4]
        async with open_device() as dev:
            async with dev.pin(middle):
                error = await error_of(dev.pin(x[other]))
                assert isinstance(error, ValueError)
                for part in (middle, x[other]):
                    start = part.ctypes.data
                    assert f"[{start:#x}, {start + part.nbytes:#x})" in str(error)
                assert "test_pin.py:" in str(error)
                y, _ = copy_in(dev, middle)
                np.testing.assert_array_equal(await dev.get(y), middle)
            async with dev.pin(x[other]):
                assert is_direct(x[other])

    run(main)


def test_cr11_pins_beside_each_other_are_apart(run, open_device) -> None:
    async def main() -> None:
        x = np.zeros(4 * NUM, np.float32)
        page = 4096
        at = -x.ctypes.data % page // 4  # two ranges that share no page
        one, other = x[at : at + NUM], x[at + NUM : at + 2 * NUM]
        async with open_device() as dev, dev.pin(one):
            async with dev.pin(other):
                assert num_registered() == 2
            assert is_direct(one)
            assert not is_direct(other)

    run(main)


def test_cr11_many_tasks_pin_the_same_memory(run, open_device) -> None:
    async def main() -> None:
        x = floats()

        async def use(num: int) -> None:
            for _ in range(5):
                async with dev.pin(x):
                    y, _ = copy_in(dev, x)
                    np.testing.assert_array_equal(await dev.get(y), x)
                await turns(num)

        async with open_device() as dev, anyio.create_task_group() as tasks:
            for num in range(6):
                tasks.start_soon(use, num)

    run(main)


def test_what_is_page_locked_by_others_stays_theirs(run, open_device) -> None:
    """A lease, a result of ``get``, and what the program asked the driver for."""

    async def main() -> None:
        async with open_device() as dev:
            result = await dev.get(dev.put(floats()))
            async with dev.pin(result) as pin:
                assert pin.is_pinned
                assert num_registered() == 0
            async with dev.pinned.lease(4096) as lease:
                held = lease.array(1024, np.float32)
                async with dev.pin(held[10:20]):
                    assert num_registered() == 0
                assert is_direct(held)
            with pytest.raises(ValueError, match="released"):
                dev.pin(held)

    run(main)


def test_what_the_driver_knows_as_page_locked_is_left_alone(run) -> None:
    async def main() -> None:
        import ctypes

        async with virtual() as dev:
            backend = dev._core.backend
            address = backend.allocate_pinned_blocking(4096)
            memory = np.frombuffer((ctypes.c_uint8 * 4096).from_address(address), np.uint8)
            async with dev.pin(memory) as pin:
                assert pin.is_pinned
                assert num_registered() == 0
            assert dev.sim.counters["register_host_blocking"] == 0
            backend.free_pinned_blocking(address)

    run(main)


# -- any memory -----------------------------------------------------------------------------------

LAYOUTS = {
    "C": lambda: floats(),
    "F": lambda: np.asfortranarray(floats().reshape(512, 512)),
    "strided": lambda: floats()[::3],
    "reversed": lambda: floats()[::-1],
    "broadcast": lambda: np.broadcast_to(floats(), (3, NUM)),
    "0-d": lambda: np.array(3.0),
    "big-endian": lambda: np.zeros(NUM, ">f4"),
    "structured": lambda: np.zeros(NUM, [("a", "i1"), ("b", "f8")]),
    "read-only": lambda: np.broadcast_to(floats(), (NUM,)),
    "bytes": lambda: bytes(NUM),
    "bytearray": lambda: bytearray(NUM),
    "memoryview": lambda: memoryview(bytearray(NUM))[10:],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_is_pinned_from_its_first_byte_to_its_last(run, open_device, layout) -> None:
    async def main() -> None:
        source = LAYOUTS[layout]()
        array = np.asarray(memoryview(source) if isinstance(source, bytes) else source)
        if isinstance(source, bytearray):
            array = np.frombuffer(source, np.uint8)
        low, high = np.lib.array_utils.byte_bounds(array)
        async with open_device() as dev:
            async with dev.pin(source) as pin:
                assert pin.nbytes == high - low
                assert is_direct(array)
            assert not is_direct(array)

    run(main)


def test_what_put_takes_without_a_copy_is_pinned_as_well(run) -> None:
    import ctypes

    class Shared:
        def __init__(self, array: Any) -> None:
            self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__

    async def main() -> None:
        async with virtual() as dev:
            for source in (Shared(floats()), ctypes.create_string_buffer(NUM)):
                await dev.put(source)
                async with dev.pin(source) as pin:
                    assert num_registered() == 1
                    assert pin.nbytes >= NUM

    run(main)


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_a_file_is_pinned_where_the_system_does_that(
    run, open_device, mode, tmp_path: Path
) -> None:
    async def main() -> None:
        path = tmp_path / "data"
        floats().tofile(path)
        x = np.memmap(path, np.float32, mode)
        async with open_device() as dev:
            pin = dev.pin(x)
            error = await error_of(pin)
            if error is not None:  # of a GPU's driver
                assert dev.backend == "cuda"
                assert type(error) is sf.DeviceError
                assert "page-lock" in str(error)
                return
            y, _ = copy_in(dev, x)
            np.testing.assert_array_equal(await dev.get(y), floats())
            await pin.unpin()

    run(main)


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2)])
def test_an_empty_array_is_pinned_without_doing_anything(run, open_device, shape) -> None:
    async def main() -> None:
        async with open_device() as dev, dev.pin(np.zeros(shape)) as pin:
            assert pin.nbytes == 0
            assert num_registered() == 0

    run(main)


@pytest.mark.parametrize("source", [3, [1.0, 2.0], "text", None, object(), np.array([None])])
def test_what_is_no_memory_is_refused_at_once(run, source: Any) -> None:
    async def main() -> None:
        async with virtual() as dev:
            with pytest.raises(TypeError):
                dev.pin(source)
            with pytest.raises(TypeError, match="on a device"):
                dev.pin(dev.zeros(3))

    run(main)


# -- ops on it ------------------------------------------------------------------------------------


def test_r6_unpinning_waits_for_the_ops_that_use_the_memory(run, open_device) -> None:
    async def main() -> None:
        x = floats()
        kept = weakref.ref(x)
        async with open_device() as dev:
            stream = dev.stream()
            pin = await dev.pin(x)
            held = open_device.stall(dev, stream)
            y, copied = copy_in(dev, x, stream)
            unpinned = pin.unpin()
            assert not is_direct(x)  # who comes now stages
            expected = x.copy()
            del x
            await turns()
            gc.collect()
            assert not unpinned.done() or copied.done()  # a GPU's stall ends by itself
            assert copied.done() or kept() is not None
            held.release()
            await unpinned
            assert copied.done()
            gc.collect()
            assert kept() is None
            np.testing.assert_array_equal(await dev.get(y), expected)

    run(main)


def test_r6_unpinning_waits_for_parked_ops_as_well(run) -> None:
    async def main() -> None:
        x = floats()
        async with virtual() as dev:
            event = anyio.Event()
            pin = await dev.pin(x)
            out = dev.put(np.zeros(NUM, np.float32), after=[event])
            write = copy_out(dev, out, x)  # parked behind it
            unpinned = pin.unpin()
            await turns()
            assert write.state is sf.OpState.PARKED
            assert not unpinned.done()
            assert num_registered() == 1
            event.set()
            await unpinned
            assert write.done()
            assert not x.any()

    run(main)


def test_ops_on_parts_are_ordered_only_where_they_meet(run) -> None:
    async def main() -> None:
        x = np.zeros(NUM, np.float32)
        low, high = x[: NUM // 2], x[NUM // 2 :]
        async with virtual() as dev, dev.pin(x):
            stream = dev.stream()
            ones = dev.full(NUM // 2, 1, np.float32)
            await ones
            with dev.sim.gate(stream):
                write = copy_out(dev, ones, low, stream)
                apart, _ = copy_in(dev, high)
                await apart
                whole, read = copy_in(dev, x)
                await turns()
                assert not read.done()
            await write
            assert (await dev.get(whole))[: NUM // 2].all()
            assert not (await dev.get(apart)).any()

    run(main)


def test_a_pin_in_many_parts_still_orders_all_of_them(run) -> None:
    async def main() -> None:
        x = np.zeros((1000, 64), np.float32)
        async with virtual() as dev, dev.pin(x):
            row = dev.full(64, 1, np.float32)
            ops = [copy_out(dev, row, part) for part in x]
            y, _ = copy_in(dev, x)
            assert (await dev.get(y)).all()
            assert all(op.done() for op in ops)
            assert len(dev._core.pins._holds) == 1
            (hold,) = dev._core.pins._holds
            assert len(hold.share.root.overlapping) <= 64

    run(main)


def test_an_unpin_that_was_called_for_is_taken_back_by_a_new_pin(run) -> None:
    async def main() -> None:
        x = floats()
        async with virtual() as dev:
            stream = dev.stream()
            first = await dev.pin(x)
            with dev.sim.gate(stream):
                copy_in(dev, x, stream)
                unpinned = first.unpin()
                second = await dev.pin(x)
                assert is_direct(x)
            await unpinned
            assert is_direct(x)
            assert dev.sim.counters["register_host_blocking"] == 1
            assert dev.sim.counters["unregister_host_blocking"] == 0
            await second.unpin()
            assert dev.sim.counters["unregister_host_blocking"] == 1

    run(main)


def test_the_last_unpin_waits_for_ops_on_all_that_is_still_registered(run) -> None:
    """Also on bytes that are not its own: what pinned them has been unpinned."""

    async def main() -> None:
        x = floats()
        async with virtual() as dev:
            stream = dev.stream()
            outer, inner = await dev.pin(x), await dev.pin(x[:10])
            await outer.unpin()
            with dev.sim.gate(stream):
                y, copied = copy_in(dev, x[100:], stream)
                last = inner.unpin()
                await turns()
                assert not last.done()
            await last
            assert copied.done()
            np.testing.assert_array_equal(await dev.get(y), x[100:])

    run(main)


# -- devices, loops and threads -------------------------------------------------------------------


def test_two_devices_share_one_registration(run) -> None:
    async def main() -> None:
        x = floats()
        async with virtual(devices=2) as one, virtual(1, devices=2) as other:
            first, second = await one.pin(x), await other.pin(x)
            assert one.sim.counters["register_host_blocking"] == 1
            assert other.sim.counters["register_host_blocking"] == 0
            stream = other.stream()
            with other.sim.gate(stream):
                y, copied = copy_in(other, x, stream)
                second.unpin()
                last = first.unpin()
                await turns()
                assert not last.done()  # it waits for the other device's op
            await last
            assert copied.done()
            np.testing.assert_array_equal(await other.get(y), x)
            assert num_registered() == 0

    run(main)


def test_a_pin_outlives_the_device_that_registered_it(run) -> None:
    async def main() -> None:
        x = floats()
        async with virtual(1, devices=2) as other:
            async with virtual(devices=2) as one:
                first = await one.pin(x)
                second = await other.pin(x)
                await first.unpin()
            assert is_direct(x)
            await second.unpin()
            assert num_registered() == 0

    run(main)


def test_another_loops_pin_is_staged_from(run) -> None:
    """It would be unpinned without waiting for our ops."""

    async def main() -> None:
        x, seen, go_on = floats(), [], threading.Event()

        async def elsewhere() -> None:
            async with virtual() as dev:
                seen.append(is_direct(x))
                async with dev.pin(x):
                    seen.append(is_direct(x))
                    seen.append(num_registered())
                    pinned.set()
                    go_on.wait(20)
                seen.append(num_registered())

        async with virtual() as dev:
            pin = await dev.pin(x)
            pinned = threading.Event()
            thread = threading.Thread(target=lambda: run(elsewhere))
            thread.start()
            assert pinned.wait(20)
            await pin.unpin()
            assert num_registered() == 1  # the other loop's
            assert not is_direct(x)
            go_on.set()
            thread.join(20)
            assert seen == [False, True, 1, 0]

    run(main)


def test_r11_a_pin_belongs_to_its_loop(run) -> None:
    async def main() -> None:
        async with virtual() as dev, dev.pin(floats()) as pin:
            errors: list[BaseException] = []

            def elsewhere() -> None:
                for call in (pin.unpin, lambda: dev.pin(floats())):
                    try:
                        call()
                    except sf.WrongThread as error:
                        errors.append(error)

            await anyio.to_thread.run_sync(elsewhere)
            assert len(errors) == 2
            assert pin.is_pinned

    run(main)
