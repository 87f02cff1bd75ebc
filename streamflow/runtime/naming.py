"""Telling the simulator's controls the names of ops, while a rule of theirs asks for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from streamflow.runtime.parked import Run

if TYPE_CHECKING:
    from streamflow.runtime.core import Core

__all__ = ["Namer", "name_ops"]

Namer: TypeAlias = Callable[[str, Run], Run]
"""Makes of an op's name and its driver calls the same calls under that name."""


def name_ops(core: Core, namer: Namer | None) -> None:
    """Pass the calls of every op through ``namer``, or no more; the short cuts name nobody."""
    core.namer = namer
    core.choose_ways()
