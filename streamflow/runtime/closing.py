"""Draining a device, and giving back all it holds."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from streamflow.errors import DeviceLost
from streamflow.runtime.op import Op, next_seq
from streamflow.runtime.parking import Parked

if TYPE_CHECKING:
    from streamflow.runtime.core import Core

__all__ = ["close", "drain", "raise_failures"]


async def drain(core: Core, *, shielded: bool = False, timeout_s: float | None = None) -> bool:
    """Wait until nothing is parked, staging or in flight. False if ``timeout_s`` ran out."""
    wake, wait = core.shell.park()
    is_over = False
    timer = None

    def attempt() -> None:
        if is_over:
            return
        op = _oldest_unfinished(core)
        if op is None:
            wake()
        else:
            op.rare().on_ended.append(attempt)
            core.want(op)

    def expire() -> None:
        nonlocal is_over
        is_over = True
        wake()

    core.drain_dropped()
    for line in core.lines:
        core.reap(line)
    if _oldest_unfinished(core) is None:
        return True
    if timeout_s is not None:
        timer = threading.Timer(timeout_s, lambda: core.shell.call_soon_threadsafe(expire))
        timer.daemon = True
        timer.start()
    attempt()
    try:
        await wait(shielded)
    finally:
        is_over_early, is_over = is_over, True
        if timer is not None:
            timer.cancel()
    return not is_over_early


def _oldest_unfinished(core: Core) -> Op[Any] | None:
    if pending := core.pending_ops():
        return pending[0]
    for line in core.lines:
        if line.inflight and core.lost is None:
            # The newest ends last; one wait per stream is enough.
            newest: Op[Any] | None = line.inflight[-1].op
            if newest is not None:
                return newest
    return None


def raise_failures(core: Core) -> None:
    """Raise what failed and nobody has looked at (rule R9)."""
    if core.lost is not None:
        core.is_loss_seen = True
        raise DeviceLost(str(core.lost), suspects=core.lost.suspects) from core.lost
    failures = core.take_failures()
    if failures:
        exceptions = [e for e in failures if isinstance(e, Exception)]
        noun = "op" if len(exceptions) == 1 else "ops"
        raise ExceptionGroup(
            f"{len(exceptions)} {noun} failed and nobody asked for the result", exceptions
        )


async def close(core: Core) -> bool:
    """Drain, free and close. False if work was left behind after ``close_timeout_s``."""
    timeout_s = core.settings.close_timeout_s
    is_drained = await drain(core, shielded=True, timeout_s=timeout_s)
    if core.lost is None:
        for op in core.pending_ops():
            parked: Parked | None = op._rare.parked if op._rare is not None else None
            if parked is not None and not is_drained:
                op.cancel()
        core.memory.free_all()
        if is_drained:
            is_drained = await drain(core, shielded=True, timeout_s=timeout_s)
    core.staging.stop_all()
    core.is_closed = core.needs_check = True

    def give_back_blocking() -> None:
        if is_drained:
            core.staging.close_blocking()
            core.pinned.close_blocking()
            if core.lost is None:
                core.memory.close()
                for line in core.lines:
                    if line.stream is not None:
                        line.stream.close()
                for event in core.events:
                    event.close()
        core.backend.close()

    wake, wait = core.shell.park()
    errors: list[BaseException] = []

    def done(_: None, error: BaseException | None) -> None:
        if error is not None:
            errors.append(error)
        wake()

    core.background.submit(next_seq(), give_back_blocking, done)
    core.schedule_turn()
    await wait(True)
    core.background.close()
    core.stagers.close()
    core.poller.close()
    if errors and core.lost is None:
        raise core.backend.translate(errors[0], "closing the device")
    return is_drained
