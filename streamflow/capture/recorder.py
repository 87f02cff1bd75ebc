"""What a task submits while it captures, as nodes and edges.

The same rules order them as order ops (R3), in books kept beside the arrays' own: what is
recorded has no ticket and no position, so nothing outside can come to wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import FrameType
from typing import Any

import numpy as np

from streamflow.backends.origin import describe, here
from streamflow.errors import CaptureRefused, Closed
from streamflow.runtime.array import Allocation, DeviceArray
from streamflow.runtime.core import Core
from streamflow.runtime.foreign import ForeignCall, RepeatedCall
from streamflow.runtime.host_memory import HostEnd
from streamflow.runtime.launch import KernelRun
from streamflow.runtime.op import Op, OpState
from streamflow.runtime.parked import After, PickLine, Run, Start
from streamflow.runtime.parking import submit_as
from streamflow.scheduler.hazards import Region
from streamflow.scheduler.timeline import Ticket, Timeline

__all__ = ["Handle", "HostStep", "Node", "Recorded", "TaskRecorder", "told"]


class Captured(CaptureRefused):
    """An op was captured, and is asked for its end. Looks its line up only when it is shown."""

    def __str__(self) -> str:
        name, code, lasti = self.args
        return (
            f"{name} ({describe(code, lasti)}) was captured: it runs when the graph is launched, "
            "so await graph.launch()"
        )

    def __repr__(self) -> str:
        return f"Captured({str(self)!r})"


class Handle:
    """A graph or executable of the backend's, closed once nobody holds it any more (R6)."""

    __slots__ = ("_core", "handle")

    def __init__(self, core: Core, handle: Any) -> None:
        self._core = core
        self.handle = handle

    def __del__(self) -> None:
        self._core.leave(partial(self._core.backend.close_graph, self.handle))


@dataclass(slots=True, eq=False)
class Node:
    """One recorded op of the device.

    Attributes
    ----------
    kind, name, where : str
        As an :class:`Op` has them.
    deps : tuple of Node
        What it comes after.
    """

    op: Op[Any]
    run: Run
    deps: tuple[Node, ...]
    child: Handle | None = None  # the backend's graph of what a foreign function submitted

    @property
    def kind(self) -> str:
        """``"launch"``, ``"fill"``, ``"copy"``, ..."""
        return self.op.kind

    @property
    def name(self) -> str:
        """As errors and traces call it."""
        return self.op.name

    @property
    def where(self) -> str:
        """File and line of the call."""
        return self.op.where

    def __repr__(self) -> str:
        return f"<Node {self.name} after {', '.join(dep.name for dep in self.deps) or 'nothing'}>"


@dataclass(slots=True, eq=False)
class HostStep:
    """A function of the host's between two parts of the graph."""

    op: Op[Any]
    function: Callable[..., Any]
    args: tuple[Any, ...]
    after: tuple[Op[Any], ...]  # earlier host steps


@dataclass(slots=True)
class _Book:
    """The hazards of one region within the graph."""

    last_write: Node | None = None
    reads: list[Node] = field(default_factory=list)


class _InnerFree:
    """Memory that was freed within the graph: the program's no more, and the graph's to its end."""

    __slots__ = ("_memory",)

    def __init__(self, memory: Allocation) -> None:
        self._memory = memory

    def __del__(self) -> None:
        memory = self._memory
        if memory.address:
            memory.core.post_free(memory.address, memory.home, memory.root)


@dataclass(eq=False)
class Recorded:
    """One recording: parts of nodes with host steps between them, and what they touch.

    Attributes
    ----------
    needs : dict of Region
        What a launch needs the contents of: read before the graph has overwritten it.
    writes : dict of Region
    overwrites : dict of Region
        Those of ``writes`` that some op writes all of, without reading.
    on_device : dict of Region
    writes_host : bool
        A launch writes memory of the program's (rule R8).
    """

    core: Core
    parts: list[list[Node] | HostStep] = field(default_factory=list)
    needs: dict[Region, None] = field(default_factory=dict)
    writes: dict[Region, None] = field(default_factory=dict)
    overwrites: dict[Region, None] = field(default_factory=dict)
    on_device: dict[Region, None] = field(default_factory=dict)
    arrays: dict[Allocation, DeviceArray] = field(default_factory=dict)
    host_arrays: dict[int, tuple[np.ndarray[Any, Any], tuple[Region, ...]]] = field(
        default_factory=dict
    )
    inner_frees: dict[Allocation, _InnerFree] = field(default_factory=dict)
    writes_host: bool = False

    @property
    def nodes(self) -> Iterator[Node]:
        """All nodes, in the order of their calls."""
        for part in self.parts:
            if isinstance(part, list):
                yield from part

    def check_usable(self) -> None:
        """Raise unless all that it touches is still there.

        Raises
        ------
        Closed
            An array was freed, or a lease or pin given back.
        """
        for memory, array in self.arrays.items():
            if memory.is_freed and memory not in self.inner_frees:
                raise Closed(f"the graph uses {array!r}, which {memory.gone}")
        for pinned, regions in self.host_arrays.values():
            try:
                host = HostEnd(self.core, pinned)
                is_there = host.is_direct and host.regions == regions  # not pinned anew
            except ValueError:  # of a lease that was released
                is_there = False
            if not is_there:
                raise Closed(
                    f"the graph copies from or to {pinned.nbytes} bytes of pinned memory that were "
                    "given back"
                )

    @property
    def nbytes(self) -> int:
        """Of the device, that a launch uses."""
        return sum(region.stop - region.start for region in self.on_device)

    @cached_property
    def used(self) -> tuple[list[Region], list[Region], bool]:
        """What a launch reads and writes, and whether it overwrites what it only writes."""
        writes = list(self.writes)
        if all(region in self.needs for region in writes):
            return [region for region in self.needs if region not in self.writes], writes, False
        return list(self.needs), writes, True

    @property
    def has_host_steps(self) -> bool:
        """Whether a launch runs code on the host."""
        return any(isinstance(part, HostStep) for part in self.parts)

    def check_same_shape(self, other: Recorded) -> None:
        """Raise unless ``other`` has the same ops and edges.

        Raises
        ------
        CaptureRefused
            Naming the first that differs.
        """
        places: tuple[dict[Any, int], dict[Any, int]] = ({}, {})
        for mine, new in _pairs(self.parts, other.parts):
            for item, known in zip((mine, new), places, strict=True):
                known[item] = len(known)
            if mine is None or new is None or _form(mine, places[0]) != _form(new, places[1]):
                told = "nothing" if new is None else f"{new.op.name} ({new.op.where})"
                was = "nothing" if mine is None else f"{mine.op.name} ({mine.op.where})"
                raise CaptureRefused(
                    f"an update has the ops of the graph with the same edges: {told} comes where "
                    f"{was} was"
                )


def _pairs(
    mine: Sequence[list[Node] | HostStep], new: Sequence[list[Node] | HostStep]
) -> Iterator[tuple[Node | HostStep | None, Node | HostStep | None]]:
    flat = [
        [item for part in parts for item in (part if isinstance(part, list) else [part])]
        for parts in (mine, new)
    ]
    longest = max(map(len, flat))
    for place in range(longest):
        yield (
            flat[0][place] if place < len(flat[0]) else None,
            flat[1][place] if place < len(flat[1]) else None,
        )


def _form(item: Node | HostStep, places: dict[Any, int]) -> Any:
    if isinstance(item, HostStep):
        return "host", tuple(places.get(op, -1) for op in item.after)
    kernel = item.run.plan.kernel if isinstance(item.run, KernelRun) else None
    return item.kind, kernel, sorted(places[dep] for dep in item.deps)


class TaskRecorder:
    """The recorder of one ``with dev.capture():``."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.recorded = Recorded(core)
        self._books: dict[Region, _Book] = {}
        self._nodes: dict[Ticket, Node | None] = {}  # None: a host step, or of an earlier part
        self._steps: dict[Ticket, HostStep] = {}
        self._lines: dict[Timeline, Node] = {}  # the newest of each explicit stream

    # -- what the runtime calls ----------------------------------------------------------

    def record(
        self,
        op: Op[Any],
        run: Run,
        line: Timeline | PickLine | None,
        reads: Sequence[Region],
        writes: Sequence[Region],
        after: After,
        is_overwrite: bool,
        start: Start | None,
    ) -> None:
        """See :class:`~streamflow.runtime.recording.Recorder`."""
        try:
            if line is None or start is not None:
                self._refuse(op, "it has work for the host in it")
            deps = self._named(op, after)
        except CaptureRefused:
            op._disown()
            raise
        for region in reads:
            for each in (region, *region.overlapping):
                book = self._books.get(each)
                if book is not None and book.last_write is not None:
                    deps[book.last_write] = None
        for region in writes:
            for each in (region, *region.overlapping):
                book = self._books.get(each)
                if book is not None:
                    if book.last_write is not None:
                        deps[book.last_write] = None
                    deps.update(dict.fromkeys(book.reads))
        if isinstance(line, Timeline) and line.is_ordered and line in self._lines:
            deps[self._lines[line]] = None
        if isinstance(run, ForeignCall):
            run = run.repeated()
        node = Node(op, run, tuple(deps))
        if isinstance(run, RepeatedCall):
            self._call(node, run)
        self._touch(op, reads, writes, is_overwrite)
        self.recorded.writes_host |= op.writes_host
        for region in reads:
            self._book(region).reads.append(node)
        for region in writes:
            self._written(region, node)
        if isinstance(line, Timeline) and line.is_ordered:
            self._lines[line] = node
        self._nodes[op.ticket] = node
        parts = self.recorded.parts
        if not parts or not isinstance(parts[-1], list):
            parts.append([])
        part = parts[-1]
        assert isinstance(part, list)
        part.append(node)
        _end(op)

    def record_host(
        self, op: Op[Any], function: Callable[..., Any], args: Sequence[Any], after: After
    ) -> None:
        """See :class:`~streamflow.runtime.recording.Recorder`."""
        try:
            self._named(op, after)
            named = [*after.tickets, *(arg.ticket for arg in args if isinstance(arg, Op))]
            for arg in args:
                if isinstance(arg, Op) and arg.ticket not in self._steps:
                    self._refuse(op, f"{arg.name} has no result in a graph")
        except CaptureRefused:
            op._disown()
            raise
        self.hold(args)
        for arg in args:
            if isinstance(arg, DeviceArray):
                self._need(arg._region)
        before = tuple(self._steps[ticket].op for ticket in named if ticket in self._steps)
        step = HostStep(op, function, tuple(args), before)
        self._steps[op.ticket] = step
        # All that is before it has ended then, and nothing after it has begun.
        self._nodes = dict.fromkeys(self._nodes)
        self._nodes[op.ticket] = None
        self._books.clear()
        self._lines.clear()
        self.recorded.parts.append(step)
        _end(op)

    def hold(self, args: Sequence[Any]) -> None:
        """See :class:`~streamflow.runtime.recording.Recorder`."""
        for arg in args:
            if isinstance(arg, DeviceArray):
                self.recorded.arrays.setdefault(arg._memory, arg)

    def hold_host(self, array: np.ndarray[Any, Any]) -> None:
        """See :class:`~streamflow.runtime.recording.Recorder`."""
        self.recorded.host_arrays[id(array)] = array, HostEnd(self._core, array).regions

    def record_allocation(self, array: DeviceArray) -> None:
        """See :class:`~streamflow.runtime.recording.Recorder`."""
        self.hold((array,))
        self._nodes[array.allocation.ticket] = None  # made already

    def record_free(self, memory: Allocation, frame: FrameType) -> Op[None]:
        """See :class:`~streamflow.runtime.recording.Recorder`."""
        op: Op[None] = Op(self._core, "free", None, frame)
        if memory.op.ticket not in self._nodes:
            op._disown()
            self._refuse(op, "it frees only what was allocated in it, or the next launch lacks it")
        memory.is_freed = True
        self.recorded.inner_frees[memory] = _InnerFree(memory)
        self._nodes[op.ticket] = None
        _end(op)
        return op

    def tickets_of(self, item: Op[Any] | DeviceArray) -> list[Ticket]:
        """See :class:`~streamflow.runtime.recording.Recorder`."""
        if isinstance(item, DeviceArray) and item._core is self._core:
            item.check_usable()
            region = item._region
            self.recorded.needs[region] = None  # each launch comes after what wrote it before
            books = (self._books.get(each) for each in (region, *region.overlapping))
            writes = (book.last_write for book in books if book is not None)
            return [node.op.ticket for node in writes if node is not None]
        if isinstance(item, Op) and item.ticket in self._nodes:
            return [item.ticket]
        what = item.name if isinstance(item, Op) else repr(item)
        raise CaptureRefused(
            f"{here()}: a graph is being captured, and {what} isn't in it: "
            "give it to graph.launch(after=)"
        )

    # -- books -----------------------------------------------------------------------------

    def _named(self, op: Op[Any], after: After) -> dict[Node, None]:
        """The nodes of ``after=``."""
        if after.futures:
            self._refuse(op, "a future in after= would be waited for once, and never again")
        nodes = (self._nodes[ticket] for ticket in after.tickets)
        return {node: None for node in nodes if node is not None}

    def _touch(
        self, op: Op[Any], reads: Sequence[Region], writes: Sequence[Region], is_overwrite: bool
    ) -> None:
        """Note what a launch as a whole reads and writes."""
        recorded = self.recorded
        for region in reads if is_overwrite else (*reads, *writes):
            self._need(region)
        recorded.writes.update(dict.fromkeys(writes))
        if is_overwrite:
            recorded.overwrites.update(dict.fromkeys(writes))
        if op.kind != "put":  # which reads on the host
            recorded.on_device.update(dict.fromkeys(reads))
        if op.kind != "get":
            recorded.on_device.update(dict.fromkeys(writes))

    def _need(self, region: Region) -> None:
        """Note that the contents of ``region`` are used, unless the graph has overwritten it."""
        recorded = self.recorded
        if not any(
            each in recorded.overwrites and _covers(each, region)
            for each in (region, *region.overlapping)
        ):
            recorded.needs[region] = None

    def _book(self, region: Region) -> _Book:
        book = self._books.get(region)
        if book is None:
            book = self._books[region] = _Book()
        return book

    def _written(self, region: Region, node: Node) -> None:
        for each in (region, *region.overlapping):
            if _covers(region, each):
                book = self._book(each)
                book.last_write = node
                book.reads.clear()

    def _call(self, node: Node, call: RepeatedCall) -> None:
        """Have a foreign function submit to a graph of its own, which becomes one node."""
        backend = self._core.backend
        node.child = Handle(self._core, backend.create_graph())
        try:
            backend.add_graph_node(node.child.handle, told(node.op, call), ())
            if call.error is not None:
                raise call.error
        except BaseException:
            node.op._disown()
            raise

    def _refuse(self, op: Op[Any], why: str) -> None:
        raise CaptureRefused(f"{op.name} ({op.where}) can't be captured: {why}")


def _covers(region: Region, other: Region) -> bool:
    return region.start <= other.start and other.stop <= region.stop


def told(op: Op[Any], run: Run) -> Run:
    """``run``, such that a backend that watches knows whose work it is."""
    checker = op._core.backend.checker
    return run if checker is None else partial(submit_as, checker, op, run)


def _end(op: Op[Any]) -> None:
    """A recorded op never runs by itself: who asks for its result is told."""
    op._disown()
    op._rare = None  # what was to follow its end, which never comes
    op._state = OpState.FAILED
    op._error = Captured(*op._told)
    op.ticket.inherited = ()
    op.ticket.failure = op._error
