"""What the tests here have in common besides their fixtures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import fields
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import uvloop

import streamflow as sf

SPIN = sf.Kernel.from_source(
    """extern "C" __global__ void spin(double seconds) {
        long long start, now;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
        do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); }
        while (now - start < (long long)(seconds * 1e9));
    }""",
    body=lambda seconds: None,
    cost=lambda seconds: seconds,
)


class Opener:
    """Opens devices of one backend and stalls their streams in the way that backend can."""

    def __init__(self, backend: str, clock: str = "virtual") -> None:
        self.backend = backend
        self.clock = clock

    def __call__(self, index: int = 0, memory: Any = None, **settings: Any) -> sf.Device:
        if self.backend == "sim":
            settings.setdefault("clock", self.clock)
        known = configured(settings)
        return sf.Device(index, backend=self.backend, memory=memory, settings=known)

    def stall(self, dev: sf.Device, stream: sf.Stream, seconds: float = 0.3) -> Stall:
        """Hold ``stream``: until released on the simulator, for ``seconds`` on a GPU."""
        return Stall(dev, stream, seconds)


class Stall:
    def __init__(self, dev: sf.Device, stream: sf.Stream, seconds: float) -> None:
        self._gate = dev.sim.gate(stream) if dev.backend == "sim" else None
        if self._gate is None:
            dev.launch(SPIN, seconds, grid=1, block=1, stream=stream, name="stall")

    def release(self) -> None:
        if self._gate is not None:
            self._gate.release()


def virtual(
    index: int = 0, placement: Any = None, memory: Any = None, **settings: Any
) -> sf.Device:
    """A simulated device on the virtual clock."""
    settings.setdefault("close_timeout_s", 5.0)  # where a test fails with a gate closed
    known = configured({"clock": "virtual", **settings})
    return sf.Device(index, backend="sim", memory=memory, settings=known, placement=placement)


def configured(settings: dict[str, Any]) -> sf.Settings:
    """Settings, from their own fields and those of ``SimOptions``."""
    names = {item.name for item in fields(sf.SimOptions)} & settings.keys()
    sim = sf.SimOptions(**{name: settings.pop(name) for name in names})
    return sf.Settings(sim=sim, **settings)


async def turns(num: int = 20) -> None:
    """Let the loop go round."""
    for _ in range(num):
        await anyio.lowlevel.checkpoint()


def wanted(*ops: Any) -> None:
    """Have somebody want the end of ``ops``: virtual time passes only then."""
    for op in ops:
        op.add_done_callback(lambda _: None)


async def until(is_so: Callable[[], object]) -> None:
    """Let the loop go round until ``is_so()``."""
    with anyio.fail_after(20):
        while not is_so():
            await anyio.lowlevel.checkpoint()


async def error_of(op: Any) -> BaseException | None:
    """What awaiting ``op`` raises, if anything; a bounded wait."""
    with anyio.fail_after(20):
        try:
            await op
        except Exception as error:
            return error
    return None


def _run(runner: Callable[[Coroutine[Any, Any, Any]], Any]) -> Callable[..., Any]:
    return lambda main: runner(main())


native = pytest.mark.parametrize(
    "run", [_run(asyncio.run), _run(uvloop.run)], ids=["asyncio", "uvloop"]
)
"""For tests that call ``task.cancel()`` themselves."""
