"""What makes two calls of a captured function the same one, and which arrays they are given."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np

from streamflow.runtime.array import DeviceArray
from streamflow.runtime.op import Op

__all__ = ["ALIGNMENT", "Arguments", "Extent"]

ALIGNMENT = 16
"""Bytes of the widest load of a thread: arrays that share memory keep their places by it."""


@dataclass(slots=True, eq=False)
class Extent:
    """Bytes of one allocation that arrays among the arguments cover without a gap.

    ``places`` are those of the arrays, which overlap if there are several.
    """

    start: int
    stop: int
    places: list[int]

    @property
    def nbytes(self) -> int:
        """At least those of each array."""
        return self.stop - self.start

    @property
    def pad(self) -> int:
        """Bytes before it in memory of the graph's: one array alone is aligned best by none."""
        return self.start % ALIGNMENT if len(self.places) > 1 else 0


class Arguments:
    """The arguments of one call.

    Attributes
    ----------
    arrays : list of DeviceArray
        Those among them, in tuples, lists, dicts and dataclasses too.
    extents : list of Extent
        What memory they are over.
    key : tuple
        Equal for calls that one recording serves: by shapes, dtypes and which arrays share
        memory; for everything else by value.
    """

    __slots__ = ("arrays", "extents", "key")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.arrays: list[DeviceArray] = []
        parts: list[Hashable] = []
        for arg in args:
            self._sign(arg, parts)
        for name in sorted(kwargs) if kwargs else ():
            parts.append(name)
            self._sign(kwargs[name], parts)
        self.extents = _extents(self.arrays)
        if len(self.extents) < len(self.arrays):
            parts.append(tuple(self._sharing(each) for each in self.extents))
        self.key = (len(args), *parts)

    def _sign(self, item: Any, parts: list[Hashable]) -> None:
        kind = item.__class__
        if isinstance(item, DeviceArray):
            self.arrays.append(item)
            parts.append(item.shape)
            parts.append(item.dtype)
        elif isinstance(item, (tuple, list)):
            parts.append((kind, len(item)))
            for part in item:
                self._sign(part, parts)
        elif isinstance(item, dict):
            parts.append((kind, *item))
            for part in item.values():
                self._sign(part, parts)
        elif is_dataclass(item) and not isinstance(item, type):
            parts.append(kind)
            for field in fields(item):
                self._sign(getattr(item, field.name), parts)
        else:
            parts.append(_value(item))

    def _sharing(self, extent: Extent) -> Hashable:
        if len(extent.places) == 1:
            return extent.places[0]
        starts = (self.arrays[place].address - extent.start for place in extent.places)
        return extent.pad, *zip(extent.places, starts, strict=True)


def _value(leaf: Any) -> Hashable:
    kind = leaf.__class__
    if isinstance(leaf, float):  # 0.0 is not -0.0, and nan is itself
        return kind, leaf.hex()
    if isinstance(leaf, complex):
        return kind, leaf.real.hex(), leaf.imag.hex()
    if isinstance(leaf, np.generic):
        return kind, leaf.dtype, leaf.tobytes()
    if isinstance(leaf, np.ndarray):
        raise TypeError(
            f"a captured function takes arrays on the device: put this ndarray of {leaf.shape} "
            f"{leaf.dtype} there first, or take it from around the function"
        )
    if isinstance(leaf, Op):
        raise TypeError(
            f"a captured function can't be given {leaf!r}, which is another one at each call: "
            "the arrays it is given bring their order along"
        )
    try:
        hash(leaf)
    except TypeError:
        raise TypeError(
            "a captured function is recorded anew for each value of what isn't an array on the "
            f"device, so it takes hashable ones only: found {kind.__name__} {leaf!r}"
        ) from None
    return kind, leaf


def _extents(arrays: Sequence[DeviceArray]) -> list[Extent]:
    """Arrays that share bytes are in one; those beside each other in one allocation are not."""
    if len({array._memory for array in arrays}) == len(arrays):
        return [
            Extent(array.address, array.address + array.nbytes, [place])
            for place, array in enumerate(arrays)
        ]
    found: list[Extent] = []
    newest: dict[Any, Extent] = {}
    for place in sorted(range(len(arrays)), key=lambda place: arrays[place].address):
        array = arrays[place]
        extent = newest.get(array._memory)
        stop = array.address + array.nbytes
        if extent is not None and array.nbytes and array.address < extent.stop:
            extent.stop = max(extent.stop, stop)
            extent.places.append(place)
        else:
            extent = Extent(array.address, stop, [place])
            found.append(extent)
            if array.nbytes:
                newest[array._memory] = extent
    found.sort(key=lambda each: min(each.places))
    return found
