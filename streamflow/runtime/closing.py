"""Draining a device, and giving back all it holds."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import anyio
from anyio.lowlevel import checkpoint_if_cancelled

from streamflow.errors import Closed, DeviceLost
from streamflow.runtime.op import Op, OpState
from streamflow.runtime.registry import take_open

if TYPE_CHECKING:
    from streamflow.runtime.core import Core

__all__ = ["close", "drain", "give_back_blocking", "raise_failures"]

_ENDED = (OpState.DONE, OpState.FAILED, OpState.CANCELLED)


async def drain(core: Core, *, shielded: bool = False, timeout_s: float | None = None) -> bool:
    """Wait until all that was called for so far has ended. False if ``timeout_s`` ran out."""
    core.drain_dropped()
    for line in list(core.lines):
        core.reap(line)
    unfinished = _unfinished(core)
    if not unfinished:
        return True
    for line in core.lines:
        if line.inflight and line.inflight[-1].failure is not None:
            # Its op has ended, its work has not: wait for a mark behind it.
            unfinished.append(core.mark(line.inflight[-1]))
    wake, wait = core.shell.park()

    def next_one() -> None:
        while unfinished and unfinished[-1]._state in _ENDED:
            unfinished.pop()
        if unfinished:
            unfinished[-1].rare().on_ended.append(next_one)
            core.want(unfinished[-1])
        else:
            wake()

    next_one()
    with _Timer(core, timeout_s, wake):
        await wait(shielded)
    return all(op._state in _ENDED for op in unfinished)


def _unfinished(core: Core) -> list[Op[Any]]:
    """What is pending, and the newest op of each stream: it ends last there."""
    newest = [line.inflight[-1].op for line in core.lines if line.inflight]
    return [*(op for op in newest if op is not None), *core.pending_ops()]


class _Timer:
    """Calls ``wake`` on the loop after a while, unless left before."""

    def __init__(self, core: Core, timeout_s: float | None, wake: Callable[[], None]) -> None:
        self._timer = None
        if timeout_s is not None:
            self._timer = threading.Timer(timeout_s, lambda: core.shell.call_soon_threadsafe(wake))
            self._timer.daemon = True

    def __enter__(self) -> None:
        if self._timer is not None:
            self._timer.start()

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()


def raise_failures(core: Core) -> None:
    """Raise what failed and nobody has looked at (rule R9)."""
    if core.lost is not None:
        core.is_loss_seen = True
        raise DeviceLost(str(core.lost), suspects=core.lost.suspects) from core.lost
    failures = core.take_failures()
    exceptions = [e for e in failures if isinstance(e, Exception)]
    if exceptions:
        noun = "op" if len(exceptions) == 1 else "ops"
        raise ExceptionGroup(
            f"{len(exceptions)} {noun} failed and nobody asked for the result", exceptions
        )


async def close(core: Core) -> bool:
    """Drain, free and close, also while the caller is being cancelled.

    A cancellation is raised at the end, when all is done. False if work was left behind
    after ``close_timeout_s``: what it uses is never given back.
    """
    core.is_closing = core.needs_check = True
    timeout_s = core.settings.close_timeout_s
    cancellations: list[BaseException] = []

    async def outlast(waiting: Awaitable[Any]) -> None:
        with anyio.CancelScope(shield=True):
            try:
                await waiting
            except anyio.get_cancelled_exc_class() as cancelled:
                cancellations.append(cancelled)

    def is_drained() -> bool:
        return core.lost is not None or not _unfinished(core)

    await outlast(drain(core, shielded=True, timeout_s=timeout_s))
    if core.lost is None and is_drained():
        core.memory.free_all()
        await outlast(drain(core, shielded=True, timeout_s=timeout_s))
    was_drained = is_drained()
    core.is_closed = True
    if not was_drained:
        core.abandon(Closed(_left_behind(core)), keeps_blocks=True)
    if core.lost is not None:
        core.memory.live.clear()  # the memory went with the device
    core.poller.close()
    core.background.close()
    core.stagers.close()

    wake, wait = core.shell.park()
    errors: list[Exception] = []

    def run_blocking() -> None:
        if take_open(core):
            errors.extend(give_back_blocking(core, was_drained))
        core.shell.call_soon_threadsafe(wake)

    threading.Thread(target=run_blocking, name="streamflow-close", daemon=True).start()
    with _Timer(core, timeout_s, wake):
        await outlast(wait(True))
    if cancellations:
        raise cancellations[0]
    await checkpoint_if_cancelled()
    if errors and core.lost is None:
        raise core.backend.translate(errors[0], "closing the device")
    return was_drained


def give_back_blocking(core: Core, was_drained: bool) -> list[Exception]:
    """Close all that ``core`` holds, whatever of it fails. Worker threads only; claim it first.

    Returns what failed. Where work was left behind, what it uses is kept (rule R6).
    """
    steps = [core.backend.close]
    if was_drained and core.lost is None:
        streams = [line.stream.close for line in core.lines if line.stream is not None]
        events = [event.close for event in core.events]
        steps = [core.staging.close_blocking, *streams, *events, core.memory.close, *steps]
    if was_drained:
        steps.insert(0, core.pinned.close_blocking)
    errors: list[Exception] = []
    for step in (core.backend.set_current, *steps):
        try:
            step()
        except Exception as error:
            errors.append(error)
    return errors


def _left_behind(core: Core) -> str:
    return (
        f"device {core.backend.index} was closed with work that did not end within "
        f"close_timeout_s={core.settings.close_timeout_s}"
    )
