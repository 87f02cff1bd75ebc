"""What the tests here have in common besides their fixtures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import uvloop

import streamflow as sf


def virtual(index: int = 0, **settings: Any) -> sf.Device:
    """A simulated device on the virtual clock."""
    settings.setdefault("close_timeout_s", 5.0)  # where a test fails with a gate closed
    return sf.Device(index, backend="sim", settings=sf.Settings(sim_clock="virtual", **settings))


async def turns(num: int = 20) -> None:
    """Let the loop go round."""
    for _ in range(num):
        await anyio.lowlevel.checkpoint()


async def until(is_so: Callable[[], object]) -> None:
    """Let the loop go round until ``is_so()``."""
    with anyio.fail_after(20):
        while not is_so():
            await anyio.lowlevel.checkpoint()


async def error_of(op: Any) -> BaseException | None:
    """What awaiting ``op`` raises, if anything."""
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
