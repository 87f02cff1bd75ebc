"""Blocks of one size, first freed first used."""

from __future__ import annotations

from typing import Any

from streamflow.errors import OutOfDeviceMemory
from streamflow.memory.blocks import Piece
from streamflow.memory.resource import DeviceMemoryResource
from streamflow.memory.sizes import ALIGNMENT, checked_size
from streamflow.memory.space import Place
from streamflow.memory.spans import FifoShelf, Region, Span
from streamflow.memory.store import Store
from streamflow.memory.suballocator import SubAllocator, round_up

__all__ = ["FixedSizeMemoryResource"]

_ALIGNMENT_MAX = 4096


class FixedSizeMemoryResource(SubAllocator):
    """Gives blocks of one size, whatever is asked for.

    Parameters
    ----------
    upstream_mr : DeviceMemoryResource
    block_size : int or str
        Rounded up to a multiple of 256 bytes.
    blocks_to_preallocate : int
        How many are taken from the upstream at a time, the first time with the first
        allocation; fewer where it has less.
    device : Device or int, optional

    Raises
    ------
    TypeError, ValueError
        A size or a number that is none, or not above 0.
    """

    _shelf_type = FifoShelf

    def __init__(
        self,
        upstream_mr: DeviceMemoryResource,
        block_size: int | str = 1 << 20,
        blocks_to_preallocate: int = 128,
        device: Any = None,
    ) -> None:
        super().__init__(upstream_mr, device)
        checked = checked_size(block_size, "block_size")
        if not checked:
            raise ValueError("block_size: at least 1 byte")
        if isinstance(blocks_to_preallocate, bool) or not hasattr(
            blocks_to_preallocate, "__index__"
        ):
            raise TypeError(f"blocks_to_preallocate is an int, found {blocks_to_preallocate!r}")
        if blocks_to_preallocate < 1:
            raise ValueError(
                f"blocks_to_preallocate is at least 1, found {int(blocks_to_preallocate)}"
            )
        self._block_nbytes = round_up(checked)
        self._num_blocks = int(blocks_to_preallocate)
        # As aligned as the size allows, so that a block needs no room for it.
        self._region_alignment = min(self._block_nbytes & -self._block_nbytes, _ALIGNMENT_MAX)

    @property
    def largest_nbytes(self) -> int | None:
        """One block."""
        return self._block_nbytes

    @property
    def block_size(self) -> int:
        """Bytes of every block."""
        return self._block_nbytes

    def get_block_size(self) -> int:
        """Bytes of every block."""
        return self._block_nbytes

    def _take(self, nbytes: int, alignment: int, place: Place) -> Piece:
        size = self._block_nbytes
        if nbytes + max(0, alignment - self._region_alignment) > size:
            raise OutOfDeviceMemory(
                f"{self!r} gives blocks of {size} bytes, which {nbytes} bytes"
                + (f" aligned to {alignment}" if alignment > ALIGNMENT else "")
                + " do not surely fit"
            )
        piece = super()._take(size, ALIGNMENT, place)
        piece.nbytes, piece.alignment = nbytes, alignment
        if alignment > ALIGNMENT:
            piece.address += -piece.address % alignment
        return piece

    def _find(self, place: Place, nbytes: int, alignment: int) -> Span | None:
        return (self._main or self._store()).take(place, nbytes, alignment)

    def _find_waiting(self, place: Place, nbytes: int, alignment: int) -> Span | None:
        return self._store().take_waiting(place, nbytes, alignment)

    def _growths(self, nbytes: int) -> list[int]:
        num, sizes = self._num_blocks, []
        while num:
            sizes.append(num * self._block_nbytes)
            num //= 2
        return sizes

    def _on_region(self, region: Region) -> None:
        region.store.split_region(region, self._block_nbytes)

    def _make_store(self) -> Store:
        assert self._space is not None
        return Store(self._space, self._order, self._shelf_type, joins=False)
