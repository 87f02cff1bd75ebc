"""Recorder: keeps the runtime's notes while it works, and makes a trace of them when asked."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from uuid import uuid4

from streamflow.backends.origin import describe
from streamflow.runtime.core import Core
from streamflow.runtime.instrument import Note, Ranges
from streamflow.trace.model import (
    Contents,
    EdgeReason,
    TracedArray,
    TracedDevice,
    TracedEdge,
    TracedMemory,
    TracedOp,
)
from streamflow.trace.nvtx_ranges import ranges_of
from streamflow.trace.trace import Trace

__all__ = ["MAX_OPS", "Recorder", "recording"]

MAX_OPS = 200_000
"""Ops that a trace keeps, unless told otherwise: about 150 MB."""

_ENGINES = {
    "put": "h2d",
    "get": "d2h",
    "launch": "compute",
    "call": "compute",
    "graph": "compute",
    "fill": "compute",
}

_PROCESS_KEY = f"{os.getpid()}-{uuid4().hex[:12]}"
if hasattr(os, "register_at_fork"):

    def _renew() -> None:
        global _PROCESS_KEY
        _PROCESS_KEY = f"{os.getpid()}-{uuid4().hex[:12]}"

    os.register_at_fork(after_in_child=_renew)


class Recorder:
    """The instrument that the runtime calls, on the loop's thread only.

    Keeps the notes of the newest ops in a ring. Records are made of them when the trace is read.

    Parameters
    ----------
    device : TracedDevice
        What is traced, and from when on.
    nbytes : int
        What arrays held when the trace began.
    max_ops : int
        Ops to keep; the oldest go first.
    """

    __slots__ = (
        "_base_nbytes",
        "_device",
        "_notes",
        "_num_called",
        "_pinned",
        "is_over",
        "ranges",
    )

    def __init__(self, device: TracedDevice, *, nbytes: int = 0, max_ops: int = MAX_OPS) -> None:
        self._device = device
        self._base_nbytes = nbytes
        self._notes: deque[Note] = deque(maxlen=max_ops)
        self._pinned: deque[tuple[float, int]] = deque(maxlen=max_ops)
        self._num_called = 0
        self.is_over = False
        self.ranges: Ranges | None = None

    def op_called(self, note: Note) -> None:
        """Note a new op, which is filled in as it goes its way."""
        notes = self._notes
        if len(notes) == notes.maxlen:  # the curve goes on from what the oldest left
            self._base_nbytes += _change_of(notes[0])
        self._num_called += 1
        notes.append(note)

    def pinned(self, time_s: float, nbytes: int) -> None:
        """Note how much pinned memory is in use."""
        self._pinned.append((time_s, nbytes))

    @property
    def trace(self) -> Trace:
        """The trace, alive: it shows whatever has been noted when it is read."""
        kept: Contents | None = None

        def read() -> Contents:
            nonlocal kept
            if kept is not None:
                return kept
            contents = self._build()
            if self.is_over and all(note.seen_s is not None for note in self._notes):
                kept = contents  # nothing will be added any more
            return contents

        return Trace(read)

    def _build(self) -> Contents:
        began_s, index = self._device.began_s, self._device.index
        notes = tuple(self._notes)
        known = {note.seq for note in notes}
        lines: dict[object, str] = {}
        arrays: dict[int, int] = {}
        ops: list[TracedOp] = []
        edges: list[TracedEdge] = []
        loose: list[TracedEdge] = []
        for note in notes:
            for array, nbytes in (*note.reads, *note.writes):
                arrays[array] = max(arrays.get(array, 0), nbytes)
            ops.append(_op(note, began_s, lines))
            told: set[int] = set()
            waited = set(note.waited)
            for src, reason, of in note.edges:
                if src in told:
                    continue
                told.add(src)
                edge = TracedEdge(src, note.seq, EdgeReason(reason), src in waited, of)
                (edges if src in known else loose).append(edge)
        where = {op.id: op.where for op in ops}
        return Contents(
            ops=tuple(ops),
            edges=tuple(edges),
            arrays=tuple(
                TracedArray(array, nbytes, index, where.get(array))
                for array, nbytes in sorted(arrays.items())
            ),
            memory=tuple(self._memory(notes)),
            devices=(self._device,),
            loose=tuple(loose),
            num_dropped=self._num_called - len(notes),
        )

    def _memory(self, notes: tuple[Note, ...]) -> Iterator[TracedMemory]:
        """The memory curve, by the device's times where these are known."""
        began_s, index = self._device.began_s, self._device.index
        changes: list[tuple[float, int, int | None]] = []
        for note in notes:
            change = _change_of(note)
            if change and note.issued_s is not None:
                if note.span_s is not None:
                    at_s = note.span_s[0] if change > 0 else note.span_s[1]
                else:
                    at_s = note.issued_s - began_s
                changes.append((at_s, change, None))
        changes.extend((at_s - began_s, 0, nbytes) for at_s, nbytes in self._pinned)
        changes.sort(key=lambda each: each[0])
        nbytes, pinned_nbytes = self._base_nbytes, 0
        for at_s, change, pinned in changes:
            nbytes += change
            if pinned is not None:
                pinned_nbytes = pinned
            yield TracedMemory(max(0.0, at_s), nbytes, pinned_nbytes, index)


def _change_of(note: Note) -> int:
    """What arrays hold more once it has ended."""
    return note.allocated_nbytes - note.freed_nbytes


def _op(note: Note, began_s: float, lines: dict[object, str]) -> TracedOp:
    where = lines.get(note.origin)
    if where is None:
        origin = note.origin
        where = lines[origin] = origin if isinstance(origin, str) else describe(*origin)
    start_s, end_s = note.span_s if note.span_s is not None else (None, None)
    if note.stream is None and note.begun_s is not None and note.seen_s is not None:
        start_s, end_s = note.begun_s - began_s, note.seen_s - began_s  # on the host alone
    return TracedOp(
        id=note.seq,
        kind=note.kind,
        name=note.label if note.label is not None else f"{note.kind}#{note.seq}",
        stream=note.stream or "host",
        engine=_engine_of(note) if note.stream else None,
        device=note.device,
        nbytes=note.allocated_nbytes
        or note.freed_nbytes
        or sum(nbytes for _, nbytes in (*note.reads, *note.writes)),
        submitted_s=note.called_s - began_s,
        start_s=start_s,
        end_s=end_s,
        state=note.state,
        where=where,
        begun_s=_since(note.begun_s, began_s),
        issued_s=_since(note.issued_s, began_s),
        seen_s=_since(note.seen_s, began_s),
        position=note.position,
        scope=note.scope,
        task=note.task,
        needs=tuple(note.needs),
        is_staged=note.is_staged,
        reads=tuple(dict.fromkeys(array for array, _ in note.reads)),
        writes=tuple(dict.fromkeys(array for array, _ in note.writes)),
        error=note.error,
        is_awaited=note.is_awaited,
    )


def _engine_of(note: Note) -> str | None:
    """The part of the device that the op occupies."""
    if note.kind != "copy":
        return _ENGINES.get(note.kind)
    # One by the host is several ops, which touch one end each; the one that only waits, none.
    if note.reads:
        return "compute" if note.writes else "d2h"
    return "h2d" if note.writes else None


def _since(time_s: float | None, began_s: float) -> float | None:
    return None if time_s is None else time_s - began_s


def recording(core: Core, max_ops: int = MAX_OPS) -> AbstractContextManager[Trace]:
    """Install a recorder into ``core`` for the length of a ``with`` block."""
    core.check_open()
    if not isinstance(max_ops, int) or max_ops < 1:
        raise ValueError(f"max_ops takes a number from 1 on, found {max_ops!r}")
    return _recording(core, max_ops)


@contextmanager
def _recording(core: Core, max_ops: int) -> Iterator[Trace]:
    core.check_open()
    backend = core.backend
    recorder: Recorder | None = None

    def begin(began_s: float) -> Recorder:
        nonlocal recorder
        device = TracedDevice(
            index=backend.index,
            name=backend.properties.name,
            backend=backend.name,
            is_virtual=backend.is_virtual,
            began_s=began_s,
            began_unix_s=time.time(),
            process_key=_PROCESS_KEY,
            compute_lanes=len(core.compute),
        )
        recorder = Recorder(device, nbytes=core.memory.live_nbytes, max_ops=max_ops)
        recorder.ranges = ranges_of()
        return recorder

    core.tracer.start(begin)
    assert recorder is not None
    try:
        yield recorder.trace
    finally:
        core.tracer.stop()
        recorder.is_over = True
