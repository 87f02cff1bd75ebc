"""One recording of a function: the graph, its own arguments and results, and copies to and fro.

The graph works on memory of its own. A call copies the arguments there, launches, and copies
what was written back and the results out, each an op of its own: so whose memory a call is
given changes nothing about the graph, and its results are the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from streamflow.backends.origin import caller, origin_of
from streamflow.capture.graph import Capture, CapturedGraph
from streamflow.capture.signature import ALIGNMENT, Arguments
from streamflow.errors import CaptureRefused, Closed
from streamflow.runtime.array import Allocation, DeviceArray
from streamflow.runtime.nested import map_leaves
from streamflow.runtime.op import Op, next_seq
from streamflow.runtime.stream import explicit_line
from streamflow.scheduler.hazards import Region

if TYPE_CHECKING:
    from streamflow.runtime.submit import Submit

__all__ = ["Replay"]

_WITHOUT_RESULT = frozenset(("launch", "fill", "copy"))

Move = tuple[int, int, int]
"""To, from and how many bytes."""


Make = Callable[[Sequence[DeviceArray], Sequence[DeviceArray], Op[Any]], Any]
"""From a call's arguments, its new memory and its op to one of its results."""


class _Slot:
    """Where a result has an array or op that each call makes anew."""

    __slots__ = ("make",)

    def __init__(self, make: Make) -> None:
        self.make = make


class Replay:
    """A recording that calls with arguments of one signature share.

    Attributes
    ----------
    graph : CapturedGraph
    """

    def __init__(
        self,
        dev: Submit,
        function: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: Arguments,
    ) -> None:
        self._dev = dev
        self._core = dev._core
        self._name = name
        own = [self._empty(each.nbytes + each.pad) for each in given.extents]
        self._starts = [
            array.address + each.pad for array, each in zip(own, given.extents, strict=True)
        ]
        stand_ins: dict[int, DeviceArray] = {}
        for array, start, extent in zip(own, self._starts, given.extents, strict=True):
            for place in extent.places:
                like = given.arrays[place]
                stand_ins[place] = _view(array, start + like.address - extent.start, like)
        in_order = iter(range(len(stand_ins)))

        def stand_in(leaf: Any) -> Any:
            return stand_ins[next(in_order)] if isinstance(leaf, DeviceArray) else leaf

        args = tuple(map_leaves(arg, stand_in) for arg in args)
        kwargs = dict(zip(kwargs, _in_order_of_names(kwargs, stand_in), strict=True))
        first_seq = next_seq()
        with Capture(dev, name) as graph:
            result = function(*args, **kwargs)
        self.graph: CapturedGraph = graph
        recorded = graph._whole
        needed = {region.allocation for region in recorded.needs}
        written = {region.allocation for region in recorded.writes}
        touched = needed | written
        self._taken = [
            array.allocation.ticket in needed
            or (array.allocation.ticket in written and array._region not in recorded.overwrites)
            for array in own
        ]
        self._written = [array.allocation.ticket in written for array in own]
        mine = {array._memory for array in own}
        self._outside = frozenset(
            memory
            for memory in recorded.arrays
            if memory not in mine and memory.op.ticket.seq < first_seq
        )
        # Memory that the function allocates is new to it each time, whatever became of the last
        # call; and so are its arguments (rule R9).
        self._renewed: list[Region] = [
            *(array._region for array in own if array.allocation.ticket in touched),
            *(
                region
                for region in {**recorded.needs, **recorded.writes}
                if region.allocation.seq > first_seq
            ),
        ]
        self._back = [
            array._region
            for array, is_written in zip(own, self._written, strict=True)
            if is_written
        ]
        self._fresh_nbytes: list[int] = []
        self._results: list[tuple[int, int, Region]] = []  # which, from where, and its hazards
        self._template = self._planned(result, own, stand_ins, given, written, first_seq)

    # -- asking ------------------------------------------------------------------------------

    @property
    def is_usable(self) -> bool:
        """Whether what it was recorded over is still there."""
        built = self.graph._built
        if built is None or built._error is not None:
            return False
        try:
            self.graph._whole.check_usable()
        except Closed:
            return False
        return True

    def is_shared_with(self, arrays: Sequence[DeviceArray]) -> bool:
        """Whether the function uses memory of ``arrays`` by another way than its arguments."""
        outside = self._outside
        return bool(outside) and any(array._memory in outside for array in arrays)

    # -- running -----------------------------------------------------------------------------

    def __call__(self, given: Arguments) -> Any:
        """Copy in, launch, copy out; what the function returns."""
        arrays = given.arrays
        fresh = [self._empty(nbytes) for nbytes in self._fresh_nbytes]
        if self._renewed:
            moves, used = self._moves(given, self._taken)
            self._submit("in", moves, used, self._renewed)
        op: Op[Any] = self.graph.launch()
        back, changed = self._moves(given, self._written)
        moves = [(start, own, nbytes) for own, start, nbytes in back]
        reads = list(self._back)
        for place, start, region in self._results:
            moves.append((fresh[place].address, start, fresh[place].nbytes))
            changed.append(fresh[place]._region)
            reads.append(region)
        if changed:
            writes_host = op.writes_host
            op = self._submit("out", moves, reads, changed)
            op.rare().writes_host = writes_host
        template = self._template
        if isinstance(template, _Slot):
            return template.make(arrays, fresh, op)
        return map_leaves(
            template,
            lambda leaf: leaf.make(arrays, fresh, op) if isinstance(leaf, _Slot) else leaf,
        )

    def _empty(self, nbytes: int) -> DeviceArray:
        array = self._dev.empty(nbytes, np.uint8)
        array.allocation._origin = origin_of(caller(1))
        return array

    def _moves(self, given: Arguments, wanted: Sequence[bool]) -> tuple[list[Move], list[Region]]:
        moves: list[Move] = []
        regions: dict[Region, None] = {}
        arrays = given.arrays
        for start, extent, is_wanted in zip(self._starts, given.extents, wanted, strict=True):
            if is_wanted:
                moves.append((start, extent.start, extent.nbytes))
                for place in extent.places:
                    regions[arrays[place]._region] = None
        return moves, list(regions)

    def _submit(
        self, way: str, moves: Sequence[Move], reads: Sequence[Region], writes: Sequence[Region]
    ) -> Op[None]:
        """All copies of one direction: one op."""
        core = self._core
        op: Op[None] = Op(core, "copy", f"{self._name} {way}")
        core.parking.submit(
            op,
            partial(_copy, core.backend.copy_d2d, moves),
            line=explicit_line(core, None) or core.picker(op),
            reads=reads,
            writes=writes,
            is_overwrite=True,
        )
        return op

    # -- results -----------------------------------------------------------------------------

    def _planned(
        self,
        result: Any,
        own: Sequence[DeviceArray],
        stand_ins: dict[int, DeviceArray],
        given: Arguments,
        written: set[Any],
        first_seq: int,
    ) -> Any:
        """``result`` with slots."""
        whose = {array._memory: number for number, array in enumerate(own)}
        made: dict[Allocation, list[int]] = {}  # [which of the fresh ones, from, to]

        def note(leaf: Any) -> Any:
            if isinstance(leaf, DeviceArray):
                leaf.check_usable()
                memory = leaf._memory
                if memory not in whose and memory.op.ticket.seq > first_seq and leaf.nbytes:
                    start = leaf.address - (leaf.address - memory.address) % ALIGNMENT
                    known = made.setdefault(memory, [len(made), start, start])
                    known[1] = min(known[1], start)
                    known[2] = max(known[2], leaf.address + leaf.nbytes)
            return leaf

        def slot(leaf: Any) -> Any:
            if isinstance(leaf, Op):
                if leaf.kind not in _WITHOUT_RESULT:
                    raise CaptureRefused(
                        f"{self._name} returns {leaf.name}, which has no result in a graph"
                    )
                return _Slot(lambda arrays, fresh, op: op)
            if not isinstance(leaf, DeviceArray):
                return leaf
            if leaf._memory in whose:
                return self._part_of_argument(leaf, whose[leaf._memory], stand_ins, given)
            if leaf._memory in made:
                which, start, _ = made[leaf._memory]
                offset = leaf.address - start
                return _Slot(
                    lambda arrays, fresh, op: _view(
                        fresh[which], fresh[which].address + offset, leaf
                    )
                )
            if leaf._memory.op.ticket.seq > first_seq:  # of no bytes
                return _Slot(lambda arrays, fresh, op: self._dev.empty(leaf.shape, leaf.dtype))
            return leaf  # from around the function: it is no other array now

        map_leaves(result, note)
        for memory, (which, start, stop) in made.items():
            self._fresh_nbytes.append(stop - start)
            if memory.op.ticket in written:
                self._results.append((which, start, memory.root))
        return map_leaves(result, slot)

    def _part_of_argument(
        self,
        leaf: DeviceArray,
        number: int,
        stand_ins: dict[int, DeviceArray],
        given: Arguments,
    ) -> _Slot:
        places = given.extents[number].places
        for place in places:
            if leaf is stand_ins[place]:
                return _part(place, None, leaf)
        for place in places:
            mine = stand_ins[place]
            offset = leaf.address - mine.address if leaf.nbytes else 0
            if 0 <= offset <= mine.nbytes - leaf.nbytes:
                return _part(place, offset, leaf)
        raise AssertionError("a view lies in what it was made of")


def _part(place: int, offset: int | None, like: DeviceArray) -> _Slot:
    """An argument, or what lies in it at ``offset``."""
    if offset is None:
        return _Slot(lambda arrays, fresh, op: arrays[place])
    return _Slot(
        lambda arrays, fresh, op: _view(arrays[place], arrays[place].address + offset, like)
    )


def _in_order_of_names(kwargs: dict[str, Any], visit: Callable[[Any], Any]) -> list[Any]:
    done = {name: map_leaves(kwargs[name], visit) for name in sorted(kwargs)}
    return [done[name] for name in kwargs]


def _view(over: DeviceArray, address: int, like: DeviceArray) -> DeviceArray:
    """An array as ``like``, elsewhere: from ``address`` on in the memory of ``over``."""
    return DeviceArray(
        over._memory,
        over._region,
        address if like.size else 0,
        like.shape,
        like.dtype,
        like.size,
    )


def _copy(copy: Callable[[int, int, int, Any], None], moves: Sequence[Move], target: Any) -> int:
    num = 0
    for to, origin, nbytes in moves:
        if nbytes:
            copy(to, origin, nbytes, target)
            num += 1
    return num
