"""Submission while a trace is being taken: the same steps, told to the instrument."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from streamflow.runtime.instrument import Instrument, Note, Ranges
from streamflow.runtime.op import Op
from streamflow.scheduler.hazards import Region
from streamflow.scheduler.timeline import Ticket, Timeline

if TYPE_CHECKING:
    from streamflow.runtime.core import Core

__all__ = ["Tracer"]


_USES_PINNED = frozenset(("put", "get", "copy", "mapped"))


class Tracer:
    """Calls the core's instrument; nothing here begins while there is none."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._base: Any = None
        self._line: Timeline | None = None
        self._last: dict[Timeline, int] = {}
        self._ranges: Ranges | None = None
        self._pinned_nbytes = -1
        self._events: list[Any] = []  # timing events whose times were read

    def start(self, begin: Callable[[float], Instrument]) -> None:
        """Begin: device times count from now, which ``begin`` is told on the host's clock."""
        core = self._core
        if core.instrument is not None:
            raise RuntimeError("a trace of this device is being taken already")
        try:
            if self._line is None:
                self._line = core.make_timeline("trace")
            self._base = core.backend.create_event(timing=True)
            self._line.stream.record(self._base)
        except Exception as error:  # a fault that nobody has seen yet
            raise core.lose(error, "beginning a trace") from error
        now_s = core.clock_s()
        core.instrument = begin(now_s)
        self._ranges = core.instrument.ranges
        self._pinned_nbytes = -1
        self._look_at_pinned(core.instrument, now_s)
        core.choose_ways()

    def stop(self) -> None:
        """End; ops still running are timed when they are seen to end."""
        self._core.instrument = self._ranges = None
        self._last.clear()
        self._core.choose_ways()
        for line in list(self._core.lines):
            self._core.reap(line)

    def forget(self, line: Timeline) -> None:
        """Nothing is submitted to ``line`` any more."""
        self._last.pop(line, None)

    def close_blocking(self) -> None:
        """Destroy its events, which nobody waits for any more. Worker threads only."""
        base, self._base = self._base, None
        for event in self._events if base is None else (*self._events, base):
            event.close()

    def op_called(
        self,
        op: Op[Any],
        reads: Sequence[Region],
        writes: Sequence[Region],
        after: Sequence[Ticket],
        is_overwrite: bool = True,
    ) -> None:
        """Note an op and why it comes after others. Before its hazards are recorded."""
        note = self._note(op)
        add = note.edges.append
        is_free = op.kind == "free"
        for region in reads:
            root = region.allocation
            array = root.seq
            last = region.last_write
            add((last.seq, "allocation" if last is root else "read-after-write", array))
            for other in region.overlapping:
                last = other.last_write
                add((last.seq, "allocation" if last is root else "read-after-write", array))
        if writes:
            reason = "free" if is_free else "write-after-write"
            if not is_overwrite:
                reason = "read-after-write"
            after_read = "free" if is_free else "write-after-read"
            for region in writes:
                root = region.allocation
                array = root.seq
                for other in (region, *region.overlapping) if region.overlapping else (region,):
                    last = other.last_write
                    is_new = last is root and not is_free
                    add((last.seq, "allocation" if is_new else reason, array))
                    for read in other.reads:
                        add((read.seq, after_read, array))
            note.writes = [(each.allocation.seq, each.stop - each.start) for each in writes]
        if reads:
            note.reads = [(each.allocation.seq, each.stop - each.start) for each in reads]
        for ticket in after:
            add(_after(ticket))
        if is_free:
            note.freed_nbytes = op._freed_nbytes

    def allocated(self, op: Op[Any], behind: Sequence[Ticket], nbytes: int) -> None:
        """Note an allocation, and the frees whose memory it was given."""
        note = self._note(op)
        note.edges = [(ticket.seq, "allocation", None) for ticket in behind]
        note.waited = [ticket.seq for ticket in behind]
        note.writes = ((note.seq, nbytes),)
        note.allocated_nbytes = nbytes

    def depends(self, op: Op[Any], ticket: Ticket) -> None:
        """A future that ``op`` waited for has told one more that it comes after."""
        self._add(op, _after(ticket))

    def found_room(self, op: Op[Any], ended: Ticket) -> None:
        """``op`` goes on in the room that the end of another made."""
        self._add(op, (ended.seq, "capacity", None))

    def _add(self, op: Op[Any], edge: tuple[int, str, int | None]) -> None:
        rare = op._rare
        if rare is not None and rare.traced is not None:
            rare.traced.edges.append(edge)

    def began(self, note: Note) -> None:
        """The work of an op on the host begins."""
        note.begun_s = self._core.clock_s()
        note.state = "staging"

    def take_event(self) -> Any:
        """A timing event, for this op alone until its time has been asked for."""
        events = self._events
        return events.pop() if events else self._core.backend.create_event(timing=True)

    def before(self, op: Op[Any], stream: Any) -> None:
        """The op's waits are in ``stream``; its own calls come next."""
        rare = op._rare
        # None where it was called for before the trace began.
        note: Note | None = rare.traced if rare is not None else None
        if note is None:
            note = self._note(op)
            note.task = None  # whoever runs now has only made it go on
        if not note.starts:  # a staging job has brought its own
            start = self.take_event()
            stream.record(start)
            note.starts = (start,)
        if self._ranges is not None:
            self._ranges.push(note)

    def submitted(self, op: Op[Any], line: Timeline, waits: list[Ticket]) -> None:
        """The op has its position."""
        assert op._rare is not None
        note: Note = op._rare.traced
        ticket = op.ticket
        if not note.ends:
            note.ends = (ticket.event,)
        note.issued_s = self._core.clock_s()
        note.state = "submitted"
        if self._ranges is not None:
            self._ranges.pop(note)
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
        note: Note | None = op.rare().traced
        if note is not None:
            note.is_staged = True
            note.starts, note.ends = tuple(starts), tuple(ends)

    def refused(self, op: Op[Any], error: BaseException) -> None:
        """The call that made ``op`` has raised: the program has none."""
        note: Note = op.rare().traced
        note.state, note.seen_s, note.base = "failed", self._core.clock_s(), None
        note.error = f"{type(error).__name__}: {error}"

    def finished(self, op: Op[Any], note: Note) -> None:
        """``op`` is in its final state."""
        core = self._core
        note.state = op._state.value
        note.seen_s = core.clock_s()
        note.is_awaited = op.rare().is_wanted
        if self._ranges is not None:  # where its calls failed
            self._ranges.pop(note)
        if note.stream is None and op.ticket.position:  # it went when the trace was over
            note.stream, note.position = op.ticket.timeline.name, op.ticket.position
        if op._error is not None:
            note.error = f"{type(op._error).__name__}: {op._error}"
        base, starts, ends = note.base, note.starts, note.ends
        note.base, note.starts, note.ends = None, (), ()
        if op._error is None and starts and core.lost is None:
            elapsed_ms = core.backend.elapsed_ms
            try:
                if note.is_staged:
                    start_ms = min(elapsed_ms(base, event) for event in starts)
                    end_ms = max(elapsed_ms(base, event) for event in ends)
                else:
                    (start,), (end,) = starts, ends
                    start_ms, end_ms = elapsed_ms(base, start), elapsed_ms(base, end)
                    self._events.append(start)
                    if op.ticket.holds == 1:
                        self._events.append(end)
            except Exception:
                # An event of another stream is still pending. The op stays untimed: whoever
                # awaits it is woken whatever a trace would have liked to know.
                return
            note.span_s = start_ms * 1e-3, end_ms * 1e-3
        if core.instrument is not None and note.kind in _USES_PINNED:
            self._look_at_pinned(core.instrument, note.seen_s)

    def _note(self, op: Op[Any]) -> Note:
        core = self._core
        instrument = core.instrument
        assert instrument is not None
        note = Note(op.ticket.seq, op.kind, op.label, op._origin, core.backend.index, op.called_s)
        rare = op.rare()
        rare.traced = note
        note.base = self._base
        if rare.scope is not None:
            note.scope = rare.scope.name
        note.task = _name_of(core.shell.task())
        instrument.op_called(note)
        if note.kind in _USES_PINNED:
            self._look_at_pinned(instrument, op.called_s)
        return note

    def _look_at_pinned(self, instrument: Instrument, now_s: float) -> None:
        nbytes = self._core.pinned.counted_nbytes
        if nbytes != self._pinned_nbytes:
            self._pinned_nbytes = nbytes
            instrument.pinned(now_s, nbytes)


def _after(ticket: Ticket) -> tuple[int, str, int | None]:
    """The edge from an op that ``after=`` named."""
    is_host = ticket.op is not None and ticket.op.kind == "host"
    return ticket.seq, "host" if is_host else "after", None


def _name_of(task: object) -> str | None:
    """As asyncio or trio calls it; None outside any task."""
    named = getattr(task, "get_name", None)
    name: str | None = named() if named is not None else getattr(task, "name", None)
    return name
