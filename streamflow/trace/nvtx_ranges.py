"""While a trace is taken, the same ops for a profiler that listens: NVTX ranges."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from streamflow.runtime.instrument import Note, Ranges
from streamflow.trace.looks import COLOURS

__all__ = ["NvtxRanges", "ranges_of"]

_KINDS = {"put": "h2d", "get": "d2h", "launch": "compute", "call": "compute", "graph": "compute"}


def ranges_of() -> Ranges | None:
    """Ranges for the profiler that listens; None where none does, or ``nvtx`` is not there."""
    try:
        nvtx = import_module("nvtx")
    except ImportError:
        return None
    domain = nvtx.get_domain("streamflow")
    # Without a profiler the package gives a domain that does nothing: no call is the cheaper way.
    return None if type(domain).__name__ == "DummyDomain" else NvtxRanges(domain)


class NvtxRanges:
    """A range around the driver calls of each op, by its name, with its scope as category.

    The payload is the id of the op in the trace. An op without a name of its own goes by its
    kind: the package keeps each text for ever.

    Parameters
    ----------
    domain : nvtx.Domain
    """

    __slots__ = ("_domain", "_open")

    def __init__(self, domain: Any) -> None:
        self._domain = domain
        self._open: list[int] = []  # a function that dev.call runs may submit ops itself

    def push(self, note: Note) -> None:
        """Begin the range of an op."""
        colour = int(COLOURS[_KINDS.get(note.kind, "other")][1:], 16)
        attributes = self._domain.get_event_attributes(
            note.label or note.kind, colour, note.scope, note.seq
        )
        self._domain.push_range(attributes)
        self._open.append(note.seq)

    def pop(self, note: Note) -> None:
        """End the range of an op, if it is open, and what is open inside it."""
        if note.seq in self._open:
            while True:
                self._domain.pop_range()
                if self._open.pop() == note.seq:
                    break
