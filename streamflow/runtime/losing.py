"""How a device ends before its work has: by a fault, or by being left with work that is stuck."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamflow.errors import DeviceLost
from streamflow.runtime.op import OpState
from streamflow.scheduler.machine import FINAL

if TYPE_CHECKING:
    from streamflow.runtime.core import Core

__all__ = ["abandon", "lose"]

_NUM_TOLD = 8  # suspects that an error's text names with their lines


def lose(core: Core, reason: DeviceLost, cause: BaseException) -> None:
    """Take the device as lost, and tell the suspects (rule R9)."""
    unfinished = [ticket.op for line in core.lines for ticket in line.inflight]
    ops = sorted((op for op in unfinished if op is not None), key=lambda op: op.ticket.seq)
    suspects = reason.suspects or tuple(op.name for op in ops)
    culprit = core.serial_op
    if culprit is not None and all(op is culprit for op in ops):
        # Its own driver calls may have seen the fault, before it had a position.
        ops, suspects = [culprit], (culprit.name,)
    told = [f"{op.name} ({op.where})" for op in ops if op.name in suspects]
    text = f"{reason}; suspects: {', '.join(told[:_NUM_TOLD])}" if told else str(reason)
    core.lost = lost = DeviceLost(text, suspects=suspects)
    lost.__cause__ = cause.with_traceback(None)
    core.needs_check = True
    abandon(core, lost)
    for peer in core.poller.peers():
        peer.abroad.fail(lost)


def abandon(core: Core, error: Exception, *, keeps_blocks: bool = False) -> None:
    """Fail everything that has not finished: it never will, or nobody will look.

    ``keeps_blocks``: the device may still be using what the ops hold, so that is never
    given back (rule R6).
    """
    core.waiting.fail(error)
    in_flight = [ticket for line in core.lines for ticket in line.abandon()]
    core.completion.clear()
    core.staging.stop_all()
    parked = core.pending_ops()
    for op in (*(ticket.op for ticket in in_flight), *parked):
        if op is None or op._state in FINAL:
            continue
        rare = op._rare
        if keeps_blocks and rare is not None:
            rare.on_retired = None
        waiting = rare.parked if rare is not None else None
        is_at_work = waiting is None or waiting.num_blockers > 0
        if op._state is OpState.STAGING and is_at_work and not keeps_blocks:
            continue  # a worker is at it, on the caller's memory perhaps: it ends soon
        if waiting is not None:
            core.parking.drop(waiting, error)
        else:
            core.fail(op, error)
