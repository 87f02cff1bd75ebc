"""An adaptor that knows every block that is out, and who asked for it."""

from __future__ import annotations

from dataclasses import dataclass
from logging import getLogger
from traceback import FrameSummary, StackSummary, walk_stack
from types import CodeType
from typing import Any, TypeAlias

from streamflow.backends.origin import caller, describe
from streamflow.memory.adaptor import UpstreamResourceAdaptor
from streamflow.memory.resource import DeviceMemoryResource, Piece
from streamflow.memory.space import Place

__all__ = ["OutstandingAllocation", "TrackingResourceAdaptor"]

_Known: TypeAlias = "tuple[CodeType, int, tuple[FrameSummary, ...]]"


@dataclass(frozen=True, slots=True)
class OutstandingAllocation:
    """A block that was not freed."""

    nbytes: int
    """What was asked for."""
    line: str
    """File and line of the program that asked for it."""
    stack: tuple[FrameSummary, ...]
    """The calls that led there, outermost first; empty without ``capture_stacks``."""


class TrackingResourceAdaptor(UpstreamResourceAdaptor):
    """Remembers each block until it is freed, and refuses frees of what it does not know.

    Parameters
    ----------
    upstream_mr : DeviceMemoryResource
    capture_stacks : bool
        Keep the whole stack of every allocation, not its line alone; each takes longer.
    device : Device or int, optional
        By default the upstream's.
    """

    def __init__(
        self,
        upstream_mr: DeviceMemoryResource,
        capture_stacks: bool = False,
        device: Any = None,
    ) -> None:
        super().__init__(upstream_mr, device)
        self._captures_stacks = bool(capture_stacks)
        # By piece, not by address: an address comes again.
        self._outstanding: dict[Piece, _Known] = {}
        self._outstanding_nbytes = 0

    def get_allocated_bytes(self) -> int:
        """The bytes that were asked for and are not freed."""
        return self._outstanding_nbytes

    def get_outstanding_allocations(self) -> dict[int, OutstandingAllocation]:
        """The blocks that are not freed, by address, in ascending order."""
        with self._lock:
            found = [(piece.address, piece.nbytes, *at) for piece, at in self._outstanding.items()]
        return {
            address: OutstandingAllocation(nbytes, describe(code, lasti), stack)
            for address, nbytes, code, lasti, stack in sorted(found, key=lambda known: known[0])
        }

    def get_outstanding_allocations_str(self) -> str:
        """A line for each block that is not freed: its address and size; its stack, if kept."""
        lines: list[str] = []
        for address, known in self.get_outstanding_allocations().items():
            text = f"{address:#x}: {known.nbytes} B"
            if known.stack:
                stack = "".join(StackSummary.from_list(list(known.stack)).format())
                text += f" : callstack:\n{stack.rstrip()}"
            else:
                text += f" : at {known.line}"
            lines.append(text + "\n")
        return "".join(lines)

    def log_outstanding_allocations(self) -> None:
        """Log :meth:`get_outstanding_allocations_str` to ``streamflow`` at level ``DEBUG``."""
        getLogger("streamflow").debug(
            "Outstanding Allocations: %s", self.get_outstanding_allocations_str()
        )

    def _take(self, nbytes: int, alignment: int, place: Place) -> Piece:
        inner = self.upstream_mr.take(nbytes, alignment, place)
        frame = caller(2)
        stack: tuple[FrameSummary, ...] = ()
        if self._captures_stacks:  # source lines are looked up when somebody reads them
            summary = StackSummary.extract(walk_stack(frame), lookup_lines=False)
            stack = tuple(reversed(summary))
        # Lines are worked out when somebody asks: that takes longer than all the rest.
        known = frame.f_code, frame.f_lasti, stack
        piece = self._wrap(inner, nbytes, alignment)
        with self._lock:
            self._outstanding[piece] = known
            self._outstanding_nbytes += nbytes
        return piece

    def _give(self, piece: Piece, place: Place) -> None:
        with self._lock:
            if self._outstanding.pop(piece, None) is None:
                raise ValueError(
                    f"{piece.nbytes} bytes at {piece.address:#x} are not outstanding here: "
                    "freed before, or by another resource"
                )
            self._outstanding_nbytes -= piece.nbytes
        assert piece.inner is not None
        self.upstream_mr.give(piece.inner, place)

    def _is_empty(self) -> bool:
        return not self._outstanding

    def _forget(self) -> None:
        with self._lock:
            self._outstanding.clear()
            self._outstanding_nbytes = 0
