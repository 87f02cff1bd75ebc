"""Cases from the field: pinned memory, and copies that the loop does not wait for."""

from __future__ import annotations

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
