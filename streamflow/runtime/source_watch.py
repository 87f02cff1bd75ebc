"""Seeing whether a program changes the source of a copy while that may still read it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from streamflow.backends.checksum import sampled_checksum
from streamflow.backends.origin import describe
from streamflow.errors import RaceDetected

if TYPE_CHECKING:
    from streamflow.backends.base import Doing
    from streamflow.runtime.core import Core

__all__ = ["SourceWatch"]

Array = np.ndarray[Any, Any]


class SourceWatch:
    """Takes a checksum of a source as the copy is submitted, where anybody wants to know.

    The simulator's race checker does, and with ``Settings.debug`` every backend.
    """

    __slots__ = ("_array", "_before", "_core", "_is_debugging", "_told")

    def __init__(self, core: Core, array: Array, told: Doing) -> None:
        checker, settings = core.backend.checker, core.settings
        self._core, self._told = core, told
        # Once is enough: a race checker reports it, too.
        self._is_debugging = settings.debug and (checker is None or not settings.sim.check_races)
        self._before = 0
        self._array: Array | None = None
        if self._is_debugging:
            self._array, self._before = array, sampled_checksum(array)
        elif checker is not None:
            self._array, self._before = array, checker.fingerprint(array)

    @property
    def is_debugging(self) -> bool:
        """Whether :meth:`end` tells, and no race checker."""
        return self._is_debugging

    def end(self) -> RaceDetected | None:
        """The source has been read: tell the race checker, or the caller, whether it changed."""
        array, self._array = self._array, None
        if array is None:
            return None
        checker, index = self._core.backend.checker, self._core.backend.index
        if self._is_debugging:
            if sampled_checksum(array) != self._before:
                return _error(self._told, index, array.nbytes)
        elif checker is not None and checker.fingerprint(array) != self._before:
            checker.source_changed(self._told, index, array.nbytes)
        return None


def _error(told: Doing, index: int, nbytes: int) -> RaceDetected:
    from streamflow.backends.sim.report import Race, RaceKind, RacingOp  # only now (R13)

    name, code, lasti = told
    reader = RacingOp(name, "reads", describe(code, lasti), "its way to the device")
    race = Race(RaceKind.HOST_CHANGE, None, reader, 0, nbytes, index)
    return RaceDetected(str(race), races=(race,))
