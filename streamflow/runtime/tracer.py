"""Submission while a trace is being taken: the same steps, told to the instrument."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from streamflow.runtime.instrument import Instrument
from streamflow.runtime.op import Op
from streamflow.scheduler.hazards import Region
from streamflow.scheduler.timeline import Ticket, Timeline

if TYPE_CHECKING:
    from streamflow.runtime.core import Core

__all__ = ["Tracer"]

_ENGINES = {
    "put": "h2d",
    "get": "d2h",
    "launch": "compute",
    "call": "compute",
    "fill": "compute",
    "copy": "compute",
}


class _Traced:
    """What is known of one traced op; ``edges`` are ``(ticket, reason)``.

    ``waited`` are tickets that a memory resource has had its stream wait for already.
    """

    __slots__ = ("base", "edges", "ends", "instrument", "nbytes", "starts", "waited", "where")

    def __init__(self, instrument: Instrument, base: Any, where: str | None) -> None:
        self.instrument = instrument
        self.base = base
        self.where = where
        self.edges: list[tuple[Ticket, str]] = []
        self.nbytes = 0
        self.starts: list[Any] = []
        self.ends: list[Any] = []
        self.waited: Sequence[Ticket] = ()


class Tracer:
    """Calls the core's instrument; nothing here runs while there is none."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._base: Any = None
        self._line: Timeline | None = None
        self._last: dict[Timeline, Ticket] = {}

    def start(self, instrument: Instrument) -> None:
        """Begin: device times count from now."""
        core = self._core
        if core.instrument is not None:
            raise RuntimeError("a trace of this device is being taken already")
        if self._line is None:
            self._line = core.make_timeline("trace")
        self._base = core.backend.create_event(timing=True)
        self._line.stream.record(self._base)
        self._last = {}
        core.instrument = instrument
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
        instrument = self._core.instrument
        assert instrument is not None
        traced = op.rare().traced = _Traced(instrument, self._base, op.where)
        add = traced.edges.append
        is_free = op.kind == "free"
        for region in reads:
            for last in (region.last_write, *(o.last_write for o in region.overlapping)):
                add((last, "allocation" if last is region.allocation else "read-after-write"))
        write_reason = "write-after-write" if is_overwrite else "read-after-write"
        for region in writes:
            for other in (region, *region.overlapping):
                last = other.last_write
                is_allocation = last is region.allocation
                add((last, "free" if is_free else "allocation" if is_allocation else write_reason))
                for read in other.reads:
                    add((read, "free" if is_free else "write-after-read"))
        for ticket in after:
            add((ticket, "after"))
        traced.nbytes = sum(region.stop - region.start for region in (*reads, *writes))

    def allocated(self, op: Op[Any], behind: Sequence[Ticket]) -> None:
        """Note an allocation, and the frees whose memory it was given."""
        self.op_called(op, (), (), ())
        traced: _Traced = op.rare().traced
        traced.edges.extend((ticket, "allocation") for ticket in behind)
        traced.waited = behind

    def take_event(self) -> Any:
        """A timing event, never pooled: its time is asked for later."""
        return self._core.backend.create_event(timing=True)

    def before(self, op: Op[Any], stream: Any) -> None:
        """The op's waits are in ``stream``; its own calls come next."""
        rare = op.rare()
        if rare.traced is None:  # called for before the trace began
            assert self._core.instrument is not None
            rare.traced = _Traced(self._core.instrument, self._base, None)
        traced: _Traced = rare.traced
        if not traced.starts:  # a staging job has brought its own
            start = self.take_event()
            stream.record(start)
            traced.starts.append(start)

    def submitted(self, op: Op[Any], line: Timeline, waits: list[Ticket]) -> None:
        """The op has its position."""
        traced: _Traced = op.rare().traced
        if not traced.ends:
            traced.ends.append(op.ticket.event)
        op.ticket.holds += 1
        self._tell(op, traced, line, waits)

    def staged(self, op: Op[Any], starts: Iterable[Any], ends: Iterable[Any]) -> None:
        """The device times of ``op`` are those of its staging job."""
        traced: _Traced | None = op.rare().traced
        if traced is not None:
            traced.starts.extend(starts)
            traced.ends.extend(ends)

    def finished(self, op: Op[Any], traced: _Traced) -> None:
        """``op`` is in its final state."""
        seq = op.ticket.seq
        backend = self._core.backend
        if op._error is None and traced.starts and self._core.lost is None:
            try:
                start_ms = min(backend.elapsed_ms(traced.base, event) for event in traced.starts)
                end_ms = max(backend.elapsed_ms(traced.base, event) for event in traced.ends)
            except Exception:
                # An event of another stream is still pending. The op stays untimed: whoever
                # awaits it is woken whatever a trace would have liked to know.
                traced.instrument.op_done(seq, op._state.value)
                return
            traced.instrument.op_timed(seq, start_ms * 1e-3, end_ms * 1e-3)
        traced.instrument.op_done(seq, op._state.value)

    def _tell(self, op: Op[Any], traced: _Traced, line: Timeline, waits: list[Ticket]) -> None:
        core, seq = self._core, op.ticket.seq
        traced.instrument.op_submitted(
            seq,
            op.kind,
            op.name,
            line.name,
            _ENGINES.get(op.kind),
            core.backend.index,
            traced.nbytes,
            traced.where,
            core.backend.clock_s(),
        )
        issued = {ticket.seq for ticket in (*waits, *traced.waited)}
        told = set()
        for ticket, reason in traced.edges:
            if ticket.seq not in told:
                told.add(ticket.seq)
                traced.instrument.edge(ticket.seq, seq, reason, ticket.seq in issued)
        last = self._last.get(line)
        if last is not None and last.seq not in told:
            traced.instrument.edge(last.seq, seq, "stream-order", False)
        self._last[line] = op.ticket
