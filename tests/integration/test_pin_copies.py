"""``put``, ``get`` and ``copy`` of memory that is pinned, was pinned, or is being unpinned."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import numpy as np
import pytest
from direct_copies import is_direct
from support import turns, virtual

import streamflow as sf
from streamflow.memory.registered import num_registered

NUM = 1 << 20  # 4 MiB: above what is copied on the loop


def floats() -> Any:
    return np.arange(NUM, dtype=np.float32)


def num_staged(dev: sf.Device) -> int:
    """Tasks that the threads for staging were given."""
    return dev._core.stagers.num_tasks


def test_cr10_pinned_sources_and_targets_are_not_staged(run, open_device) -> None:
    async def main() -> None:
        x, back = floats(), np.zeros(NUM, np.float32)
        async with open_device() as dev, dev.pin(x), dev.pin(back):
            y = dev.put(x)
            await dev.get(y, out=back)
            np.testing.assert_array_equal(back, x)
            part = await dev.put(x[100 : NUM // 2])
            np.testing.assert_array_equal(await dev.get(part), x[100 : NUM // 2])
            assert num_staged(dev) == 0

    run(main)


def test_pinned_memory_of_any_layout_is_copied(run, open_device) -> None:
    async def main() -> None:
        x, back = floats().reshape(1024, 1024), np.zeros((1024, 1024), np.float32)
        async with open_device() as dev, dev.pin(x), dev.pin(back):
            for view in (x[::-1], x.T, x[:, ::3], np.broadcast_to(x[0], (7, 1024))):
                np.testing.assert_array_equal(await dev.get(dev.put(view)), view)
            await dev.get(dev.put(x), out=back.T)
            np.testing.assert_array_equal(back.T, x)

    run(main)


def test_copies_are_staged_before_and_after(run, open_device) -> None:
    async def main() -> None:
        x = floats()
        async with open_device() as dev:
            await dev.put(x)
            before = num_staged(dev)
            assert before > 0
            async with dev.pin(x):
                await dev.put(x)
                assert num_staged(dev) == before
            np.testing.assert_array_equal(await dev.get(dev.put(x)), x)
            assert num_staged(dev) > before

    run(main)


def test_r6_a_copy_that_meets_an_unpin_is_staged(run) -> None:
    """Though the driver still counts the memory as page-locked."""

    async def main() -> None:
        x = floats()
        async with virtual() as dev:
            pin, stream = await dev.pin(x), dev.stream()
            with dev.sim.gate(stream):
                first = dev.put(x, stream=stream)
                unpinned = pin.unpin()
                assert not is_direct(x)
                before = num_staged(dev)
                second = dev.put(x)
                await second
                assert num_staged(dev) > before
                assert not unpinned.done()
            await unpinned
            for y in (first, second):
                np.testing.assert_array_equal(await dev.get(y), x)

    run(main)


def test_an_array_that_is_pinned_in_part_is_staged(run, open_device) -> None:
    """And ordered with the copies of the part."""

    async def main() -> None:
        x = floats()
        low = x[: NUM // 4]
        async with open_device() as dev, dev.pin(low):
            before = num_staged(dev)
            np.testing.assert_array_equal(await dev.get(dev.put(x)), x)
            assert num_staged(dev) > before
            stream, zeros = dev.stream(), dev.zeros(NUM // 4, np.float32)
            held = open_device.stall(dev, stream)
            write = dev.get(zeros, out=low, stream=stream)
            y = dev.put(x)
            await turns()
            held.release()
            expected = floats()
            expected[: NUM // 4] = 0
            np.testing.assert_array_equal(await dev.get(y), expected)
            assert write.done()
            zeros.free()

    run(main)


def test_a_write_to_pinned_memory_comes_before_what_reads_it(run, open_device) -> None:
    async def main() -> None:
        x = np.zeros(NUM, np.float32)
        async with open_device() as dev:
            stream = dev.stream()
            ones = dev.full(NUM, 1, np.float32)
            async with dev.pin(x):
                held = open_device.stall(dev, stream)
                write = dev.get(ones, out=x, stream=stream)
                y = dev.put(x)
                await turns()
                held.release()
                assert (await dev.get(y) == 1).all()
                assert write.done()
            ones.free()

    run(main)


def test_two_buffers_in_turn(run, open_device) -> None:
    """As in hand-written double buffering: halves of one pinned array."""

    async def main() -> None:
        buffer = np.zeros((2, NUM // 2), np.float32)
        async with open_device() as dev, dev.pin(buffer):
            arrays: list[Any] = [None, None]
            for step in range(8):
                half = buffer[step % 2]
                if arrays[step % 2] is not None:
                    await arrays[step % 2]
                half[:] = step
                arrays[step % 2] = dev.put(half)
            for at, y in enumerate(arrays):
                assert (await dev.get(y) == 6 + at).all()
            del arrays, y

    run(main)


@pytest.mark.parametrize("is_mapped", [False, True])
def test_copies_between_mapped_and_pinned_memory(run, open_device, is_mapped: bool) -> None:
    async def main() -> None:
        async with open_device() as dev:
            m = await dev.mapped(NUM, np.float32)
            m.host[:] = floats()
            x = np.zeros(NUM, np.float32)
            async with dev.pin(x):
                await dev.get(m, out=x)
                np.testing.assert_array_equal(x, floats())
                x[:] = 3
                await dev.copy(m, x)
                assert (m.host == 3).all()
            if is_mapped:
                y = dev.put(m.host)
                dev.fill(m, 4)  # after the copy has read it
                assert (await dev.get(y) == 3).all()
                y.free()
            m.free()

    run(main)


def test_r11_loops_of_several_threads_pin_and_copy_the_same_memory(run, open_device) -> None:
    x = floats()
    errors: list[BaseException] = []

    async def main() -> None:
        async with open_device() as dev:
            for step in range(15):
                part = x[step * 100 :]
                try:
                    async with dev.pin(x if step % 3 else part):
                        np.testing.assert_array_equal(await dev.get(dev.put(part)), part)
                except ValueError as error:  # all of it, while another loop has a part
                    assert "overlaps" in str(error)  # noqa: PT017

    def work() -> None:
        try:
            run(main)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert num_registered() == 0


def test_a_cancelled_copy_into_pinned_memory_ends_first(run) -> None:
    async def main() -> None:
        x = np.zeros(NUM, np.float32)
        async with virtual() as dev, dev.pin(x):
            ones, stream = dev.full(NUM, 1, np.float32), dev.stream()
            gate = dev.sim.gate(stream)
            async with anyio.create_task_group() as tasks:

                async def read() -> None:
                    try:
                        await dev.get(ones, out=x, stream=stream)
                    finally:
                        seen.append(bool(x.all()))

                seen: list[bool] = []
                tasks.start_soon(read)
                await turns()
                tasks.cancel_scope.cancel()
                with anyio.CancelScope(shield=True):
                    await turns()
                    assert not seen
                    gate.release()
            assert seen == [True]
            ones.free()

    run(main)
