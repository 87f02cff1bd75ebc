"""Where the newest data of a host and device pair is: Caffe's states, as a table (sans-IO).

::

    asked            UNINITIALIZED  HEAD_AT_CPU  HEAD_AT_GPU  SYNCED     POISONED
    READ_HOST        zeros CPU      . CPU        copy SYNCED  . SYNCED   raises
    READ_DEVICE      zeros GPU      copy SYNCED  . GPU        . SYNCED   raises
    WRITE_HOST       zeros CPU      . CPU        copy CPU     . CPU      raises
    WRITE_DEVICE     zeros GPU      copy GPU     . GPU        . GPU      raises
    WRITE_ALL_HOST   . CPU          . CPU        . CPU        . CPU      . CPU
    WRITE_ALL_DEVICE . GPU          . GPU        . GPU        . GPU      . GPU
    ADOPT_HOST       . CPU          . CPU        refused      . CPU      . CPU
    ADOPT_DEVICE     . GPU          refused      . GPU        . GPU      . GPU
    PUSH             refused        copy SYNCED  . GPU        . SYNCED   raises
    PULL             refused        . CPU        copy SYNCED  . SYNCED   raises
    DISCARD          . UNINIT.      . UNINIT.    . UNINIT.    . UNINIT.  . UNINIT.

A copy leads to SYNCED only when it has completed, and a write counts only once its block has
been left: until then :class:`Heads` keeps the state that there would be without them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

__all__ = ["TABLE", "Asked", "Cell", "Heads", "Side", "Step", "SyncedState"]


class SyncedState(Enum):
    """Where the newest data of a :class:`streamflow.SyncedArray` is."""

    UNINITIALIZED = "uninitialized"
    """Nowhere: it reads as zeros."""
    HEAD_AT_CPU = "head_at_cpu"
    HEAD_AT_GPU = "head_at_gpu"
    SYNCED = "synced"
    """On both sides."""
    POISONED = "poisoned"
    """Nowhere: what should have written it failed. Reads raise the cause."""


class Side(Enum):
    """One of the two memories."""

    CPU = "CPU"
    GPU = "GPU"

    @property
    def other(self) -> Side:
        """The other one."""
        return Side.GPU if self is Side.CPU else Side.CPU

    @property
    def head(self) -> SyncedState:
        """The state in which only this side has the data."""
        return SyncedState.HEAD_AT_CPU if self is Side.CPU else SyncedState.HEAD_AT_GPU


class Asked(Enum):
    """What one may want of the pair."""

    READ_HOST = "read on the host"
    READ_DEVICE = "read on the device"
    WRITE_HOST = "write on the host"
    WRITE_DEVICE = "write on the device"
    WRITE_ALL_HOST = "overwrite on the host"
    WRITE_ALL_DEVICE = "overwrite on the device"
    ADOPT_HOST = "adopt host data"
    ADOPT_DEVICE = "adopt device data"
    PUSH = "push"
    PULL = "pull"
    DISCARD = "discard"


class Step(Enum):
    """What has to happen first."""

    NOTHING = "nothing"
    ZEROS = "zeros"
    COPY = "copy"
    REFUSE = "refuse"
    RAISE = "raise the cause"


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the table: the step, and the state once all is done."""

    step: Step
    then: SyncedState


_UNINIT, _CPU, _GPU, _SYNCED, _POISONED = SyncedState
_NOTHING, _ZEROS, _COPY, _REFUSE, _RAISE = Step


def _row(*cells: tuple[Step, SyncedState]) -> dict[SyncedState, Cell]:
    return {state: Cell(*cell) for state, cell in zip(SyncedState, cells, strict=True)}


_RAISES = (_RAISE, _POISONED)
_TO_CPU, _TO_GPU, _TO_SYNCED = (_NOTHING, _CPU), (_NOTHING, _GPU), (_NOTHING, _SYNCED)
_COPY_SYNCED = (_COPY, _SYNCED)

TABLE: Final[dict[Asked, dict[SyncedState, Cell]]] = {
    Asked.READ_HOST: _row((_ZEROS, _CPU), _TO_CPU, _COPY_SYNCED, _TO_SYNCED, _RAISES),
    Asked.READ_DEVICE: _row((_ZEROS, _GPU), _COPY_SYNCED, _TO_GPU, _TO_SYNCED, _RAISES),
    Asked.WRITE_HOST: _row((_ZEROS, _CPU), _TO_CPU, (_COPY, _CPU), _TO_CPU, _RAISES),
    Asked.WRITE_DEVICE: _row((_ZEROS, _GPU), (_COPY, _GPU), _TO_GPU, _TO_GPU, _RAISES),
    Asked.WRITE_ALL_HOST: _row(*[_TO_CPU] * 5),
    Asked.WRITE_ALL_DEVICE: _row(*[_TO_GPU] * 5),
    Asked.ADOPT_HOST: _row(_TO_CPU, _TO_CPU, (_REFUSE, _GPU), _TO_CPU, _TO_CPU),
    Asked.ADOPT_DEVICE: _row(_TO_GPU, (_REFUSE, _CPU), _TO_GPU, _TO_GPU, _TO_GPU),
    Asked.PUSH: _row((_REFUSE, _UNINIT), _COPY_SYNCED, _TO_GPU, _TO_SYNCED, _RAISES),
    Asked.PULL: _row((_REFUSE, _UNINIT), _TO_CPU, _COPY_SYNCED, _TO_SYNCED, _RAISES),
    Asked.DISCARD: _row(*[(_NOTHING, _UNINIT)] * 5),
}


class Heads:
    """The state of one pair, and the version of its data.

    Attributes
    ----------
    state : SyncedState
    version : int
        Goes up whenever the data changes or is given up.
    copy : object or None
        The copy of this data that is under way: one that was begun for older data is for nobody
        any more, and changes nothing when it ends.
    cause : BaseException or None
        What poisoned it.
    """

    __slots__ = ("cause", "copy", "state", "version")

    def __init__(self) -> None:
        self.state = SyncedState.UNINITIALIZED
        self.version = 0
        self.copy: Any = None
        self.cause: BaseException | None = None

    def look(self, asked: Asked) -> Cell:
        """What ``asked`` takes, now."""
        return TABLE[asked][self.state]

    def is_current(self, side: Side) -> bool:
        """Whether ``side`` has the data."""
        return self.state in (side.head, SyncedState.SYNCED)

    # -- data ------------------------------------------------------------------------------

    def settle(self, state: SyncedState, cause: BaseException | None = None) -> None:
        """New data, or none."""
        self.state = state
        self.cause = cause
        self.version += 1
        self.copy = None

    def begin_write(self, side: Side) -> None:
        """Somebody may change ``side`` from here on: only the other one can be relied upon."""
        keeps_other = self.is_current(side.other)
        self.settle(side.other.head if keeps_other else self.state, self.cause)

    def end_write(self, side: Side) -> None:
        """It has been written."""
        self.settle(side.head)

    def fail_write(self, side: Side, cause: BaseException) -> None:
        """It may have been half written: the other side's data stands if it has any."""
        if self.state is side.head:
            self.settle(SyncedState.POISONED, cause)

    # -- copies ----------------------------------------------------------------------------

    def begin_copy(self, copy: object) -> None:
        """It sets out for the side that lacks the data."""
        assert self.state in (SyncedState.HEAD_AT_CPU, SyncedState.HEAD_AT_GPU)
        self.copy = copy

    def end_copy(self, copy: object, *, is_well: bool) -> bool:
        """It has completed, or failed. True if both sides are in step now."""
        if copy is not self.copy:
            return False
        self.copy = None
        if is_well:
            self.state = SyncedState.SYNCED  # the data is the same: no new version
        return is_well
