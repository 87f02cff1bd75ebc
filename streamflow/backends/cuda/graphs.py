"""Graphs: each node is a capture of its own, on a private stream, into a graph that is ours.

``cuStreamBeginCaptureToGraph`` starts a capture behind nodes that are there already, so our
edges are the driver's, and no stream that anybody else uses ever captures. Relaxed mode: other
threads, pollers and finalisers may call what they like meanwhile, but for one thing. Waiting for
the whole device ends every capture on it, whatever the mode. Our own waits for the moment
between two captures; after somebody else's, the graph is made once more from the start.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from cuda.bindings import driver

from streamflow.backends.cuda.errors import DriverCallError, check, code_name
from streamflow.backends.cuda.graph_places import places_of
from streamflow.backends.cuda.streams import StreamTable
from streamflow.backends.memory import MemoryKind, PointerAttributes
from streamflow.errors import Closed, DeviceError, DeviceLost, StreamflowError

__all__ = ["CudaExecutable", "CudaGraph", "CudaNode", "GraphVerbs"]

_RELAXED = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
_lock = threading.Lock()
_captures: dict[int, AbstractContextManager[Any]] = {}
_INVALID = "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
_NUM_TRIES = 5
_CHANGED = driver.CUresult.CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE


class _Memory:
    """Device memory that a graph's nodes work with, until the last that does the same is closed."""

    __slots__ = ("addresses", "num_holders")

    def __init__(self) -> None:
        self.addresses: list[int] = []
        self.num_holders = 1


class CudaGraph:
    """A ``CUgraph``.

    Attributes
    ----------
    is_broken : bool
        A capture into it has failed: it can only be closed.
    is_lost : bool
        The driver called the capture invalid. It may have destroyed the graph, then or at the
        end of the capture (not documented), so we never do.
    """

    __slots__ = ("embedded", "handle", "is_broken", "is_closed", "is_lost", "memory", "steps")

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.steps: list[_Step] = []
        self.is_broken = False
        self.is_lost = False
        self.is_closed = False
        self.memory = _Memory()
        self.embedded: list[_Memory] = []  # of the graphs that are nodes of this one

    def check(self) -> None:
        """Raise if nothing can be done with it any more."""
        if self.is_closed:
            raise Closed("the graph is closed")
        if self.is_broken:
            raise DeviceError("the graph holds half a node: it can only be closed")


class CudaNode:
    """All that one ``run`` submitted; ``leaves`` are the driver's nodes that end last."""

    __slots__ = ("graph", "leaves")

    def __init__(self, graph: CudaGraph, leaves: Sequence[Any]) -> None:
        self.graph = graph
        self.leaves = leaves


class _Step(NamedTuple):
    """How a node was made: by a ``run``, or as a copy of a graph."""

    node: CudaNode
    run: Callable[[Any], object] | CudaGraph
    deps: tuple[CudaNode, ...]


class _Disturbed(Exception):
    """The capture was ended from outside, or by what its ``run`` did unseen."""


class CudaExecutable:
    """A ``CUgraphExec``."""

    __slots__ = ("handle", "is_closed", "memory", "num_places")

    def __init__(self, handle: Any, num_places: int) -> None:
        self.handle = handle
        self.num_places = num_places  # an update changes neither nodes nor edges
        self.is_closed = False
        self.memory: list[_Memory] = []

    def check(self) -> None:
        """Raise if it can't be launched any more."""
        if self.is_closed:
            raise Closed("the executable is closed")

    def hold(self, graph: CudaGraph) -> None:
        """Keep the memory of a graph that it was made of or updated by."""
        self.memory += _held(graph)


class GraphVerbs:
    """Verbs of :class:`streamflow.backends.base.Backend`.

    Attributes
    ----------
    _noting : dict
        By stream, the graph that what is submitted there goes to. Empty nearly always.
    _idle_streams : list of Stream
        For captures.
    """

    index: int
    _streams: StreamTable
    _num_devices: int
    _is_lost: bool
    _noting: dict[Any, CudaGraph]
    _idle_streams: list[Any]

    def set_current(self) -> None:
        raise NotImplementedError

    def create_stream(self, *, priority: int = 0) -> Any:
        raise NotImplementedError

    def pointer_attributes(self, address: int, /) -> PointerAttributes:
        raise NotImplementedError

    def translate(self, error: BaseException, doing: str) -> StreamflowError:
        raise NotImplementedError

    def create_graph(self) -> CudaGraph:
        """``cuGraphCreate``."""
        self.set_current()
        return CudaGraph(check(driver.cuGraphCreate(0), "cuGraphCreate"))

    def add_graph_node(
        self, graph: CudaGraph, run: Callable[[Any], object], deps: Sequence[CudaNode], /
    ) -> CudaNode:
        """One capture, from the leaves of ``deps`` on."""
        return self._append(graph, run, deps)

    def embed_graph(
        self, graph: CudaGraph, child: CudaGraph, deps: Sequence[CudaNode], /
    ) -> CudaNode:
        """``cuGraphAddChildGraphNode``, which copies ``child``."""
        child.check()
        node = self._append(graph, child, deps)
        graph.embedded += _held(child)
        return node

    def instantiate_graph_blocking(self, graph: CudaGraph, /) -> CudaExecutable:
        """``cuGraphInstantiate``."""
        graph.check()
        self.set_current()
        num_places = max(1, places_of(graph.handle))
        call = "cuGraphInstantiate"
        made = check(driver.cuGraphInstantiate(graph.handle, 0), call)
        executable = CudaExecutable(made, num_places)
        executable.hold(graph)
        return executable

    def update_graph_blocking(self, executable: CudaExecutable, graph: CudaGraph, /) -> None:
        """``cuGraphExecUpdate``."""
        executable.check()
        graph.check()
        self.set_current()
        error, info = driver.cuGraphExecUpdate(executable.handle, graph.handle)
        if error == _CHANGED:
            said = str(getattr(getattr(info, "result", None), "name", ""))
            reason = said.removeprefix("CU_GRAPH_EXEC_UPDATE_ERROR_").replace("_", " ").lower()
            raise DeviceError(
                f"the executable can't be updated with this graph ({reason or 'it differs'}): "
                "instantiate it"
            )
        if error:
            raise DriverCallError(error, "cuGraphExecUpdate")
        if executable.memory:
            with capturing(self.index):  # launches may still use it
                check(driver.cuCtxSynchronize(), "cuCtxSynchronize")
        held, executable.memory = executable.memory, []
        executable.hold(graph)
        _release(held)

    def launch_graph(self, executable: CudaExecutable, stream: Any, /) -> int:
        """``cuGraphLaunch``."""
        if executable.is_closed:
            executable.check()
        if self._noting:
            self._refuse_node(stream, "a launch of another graph")
        if self._num_devices > 1:
            self.set_current()
        (error,) = driver.cuGraphLaunch(executable.handle, self._streams[stream])
        if error:
            raise DriverCallError(error, "cuGraphLaunch")
        return executable.num_places

    def close_graph(self, graph_or_executable: Any, /) -> None:
        """``cuGraphDestroy`` or ``cuGraphExecDestroy``."""
        found = graph_or_executable
        if found.is_closed:
            return
        found.is_closed = True
        if isinstance(found, CudaGraph):
            found.steps = []
        if self._is_lost:  # every call would fail; the driver reclaims all with the process
            return
        try:
            self.set_current()
            if isinstance(found, CudaExecutable):
                check(driver.cuGraphExecDestroy(found.handle), "cuGraphExecDestroy")
                held = found.memory
            else:
                if not found.is_lost:
                    check(driver.cuGraphDestroy(found.handle), "cuGraphDestroy")
                held = [found.memory, *found.embedded]
            _release(held)
        except DriverCallError as error:
            # A fault that shows only now is not ours to report: the ops report it.
            if not isinstance(self.translate(error, "closing a graph"), DeviceLost):
                raise

    def _graph_memory(self, stream: Any, nbytes: int) -> int | None:
        """Memory for each launch of the node that is noted on ``stream``; None if none is."""
        graph = self._noting.get(stream)
        if graph is None:
            return None
        address = int(check(driver.cuMemAlloc(nbytes), "cuMemAlloc"))
        graph.memory.addresses.append(address)
        return address

    def _refuse_node(self, stream: Any, what: str) -> None:
        """Raise if a graph's node is being noted on ``stream``."""
        if stream in self._noting:
            raise DeviceError(
                f"{what} can't be part of a graph: a node launches, copies, fills and calls"
            )

    def _refuse_pageable(self, stream: Any, *addresses: int) -> None:
        """Raise if a node is noted on ``stream`` that would copy from or to pageable memory.

        What the driver makes of such a copy in a capture is not documented.
        """
        if stream in self._noting and any(
            self.pointer_attributes(address).kind is MemoryKind.UNREGISTERED
            for address in addresses
        ):
            raise DeviceError("a copy from or to pageable memory can't be part of a graph")

    def _append(
        self,
        graph: CudaGraph,
        run: Callable[[Any], object] | CudaGraph,
        deps: Sequence[CudaNode],
    ) -> CudaNode:
        graph.check()
        if any(dep.graph is not graph for dep in deps):
            raise ValueError("a node depends on nodes of its own graph only")
        self.set_current()
        step = _Step(CudaNode(graph, ()), run, tuple(deps))
        steps = [step]
        for num_tries in range(1, _NUM_TRIES + 1):
            try:
                for each in steps:
                    self._make(graph, each)
                break
            except _Disturbed as error:
                if num_tries == _NUM_TRIES:
                    raise DeviceError(
                        "a node's run did what can't be part of a graph, such as waiting, or "
                        "another thread keeps waiting for the whole device"
                    ) from error
            graph.handle = check(driver.cuGraphCreate(0), "cuGraphCreate")
            graph.is_broken = graph.is_lost = False
            steps = [*graph.steps, step]
        graph.steps.append(step)
        return step.node

    def _make(self, graph: CudaGraph, step: _Step) -> None:
        """Have the driver make a node."""
        node, run, deps = step
        if len(deps) == 1:
            before = deps[0].leaves
        else:  # each but once: the driver takes no edge twice
            before = list({int(leaf): leaf for dep in deps for leaf in dep.leaves}.values())
        if isinstance(run, CudaGraph):
            call = "cuGraphAddChildGraphNode"
            run.check()  # it may have been closed before this graph had to be made again
            added = driver.cuGraphAddChildGraphNode(graph.handle, before, len(before), run.handle)
            node.leaves = [check(added, call)]
            return
        try:
            stream = self._idle_streams.pop()
        except IndexError:
            stream = self.create_stream()
        try:
            leaves = self._capture(graph, run, before, stream)
        finally:
            self._idle_streams.append(stream)
        if not leaves or _same(leaves, before):  # it submitted nothing
            call = "cuGraphAddEmptyNode"
            added = driver.cuGraphAddEmptyNode(graph.handle, before, len(before))
            leaves = [check(added, call)]
        node.leaves = leaves

    def _capture(
        self, graph: CudaGraph, run: Callable[[Any], object], before: Sequence[Any], stream: Any
    ) -> Sequence[Any]:
        """What the driver's next node after those of ``run`` would depend on."""
        handle = self._streams[stream]
        error: BaseException | None = None
        found: Any = None
        with capturing(self.index):
            begun = driver.cuStreamBeginCaptureToGraph(
                handle, graph.handle, before or None, None, len(before), _RELAXED
            )
            check(begun, "cuStreamBeginCaptureToGraph")
            graph.is_broken = True  # until all of it has gone well
            self._noting[stream] = graph
            try:
                run(stream)
                found = driver.cuStreamGetCaptureInfo(handle)
            except BaseException as raised:
                error = raised
            finally:
                del self._noting[stream]
                ended = driver.cuStreamEndCapture(handle)[0]
                graph.is_lost = bool(ended)
        if error is not None:
            if ended and code_name(error) == _INVALID:
                raise _Disturbed from error
            raise error
        if ended:
            failure = DriverCallError(ended, "cuStreamEndCapture")
            if failure.code == _INVALID:
                raise _Disturbed from failure
            if failure.code.startswith("CUDA_ERROR_STREAM_CAPTURE"):
                raise DeviceError(f"a node's run can't be part of a graph: {failure}")
            raise failure
        if found[0]:
            raise DriverCallError(found[0], "cuStreamGetCaptureInfo")
        graph.is_broken = False
        leaves: Sequence[Any] = found[4]
        return leaves


def capturing(index: int) -> AbstractContextManager[Any]:
    """To be held by who captures on a device, and by who waits for all of it."""
    lock = _captures.get(index)
    if lock is None:
        lock = _captures.setdefault(index, threading.RLock())
    return lock


def _held(graph: CudaGraph) -> list[_Memory]:
    """What ``graph`` works with, for one holder more."""
    held = [memory for memory in (graph.memory, *graph.embedded) if memory.addresses]
    with _lock:
        for memory in held:
            memory.num_holders += 1
    return held


def _release(held: Sequence[_Memory]) -> None:
    """Free what nobody else works with."""
    for memory in held:
        with _lock:
            memory.num_holders -= 1
            unused = [] if memory.num_holders else memory.addresses
        while unused:
            check(driver.cuMemFree(unused.pop()), "cuMemFree")


def _same(leaves: Sequence[Any], before: Sequence[Any]) -> bool:
    return len(leaves) == len(before) and set(map(int, leaves)) == set(map(int, before))
