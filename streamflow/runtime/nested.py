"""Values in tuples, lists, dicts and dataclasses, nested as the program likes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

__all__ = ["leaves", "map_leaves"]

Visit = Callable[[Any], Any]
"""From a leaf to what takes its place."""


def map_leaves(item: Any, visit: Visit) -> Any:
    """``item`` with ``visit(leaf)`` in the place of every leaf, in containers of its own."""
    if isinstance(item, np.ndarray):
        return visit(item)  # the usual case first
    if isinstance(item, tuple):
        parts = [map_leaves(part, visit) for part in item]
        make = getattr(type(item), "_make", None)  # a NamedTuple's
        return tuple(parts) if make is None else make(parts)
    if isinstance(item, list):
        return [map_leaves(part, visit) for part in item]
    if isinstance(item, dict):
        changed: dict[Any, Any] = copy.copy(
            item
        )  # keeps the order, and a subclass with what belongs to it
        for key, part in item.items():
            changed[key] = map_leaves(part, visit)
        return changed
    if is_dataclass(item) and not isinstance(item, type):
        made = copy.copy(item)  # not by __init__, which may take something else
        for field in fields(item):
            part = map_leaves(getattr(item, field.name), visit)
            object.__setattr__(made, field.name, part)  # it may be frozen
        return made
    return visit(item)


def leaves(item: Any) -> Iterator[Any]:
    """All that is no container, in the order of :func:`map_leaves`."""
    if isinstance(item, (tuple, list)):
        for part in item:
            yield from leaves(part)
    elif isinstance(item, dict):
        for part in item.values():
            yield from leaves(part)
    elif is_dataclass(item) and not isinstance(item, type):
        for field in fields(item):
            yield from leaves(getattr(item, field.name))
    else:
        yield item
