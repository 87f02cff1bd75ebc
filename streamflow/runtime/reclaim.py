"""Giving back the devices of event loops that ended without leaving them (C12).

Nobody can await their ops any more, and their poller never runs again. What their streams
still run goes on; once it has ended, their memory, streams and threads are given back by
whoever enters a device next. Nothing here waits for work: what is stalled is left for a
later device.
"""

from __future__ import annotations

import time
from logging import getLogger
from typing import TYPE_CHECKING, Any

from streamflow.errors import Closed, DeviceLost
from streamflow.runtime.closing import give_back_blocking
from streamflow.runtime.losing import abandon
from streamflow.runtime.registry import add_open, take_ended
from streamflow.scheduler.loops import EndedShell

if TYPE_CHECKING:
    from streamflow.runtime.core import Core
    from streamflow.runtime.op import Op

__all__ = ["reclaim_blocking"]

PATIENCE_S = 0.1
"""For workers to reach the end of a chunk, and for frees: neither waits for a stalled stream."""


def reclaim_blocking() -> None:
    """Give back what has ended of devices whose loop has. Worker threads only."""
    cores = take_ended()
    for core in cores:  # all of them first: ops of one may wait for ops of another
        _condemn(core)
    for core in cores:
        try:
            is_given_back = _give_back_blocking(core)
        except Exception:  # its loop is gone, and this device has nothing to do with it
            getLogger("streamflow").exception("device %d could not be reclaimed", _index(core))
            continue
        if not is_given_back:
            add_open(core)


def _index(core: Core) -> int:
    return core.backend.index


def _condemn(core: Core) -> None:
    """Nothing of ``core`` is submitted, nobody is told anything, and its threads end."""
    core.is_closing = core.is_closed = core.needs_check = True
    core.instrument = None
    core.shell = EndedShell(core.shell.key)
    core.waiting.silence()
    core.completion.clear()
    core.poller.close()
    core.staging.stop_all(drops_waiting=True)
    for pool in core.pools:
        pool.close()
    for line in core.lines:
        for ticket in line.inflight:
            _silence(ticket.op)
    for op in core.pending_ops():
        _silence(op)


def _silence(op: Op[Any] | None) -> None:
    """Leave of ``op`` only what gives back what it holds: who waited is on the dead loop."""
    rare = None if op is None else op._rare
    if rare is not None:
        rare.wakers = rare.callbacks = rare.on_ended = ()
        rare.on_device_done = None
        rare.scope, rare.budgets = None, ()
        if rare.parked is not None:
            rare.parked.stops = ()  # they cancel tasks of the loop that ended


def _give_back_blocking(core: Core) -> bool:
    """Give ``core`` back if its work has ended; False if it has not."""
    if core.lost is None:
        core.backend.set_current()
        if not _has_ended(core):
            return False
    for pool in core.pools:
        for _, _, done, result, error in pool.take_results():
            done(result, error)  # closed: it lets go of what it holds
    _end_ops(core)
    if core.lost is None:
        core.memory.free_all()
        if not _has_ended(core):
            return False
    else:
        core.memory.live.clear()  # the memory went with the device
    for error in give_back_blocking(core, was_drained=True):
        if core.lost is None:
            getLogger("streamflow").error("closing device %d: %s", _index(core), error)
    return True


def _end_ops(core: Core) -> None:
    closed = Closed(f"the event loop of device {_index(core)} ended before this op was seen to")
    abandon(core, closed)
    for op in core.pending_ops():  # a staging job that no worker had begun
        core.fail(op, closed)
    core.failures.take(lambda _: True)


def _has_ended(core: Core) -> bool:
    """Whether no worker and no stream has anything left; a fault found here loses the device."""
    until_s = time.monotonic() + PATIENCE_S
    while True:
        while core.backend.advance(0):  # nobody else lets virtual time pass
            pass
        if not any(pool.num_busy for pool in core.pools) and _are_idle(core):
            return True
        if time.monotonic() > until_s:
            return False
        time.sleep(1e-3)


def _are_idle(core: Core) -> bool:
    for line in (*core.lines, *core.pins.lines()):
        owner = line.owner  # of another device perhaps, which uses what this one has pinned
        try:
            if owner.lost is None and line.inflight and not line.inflight[-1].event.is_done:
                return False
        except Exception as error:
            owner.lose_to(DeviceLost(f"polling an event: {error}"), error)
    return True
