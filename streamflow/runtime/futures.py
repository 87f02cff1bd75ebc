"""What ``after=`` takes: ops, arrays, and futures of the event loop that aren't ops yet (R7)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError
from contextvars import Context
from functools import partial
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any

from streamflow.errors import OpCancelled, UpstreamFailed
from streamflow.runtime.array import DeviceArray
from streamflow.runtime.op import Op, added
from streamflow.runtime.parked import NOTHING, After, Parked
from streamflow.runtime.recording import recorder_of
from streamflow.scheduler.hazards import add_unpassed
from streamflow.scheduler.timeline import Ticket

if TYPE_CHECKING:
    from streamflow.runtime.core import Core

__all__ = ["Futures", "is_future"]


def is_future(item: object) -> bool:
    """Whether ``item`` is a future, task handle or event of anyio, asyncio or a thread pool.

    anyio's ``Future``, ``TaskHandle`` and ``Event`` (trio's and asyncio's events, too) are
    awaited with ``wait()``; asyncio's and concurrent's futures call back.
    """
    kind = type(item)
    if isinstance(item, (Op, DeviceArray)):
        return False
    if callable(getattr(kind, "add_done_callback", None)):
        return True
    has_outcome = hasattr(kind, "return_value") or hasattr(kind, "is_set")
    return has_outcome and iscoroutinefunction(getattr(kind, "wait", None))


class Futures:
    """What ops of one device come after: ops, arrays, and futures of the event loop."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def after(self, after: Any) -> After:
        """What ``after=`` names: ops, arrays for their latest write, and futures.

        Raises
        ------
        TypeError
            Something else.
        ValueError
            An op or a future of another event loop.
        Closed
            A freed array.
        """
        if isinstance(after, (tuple, list)) and not after:
            return NOTHING
        if isinstance(after, (Op, DeviceArray)) or is_future(after):
            after = (after,)
        tickets: list[Ticket] = []
        futures: list[Any] = []
        if not isinstance(after, Iterable):
            after = (after,)
        for item in after:
            if isinstance(item, (Op, DeviceArray)):
                tickets += self.tickets_of(item)
            elif is_future(item):
                self._check(item)
                futures.append(item)
            else:
                raise TypeError(f"after= takes ops, device arrays and futures, found {item!r}")
        return After(tickets, futures)

    def tickets_of(self, item: Op[Any] | DeviceArray) -> list[Ticket]:
        """What comes after ``item`` has to come after: the op, or the writes of the array."""
        core = item._core
        if (recorder := recorder_of(self._core)) is not None:
            return recorder.tickets_of(item)
        tickets: list[Ticket] = []
        if isinstance(item, DeviceArray):
            item.check_usable()
            for other in item._region.overlapping:
                add_unpassed(other.last_write, tickets)
            ticket = item._region.last_write
        elif item.kind == "staged":
            raise ValueError("after= takes ops of the device: pass the array instead")
        else:
            ticket = item.ticket
        if core is not self._core and core.shell.key != self._core.shell.key:
            raise ValueError(f"{item!r} belongs to another event loop")
        if not ticket.is_passed or ticket.failure is not None:
            tickets.append(ticket)
        return tickets

    def _check(self, future: Any) -> None:
        """Raise ``ValueError`` if ``future`` is of another event loop, or of another library."""
        library, ours = type(future).__module__.partition(".")[0], self._core.shell.library
        if library in ("asyncio", "trio") and library != ours:
            raise ValueError(f"{future!r} is {library}'s, and this event loop {ours}'s")
        get_loop = getattr(future, "get_loop", None)
        if get_loop is not None and get_loop() is not self._core.shell.key:
            raise ValueError(f"{future!r} belongs to another event loop")

    def watch(self, parked: Parked, future: Any) -> None:
        """Meet one need of ``parked`` once ``future`` is resolved.

        Where its result is an op or an array, or several, ``parked`` comes after those.
        """
        core = self._core
        parked.need = f"{type(future).__name__} {getattr(future, 'name', '') or ''}".rstrip()

        def resolved(_: object = None) -> None:
            if not parked.has_left:
                self._resolved(parked, future)

        if not hasattr(type(future), "add_done_callback"):
            self._wait(parked, future, resolved)
        elif hasattr(future, "get_loop"):
            future.add_done_callback(resolved, context=Context())
            stop = partial(future.remove_done_callback, resolved)
            parked.stops = added(parked.stops, stop)
        else:  # a thread pool's, resolved on any thread
            future.add_done_callback(lambda _: core.shell.call_soon_threadsafe(resolved))

    def _wait(self, parked: Parked, future: Any, resolved: Callable[[], None]) -> None:
        async def wait() -> None:
            try:
                await future.wait()
            except Exception as error:
                self._core.parking.drop(parked, error.with_traceback(None))
                return
            resolved()

        def gone() -> None:  # by whoever cancels all tasks of a loop
            what = f"{parked.op.name}: the task that watched its future was cancelled"
            self._core.parking.drop(parked, OpCancelled(what))

        parked.stops = added(parked.stops, self._core.shell.spawn(wait, Context(), gone))

    def _resolved(self, parked: Parked, future: Any) -> None:
        core, parking = self._core, self._core.parking
        try:
            result = _result_of(future)
        except _Cancelled:
            what = f"{parked.op.name} waits for a future that was cancelled"
            parking.drop(parked, OpCancelled(what))
            return
        except BaseException as error:
            failure = UpstreamFailed(f"{parked.op.name} waits for a future that failed: {error!r}")
            failure.__cause__ = error.with_traceback(None)
            core.failures.note(error, parked.op.rare().scope)
            parking.drop(parked, failure)
            return
        try:
            for item in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(item, (Op, DeviceArray)):
                    for ticket in core.tickets_of(item):
                        parking.depend(parked, ticket)
        except Exception as error:  # a cycle, a freed array, an op of another loop
            parking.drop(parked, error.with_traceback(None))
            return
        parked.need = ""
        parking.ready(parked)


class _Cancelled(Exception):
    """The future was cancelled, in whatever words its library has for that."""


def _result_of(future: Any) -> object:
    """The result of a resolved future; raises what it failed with."""
    kind = type(future)
    if hasattr(kind, "add_done_callback"):
        if future.cancelled():
            raise _Cancelled
        error = future.exception()
        if error is not None:
            raise error
        return future.result()
    if not hasattr(kind, "return_value"):
        return None  # an event
    try:
        result: object = future.return_value
        return result
    except Exception as error:
        # anyio: FutureFailed and TaskFailed carry the cause, their cancelled kinds none.
        cause = error.__cause__
    if cause is None or isinstance(cause, CancelledError):
        raise _Cancelled
    raise cause  # outside of the handler: its context would hold our frames, and so the op (C23)
