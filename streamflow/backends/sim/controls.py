"""What a test can do to the simulated machine: ``dev.sim``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from math import isfinite
from types import TracebackType
from typing import TYPE_CHECKING

from streamflow.backends.sim.command import GateCommand
from streamflow.backends.sim.log import EventLog
from streamflow.backends.sim.memory_map import MemoryRow, read_memory_map
from streamflow.backends.sim.report import Race
from streamflow.backends.sim.stall import ENGINES, Stall, StallCommand, stall_engine, stall_stream
from streamflow.backends.sim.stream import SimStream
from streamflow.errors import DeviceError, LaunchFailed, OutOfDeviceMemory

if TYPE_CHECKING:
    from streamflow.backends.sim.device import SimDevice
    from streamflow.backends.sim.machine import Fault, World

__all__ = ["FAIL_KINDS", "Clock", "Controls", "Gate", "Rule", "Stall"]

FAIL_KINDS = (
    "launch",
    "call",
    "copy_h2d",
    "copy_d2h",
    "copy_d2d",
    "copy_peer",
    "fill",
    "prefetch",
    "allocate",
    "free",
    "register",
    "unregister",
)

_NUMBER = re.compile(r"#\d+$", re.ASCII)
"""What tells ops apart that were given no name: ``get#5``."""


class Gate:
    """Holds a stream's later work until released; leaving its ``with`` block releases it."""

    def __init__(self, controls: Controls, command: GateCommand) -> None:
        self._controls = controls
        self._command = command
        self._is_open = False

    @property
    def is_open(self) -> bool:
        return self._is_open

    def release(self) -> None:
        """Let the stream go on. From any thread; again does nothing."""
        world = self._command.stream.world
        with world.lock:
            if self._is_open:
                return
            self._is_open = True
            world.open_gate(self._command)
        self._controls.on_change()

    def __enter__(self) -> Gate:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class Rule:
    """A failure to come; ``clear()`` or leaving its ``with`` block takes it back.

    Attributes
    ----------
    num_fired : int
        How often it has made a call fail.
    is_op_named : bool
        Its name may be an op's, too: each has to be told then, by a longer way.
    """

    def __init__(
        self,
        controls: Controls,
        *,
        kind: str | None,
        name: str | None,
        num_before: int,
        repeats: bool,
        error: BaseException | type[BaseException] | None,
        sticky: bool,
        is_op_named: bool = False,
    ) -> None:
        self._controls = controls
        self._kind = kind
        self._name = name
        self.is_op_named = is_op_named and name is not None
        self._num_before = num_before
        self._repeats = repeats
        self._error = error
        self._sticky = sticky
        self.num_fired = 0
        controls.rules.append(self)
        controls.on_rules()

    def clear(self) -> None:
        """Take it back; after it has fired for good, does nothing."""
        if self in self._controls.rules:
            self._controls.rules.remove(self)
            self._controls.on_rules()

    def __enter__(self) -> Rule:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.clear()

    def on_submit(self, kind: str, label: str, op_name: str | None) -> BaseException | None:
        """The fault a matching submission is to run into; raises a failure of the call."""
        if self._kind not in (None, kind):
            return None
        if self._name not in (None, label, op_name) and (
            op_name is None or self._name != _NUMBER.sub("", op_name)
        ):
            return None
        if self._num_before:
            self._num_before -= 1
            return None
        self.num_fired += 1
        if not self._repeats:
            self.clear()
        error = self._error or _default_error(kind, label, self._sticky)
        if isinstance(error, type):
            error = error(f"{label}: failure injected by the simulator's controls")
        if self._sticky:
            return error
        raise error


def _default_error(kind: str, label: str, sticky: bool) -> BaseException:
    text = f"{label}: failure injected by the simulator's controls"
    if sticky:
        return RuntimeError(text)
    if kind in ("launch", "call"):
        return LaunchFailed(text)
    return OutOfDeviceMemory(text) if kind == "allocate" else DeviceError(text)


class Clock:
    """The clock the simulated devices of a loop run by."""

    def __init__(self, world: World) -> None:
        self._world = world

    @property
    def is_virtual(self) -> bool:
        return self._world.is_virtual

    @property
    def now_s(self) -> float:
        return self._world.now_s()

    @property
    def next_s(self) -> float | None:
        """When the next running work ends; None if none runs, or on the wall clock."""
        with self._world.lock:
            return self._world.next_s() if self._world.is_virtual else None

    def advance(self, seconds: float) -> float:
        """Let virtual time pass, at most to the next completion, which it leaves undone.

        Returns
        -------
        float
            The seconds that passed.
        """
        if not self._world.is_virtual:
            raise RuntimeError("the wall clock passes by itself; use SimOptions(clock='virtual')")
        with self._world.lock:
            return self._world.skip(seconds)


class Controls:
    """Gates, failures, stalls, counters, the clock and the memory of one simulated device.

    Attributes
    ----------
    counters : Counter
        Calls of each backend verb, and of ``is_done``, ``record``, ``wait``, ``event_sync``,
        ``stream_sync``, ``event_close``, ``stream_close``; ``would_block`` counts refused
        submissions that would have blocked on hardware (rule R7).
    clock : Clock
    resolve : callable
        Turns what callers name (a lane's name, say) into a ``SimStream`` or something
        with a ``backend_stream``. The layer above sets it.
    on_change : callable
        Called, from any thread, after a gate was released or a stall ended: wakes the poller.
    on_naming : callable
        Called with whether any rule asks for the names of ops, as that changes. The layer above
        sets it.
    """

    def __init__(self, device: SimDevice) -> None:
        self._device = device
        self.counters: Counter[str] = device.counts
        self.clock = Clock(device.world)
        self.resolve: Callable[[object], object] = lambda target: target
        self.on_change: Callable[[], None] = lambda: None
        self.on_naming: Callable[[bool], None] = lambda is_naming: None
        self.rules: list[Rule] = []
        self._stalls: list[Stall] = []
        self._is_naming = False

    # -- the race checker ------------------------------------------------------------------

    @property
    def races(self) -> tuple[Race, ...]:
        """The races found on this device that :meth:`take_races` has not taken."""
        races = self._device.world.races
        return () if races is None else tuple(races.found(self._device.index))

    def take_races(self) -> tuple[Race, ...]:
        """The races found so far, which are not reported any more when the device is left.

        Each was told once for its two lines; should they race again, that is told anew.
        """
        races = self._device.world.races
        return () if races is None else tuple(races.take(self._device.index))

    # -- what a test sees and does -----------------------------------------------------------

    def log(self) -> EventLog:
        """What ends while its ``with`` block runs, on every device of the loop, in order.

        Launches, copies, fills, allocations and frees; not waits, records, gates and stalls.
        """
        return EventLog(self._device.world)

    @property
    def fault(self) -> Fault | None:
        """What the device was lost to."""
        return self._device.gpu.fault

    def gate(self, stream: object) -> Gate:
        """Hold what is submitted to ``stream`` from now on.

        Ordering
        --------
        Queued on the stream at this call: earlier work runs, and an event recorded
        earlier is unaffected.
        """
        target = self._stream(stream, "gate")
        command = GateCommand(target)
        with target.world.lock:
            target.world.submit(command)
        return Gate(self, command)

    def fail(
        self,
        kind: str | None = None,
        *,
        name: str | None = None,
        nth: int = 1,
        error: BaseException | type[BaseException] | None = None,
        sticky: bool = True,
    ) -> Rule:
        """Make the ``nth`` matching submission from now on fail.

        Parameters
        ----------
        kind : str, optional
            One of ``FAIL_KINDS``; any if left out.
        name : str, optional
            The kernel's name, or the op's: what ``dev.launch(..., name=)`` was given, or what an
            op without a name does, such as ``get``, ``put``, ``copy``, ``fill``. Of a staged
            copy each chunk counts.
        nth : int
            1 is the next one.
        error : exception, optional
            What is raised at the call, or what a sticky fault is caused by.
        sticky : bool
            True: the op faults when it runs, and the device is lost. False: the backend's call
            raises, as a driver's does that leaves the device usable, and so the op fails. That
            is all that ``register`` and ``unregister``, which are no work of a stream, ever do.
        """
        if kind is not None and kind not in FAIL_KINDS:
            raise ValueError(f"kind is one of {', '.join(FAIL_KINDS)}; found {kind!r}")
        if nth < 1:
            raise ValueError(f"nth counts from 1, found {nth}")
        return Rule(
            self,
            kind=kind,
            name=name,
            num_before=nth - 1,
            repeats=False,
            error=error,
            sticky=sticky,
            is_op_named=True,
        )

    def out_of_memory(self, *, after: int = 0) -> Rule:
        """Make every allocation but the next ``after`` ones fail, until cleared."""
        if after < 0:
            raise ValueError(f"after cannot be negative, found {after}")
        return Rule(
            self,
            kind="allocate",
            name=None,
            num_before=after,
            repeats=True,
            error=None,
            sticky=False,
        )

    def stall(self, target: object, seconds: float) -> Stall:
        """Have an engine, or a stream, do nothing for a while.

        Parameters
        ----------
        target : str or Stream or Lane
            ``"h2d"``, ``"d2h"`` or ``"compute"``: that engine starts nothing for ``seconds``
            from now; what it runs already ends in its own time. A stream, a lane or another
            lane's name (the lane ``h2d`` is ``dev.lanes["h2d"]``): what is submitted there from
            now on starts ``seconds`` later.
        seconds : float
            Of the device's clock. For something that never ends, use :meth:`gate`.

        Returns
        -------
        Stall
            ``end()``, or leaving its ``with`` block, ends it early.
        """
        if not (isfinite(seconds) and seconds >= 0):
            raise ValueError(f"a stall takes finite seconds, found {seconds}; see gate()")
        device = self._device
        if isinstance(target, str) and target in ENGINES:
            device.counts["stall"] += 1
            if device.stop is not None:
                raise device.stop()
            with device.world.lock:
                commands = stall_engine(device, target, seconds)
        else:
            stream = self._stream(target, "stall")
            with stream.world.lock:
                commands = stall_stream(stream, seconds)
        stall = Stall(commands, self.on_change)
        self._stalls = [other for other in self._stalls if not other.is_over]
        self._stalls.append(stall)
        return stall

    def memory_map(self) -> tuple[MemoryRow, ...]:
        """Every block of the device's memory, by address.

        The capacities of a pool's rows sum up to what it reserved, their ``nbytes`` to what it
        has in use; all capacities, to what the device has not free.
        """
        with self._device.world.lock:
            return read_memory_map(self._device.gpu)

    def holding(self, stream: SimStream) -> str:
        """What of these controls keeps the next work of ``stream`` from running; "" for nothing."""
        with self._device.world.lock:
            head = stream.queue[0] if stream.queue else None
            if isinstance(head, GateCommand | StallCommand):
                return f"a {head.label} on {stream.name}"
            if (
                head is None
                or head.engine is None
                or all(head is not e[4] for e in head.engine.ready)
            ):
                return ""
            is_stalled = any(each.holds(head.engine) for each in self._stalls)
            return f"the stall of engine {head.engine.name}" if is_stalled else ""

    def end_stalls(self) -> None:
        """The device is being closed: nobody is to wait for a stall of it any more."""
        for stall in self._stalls:
            stall.cut_short()

    def on_rules(self) -> None:
        """The rules have changed: whether any asks for the names of ops."""
        is_naming = any(rule.is_op_named for rule in self.rules)
        if is_naming is not self._is_naming:
            self._is_naming = is_naming
            self.on_naming(is_naming)

    def on_submit(self, kind: str, label: str) -> BaseException | None:
        """Apply the rules to a submission; the world's lock is held."""
        fault: BaseException | None = None
        doing = self._device.checker.doing()
        op_name = None if doing is None else doing[0]
        for rule in tuple(self.rules):
            fault = rule.on_submit(kind, label, op_name) or fault
        return fault

    def _stream(self, target: object, verb: str) -> SimStream:
        found = self.resolve(target)
        found = getattr(found, "backend_stream", found)
        if not isinstance(found, SimStream):
            raise TypeError(f"a {verb} needs a simulated stream, found {target!r}")
        found.device.counts[verb] += 1
        found.check()
        return found
