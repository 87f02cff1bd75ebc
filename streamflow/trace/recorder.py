"""Recorder: takes notes while the runtime works, and makes a trace of them when asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from streamflow.runtime.core import Core
from streamflow.trace.model import Contents, EdgeReason, Trace, TracedEdge, TracedOp

__all__ = ["Recorder", "recording"]


class Recorder:
    """The instrument that the runtime calls, on the loop's thread only.

    It calls on the hot path, so a call appends one tuple; records are made of them when the
    trace is read, and kept until something was added. Notes about ops submitted
    before the recorder was set, and edges to such ops, are dropped.

    Parameters
    ----------
    start_s : float
        The clock's reading when the trace begins (:meth:`Backend.clock_s
        <streamflow.backends.base.Backend.clock_s>`).
    """

    __slots__ = ("_contents", "_contents_size", "_done", "_edges", "_ops", "_timed", "start_s")

    def __init__(self, start_s: float = 0.0) -> None:
        self.start_s = start_s
        self._ops: list[tuple[int, str, str, str, str | None, int, int, str | None, float]] = []
        self._edges: list[tuple[int, int, EdgeReason | str, bool]] = []
        self._timed: list[tuple[int, float, float]] = []
        self._done: list[tuple[int, str]] = []
        self._contents: Contents = ((), ())
        self._contents_size = 0

    def op_submitted(
        self,
        op_id: int,
        kind: str,
        name: str,
        stream_name: str,
        engine: str | None,
        device_index: int,
        nbytes: int,
        where: str | None,
        now_s: float,
    ) -> None:
        """Note a new op. ``now_s`` is on the same clock as ``start_s``."""
        self._ops.append(
            (op_id, kind, name, stream_name, engine, device_index, nbytes, where, now_s)
        )

    def edge(self, src_id: int, dst_id: int, reason: EdgeReason | str, issued: bool) -> None:
        """Note that ``dst_id`` comes after ``src_id``.

        ``reason`` is an :class:`EdgeReason` or its value; another string raises ``ValueError``
        when the trace is read.
        """
        self._edges.append((src_id, dst_id, reason, issued))

    def op_timed(self, op_id: int, start_s: float, end_s: float) -> None:
        """Note when the device ran an op, in seconds since the trace began."""
        self._timed.append((op_id, start_s, end_s))

    def op_done(self, op_id: int, state: str) -> None:
        """Note an op's state; the last one counts."""
        self._done.append((op_id, state))

    @property
    def trace(self) -> Trace:
        """The trace, alive: it shows whatever has been noted when it is read."""
        return Trace(self._read)

    def _read(self) -> Contents:
        size = len(self._ops) + len(self._edges) + len(self._timed) + len(self._done)
        if size != self._contents_size:
            self._contents = self._build()
            self._contents_size = size
        return self._contents

    def _build(self) -> Contents:
        times = {op_id: (start_s, end_s) for op_id, start_s, end_s in self._timed}
        states = dict(self._done)
        ops = []
        for op_id, kind, name, stream, engine, device, nbytes, where, now_s in self._ops:
            start_s, end_s = times.get(op_id, (None, None))
            ops.append(
                TracedOp(
                    id=op_id,
                    kind=kind,
                    name=name,
                    stream=stream,
                    engine=engine,
                    device=device,
                    nbytes=nbytes,
                    submitted_s=now_s - self.start_s,
                    start_s=start_s,
                    end_s=end_s,
                    state=states.get(op_id, "submitted"),
                    where=where,
                )
            )
        known = {op.id for op in ops}
        edges = tuple(
            TracedEdge(src, dst, EdgeReason(reason), issued)
            for src, dst, reason, issued in self._edges
            if src in known and dst in known
        )
        return tuple(ops), edges


@contextmanager
def recording(core: Core) -> Iterator[Trace]:
    """Install a recorder into ``core`` for the length of a ``with`` block."""
    core.check_open()
    recorder = Recorder(core.backend.clock_s())
    core.tracer.start(recorder)
    try:
        yield recorder.trace
    finally:
        core.tracer.stop()
