"""Submission while a trace is being taken: the same steps, told to the instrument."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from streamflow.runtime.instrument import Instrument, Note
from streamflow.runtime.op import Op
from streamflow.scheduler.hazards import Region
from streamflow.scheduler.timeline import Ticket, Timeline

if TYPE_CHECKING:
    from streamflow.runtime.core import Core

__all__ = ["Tracer"]


class _Traced:
    """The note of one op, and the events that time it; ``base`` is the trace's own."""

    __slots__ = ("base", "ends", "note", "starts")

    def __init__(self, note: Note, base: Any) -> None:
        self.note = note
        self.base = base
        self.starts: list[Any] = []
        self.ends: list[Any] = []


class Tracer:
    """Calls the core's instrument; nothing here runs while there is none.

    Attributes
    ----------
    made_room : int
        Number of the op whose end was seen last: what could not go on for want of room goes
        on because of it.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._base: Any = None
        self._line: Timeline | None = None
        self._last: dict[Timeline, int] = {}
        self._pinned_nbytes = -1
        self.made_room = 0

    def start(self, begin: Callable[[float], Instrument]) -> None:
        """Begin: device times count from now, which ``begin`` is told on the host's clock."""
        core = self._core
        if core.instrument is not None:
            raise RuntimeError("a trace of this device is being taken already")
        if self._line is None:
            self._line = core.make_timeline("trace")
        self._base = core.backend.create_event(timing=True)
        self._line.stream.record(self._base)
        self._last = {}
        self._pinned_nbytes = -1
        core.instrument = begin(core.clock_s())
        core.choose_ways()

    def stop(self) -> None:
        """End; ops still running are timed when they are seen to end."""
        self._core.instrument = None
        self._core.choose_ways()
        for line in self._core.lines:
            self._core.reap(line)

    def op_called(
        self,
        op: Op[Any],
        reads: Sequence[Region],
        writes: Sequence[Region],
        after: Sequence[Ticket],
        is_overwrite: bool = True,
    ) -> None:
        """Note an op and why it comes after others. Before its hazards are recorded."""
        note = self._note(op).note
        edges: list[tuple[Ticket, str, int | None]] = []
        is_free = op.kind == "free"
        for region in reads:
            array = region.allocation.seq
            for last in (region.last_write, *(o.last_write for o in region.overlapping)):
                is_allocation = last is region.allocation
                edges.append((last, "allocation" if is_allocation else "read-after-write", array))
        write_reason = "write-after-write" if is_overwrite else "read-after-write"
        for region in writes:
            array = region.allocation.seq
            for other in (region, *region.overlapping):
                last = other.last_write
                is_allocation = last is region.allocation
                reason = "free" if is_free else "allocation" if is_allocation else write_reason
                edges.append((last, reason, array))
                reason = "free" if is_free else "write-after-read"
                edges.extend((read, reason, array) for read in other.reads)
        for ticket in after:
            is_host = ticket.op is not None and ticket.op.kind == "host"
            edges.append((ticket, "host" if is_host else "after", None))
        note.edges = [(ticket.seq, reason, array) for ticket, reason, array in edges]
        note.reads = tuple((each.allocation.seq, each.stop - each.start) for each in reads)
        note.writes = tuple((each.allocation.seq, each.stop - each.start) for each in writes)
        if is_free:
            note.freed_nbytes = op._freed_nbytes

    def allocated(self, op: Op[Any], behind: Sequence[Ticket], nbytes: int) -> None:
        """Note an allocation, and the frees whose memory it was given."""
        note = self._note(op).note
        note.edges = [(ticket.seq, "allocation", None) for ticket in behind]
        note.waited = [ticket.seq for ticket in behind]
        note.writes = ((note.seq, nbytes),)
        note.allocated_nbytes = nbytes

    def found_room(self, op: Op[Any]) -> None:
        """``op`` goes on because another has ended."""
        rare = op._rare
        if rare is not None and rare.traced is not None and self.made_room:
            rare.traced.note.edges.append((self.made_room, "capacity", None))

    def began(self, traced: _Traced) -> None:
        """The work of an op on the host begins."""
        traced.note.begun_s = self._core.clock_s()
        traced.note.state = "staging"

    def take_event(self) -> Any:
        """A timing event, never pooled: its time is asked for later."""
        return self._core.backend.create_event(timing=True)

    def before(self, op: Op[Any], stream: Any) -> None:
        """The op's waits are in ``stream``; its own calls come next."""
        rare = op._rare
        traced: _Traced
        if rare is None or rare.traced is None:  # called for before the trace began
            traced = self._note(op)
        else:
            traced = rare.traced
        if not traced.starts:  # a staging job has brought its own
            start = self.take_event()
            stream.record(start)
            traced.starts.append(start)

    def submitted(self, op: Op[Any], line: Timeline, waits: list[Ticket]) -> None:
        """The op has its position."""
        assert op._rare is not None
        traced: _Traced = op._rare.traced
        ticket = op.ticket
        if not traced.ends:
            traced.ends.append(ticket.event)
        ticket.holds += 1
        note = traced.note
        note.issued_s = self._core.clock_s()
        note.state = "submitted"
        note.stream = line.name
        note.position = ticket.position
        if waits:
            note.waited = [*note.waited, *(each.seq for each in waits)]
        last = self._last.get(line)
        if last is not None:
            note.edges.append((last, "stream-order", None))
        self._last[line] = ticket.seq

    def staged(self, op: Op[Any], starts: Iterable[Any], ends: Iterable[Any]) -> None:
        """The device times of ``op`` are those of its staging job."""
        traced: _Traced | None = op.rare().traced
        if traced is not None:
            traced.note.is_staged = True
            traced.starts.extend(starts)
            traced.ends.extend(ends)

    def finished(self, op: Op[Any], traced: _Traced) -> None:
        """``op`` is in its final state."""
        core, note = self._core, traced.note
        note.state = op._state.value
        note.seen_s = core.clock_s()
        note.is_awaited = op.rare().is_wanted
        self.made_room = note.seq
        if op._error is None and traced.starts and core.lost is None:
            elapsed_ms, base = core.backend.elapsed_ms, traced.base
            try:
                start_ms = min(elapsed_ms(base, event) for event in traced.starts)
                end_ms = max(elapsed_ms(base, event) for event in traced.ends)
            except Exception:
                # An event of another stream is still pending. The op stays untimed: whoever
                # awaits it is woken whatever a trace would have liked to know.
                return
            note.span_s = start_ms * 1e-3, end_ms * 1e-3
        if core.instrument is not None:
            self._look_at_pinned(core.instrument, note.seen_s)

    def _note(self, op: Op[Any]) -> _Traced:
        core = self._core
        instrument = core.instrument
        assert instrument is not None
        note = Note(op.ticket.seq, op.kind, op.label, op._origin, core.backend.index, op.called_s)
        rare = op.rare()
        traced = rare.traced = _Traced(note, self._base)
        if rare.scope is not None:
            note.scope = rare.scope.name
        note.task = _name_of(core.shell.task())
        instrument.op_called(note)
        self._look_at_pinned(instrument, op.called_s)
        return traced

    def _look_at_pinned(self, instrument: Instrument, now_s: float) -> None:
        nbytes = self._core.pinned.counted_nbytes
        if nbytes != self._pinned_nbytes:
            self._pinned_nbytes = nbytes
            instrument.pinned(now_s, nbytes)


def _name_of(task: object) -> str | None:
    """As asyncio or trio calls it; None outside any task."""
    named = getattr(task, "get_name", None)
    name: str | None = named() if named is not None else getattr(task, "name", None)
    return name
