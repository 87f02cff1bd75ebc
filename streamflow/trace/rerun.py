"""The ops of a trace once more, on the simulator's machine: streams, engines and their queues.

What a replay needs of an op is when it may go and how long it keeps its engine: no memory is
touched, and no event loop runs. Lanes are chosen and waits are left out by the scheduler's own
rules; the host is a heap of moments at which the program, or the runtime, does something.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import Context
from dataclasses import dataclass
from heapq import heappop, heappush

from streamflow.backends.sim.command import Command
from streamflow.backends.sim.device import SimDevice, open_device
from streamflow.backends.sim.machine import Engine
from streamflow.backends.sim.stream import SimStream
from streamflow.config import Settings
from streamflow.scheduler.placement import choose_lane
from streamflow.scheduler.timeline import Ticket, Timeline, needed_waits
from streamflow.trace.happenings import (
    CALLED,
    COMPUTE,
    DIGITS,
    ENDED,
    GONE,
    ISSUED,
    LANES,
    Order,
    workers_s,
)
from streamflow.trace.host_order import Call
from streamflow.trace.model import TracedEdge, TracedOp

__all__ = ["Machine", "Times", "rerun"]

_CALL_CALLS = 17
"""What a foreign function counts in its stream's window, with its event."""


@dataclass(slots=True)
class Machine:
    """What the ops run on.

    ``compute_lanes`` is None where every op keeps the lane that it had.
    """

    settings: Settings
    devices: Sequence[int]
    compute_lanes: int | None
    host_workers: int


@dataclass(slots=True)
class Times:
    """What became of one op. ``waited`` are the places of those it waited for on the device."""

    called_s: float = 0.0
    begun_s: float | None = None
    issued_s: float | None = None
    start_s: float = 0.0
    end_s: float = 0.0
    stream: str = ""
    position: int = 0
    waited: Sequence[int] = ()


def rerun(
    ops: Sequence[TracedOp],
    edges: Sequence[TracedEdge],
    calls: Sequence[Call],
    measured: dict[int, float],
    durations: dict[int, float],
    machine: Machine,
) -> list[Times]:
    """When each op would go its way; by place.

    Parameters
    ----------
    ops : sequence of TracedOp
        In the order in which they were called for; each has its times.
    edges : sequence of TracedEdge
    calls : sequence of Call
        For each op.
    measured, durations : dict
        By id, how long it kept its engine busy, and how long it does now.
    machine : Machine
    """
    return _Rerun(ops, edges, calls, measured, durations, machine).run()


class _Piece(Command):
    """An op's place on a stream; with an engine, its work. Without a place, a delay."""

    __slots__ = ("place", "seconds", "start_s")
    label = "op of a trace"

    def __init__(
        self, stream: SimStream, engine: Engine | None, place: int | None, seconds: float
    ) -> None:
        super().__init__(stream, engine)
        self.place = place
        self.seconds = seconds
        self.start_s = 0.0
        stream.num_work += engine is not None

    def duration_s(self) -> float:
        self.start_s = self.stream.world.now_s()
        return self.seconds

    def settle(self, now_s: float) -> bool:
        self.start_s = now_s
        return True


_NOWHERE = Timeline(0)
"""Stands for a stream that nothing is on."""


class _Rerun:
    def __init__(
        self,
        ops: Sequence[TracedOp],
        edges: Sequence[TracedEdge],
        calls: Sequence[Call],
        measured: dict[int, float],
        durations: dict[int, float],
        machine: Machine,
    ) -> None:
        self._ops = ops
        self._machine = machine
        self._calls = calls
        self._measured_s = [measured[op.id] for op in ops]
        self._seconds = [durations[op.id] for op in ops]
        self.times = [Times() for _ in ops]
        self._tickets = [Ticket(place, place) for place in range(len(ops))]
        order = Order(ops, edges, calls, keeps_lanes=machine.compute_lanes is None)
        self._needs = order.needs
        self._followers = order.followers
        self._num_before = order.num_before
        self._ready_s = order.ready_s
        self._due: list[tuple[float, bool, int, float, int]] = []
        self._num_added = 0
        self._num_called = 0  # places up to here are called
        self._at = -1  # what is happening
        self._workers_s = workers_s(ops)
        self._ended: list[int] = []
        self._num_wanted: dict[Timeline, int] = {}
        # By engine: when it will be through with what is staged, and when the last was issued.
        self._staged_s: dict[Engine | None, float] = {}
        self._staged_issued_s: dict[Engine | None, float] = {}
        self._is_over = [False] * len(ops)
        self._open()

    # -- the machine --------------------------------------------------------------------------

    def _open(self) -> None:
        machine = self._machine
        key = object()
        # A schedule that a test explores is not ours.
        self._devices: dict[int, SimDevice] = {
            index: Context().run(open_device, number, machine.settings, key)
            for number, index in enumerate(machine.devices)
        }
        self._world = next(iter(self._devices.values())).world
        self._world.listeners.append(self._piece_ended)
        self._lines: dict[tuple[int, str], Timeline] = {}
        self._lanes: dict[int, list[Timeline]] = {}
        self._idle: dict[int, list[SimStream]] = {index: [] for index in self._devices}
        self._hosts: dict[int, Engine] = {}
        for index, device in self._devices.items():
            num = machine.compute_lanes or 0
            self._lanes[index] = [self._line(index, f"compute{n}") for n in range(num)]
            for name in LANES:
                self._line(index, name)
            self._hosts[index] = Engine(device.gpu, "host", machine.host_workers)

    def _line(self, index: int, name: str) -> Timeline:
        line = self._lines.get((index, name))
        if line is None:
            stream = self._devices[index].create_stream()
            line = self._lines[index, name] = Timeline(stream.id, stream, name)
            self._num_wanted[line] = 0
        return line

    def run(self) -> list[Times]:
        world, due = self._world, self._due
        try:
            with world.lock:
                for happening, num in enumerate(self._num_before):
                    if not num and happening % 4 == CALLED:
                        self._add(self._ready_s[happening], happening)
                while True:
                    self._tell_ends()
                    next_s = world.next_s()
                    if due and (next_s is None or due[0][:2] <= (round(next_s, DIGITS), False)):
                        *_, at_s, happening = heappop(due)
                        if at_s > world.now_s():
                            world.skip(at_s - world.now_s())
                        self._happens(happening)
                    elif not world.step() and not self._call_anyway():
                        break
        finally:
            for device in self._devices.values():
                device.close()
        assert all(self._is_over), "the ops of a trace wait for each other"
        return self.times

    def _call_anyway(self) -> bool:
        """Make the first call that is still to come, where all wait for each other.

        The program would not do that: who waited for whom was not read off the trace rightly.
        """
        while self._num_called < len(self._ops):
            called = 4 * self._num_called + CALLED
            self._num_called += 1
            if self._num_before[called] > 0:
                self._num_before[called] = 0
                self._add(self._world.now_s(), called)
                return True
        return False

    def _add(self, at_s: float, happening: int) -> None:
        # What workers have done is seen in a later turn than what the program does now, and in
        # the order of the ops; all else as one thing leads to another.
        is_later = self._is_later(happening)
        self._num_added += 1
        order = happening if is_later else self._num_added
        heappush(self._due, (round(at_s, DIGITS), is_later, order, at_s, happening))

    def _happens(self, happening: int) -> None:
        place, what = divmod(happening, 4)
        now_s, times = self._world.now_s(), self.times[place]
        outer, self._at = self._at, happening
        if what == CALLED:
            times.called_s = now_s
            if self._calls[place].sees_all:
                for line in self._lines.values():
                    self._retire(line)
        elif what == GONE:
            self._go(place)
        elif what == ISSUED:
            self._issue(place)
        for then, seconds in self._followers[happening]:
            self._met(then, now_s + seconds)
        self._at = outer

    def _met(self, happening: int, at_s: float) -> None:
        """One more of what comes before it is so."""
        self._ready_s[happening] = max(self._ready_s[happening], at_s)
        self._num_before[happening] -= 1
        if self._num_before[happening]:
            return
        at_s = self._ready_s[happening]
        is_own = happening // 4 == self._at // 4 and not self._is_later(happening)
        if is_own and at_s <= self._world.now_s():  # within one call of the program's
            self._happens(happening)
        else:
            self._add(at_s, happening)

    def _is_later(self, happening: int) -> bool:
        place, what = divmod(happening, 4)
        op = self._ops[place]
        return op.is_staged if what == ISSUED else what == GONE and len(op.needs) > 0

    # -- an op --------------------------------------------------------------------------------

    def _go(self, place: int) -> None:
        op, now_s = self._ops[place], self._world.now_s()
        device = self._devices[op.device]
        issued_s = now_s
        if op.begun_s is not None:
            self.times[place].begun_s = now_s
        if op.stream == "host":
            self._submit(place, device.create_stream(), self._hosts[op.device])
            return
        if op.is_staged:
            idle = self._idle[op.device]
            stream = idle.pop() if idle else device.create_stream()
            # Of jobs that begin at the same moment the earlier one comes first, before lanes.
            stream.draw = lambda: float(place - len(self._ops))
            if place in self._workers_s:
                aside = device.gpu.aside
                self._world.submit(_Piece(stream, aside, None, self._workers_s[place]))
            self._submit(place, stream, self._engine(op))
            self._tickets[place].event = stream.place()
            issued_s = self._staged(place, now_s)
        self._met(4 * place + ISSUED, issued_s)

    def _staged(self, place: int, now_s: float) -> float:
        """When the workers will have submitted all copies of a staged op that begins now.

        They wait for their chunks, so that depends on when the engine comes to it.
        """
        op, seconds = self._ops[place], self._seconds[place]
        engine = self._engine(op)
        now_s += self._workers_s.get(place, 0.0)
        start_s = max(now_s, self._staged_s.get(engine, 0.0))
        self._staged_s[engine] = start_s + seconds
        measured_s = self._measured_s[place]
        issued_s = max(now_s, self._staged_issued_s.get(engine, 0.0))  # first come, first served
        if measured_s and op.issued_s is not None and op.end_s is not None:
            left_s = (op.end_s - op.issued_s) * seconds / measured_s
            issued_s = max(issued_s, start_s + seconds - left_s)
        self._staged_issued_s[engine] = issued_s
        return issued_s

    def _engine(self, op: TracedOp) -> Engine | None:
        gpu = self._devices[op.device].gpu
        if op.engine == "h2d":
            return gpu.h2d
        if op.engine == "d2h":
            return gpu.d2h
        return gpu.compute if op.engine == "compute" else None

    def _issue(self, place: int) -> None:
        op, ticket, times = self._ops[place], self._tickets[place], self.times[place]
        times.issued_s = self._world.now_s()
        needs = [self._tickets[need] for need in self._needs[place]]
        needs = [need for need in needs if need.position and not need.is_passed]
        line = self._pick(place, needs)
        waits = needed_waits(line, needs)
        for wait in waits:
            line.stream.follow(wait.event)
        if waits:
            line.join(waits)
        times.waited = [wait.seq for wait in waits]
        if op.is_staged:
            line.stream.follow(ticket.event)
            self._submit(place, line.stream, None)
        else:
            self._submit(place, line.stream, self._engine(op))
        num_calls = len(waits) + (_CALL_CALLS if op.kind == "call" else 2)
        line.advance(ticket, num_calls, line.stream.place())
        times.stream, times.position = line.name, line.position
        self._num_wanted[line] += op.is_awaited
        if not len(line.inflight) & 63:
            self._retire(line)

    def _pick(self, place: int, needs: list[Ticket]) -> Timeline:
        op = self._ops[place]
        lanes = self._lanes[op.device]
        if not (lanes and (COMPUTE.fullmatch(op.stream) or op.kind == "free")):
            return self._line(op.device, op.stream)
        if op.kind != "free":
            return choose_lane(lanes, needs)
        last = needed_waits(_NOWHERE, needs)  # goes where its only outstanding use is (rule R5)
        if not last:
            known = [self._tickets[need] for need in self._needs[place]]
            last = [ticket for ticket in known if ticket.position][:1]
        return last[0].timeline if len(last) == 1 else self._line(op.device, "free")

    def _submit(self, place: int, stream: SimStream, engine: Engine | None) -> None:
        self._world.submit(_Piece(stream, engine, place, self._seconds[place]))

    # -- its end ------------------------------------------------------------------------------

    def _piece_ended(self, command: Command, now_s: float) -> None:
        if not isinstance(command, _Piece) or command.place is None:
            return
        times, op = self.times[command.place], self._ops[command.place]
        is_copy = op.is_staged and command.engine is not None
        if is_copy or not op.is_staged:
            times.start_s, times.end_s = command.start_s, now_s
        if is_copy:  # what follows on the op's own stream tells its end
            self._idle[op.device].append(command.stream)
        else:
            self._ended.append(command.place)

    def _tell_ends(self) -> None:
        """Let all react that has ended by now."""
        while self._ended:
            ended, self._ended = self._ended, []
            for place in ended:
                self._is_over[place] = True
            for place in ended:
                ticket = self._tickets[place]
                if ticket.position:
                    line = ticket.timeline
                    if self._num_wanted[line]:
                        self._num_wanted[line] -= self._ops[place].is_awaited
                        self._retire(line)
                self._happens(4 * place + ENDED)

    def _retire(self, line: Timeline) -> None:
        num = 0
        for ticket in line.inflight:
            if not self._is_over[ticket.op]:
                break
            num += 1
        line.retire(num)
