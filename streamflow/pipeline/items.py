"""Items: arrays in tuples, lists, dicts and dataclasses, nested as the program likes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from streamflow.runtime.nested import leaves, map_leaves

__all__ = ["copied", "host_arrays", "leaves", "map_leaves", "rows", "stacked", "tell"]


def is_host_array(leaf: Any) -> bool:
    """Whether ``leaf`` is NumPy's: an array, or a scalar, which is an array without axes."""
    return isinstance(leaf, (np.ndarray, np.generic))


def host_arrays(item: Any) -> list[Any]:
    """The ndarrays in ``item``."""
    return [leaf for leaf in leaves(item) if is_host_array(leaf)]


def copied(item: Any) -> Any:
    """``item`` with arrays of its own. Takes as long as a copy does: worker threads only."""
    return map_leaves(item, lambda leaf: leaf.copy() if is_host_array(leaf) else leaf)


def stacked(items: Sequence[Any]) -> Any:
    """One item of ``items``: each array along a new first axis, other leaves as lists.

    Raises
    ------
    ValueError
        The items are not alike: ragged.
    """
    first = items[0]
    columns = [list(leaves(item)) for item in items]
    for place, column in enumerate(columns):
        if len(column) != len(columns[0]):
            raise ValueError(
                f"ragged batch: its item {place} has {len(column)} leaves, its first "
                f"{len(columns[0])}: {tell(items[place])} and {tell(first)}"
            )
    places = iter(range(len(columns[0])))

    def stack(leaf: Any) -> Any:
        place = next(places)
        parts = [column[place] for column in columns]
        if not is_host_array(leaf):
            return parts
        for number, part in enumerate(parts):
            if not is_host_array(part) or (part.shape, part.dtype) != (leaf.shape, leaf.dtype):
                raise ValueError(
                    f"ragged batch: its item {number} has {tell(part)} where its first has "
                    f"{tell(leaf)}. Pad them in a map_host before, or use batches of 1"
                )
        return np.stack(parts)

    return map_leaves(first, stack)


def rows(item: Any) -> list[Any]:
    """The items along the first axis of the arrays in ``item``; views, other leaves in each.

    Raises
    ------
    ValueError
        The first axes differ, or there is none.
    """
    arrays = host_arrays(item)
    if not arrays or any(array.ndim == 0 for array in arrays):
        raise ValueError(f"unbatch takes arrays with a first axis to go along, found {tell(item)}")
    lengths = {len(array) for array in arrays}
    if len(lengths) > 1:
        raise ValueError(f"unbatch found first axes of {sorted(lengths)} in one item: {tell(item)}")

    def row(number: int) -> Any:
        return map_leaves(item, lambda leaf: leaf[number] if is_host_array(leaf) else leaf)

    return [row(number) for number in range(lengths.pop())]


def tell(item: Any) -> str:
    """``item`` in a few words, for errors."""
    if is_host_array(item):
        kind = type(item).__name__
        return f"{kind} {item.shape} {item.dtype}"
    if isinstance(item, (tuple, list)):
        inner = ", ".join(tell(part) for part in item[:4])
        return f"{type(item).__name__} of {len(item)} ({inner}{', ...' if len(item) > 4 else ''})"
    if isinstance(item, dict):
        return f"{type(item).__name__} of {', '.join(map(repr, list(item)[:4])) or 'nothing'}"
    text = repr(item)
    return f"{type(item).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
