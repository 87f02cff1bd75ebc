"""The serial model: what arrays hold, whose failed write spoiled them, and what ops end as."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import numpy as np

import streamflow as sf

NUM_PARTS = 3

Place = tuple["Slot", int | None]
"""An array, or one of the parts it is split into."""


class Outcome(Enum):
    """What an op ends as."""

    GOOD = "good"
    REFUSED = "refused"
    """It fails by itself: the root of what fails after it."""
    UPSTREAM = "upstream"
    """What it needs has failed."""
    CANCELLED = "cancelled"
    EITHER = "upstream or cancelled, whichever is known first"


class Cells:
    """The contents of one array, and which regions a failed write has spoiled (R9).

    A write of the whole array speaks for its parts; reading the whole array inherits the
    failed write of a part if that came later.
    """

    def __init__(self, data: np.ndarray) -> None:
        self.data = data
        self._clock = 0
        self._whole = (0, False)
        self._parts = [(0, False)] * NUM_PARTS

    def at(self, part: int | None) -> np.ndarray:
        return self.data if part is None else np.array_split(self.data, NUM_PARTS)[part]

    def is_spoiled(self, part: int | None) -> bool:
        if part is not None:
            return self._parts[part][1]
        when, has_failed = self._whole
        return has_failed or any(failed and later > when for later, failed in self._parts)

    def wrote(self, part: int | None, has_failed: bool) -> None:
        self._clock += 1
        if part is None:
            self._whole = (self._clock, has_failed)
            self._parts = [self._whole] * NUM_PARTS
        else:
            self._parts[part] = (self._clock, has_failed)


class Slot:
    """An array on a device with its model, and the stream that used it last."""

    __slots__ = ("array", "cells", "dev_no", "parts", "where")

    def __init__(self, dev_no: int, array: sf.DeviceArray | None, data: np.ndarray) -> None:
        self.dev_no = dev_no
        self.array: sf.DeviceArray | None = None
        self.cells = Cells(data)
        self.where: str | None = None
        if array is not None:
            self.hold(array)

    def hold(self, array: sf.DeviceArray) -> None:
        self.array = array
        self.parts = array.split(NUM_PARTS)

    def at(self, part: int | None) -> sf.DeviceArray:
        assert self.array is not None
        return self.array if part is None else self.parts[part]


class Move:
    """One op of the program and what it means.

    ``effect`` does to the model what the op does to the device and returns the result.
    """

    __slots__ = ("after", "effect", "expected", "op", "outcome", "overwrites", "plan", "reads")
    __slots__ += ("what", "writes")

    def __init__(
        self,
        what: str,
        effect: Callable[[], Any],
        *,
        reads: Sequence[Place] = (),
        writes: Sequence[Place] = (),
        overwrites: Sequence[Place] = (),
        after: Sequence[Move] = (),
        plan: Outcome = Outcome.GOOD,
    ) -> None:
        self.what = what
        self.effect: Callable[[], Any] | None = effect
        self.reads = reads
        self.writes = writes
        self.overwrites = overwrites
        self.after = list(after)
        self.plan = plan
        self.op: sf.Op[Any] | None = None
        self.outcome: Outcome | None = None
        self.expected: Any = None

    @property
    def places(self) -> Sequence[Place]:
        return (*self.reads, *self.writes, *self.overwrites)

    def is_fed(self) -> bool:
        """Whether all that it needs is there, in the order of the program."""
        return not any(
            slot.cells.is_spoiled(part) for slot, part in (*self.reads, *self.writes)
        ) and all(before.outcome is Outcome.GOOD for before in self.after)

    def settle(self, outcome: Outcome) -> None:
        """It ends, in the model, as ``outcome``; lets go of the arrays."""
        self.outcome = outcome
        has_failed = outcome is not Outcome.GOOD
        if not has_failed:
            assert self.effect is not None
            self.expected = self.effect()
        for slot, part in (*self.writes, *self.overwrites):
            slot.cells.wrote(part, has_failed)
        self.effect = None
        self.reads = self.writes = self.overwrites = self.after = ()

    def foresee(self) -> Outcome:
        """What it will end as: known when it is submitted, whenever that shows."""
        if self.is_fed():
            return self.plan
        return Outcome.EITHER if self.plan is Outcome.CANCELLED else Outcome.UPSTREAM
