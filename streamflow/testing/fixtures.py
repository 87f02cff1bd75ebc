"""What stands behind the fixtures of the pytest plugin: a device that is checked as it is left."""

from __future__ import annotations

import gc
import warnings
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from streamflow.config import Settings, SimOptions
from streamflow.device import Device
from streamflow.runtime.live import Held

__all__ = ["checked_device", "default_settings", "find_leaks"]

CLOSE_TIMEOUT_S = 5.0
"""A test that leaves a gate closed is to say so while somebody still looks."""


def default_settings(seed: int) -> Settings:
    """Those of the environment, for a test: virtual clock, seed, and little patience."""
    sim = SimOptions.from_environment(clock="virtual", seed=seed)
    return Settings.from_environment(sim=sim, close_timeout_s=CLOSE_TIMEOUT_S)


@asynccontextmanager
async def checked_device(
    index: int, backend: str, settings: Settings, *, seed: int, note: Callable[[Held], object]
) -> AsyncIterator[Device]:
    """An open device; leaving it raises what nobody has observed.

    Parameters
    ----------
    index, backend
        As for ``Device``.
    settings : Settings
        Clock and seed of the simulator are replaced.
    seed : int
        Of the simulator's schedule.
    note : callable
        Given what :func:`find_leaks` is to look at once the whole test is over: fixtures that
        are left after this one may hold arrays too.
    """
    sim = replace(settings.sim, clock="virtual", seed=seed)
    dev = Device(index, backend=backend, settings=replace(settings, sim=sim))
    await dev.__aenter__()
    yield dev
    # Not in a finally: a fixture is never told how its test ended, and this runs in any case.
    if not dev._core.is_closing:  # the test may have left it itself
        note(Held(dev._core))
    with warnings.catch_warnings():
        # It says of the arrays what the check says of all, or was told to overlook.
        warnings.filterwarnings("ignore", r"device \d+ was closed with", ResourceWarning)
        await dev.__aexit__(None, None, None)


def find_leaks(noted: Sequence[Held]) -> str:
    """What is held of devices that are closed, with the lines that made it; else empty."""
    if not any(held.counts() for held in noted):
        return ""
    gc.collect()
    found = [(held.index, held.counts()) for held in noted]
    lines = [
        line
        for index, counts in found
        if counts
        for line in (
            f"the test is over, and of device {index} something still holds:",
            *(
                f"  {kind} made at {where}{f' ({num})' if num > 1 else ''}"
                for (kind, where), num in counts.items()
            ),
        )
    ]
    if lines:
        lines.append(
            "Look for a global, a fixture of a wider scope, a cache, or a task that goes on."
        )
    return "\n".join(lines)
