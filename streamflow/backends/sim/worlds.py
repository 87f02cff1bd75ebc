"""Which world a device belongs to: one for each event loop, while any of its devices is open."""

from __future__ import annotations

import threading
from dataclasses import replace

from streamflow.backends.sim.machine import World
from streamflow.backends.sim.predict import PredictingWorld
from streamflow.backends.sim.schedule import IMPOSED, Plan, Schedule
from streamflow.config import Settings

__all__ = ["enter_world", "leave_world"]

_lock = threading.Lock()
_worlds: dict[object, World] = {}


def enter_world(settings: Settings, loop_key: object) -> World:
    """The world of this loop, made if it is the first; each call needs a ``leave_world``.

    Raises
    ------
    ValueError
        The world exists and runs by another clock.
    """
    imposed = IMPOSED.get()
    if imposed is not None:
        settings = replace(settings, sim=replace(settings.sim, clock="virtual"))
    with _lock:
        world = _worlds.get(loop_key)
        if world is None:
            kind = PredictingWorld if settings.sim.predict else World
            schedule = None
            if imposed is not None:
                schedule = imposed.begin()
            elif settings.sim.schedule:
                schedule = Schedule(Plan.parse(settings.sim.schedule))
            world = _worlds[loop_key] = kind(settings, schedule)
        elif world.is_virtual != (settings.sim.clock == "virtual"):
            raise ValueError(
                f"clock={settings.sim.clock!r}, but the devices already open on this event "
                "loop run by the other clock: pass SimOptions(clock=...) to have them agree"
            )
        world.num_opened += 1
        return world


def leave_world(world: World, loop_key: object) -> None:
    """Drop the world with its last device; the next one starts with a fresh clock."""
    with _lock:
        world.num_opened -= 1
        is_last = world.num_opened == 0
        if is_last:
            del _worlds[loop_key]
    if is_last:
        with world.lock:
            world.close()
