"""Cases from the field: pinned memory, and copies that the loop does not wait for."""

from __future__ import annotations

import gc
import threading
from functools import partial
from typing import Any

import anyio.lowlevel
import numpy as np
import pytest
from support import turns, virtual, wanted

import streamflow as sf
from streamflow.memory.page_locked import find


class Held:
    """Has the first copy of a worker wait: that thread stands still in the middle of its job."""

    def __init__(self, dev: sf.Device, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_begun, self._may_go_on = threading.Event(), threading.Event()
        backend: Any = dev._core.backend
        copy = getattr(backend, name)

        def held(*args: Any) -> Any:
            self.has_begun.set()
            # A loop that does this itself would wait here for itself.
            assert self._may_go_on.wait(10), "the loop waits for the copy"
            return copy(*args)

        monkeypatch.setattr(backend, name, held, raising=False)

    def let_go(self) -> None:
        self._may_go_on.set()


@pytest.mark.parametrize("name", ["put", "get"])
def test_c25_the_loop_goes_round_while_a_pageable_copy_is_staged(
    run, open_device, monkeypatch, name
):
    async def main():
        async with open_device(staging_in_nbytes=1 << 16, staging_out_nbytes=1 << 16) as dev:
            source = np.arange(1 << 20, dtype=np.uint8)
            out = np.zeros_like(source)
            array = await dev.put(source)
            held = Held(dev, "copy_h2d" if name == "put" else "copy_d2h", monkeypatch)
            try:
                op = dev.put(source).ready if name == "put" else dev.get(array, out=out)
                wanted(op)
                num_turns = 0
                while num_turns < 100 or not held.has_begun.is_set():
                    await anyio.lowlevel.checkpoint()
                    num_turns += 1
                assert not op.done()
            finally:
                held.let_go()
            await op
            assert name == "put" or (out == source).all()

    run(main)


@pytest.mark.parametrize("kind", ["out=", "copy"])
def test_c25_a_copy_to_an_ordinary_array_returns_at_once_and_completes_later(
    run, open_device, kind
):
    async def main():
        async with open_device() as dev:
            source = np.arange(1 << 18, dtype=np.float32)
            array = await dev.put(source)
            out = np.zeros_like(source)
            stream = dev.stream("S")
            stall = open_device.stall(dev, stream)
            dev.fill(array, 7, stream=stream)
            if kind == "out=":
                op = dev.get(array, out=out)
            else:
                op = dev.copy(out, array)
            await turns(50)
            assert not op.done()
            assert not out.any()
            stall.release()
            assert await op is out
            assert (out == 7).all()

    run(main)


# -- pinned blocks ---------------------------------------------------------------------------------

NBYTES = 3 << 20


async def result_of(dev: sf.Device) -> tuple[np.ndarray[Any, Any], object]:
    """A pinned array that ``get`` returned."""
    return await dev.get(dev.full(NBYTES, 1, np.uint8)), None


async def leased(dev: sf.Device) -> tuple[np.ndarray[Any, Any], Any]:
    """An array of a lease, and that lease."""
    lease = dev.pinned.try_lease(NBYTES)
    if lease is None:
        request = dev.pinned.lease(NBYTES)
        lease = await request.__aenter__()
    return lease.array(), lease


@pytest.mark.parametrize("kind", ["result", "lease", "dropped lease"])
def test_c5_the_block_of_a_dropped_source_is_handed_out_after_its_copy(run, open_device, kind):
    async def main():
        async with open_device() as dev:
            make = result_of if kind == "result" else leased
            blocks, unpinned = dev._core.pinned, []
            unpin = blocks._free_blocking
            blocks._free_blocking = lambda at: unpinned.append(at) or unpin(at)
            stream = dev.stream("S")
            x, lease = await make(dev)
            x[:] = 5
            address = x.ctypes.data
            stall = open_device.stall(dev, stream)
            on_device = dev.put(x, stream=stream)
            if kind == "lease":
                lease.release()
            del x
            kept = [lease]
            del lease
            if kind == "dropped lease":
                with pytest.warns(ResourceWarning, match="never released"):
                    kept.clear()
            kept.clear()
            gc.collect()
            y, other = await make(dev)
            assert y.ctypes.data != address
            y[:] = 9
            await dev.pinned.trim()
            assert address not in unpinned
            stall.release()
            assert (await dev.get(on_device) == 5).all()
            await dev.synchronize()
            gc.collect()
            if other is not None:
                other.release()
            del y
            await dev.pinned.trim()
            assert address in unpinned

    run(main)


PUT_NBYTES = (1, 512, 5000, 64 << 10, (64 << 10) + 1, 1 << 20, 9 << 20)


async def seconds_of_puts(dev: sf.Device) -> list[float]:
    """How long each takes on the device's clock, one after the other."""
    taken = []
    for number, nbytes in enumerate(PUT_NBYTES):
        for step in (1, -3):
            source = np.full(nbytes * abs(step), number, np.uint8)[::step]
            start = dev.sim.clock.now_s
            array = await dev.put(source)
            taken.append(dev.sim.clock.now_s - start)
            assert (await dev.get(array, out=np.zeros_like(source)) == number).all()
    return taken


HOARD = {(1 << 20): 6, (64 << 10) + 1: 10, 64 << 10: 150, 5000: 60}
"""Bytes of results, and how many: more than the budget, and than what a device has at first."""


def test_hoarded_results_never_starve_put(run):
    async def main(is_hoarding: bool) -> list[float]:
        async with virtual(
            pinned_budget_nbytes=4 << 20, staging_in_nbytes=1 << 20, staging_out_nbytes=1 << 20
        ) as dev:
            hoard = []
            for nbytes, num in HOARD.items() if is_hoarding else ():
                array = dev.full(nbytes, 3, np.uint8)
                hoard += [await dev.get(array) for _ in range(num)]
                assert find(hoard[-1]) is None  # fell back to pageable memory
                assert dev.pinned.try_lease(nbytes) is None
            taken = await seconds_of_puts(dev)
            assert all((result == 3).all() for result in hoard)
            assert dev.pinned.stats().pinned_nbytes <= 4 << 20
            return taken

    without, beside = run(partial(main, False)), run(partial(main, True))
    for alone, hoarding in zip(without, beside, strict=True):
        assert hoarding <= 2 * alone + 1e-4
