"""Graphs: each node is a capture of its own, on a private stream, into a graph that is ours.

``cuStreamBeginCaptureToGraph`` starts a capture behind nodes that are there already, so our
edges are the driver's, and no stream that anybody else uses ever captures. Relaxed mode: other
threads, pollers and finalisers may call what they like meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from cuda.bindings import driver

from streamflow.backends.cuda.errors import DriverCallError, check
from streamflow.backends.cuda.streams import StreamTable
from streamflow.backends.memory import MemoryKind, PointerAttributes
from streamflow.errors import Closed, DeviceError, DeviceLost, StreamflowError

__all__ = ["CudaExecutable", "CudaGraph", "CudaNode", "GraphVerbs"]

_RELAXED = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
_lock = threading.Lock()
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

    __slots__ = ("embedded", "handle", "is_broken", "is_closed", "is_lost", "memory")

    def __init__(self, handle: Any) -> None:
        self.handle = handle
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


class CudaExecutable:
    """A ``CUgraphExec``."""

    __slots__ = ("handle", "is_closed", "memory")

    def __init__(self, handle: Any) -> None:
        self.handle = handle
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
        before = self._leaves_of(graph, deps)
        self.set_current()
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
        return CudaNode(graph, leaves)

    def embed_graph(
        self, graph: CudaGraph, child: CudaGraph, deps: Sequence[CudaNode], /
    ) -> CudaNode:
        """``cuGraphAddChildGraphNode``, which copies ``child``."""
        child.check()
        before = self._leaves_of(graph, deps)
        self.set_current()
        added = driver.cuGraphAddChildGraphNode(graph.handle, before, len(before), child.handle)
        node = CudaNode(graph, [check(added, "cuGraphAddChildGraphNode")])
        graph.embedded += _held(child)
        return node

    def instantiate_graph_blocking(self, graph: CudaGraph, /) -> CudaExecutable:
        """``cuGraphInstantiate``."""
        graph.check()
        self.set_current()
        call = "cuGraphInstantiate"
        executable = CudaExecutable(check(driver.cuGraphInstantiate(graph.handle, 0), call))
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
            check(driver.cuCtxSynchronize(), "cuCtxSynchronize")  # launches may still use it
        held, executable.memory = executable.memory, []
        executable.hold(graph)
        _release(held)

    def launch_graph(self, executable: CudaExecutable, stream: Any, /) -> None:
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

    def close_graph(self, graph_or_executable: Any, /) -> None:
        """``cuGraphDestroy`` or ``cuGraphExecDestroy``."""
        found = graph_or_executable
        if found.is_closed:
            return
        found.is_closed = True
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

    def _leaves_of(self, graph: CudaGraph, deps: Sequence[CudaNode]) -> Sequence[Any]:
        """What a new node of ``graph`` depends on, as the driver has it."""
        graph.check()
        if any(dep.graph is not graph for dep in deps):
            raise ValueError("a node depends on nodes of its own graph only")
        if len(deps) == 1:
            return deps[0].leaves
        # Each but once: the driver takes no edge twice.
        return list({int(leaf): leaf for dep in deps for leaf in dep.leaves}.values())

    def _capture(
        self, graph: CudaGraph, run: Callable[[Any], object], before: Sequence[Any], stream: Any
    ) -> Sequence[Any]:
        """What the driver's next node after those of ``run`` would depend on."""
        handle = self._streams[stream]
        begun = driver.cuStreamBeginCaptureToGraph(
            handle, graph.handle, before or None, None, len(before), _RELAXED
        )
        check(begun, "cuStreamBeginCaptureToGraph")
        graph.is_broken = True  # until all of it has gone well
        self._noting[stream] = graph
        try:
            run(stream)
            found = driver.cuStreamGetCaptureInfo(handle)
        finally:
            del self._noting[stream]
            ended = driver.cuStreamEndCapture(handle)[0]
            graph.is_lost = bool(ended)
        if ended:
            error = DriverCallError(ended, "cuStreamEndCapture")
            if not error.code.startswith("CUDA_ERROR_STREAM_CAPTURE"):
                raise error
            raise DeviceError(
                f"a node's run did what can't be part of a graph, such as waiting: {error}"
            )
        if found[0]:
            raise DriverCallError(found[0], "cuStreamGetCaptureInfo")
        graph.is_broken = False
        leaves: Sequence[Any] = found[4]
        return leaves


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
