"""What a test can do to the simulated machine: ``dev.sim``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from streamflow.backends.sim.command import GateCommand
from streamflow.backends.sim.log import EventLog
from streamflow.backends.sim.stream import SimStream
from streamflow.errors import DeviceError, LaunchFailed, OutOfDeviceMemory

if TYPE_CHECKING:
    from streamflow.backends.sim.device import SimDevice
    from streamflow.backends.sim.machine import Fault, World

__all__ = ["FAIL_KINDS", "Clock", "Controls", "Gate", "Rule"]

FAIL_KINDS = (
    "launch",
    "call",
    "copy_h2d",
    "copy_d2h",
    "copy_d2d",
    "copy_peer",
    "fill",
    "allocate",
    "free",
)


class Gate:
    """Holds a stream's later work until released; leaving its ``with`` block releases it."""

    def __init__(self, controls: Controls, command: GateCommand) -> None:
        self._controls = controls
        self._command = command

    @property
    def is_open(self) -> bool:
        return self._command.is_open

    def release(self) -> None:
        """Let the stream go on. From any thread; again does nothing."""
        command = self._command
        stream = command.stream
        world = stream.world
        with world.lock:
            if command.is_open:
                return
            command.is_open = True
            if stream.queue and stream.queue[0] is command:
                stream.resume()
                world.settle(world.now_s())
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
    """

    def __init__(
        self,
        rules: list[Rule],
        *,
        kind: str | None,
        name: str | None,
        num_before: int,
        repeats: bool,
        error: BaseException | type[BaseException] | None,
        sticky: bool,
    ) -> None:
        self._rules = rules
        self._kind = kind
        self._name = name
        self._num_before = num_before
        self._repeats = repeats
        self._error = error
        self._sticky = sticky
        self.num_fired = 0
        rules.append(self)

    def clear(self) -> None:
        """Take it back; after it has fired for good, does nothing."""
        if self in self._rules:
            self._rules.remove(self)

    def __enter__(self) -> Rule:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.clear()

    def on_submit(self, kind: str, label: str) -> BaseException | None:
        """The fault a matching submission is to run into; raises a failure of the call."""
        if self._kind not in (None, kind) or self._name not in (None, label):
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
    """Gates, failures, counters and the clock of one simulated device.

    Attributes
    ----------
    counters : Counter
        Calls of each backend verb, and of ``is_done``, ``record``, ``wait``,
        ``event_sync``, ``stream_sync``; ``would_block`` counts refused submissions
        that would have blocked on hardware (rule R7).
    clock : Clock
    resolve : callable
        Turns what callers name (a lane's name, say) into a ``SimStream`` or something
        with a ``backend_stream``. The layer above sets it.
    on_change : callable
        Called, from any thread, after a gate was released: wakes the poller.
    """

    def __init__(self, device: SimDevice) -> None:
        self._device = device
        self.counters: Counter[str] = device.counts
        self.clock = Clock(device.world)
        self.resolve: Callable[[object], object] = lambda target: target
        self.on_change: Callable[[], None] = lambda: None
        self.rules: list[Rule] = []

    def name_stream(self, stream: SimStream, name: str) -> None:
        """What logs are to call a stream."""
        stream.name = name

    def log(self) -> EventLog:
        """What ends while its ``with`` block runs, on every device of the loop, in order.

        Launches, copies, fills, allocations and frees; not waits, records and gates.
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
        target = self.resolve(stream)
        target = getattr(target, "backend_stream", target)
        if not isinstance(target, SimStream):
            raise TypeError(f"a gate needs a simulated stream, found {stream!r}")
        target.device.counts["gate"] += 1
        target.check()
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
            The kernel's name.
        nth : int
            1 is the next one.
        error : exception, optional
            What is raised at the call, or what a sticky fault is caused by.
        sticky : bool
            True: the op faults when it runs, and the device is lost. False: the call raises,
            as the driver reports failures that leave the device usable.
        """
        if kind is not None and kind not in FAIL_KINDS:
            raise ValueError(f"kind is one of {', '.join(FAIL_KINDS)}; found {kind!r}")
        if nth < 1:
            raise ValueError(f"nth counts from 1, found {nth}")
        return Rule(
            self.rules,
            kind=kind,
            name=name,
            num_before=nth - 1,
            repeats=False,
            error=error,
            sticky=sticky,
        )

    def out_of_memory(self, *, after: int = 0) -> Rule:
        """Make every allocation but the next ``after`` ones fail, until cleared."""
        if after < 0:
            raise ValueError(f"after cannot be negative, found {after}")
        return Rule(
            self.rules,
            kind="allocate",
            name=None,
            num_before=after,
            repeats=True,
            error=None,
            sticky=False,
        )

    def on_submit(self, kind: str, label: str) -> BaseException | None:
        """Apply the rules to a submission; the world's lock is held."""
        fault: BaseException | None = None
        for rule in tuple(self.rules):
            fault = rule.on_submit(kind, label) or fault
        return fault
