"""Draining a device, and giving back all it holds."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
from anyio.lowlevel import checkpoint_if_cancelled

from streamflow.errors import Closed, DeadlineExceeded, OpCancelled, RaceDetected
from streamflow.memory.space import leave_space
from streamflow.runtime.failures import add_note, add_notes, raise_group
from streamflow.runtime.losing import abandon
from streamflow.runtime.op import Op, OpState, added
from streamflow.runtime.registry import take_open
from streamflow.runtime.report import make_report
from streamflow.runtime.scope import is_around_here
from streamflow.scheduler.machine import FINAL

if TYPE_CHECKING:
    from streamflow.runtime.core import Core

__all__ = ["close", "drain", "give_back_blocking", "leave", "raise_failures"]


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
        while unfinished and unfinished[-1]._state in FINAL:
            unfinished.pop()
        if unfinished:
            rare = unfinished[-1].rare()
            rare.on_ended = added(rare.on_ended, next_one)
            core.want(unfinished[-1])
        else:
            wake()

    next_one()
    with _Timer(core, timeout_s, wake):
        await wait(shielded)
    return all(op._state in FINAL for op in unfinished)


def _unfinished(core: Core) -> list[Op[Any]]:
    """What is pending, and the newest op of each stream: it ends last there."""
    newest = [line.inflight[-1].op for line in core.lines if line.inflight]
    return [*(op for op in newest if op is not None), *core.pending_ops()]


class _Timer:
    """Calls ``wake`` after a while of the loop's time, virtual clock or not, unless left before."""

    def __init__(self, core: Core, timeout_s: float | None, wake: Callable[[], None]) -> None:
        self._shell = core.shell
        self._timeout_s = timeout_s
        self._wake = wake

    def __enter__(self) -> None:
        self._cancel = None
        if self._timeout_s is not None:
            self._cancel = self._shell.call_later(self._timeout_s, self._wake)

    def __exit__(self, *_: object) -> None:
        if self._cancel is not None:
            self._cancel()


def leave(core: Core, error: BaseException | None) -> None:
    """Raise what is left to say when a device has been closed; the body failed with ``error``.

    A cancellation stays as it is, with notes; other errors are joined by failed ops.
    """
    failures = core.failures.take(lambda _: True) + _take_races(core)
    if error is not None and core.left_behind is not None:
        add_note(error, f"{_left_behind(core)}\n{core.left_behind}")
    if error is not None and not isinstance(error, Exception):
        add_notes(error, failures)
        return
    if error is None and core.left_behind is not None and core.lost is None:
        late = DeadlineExceeded(
            f"{_left_behind(core)}\n{core.left_behind}", report=core.left_behind
        )
        add_notes(late, failures)
        raise late
    if core.lost is not None and not core.is_loss_seen and error is None:
        lost = core.tell_loss()
        add_notes(lost, [failure for failure in failures if isinstance(failure, RaceDetected)])
        raise lost from core.lost
    if failures:
        raise_group(f"device {core.backend.index}", error, failures)


def _take_races(core: Core) -> list[BaseException]:
    """What the race checker has found since somebody asked last, as at most one error."""
    controls = core.backend.controls()
    races = () if controls is None else controls.take_races()
    if not races:
        return []
    noun = "race" if len(races) == 1 else "races"
    text = "\n".join(str(race) for race in races)
    return [
        RaceDetected(f"{len(races)} {noun} on device {core.backend.index}\n{text}", races=races)
    ]


def raise_failures(core: Core) -> None:
    """Raise what failed and nobody has looked at (rule R9)."""
    if core.lost is not None:
        raise core.tell_loss() from core.lost
    failures = core.failures.take(is_around_here) + _take_races(core)
    if failures:
        raise_group(f"device {core.backend.index}", None, failures)


async def close(core: Core, error: BaseException | None) -> None:
    """Drain, free and close, also while the caller is being cancelled.

    Left by an ``error``, it drops what is parked; by a cancellation, staging stops as well.
    A cancellation meanwhile is raised at the end, when all is done. Work that does not end
    within ``close_timeout_s`` is left behind: what it uses is never given back.
    """
    core.is_closing = core.needs_check = True
    core.waiting.fail(Closed(f"device {core.backend.index} was closed"))
    if error is not None:
        _give_up(core, error)
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

    async def drain_all() -> None:
        """Until nothing is left, also of what is dropped meanwhile, or something is stuck."""
        while True:
            core.drain_dropped()
            before = _unfinished(core)
            await outlast(drain(core, shielded=True, timeout_s=timeout_s))
            if is_drained() or not set(before).isdisjoint(_unfinished(core)):
                return

    await drain_all()
    if core.lost is None and is_drained():
        core.memory.free_all()
        core.pins.unpin_all()
        await drain_all()
    if core.leases.is_pinning:  # for who was told already: the block is to go with the others
        core.leases.on_pinned, wait = core.shell.park()
        with _Timer(core, timeout_s, core.leases.on_pinned):
            await outlast(wait(True))
        core.leases.on_pinned = None
    was_drained = is_drained()
    if not was_drained:
        core.left_behind = make_report(core)
    core.is_closed = True
    if not was_drained:
        closed = Closed(_left_behind(core))
        abandon(core, closed, keeps_blocks=True)
        core.observed(closed)  # leave() tells
    if core.lost is not None:
        core.memory.live.clear()  # the memory went with the device
    core.poller.close()
    for pool in core.pools:
        pool.close()

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
    if error is None or isinstance(error, Exception):  # else a cancellation is on its way already
        await checkpoint_if_cancelled()
    if errors and core.lost is None:
        raise core.backend.translate(errors[0], "closing the device")


def _give_up(core: Core, error: BaseException) -> None:
    for op in reversed(core.pending_ops()):
        rare = op._rare
        if rare is None or op.kind in ("free", "unpin"):
            continue
        if op._state is OpState.PARKED and rare.parked is not None:
            why = f"{op.name} was dropped: its device was left by {error!r}"
            core.parking.drop(rare.parked, OpCancelled(why))
        elif rare.stop is not None and not isinstance(error, Exception):
            rare.stop()


def give_back_blocking(core: Core, was_drained: bool) -> list[Exception]:
    """Close all that ``core`` holds, whatever of it fails. Worker threads only; claim it first.

    Returns what failed. Where work was left behind, what it uses is kept (rule R6).
    """
    steps = [core.backend.close]
    if was_drained and core.lost is None:
        streams = [line.stream.close for line in core.lines if line.stream is not None]
        events = [event.close for event in core.events]
        steps = [
            *core.leftovers,
            core.pins.close_blocking,
            core.staging.close_blocking,
            *streams,
            *events,
            core.tracer.close_blocking,
            core.memory.close,
            *steps,
        ]
    keeps = not was_drained or core.lost is not None
    steps.insert(0, partial(leave_space, core.space, core.backend, keeps=keeps))
    if was_drained:
        steps[:0] = [core.pinned.close_blocking, core.leases.take_dropped]
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
