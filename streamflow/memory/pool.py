"""A coalescing best-fit pool over any resource."""

from __future__ import annotations

from typing import Any

from streamflow.memory.resource import DeviceMemoryResource
from streamflow.memory.sizes import ALIGNMENT, checked_size
from streamflow.memory.space import Place
from streamflow.memory.spans import Region, SizeShelf, Span
from streamflow.memory.suballocator import SubAllocator, round_up

__all__ = ["PoolMemoryResource"]


class PoolMemoryResource(SubAllocator):
    """Best fit among what is free, joined with its neighbours when room is wanted.

    Parameters
    ----------
    upstream_mr : DeviceMemoryResource
    initial_pool_size : int or str, optional
        What is taken with the first allocation, in bytes or as ``"1GiB"``; None: half of what
        the device has free then. Less, down to what is asked for, where the upstream has less.
    maximum_pool_size : int or str, optional
        What the pool never exceeds.
    device : Device or int, optional

    Notes
    -----
    Grows by the larger of the request and its present size; under a maximum by the larger of
    the request and half of the rest. Where the upstream refuses, by half of that, down to the
    request.

    Raises
    ------
    TypeError, ValueError
        A size that is none, or an initial one above the maximum.
    """

    _shelf_type = SizeShelf

    def __init__(
        self,
        upstream_mr: DeviceMemoryResource,
        initial_pool_size: int | str | None = None,
        maximum_pool_size: int | str | None = None,
        device: Any = None,
    ) -> None:
        super().__init__(upstream_mr, device)
        initial = (
            None
            if initial_pool_size is None
            else checked_size(initial_pool_size, "initial_pool_size")
        )
        maximum = (
            None
            if maximum_pool_size is None
            else checked_size(maximum_pool_size, "maximum_pool_size")
        )
        if initial is not None and maximum is not None and initial > maximum:
            raise ValueError(
                f"initial_pool_size ({initial}) is above maximum_pool_size ({maximum})"
            )
        self._initial_nbytes = None if initial is None else round_up(initial)
        self._max_nbytes = None if maximum is None else maximum & -ALIGNMENT
        self._is_grown = False

    @property
    def largest_nbytes(self) -> int | None:
        """The maximum; None where there is none."""
        return self._max_nbytes

    def pool_size(self) -> int:
        """Bytes taken from the upstream."""
        return self.reserved_nbytes

    def _find(self, place: Place, nbytes: int, alignment: int) -> Span | None:
        return (self._main or self._store()).take(place, nbytes, alignment)

    def _find_waiting(self, place: Place, nbytes: int, alignment: int) -> Span | None:
        store = self._store()
        span = store.take_waiting(place, nbytes, alignment)
        return span if span is not None else store.take_joined(place, nbytes, alignment)

    def _growths(self, nbytes: int) -> list[int]:
        reserved, rest = self._reserved_nbytes, None
        if self._max_nbytes is not None:
            rest = self._max_nbytes - reserved
            if nbytes > rest:
                return []
        if not self._is_grown:
            first = self._initial_nbytes
            if first is None:
                first = self._known_space().backend.memory_info()[0] // 2
            wanted = max(nbytes, first)
        else:
            wanted = max(nbytes, reserved if rest is None else rest // 2)
        if rest is not None:
            wanted = min(wanted, rest)
        sizes = [wanted & -ALIGNMENT]
        while sizes[-1] > nbytes:
            sizes.append(max(nbytes, sizes[-1] // 2 & -ALIGNMENT))
        return sizes

    def _on_region(self, region: Region) -> None:
        self._is_grown = True

    def _forget(self) -> None:
        super()._forget()
        self._is_grown = False
