"""What stands behind the fixtures of the pytest plugin: a device that is checked as it is left."""

from __future__ import annotations

import gc
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from streamflow.config import Settings, SimOptions
from streamflow.device import Device
from streamflow.runtime.closing import drain
from streamflow.runtime.failures import add_note

__all__ = ["checked_device", "default_settings"]

CLOSE_TIMEOUT_S = 5.0
"""A test that leaves a gate closed is to say so while somebody still looks."""


def default_settings(seed: int) -> Settings:
    """Those of the environment, for a test: virtual clock, seed, and little patience."""
    sim = SimOptions.from_environment(clock="virtual", seed=seed)
    return Settings.from_environment(sim=sim, close_timeout_s=CLOSE_TIMEOUT_S)


@asynccontextmanager
async def checked_device(
    index: int,
    backend: str,
    settings: Settings,
    *,
    seed: int,
    has_raised: Callable[[], bool],
    let_go: Callable[[], object],
) -> AsyncIterator[Device]:
    """An open device; leaving it raises what nobody has observed, then what is left over.

    Parameters
    ----------
    index, backend
        As for ``Device``.
    settings : Settings
        Clock and seed of the simulator are replaced.
    seed : int
        Of the simulator's schedule.
    has_raised : callable
        Whether the test has raised: its traceback then holds frames, and they hold arrays.
    let_go : callable
        Drops what the test was called with; called only where something is left over.
    """
    sim = replace(settings.sim, clock="virtual", seed=seed)
    dev = Device(index, backend=backend, settings=replace(settings, sim=sim))
    await dev.__aenter__()
    yield dev
    # Not in a finally: a fixture is never told how its test ended, and this runs in any case.
    leaks = "" if has_raised() else await _find_leaks(dev, let_go)
    try:
        await _leave(dev)
    except BaseException as error:
        if leaks:
            add_note(error, leaks)
        raise
    if leaks:
        raise AssertionError(leaks)


async def _leave(dev: Device) -> None:
    with warnings.catch_warnings():
        # It says of the arrays what the check says of all, or was told to overlook.
        warnings.filterwarnings("ignore", r"device \d+ was closed with", ResourceWarning)
        await dev.__aexit__(None, None, None)


async def _find_leaks(dev: Device, let_go: Callable[[], object]) -> str:
    """What is still held once all work has ended, with the lines that made it; else empty."""
    core = dev._core
    # Work under way holds arrays and blocks. Where it doesn't end, leaving tells why.
    has_ended = await drain(core, shielded=True, timeout_s=core.settings.close_timeout_s)
    if core.lost is not None or not has_ended:
        return ""
    held = _held(dev)
    if held:
        let_go()
        held = _held(dev)
    if not held:
        return ""
    lines = [
        f"  {kind} made at {line}{f' ({num})' if num > 1 else ''}"
        for kind, counts in held.items()
        for line, num in counts.items()
    ]
    return "\n".join(
        [
            f"the test is over, and of device {dev.index} something still holds:",
            *lines,
            "Look for a global, a fixture of a wider scope, a cache, or a task that goes on.",
        ]
    )


def _held(dev: Device) -> dict[str, dict[str, int]]:
    gc.collect()
    dev._core.drain_dropped()
    held = {
        kind: {line: num for line, num in counts.items() if line != "streamflow"}
        for kind, counts in dev.live().items()
        if kind != "op"
    }
    return {kind: counts for kind, counts in held.items() if counts}
