"""What the resources that wrap one other have in common."""

from __future__ import annotations

from typing import Any

from streamflow.memory.blocks import Piece
from streamflow.memory.current import find_space
from streamflow.memory.resource import DeviceMemoryResource
from streamflow.memory.space import Place, Space

__all__ = ["UpstreamResourceAdaptor"]


class UpstreamResourceAdaptor(DeviceMemoryResource):
    """A resource whose memory comes from another one, and that adds something to the calls.

    Who may touch the memory, and whether it is stream-ordered, are the upstream's. Adaptors
    wrap each other in any order; a block goes back through all that it came through.

    Two are equal if they are of one class, do the same, and their upstreams are equal: then
    either takes a block of the other back, which is charged to the one that gave it.

    Parameters
    ----------
    upstream_mr : DeviceMemoryResource
        Kept alive; may have other users.
    device : Device or int, optional
        By default the upstream's.

    Attributes
    ----------
    upstream_mr : DeviceMemoryResource
    """

    def __init__(self, upstream_mr: DeviceMemoryResource, device: Any = None) -> None:
        if not isinstance(upstream_mr, DeviceMemoryResource):
            raise TypeError(
                f"upstream_mr of {type(self).__name__} takes a memory resource, "
                f"found {upstream_mr!r}"
            )
        super().__init__(device)
        self.upstream_mr = upstream_mr
        self.is_device_accessible = upstream_mr.is_device_accessible
        self.is_host_accessible = upstream_mr.is_host_accessible
        self.is_stream_ordered = upstream_mr.is_stream_ordered
        mine, below = super().device, upstream_mr.device
        if mine is not None and below is not None and mine != below:
            raise ValueError(
                f"device={mine}, but the upstream {upstream_mr!r} has its memory on device {below}"
            )

    def get_upstream(self) -> DeviceMemoryResource:
        """:attr:`upstream_mr`, as RMM has it."""
        return self.upstream_mr

    @property
    def device(self) -> int | None:
        """The device's ordinal; None until it is known."""
        own = super().device
        return self.upstream_mr.device if own is None else own

    @property
    def largest_nbytes(self) -> int | None:
        """The upstream's."""
        return self.upstream_mr.largest_nbytes

    def trim(self) -> None:
        """Have the upstream give back what it keeps for later, as far as nothing uses it."""
        super().trim()
        self.upstream_mr.trim()

    def is_equal(self, other: DeviceMemoryResource) -> bool:
        """Whether memory of one may be given back to the other."""
        if self is other:
            return True
        return (
            type(self) is type(other)
            and isinstance(other, UpstreamResourceAdaptor)
            and self._parameters() == other._parameters()
            and self.upstream_mr.is_equal(other.upstream_mr)
        )

    def _parameters(self) -> tuple[object, ...]:
        """What equal ones have in common besides their upstream."""
        return ()

    def _wrap(self, inner: Piece, nbytes: int, alignment: int) -> Piece:
        """The whole of a piece of the upstream, as one of ours."""
        capacity_nbytes = inner.capacity_nbytes
        return Piece(
            self, inner.address, nbytes, alignment, capacity_nbytes=capacity_nbytes, inner=inner
        )

    def _give(self, piece: Piece, place: Place) -> None:
        inner = piece.inner
        assert inner is not None
        try:
            self.upstream_mr.give(inner, place)
        except BaseException:
            if not inner.address:  # it is back all the same, so ours is
                piece.address = 0
                self._on_given(piece)
            raise
        self._on_given(piece)

    def _on_given(self, piece: Piece) -> None:
        """The upstream has what is in ``piece``; not called where it would not take it."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.upstream_mr!r}>"

    @property
    def _depth(self) -> int:
        return 1 + self.upstream_mr._depth

    # An adaptor keeps nothing for later, and the upstream is told of what concerns it.

    def _reap(self) -> bool:
        self._drain()
        if self._is_dropped:
            if not self._is_empty():
                return False
            self._on_space_closing()
        return True

    def _on_space_closing(self) -> None:
        try:
            self._drain()
        finally:
            self._forget()
            self._space = None

    def _is_empty(self) -> bool:
        return True

    def _known_space(self) -> Space:
        space = self._space
        if space is not None and space.is_open:
            return space
        if self._device is not None:
            return find_space(self._device)
        return self.upstream_mr._known_space()
