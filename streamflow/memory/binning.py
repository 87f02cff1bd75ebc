"""A resource for each range of sizes."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import fields
from typing import Any

from streamflow.memory.blocks import Piece
from streamflow.memory.figures import Figures, SubAllocatorInfo
from streamflow.memory.fixed_size import FixedSizeMemoryResource
from streamflow.memory.resource import DeviceMemoryResource
from streamflow.memory.sizes import ALIGNMENT, checked_size
from streamflow.memory.space import Place
from streamflow.memory.suballocator import SubAllocator, round_up

__all__ = ["BinningMemoryResource"]

_MAX_EXPONENT = 62


class BinningMemoryResource(Figures, DeviceMemoryResource):
    """Takes from the smallest bin that a request fits, from the upstream if none is so large.

    A block goes back to the bin that it came from, whatever bins were added since.

    Parameters
    ----------
    upstream_mr : DeviceMemoryResource
        For what fits no bin, and for the bins made here.
    min_size_exponent, max_size_exponent : int
        Makes a bin of fixed-size blocks for every power of two between them, both included;
        -1 twice: none.
    device : Device or int, optional

    Raises
    ------
    TypeError, ValueError
        Exponents that are no range from 0 on.
    """

    def __init__(
        self,
        upstream_mr: DeviceMemoryResource,
        min_size_exponent: int = -1,
        max_size_exponent: int = -1,
        device: Any = None,
    ) -> None:
        if not isinstance(upstream_mr, DeviceMemoryResource):
            raise TypeError(f"upstream_mr takes a memory resource, found {upstream_mr!r}")
        super().__init__(upstream_mr.device if device is None else device)
        self.upstream_mr = upstream_mr
        self.is_device_accessible = upstream_mr.is_device_accessible
        self.is_host_accessible = upstream_mr.is_host_accessible
        self.is_stream_ordered = upstream_mr.is_stream_ordered
        # Replaced as a whole, so that an allocation sees either the old bins or the new.
        self._bins: tuple[tuple[int, ...], tuple[DeviceMemoryResource, ...]] = (), ()
        self._made: list[DeviceMemoryResource] = []  # the bins that are nobody else's
        self._direct_nbytes = 0
        self._foreign_nbytes = 0  # in bins that tell no figures
        self._num_direct_calls = 0
        low, high = (_exponent(each) for each in (min_size_exponent, max_size_exponent))
        if (low, high) != (-1, -1):
            if not 0 <= low <= high <= _MAX_EXPONENT:
                raise ValueError(
                    f"bins range over exponents from 0 to {_MAX_EXPONENT}, found {low} to {high}"
                )
            for exponent in range(low, high + 1):
                self.add_bin(1 << exponent)

    def get_upstream(self) -> DeviceMemoryResource:
        """The resource for what fits no bin."""
        return self.upstream_mr

    @property
    def largest_nbytes(self) -> int | None:
        """What the upstream or the largest bin can serve."""
        sizes = self._bins[0]
        below = self.upstream_mr.largest_nbytes
        return below if below is None or not sizes else max(below, sizes[-1])

    @property
    def bin_mrs(self) -> list[DeviceMemoryResource]:
        """The bins' resources, the smallest size first."""
        return list(self._bins[1])

    def add_bin(
        self, allocation_size: int | str, bin_resource: DeviceMemoryResource | None = None
    ) -> None:
        """Have requests of up to ``allocation_size`` bytes, and of no smaller bin, taken elsewhere.

        Parameters
        ----------
        allocation_size : int or str
            Rounded up to a multiple of 256 bytes.
        bin_resource : DeviceMemoryResource, optional
            None: blocks of that size, taken from the upstream.

        Raises
        ------
        TypeError, ValueError
            A size that is none or has a bin already; not a resource.
        """
        size = checked_size(allocation_size, "allocation_size")
        if not size:
            raise ValueError("allocation_size: at least 1 byte")
        size = round_up(size)
        made: list[DeviceMemoryResource] = []
        if bin_resource is None:
            bin_resource = FixedSizeMemoryResource(self.upstream_mr, size, device=self._device)
            made.append(bin_resource)
        elif not isinstance(bin_resource, DeviceMemoryResource):
            raise TypeError(f"bin_resource takes a memory resource, found {bin_resource!r}")
        with self._lock:
            sizes, resources = self._bins
            at = bisect_left(sizes, size)
            if at < len(sizes) and sizes[at] == size:
                if size < 2 * ALIGNMENT:
                    return  # powers of two below the least alignment are one bin
                raise ValueError(f"there is a bin for {size} bytes already: {resources[at]!r}")
            self._bins = (
                (*sizes[:at], size, *sizes[at:]),
                (*resources[:at], bin_resource, *resources[at:]),
            )
            self._made += made

    def close(self) -> None:
        """Give back what is not in use, and refuse further allocations; so do the bins made here.

        Blocks in use may still be freed.
        """
        for resource in self._made:
            resource.close()
        super().close()

    def trim(self) -> None:
        """Have every bin and the upstream give back what they can."""
        super().trim()
        for resource in (*self._bins[1], self.upstream_mr):
            resource.trim()

    # -- figures -----------------------------------------------------------------------------

    def info(self) -> SubAllocatorInfo:
        """Of all bins together; what came from the upstream is in use.

        The largest hole is that of one bin.
        """
        figures = [each.info() for each in self._figured()]
        with self._lock:
            other = self._direct_nbytes + self._foreign_nbytes
        sums = {
            field.name: sum(getattr(each, field.name) for each in figures)
            for field in fields(SubAllocatorInfo)
        }
        sums["live_nbytes"] += other
        sums["reserved_nbytes"] += other
        sums["num_upstream_calls"] += self._num_direct_calls
        sums["largest_free_nbytes"] = max((each.largest_free_nbytes for each in figures), default=0)
        return SubAllocatorInfo(**sums)

    # -- inside ------------------------------------------------------------------------------

    @property
    def _depth(self) -> int:
        return 1 + max(each._depth for each in (*self._bins[1], self.upstream_mr))

    def _is_empty(self) -> bool:
        return not self.live_nbytes

    def _take(self, nbytes: int, alignment: int, place: Place) -> Piece:
        sizes, resources = self._bins
        # A bin's blocks are surely aligned to 256 bytes only.
        at = bisect_left(sizes, nbytes + max(0, alignment - ALIGNMENT))
        source = resources[at] if at < len(sizes) else self.upstream_mr
        inner = source.take(nbytes, alignment, place)
        if at == len(sizes) or not isinstance(source, SubAllocator):
            self._count(inner.capacity_nbytes, is_direct=at == len(sizes))
        capacity_nbytes, is_direct = inner.capacity_nbytes, at == len(sizes)
        return Piece(self, inner.address, nbytes, alignment, capacity_nbytes, inner, is_direct)

    def _give(self, piece: Piece, place: Place) -> None:
        inner = piece.inner
        assert inner is not None
        inner.resource.give(inner, place)
        if piece.note or not isinstance(inner.resource, SubAllocator):
            self._count(-inner.capacity_nbytes, is_direct=piece.note)

    def _count(self, nbytes: int, *, is_direct: bool) -> None:
        with self._lock:
            if is_direct:
                self._direct_nbytes += nbytes
                self._num_direct_calls += 1
            else:
                self._foreign_nbytes += nbytes

    def _figured(self) -> list[SubAllocator]:
        """The bins that tell their figures, each once."""
        return list(
            {id(each): each for each in self._bins[1] if isinstance(each, SubAllocator)}.values()
        )

    def _on_space_closing(self) -> None:
        """The bins have their own turn."""
        self._forget()
        self._space = None

    def _forget(self) -> None:
        self._dropped.clear()
        self._direct_nbytes = self._foreign_nbytes = 0


def _exponent(value: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"an exponent is an int, found {value!r}")
    return int(value)
