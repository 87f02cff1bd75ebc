"""What a launch of a ``CUgraph`` takes of a stream's queue, by what the driver made of it."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver

from streamflow.backends.cuda.errors import check
from streamflow.backends.graph_places import count_places

__all__ = ["places_of"]

_Type = driver.CUgraphNodeType
_KERNEL = _Type.CU_GRAPH_NODE_TYPE_KERNEL
_EMPTY = _Type.CU_GRAPH_NODE_TYPE_EMPTY
_CHILD = _Type.CU_GRAPH_NODE_TYPE_GRAPH
_LOSSY = driver.CUresult.CUDA_ERROR_LOSSY_QUERY


def places_of(graph: Any) -> int:
    """At most how many; one call for each node, and another for each graph that is a node."""
    call = "cuGraphGetNodes"
    found = driver.cuGraphGetNodes(graph)
    check(found[:1], call)
    if not found[2]:
        return 0
    found = driver.cuGraphGetNodes(graph, found[2])
    check(found[:1], call)
    nodes = found[1]
    own = [_own_places(node) for node in nodes]
    if None not in own:
        return sum(places for places in own if places is not None)
    at = {int(node): index for index, node in enumerate(nodes)}
    return count_places(own, [(at[earlier], at[later]) for earlier, later in _edges(graph)])


def _own_places(node: Any) -> int | None:
    """What a node takes by itself, whatever is around it; None for a kernel."""
    kind = check(driver.cuGraphNodeGetType(node), "cuGraphNodeGetType")
    if kind == _KERNEL:
        return None
    if kind == _EMPTY:
        return 0
    if kind == _CHILD:
        call = "cuGraphChildGraphNodeGetGraph"
        return places_of(check(driver.cuGraphChildGraphNodeGetGraph(node), call))
    return 1


def _edges(graph: Any) -> list[tuple[int, int]]:
    """The edges by handles; those with data of their own are there twice: they end a run."""
    call = "cuGraphGetEdges"
    found = driver.cuGraphGetEdges(graph)
    if found[0] == _LOSSY:  # there is data, and it can't be counted without: no run is known
        return []
    check(found[:1], call)
    if not found[4]:
        return []
    _, earlier, later, data, _ = found = driver.cuGraphGetEdges(graph, found[4])
    check(found[:1], call)
    edges = []
    for before, after, about in zip(earlier, later, data, strict=True):
        edge = int(before), int(after)
        edges.append(edge)
        if about.type or about.from_port or about.to_port:
            edges.append(edge)
    return edges
