"""Whether memory is in the hands of certain tasks and of nobody else.

Asked when tasks wait for memory and no free is pending: if nothing but those tasks refers to
the arrays that are alive, nobody will ever free one.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from sys import getrefcount
from types import CellType, CoroutineType, GeneratorType
from typing import Any
from weakref import getweakrefcount

from streamflow.runtime.array import Allocation, DeviceArray

__all__ = ["are_held_only_by"]

_CALLS = (CoroutineType, GeneratorType)
_WALKED = (*_CALLS, list, tuple, dict, set, CellType, DeviceArray)
_NUM_OBJECTS_MAX = 10_000


def are_held_only_by(allocations: list[Allocation], tasks: Iterable[Any]) -> bool:
    """Whether every reference to ``allocations`` comes from what ``tasks`` have suspended.

    Follows the variables of their coroutines, through lists, tuples, dicts, sets, closures and
    arrays. A reference from anywhere else, an object of the program's say, means False; so does
    a weak one, and a walk that would take long: True is certain, False is not.
    """
    walk = _Walk(map(id, allocations))
    roots = [task.get_coro() if hasattr(task, "get_coro") else task.coro for task in tasks]
    return walk.reach(roots) and all(map(walk.is_explained, walk.held))


class _Walk:
    """What the coroutines refer to, and from where. No cycle with itself: counts stay true."""

    def __init__(self, held: Iterable[int]) -> None:
        self.held = frozenset(held)
        self._found: dict[int, Any] = {}  # by id: one reference of ours to each
        self._parents: dict[int, list[int]] = {}
        self._known: dict[int, bool] = {}

    def reach(self, roots: list[Any]) -> bool:
        """Follow all that ``roots`` refer to; False if that is too much."""
        for root in roots:
            call = self._found[id(root)] = root  # where another refers to it: not walked twice
            while isinstance(call, _CALLS):  # what a task awaits is the task's, whoever knows it
                self._known[id(call)] = True
                call = call.cr_await if isinstance(call, CoroutineType) else call.gi_yieldfrom
        stack = roots
        while stack:
            parent = stack.pop()
            for child in gc.get_referents(parent):
                key = id(child)
                if not (isinstance(child, _WALKED) or key in self.held):
                    continue
                self._parents.setdefault(key, []).append(id(parent))
                if key not in self._found:
                    self._found[key] = child
                    if key not in self.held:
                        stack.append(child)
            if len(self._found) > _NUM_OBJECTS_MAX:
                return False
        return True

    def is_explained(self, key: int) -> bool:
        """Whether all references to an object are those found, from objects that are explained."""
        if key not in self._known:
            self._known[key] = False  # a cycle of containers: no task alone holds it
            self._known[key] = key in self._found and self._count(key)
        return self._known[key]

    def _count(self, key: int) -> bool:
        is_held = key in self.held  # by the caller's list as well, and weakly by the device
        if getweakrefcount(self._found[key]) > is_held:
            return False
        num_others = _num_references(self._found, key) - _NUM_OWN - is_held
        parents = self._parents[key]
        return num_others == len(parents) and all(map(self.is_explained, parents))


def _num_references(found: dict[int, Any], key: int) -> int:
    thing = found[key]
    return getrefcount(thing)


_NUM_OWN = _num_references({0: object()}, 0)
"""How many of those are ours: which calls count differs between versions of Python."""
