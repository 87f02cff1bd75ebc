"""Pinned memory that several devices use: undone by one, it serves the others of its loop."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import numpy as np
import pytest
from direct_copies import copy_in, is_direct
from support import error_of, turns, until, virtual

import streamflow as sf
from streamflow.memory.registered import num_registered

NUM = 1 << 18


def floats() -> Any:
    return np.arange(NUM, dtype=np.float32)


@contextmanager
def no_warning_of_pins() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield


def forget(x: Any) -> None:
    """The test's process goes on: give back what a real one would have kept."""
    from streamflow.backends.sim import host_memory
    from streamflow.memory import page_locked, registered

    start = x.ctypes.data
    registered._table.registrations.clear()
    registered._table.starts.clear()
    page_locked.remove_range(start)
    host_memory.free(start, host_memory.HostKind.REGISTERED)


def test_r6_closing_a_device_waits_for_what_others_copy_from_its_pins(run) -> None:
    async def main() -> None:
        x = floats()
        async with virtual(1, devices=2) as other, anyio.create_task_group() as tasks:
            stream = other.stream()
            gate = other.sim.gate(stream)

            async def release(one: sf.Device) -> None:
                await until(lambda: one._core.is_closed or one._core.pending_ops())
                assert not one._core.is_closed
                gate.release()

            with no_warning_of_pins():
                async with virtual(devices=2) as one:
                    pin = await one.pin(x)
                    y, copied = copy_in(other, x, stream)
                    tasks.start_soon(release, one)
            assert copied.done()
            assert not pin.is_pinned
            assert num_registered() == 0
            np.testing.assert_array_equal(await other.get(y), x)

    run(main)


def test_r6_the_last_pin_counts_no_more_those_of_a_closed_device(run) -> None:
    async def main() -> None:
        x = floats()
        async with virtual(1, devices=2) as other:
            last, stream = await other.pin(x), other.stream()
            with no_warning_of_pins():
                async with virtual(devices=2) as one:
                    pin = await one.pin(x)
            assert not pin.is_pinned
            assert is_direct(x)
            with other.sim.gate(stream):
                copy_in(other, x, stream)
                unpinned = last.unpin()
                assert not is_direct(x)  # who comes now stages
                y = other.put(x, stream=stream)
            await unpinned
            assert num_registered() == 0
            np.testing.assert_array_equal(await other.get(y), x)

    run(main)


def test_c12_pins_of_a_loop_that_ended_outlast_what_its_other_devices_run(run) -> None:
    x, kept = floats(), []

    async def first() -> None:
        one, other = virtual(devices=2), virtual(1, devices=2)
        await one.__aenter__()
        await other.__aenter__()
        pin, stream = await one.pin(x), other.stream()
        gate = other.sim.gate(stream)
        kept.extend([gate, one, other, pin, stream, copy_in(other, x, stream)])

    async def later(num: int) -> None:
        async with virtual():
            assert num_registered() == num

    run(first)
    run(lambda: later(1))
    kept[0].release()
    run(lambda: later(0))
    kept.clear()


@pytest.mark.parametrize("kind", ["lease", "mapped"])
def test_r11_leased_memory_is_staged_from_by_another_loop(run, kind: str) -> None:
    """Its release would ask that loop's device for the end of the copy, in the wrong thread."""

    async def main() -> None:
        seen: list[Any] = []

        async def elsewhere() -> None:
            async with virtual() as other:
                seen.append(is_direct(x))
                seen.append(await other.get(await other.put(x)))

        async with virtual() as dev, dev.pinned.lease(4 * NUM) as lease:
            m = await dev.mapped(NUM, np.float32)
            x = lease.array(NUM, np.float32) if kind == "lease" else m.host
            x[:] = 7
            assert is_direct(x)
            thread = threading.Thread(target=lambda: run(elsewhere))
            thread.start()
            thread.join(20)
            assert seen[0] is False
            np.testing.assert_array_equal(seen[1], x)
            m.free()

    run(main)


@pytest.mark.parametrize("is_asked_before", [False, True])
def test_r6_what_a_closed_device_left_behind_keeps_the_pin(run, is_asked_before: bool) -> None:
    async def main() -> None:
        x = floats()
        async with virtual(devices=2) as one:
            other = virtual(1, devices=2, close_timeout_s=0.1)
            pin = await one.pin(x)
            await other.__aenter__()
            stream = other.stream()
            gate = other.sim.gate(stream)
            copy_in(other, x, stream)
            unpinned = pin.unpin() if is_asked_before else None
            with pytest.raises(sf.DeadlineExceeded):
                await other.__aexit__(None, None, None)
            error = await error_of(unpinned or pin.unpin())
            assert isinstance(error, sf.Closed)
            assert f"{x.nbytes} bytes at {x.ctypes.data:#x} stay page-locked" in str(error)
            assert num_registered() == 1
            gate.release()
        forget(x)

    run(main)


@pytest.mark.parametrize("is_released_before", [False, True])
def test_r6_what_a_closed_device_left_behind_keeps_the_lease(run, is_released_before: bool) -> None:
    async def main() -> None:
        async with virtual(devices=2) as one:
            other = virtual(1, devices=2, close_timeout_s=0.1)
            await other.__aenter__()
            stream, lease = other.stream(), one.pinned.try_lease(4096)
            assert lease is not None
            other.sim.gate(stream)
            other.put(lease.array(), stream=stream)
            if is_released_before:
                lease.release()
            with pytest.raises(sf.DeadlineExceeded):
                await other.__aexit__(None, None, None)
            if not is_released_before:
                lease.release()
            await turns()
            assert one.pinned.stats().num_live == 1

    run(main)


def test_r6_what_a_closed_device_left_behind_keeps_mapped_memory(run) -> None:
    async def main() -> None:
        async with virtual(devices=2) as one:
            other = virtual(1, devices=2, close_timeout_s=0.1)
            await other.__aenter__()
            m, stream = await one.mapped(NUM, np.float32), other.stream()
            other.sim.gate(stream)
            other.put(m.host, stream=stream)
            with pytest.raises(sf.DeadlineExceeded):
                await other.__aexit__(None, None, None)
            await m.free()
            assert one.pinned.stats().num_live == 1

    run(main)
