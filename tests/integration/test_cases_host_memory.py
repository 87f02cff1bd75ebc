"""Cases from the field: pinned memory, and copies that the loop does not wait for."""

from __future__ import annotations

import gc
import threading
from typing import Any

import anyio.lowlevel
import numpy as np
import pytest
from support import turns, wanted

import streamflow as sf


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
            if kind == "dropped lease":
                with pytest.warns(ResourceWarning, match="never released"):
                    del lease
                    gc.collect()
            else:
                del lease
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
