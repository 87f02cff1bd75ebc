"""The states of an op and the steps between them, as data (sans-IO).

::

    parked ── start ──> staging ── submit ──> submitted ── complete ──> done
      │                    │                      │
      ├── submit ─────────────────────────────────┤
      │                    ├── complete ──────────────────────────────> done
      ├── fail ────────────┴── fail ──────────────┴── fail ───────────> failed
      └── cancel ──────────┴── cancel ────────────────────────────────> cancelled

*Staging* is an op's work on the host: copies through pinned memory, or a host task.
A submitted op can't be cancelled: a running kernel can't be stopped (rule R8).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from types import MappingProxyType

__all__ = ["FINAL", "TRANSITIONS", "IllegalTransition", "OpState", "OpStep", "step"]


class OpState(Enum):
    """Where an op is. The last three are final."""

    PARKED = "parked"
    STAGING = "staging"
    SUBMITTED = "submitted"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class OpStep(Enum):
    """What happens to an op."""

    START = "start"
    """Its work on the host begins."""
    SUBMIT = "submit"
    """It has its position on a stream."""
    COMPLETE = "complete"
    """All its work has ended well."""
    FAIL = "fail"
    CANCEL = "cancel"
    """It is removed before it reached the device."""


TRANSITIONS: Mapping[OpState, Mapping[OpStep, OpState]] = MappingProxyType(
    {
        OpState.PARKED: {
            OpStep.START: OpState.STAGING,
            OpStep.SUBMIT: OpState.SUBMITTED,
            OpStep.FAIL: OpState.FAILED,
            OpStep.CANCEL: OpState.CANCELLED,
        },
        OpState.STAGING: {
            OpStep.SUBMIT: OpState.SUBMITTED,
            OpStep.COMPLETE: OpState.DONE,
            OpStep.FAIL: OpState.FAILED,
            OpStep.CANCEL: OpState.CANCELLED,
        },
        OpState.SUBMITTED: {
            OpStep.COMPLETE: OpState.DONE,
            OpStep.FAIL: OpState.FAILED,
        },
        OpState.DONE: {},
        OpState.FAILED: {},
        OpState.CANCELLED: {},
    }
)

FINAL = tuple(state for state, steps in TRANSITIONS.items() if not steps)  # a set would hash


class IllegalTransition(RuntimeError):
    """A step that the table does not have: a mistake of streamflow's own."""


def step(state: OpState, happened: OpStep, story: Callable[[], str]) -> OpState:
    """The state after ``happened``.

    Parameters
    ----------
    state : OpState
    happened : OpStep
    story : callable
        Tells what is known of the op; only asked where the step is illegal.

    Raises
    ------
    IllegalTransition
        The table has no such step.
    """
    after = TRANSITIONS[state].get(happened)
    if after is None:
        raise IllegalTransition(f"an op that is {state.value} cannot {happened.value}: {story()}")
    return after
