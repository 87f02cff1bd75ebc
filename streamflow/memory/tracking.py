"""An adaptor that knows every block that is out, and who asked for it."""

from __future__ import annotations

from dataclasses import dataclass
from logging import getLogger
from traceback import FrameSummary, StackSummary, walk_stack
from types import CodeType
from typing import Any, TypeAlias

from streamflow.backends.origin import ON_BEHALF, caller, describe
from streamflow.memory.adaptor import UpstreamResourceAdaptor
from streamflow.memory.blocks import Piece
from streamflow.memory.resource import DeviceMemoryResource
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
    """The calls that led there, outermost first; empty without ``capture_stacks``, and for what
    was waited for."""


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
        known = self._called_from()  # before there is something to lose
        piece = self._wrap(self.upstream_mr.take(nbytes, alignment, place), nbytes, alignment)
        with self._lock:
            self._outstanding[piece] = known
            self._outstanding_nbytes += nbytes
        return piece

    def _called_from(self) -> _Known:
        # As it is: to work out lines takes longer than all the rest, so who asks for them does.
        earlier = ON_BEHALF.get()
        if earlier is not None:  # the stack of that call is gone
            return *earlier, ()
        frame = caller(3)
        stack: tuple[FrameSummary, ...] = ()
        if self._captures_stacks:
            summary = StackSummary.extract(walk_stack(frame), lookup_lines=False)
            stack = tuple(reversed(summary))
        return frame.f_code, frame.f_lasti, stack

    def _give(self, piece: Piece, place: Place) -> None:
        if piece not in self._outstanding:
            raise ValueError(
                f"{piece.nbytes} bytes at {piece.address:#x} are not outstanding here: "
                "freed before, or by another resource"
            )
        super()._give(piece, place)

    def _on_given(self, piece: Piece) -> None:
        with self._lock:
            if self._outstanding.pop(piece, None) is not None:  # else its device was closed
                self._outstanding_nbytes -= piece.nbytes

    def _is_empty(self) -> bool:
        return not self._outstanding

    def _forget(self) -> None:
        with self._lock:
            self._outstanding.clear()
            self._outstanding_nbytes = 0
