"""What is asked of the driver to know how much of a queue a graph takes, and what comes of it."""

# ruff: noqa: N802 - the driver's own names

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import pytest

pytest.importorskip("cuda.core", reason="no cuda.core on this platform")

from cuda.bindings import driver as real

from streamflow.backends.cuda import graph_places
from streamflow.backends.cuda.errors import DriverCallError
from streamflow.backends.cuda.graph_places import places_of

OK = real.CUresult.CUDA_SUCCESS
FAULT = real.CUresult.CUDA_ERROR_LAUNCH_FAILED
_TYPES = {
    "kernel": real.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL,
    "copy": real.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMCPY,
    "fill": real.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET,
    "host": real.CUgraphNodeType.CU_GRAPH_NODE_TYPE_HOST,
    "graph": real.CUgraphNodeType.CU_GRAPH_NODE_TYPE_GRAPH,
    "empty": real.CUgraphNodeType.CU_GRAPH_NODE_TYPE_EMPTY,
    "allocate": real.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEM_ALLOC,
    "free": real.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEM_FREE,
}


class Data(NamedTuple):
    """As CUgraphEdgeData."""

    from_port: int = 0
    to_port: int = 0
    type: int = 0


class Graph:
    """A graph of the driver's: a node is a number that no other graph has."""

    def __init__(self, first: int = 100) -> None:
        self.first = first
        self.kinds: list[str] = []
        self.edges: list[tuple[int, int, Data]] = []
        self.children: dict[int, Graph] = {}

    def add(self, kind: str, *deps: int, data: Data | None = None) -> int:
        node = self.first + len(self.kinds)
        self.kinds.append(kind)
        self.edges += [(dep, node, data or Data()) for dep in deps]
        return node

    def embed(self, child: Graph, *deps: int) -> int:
        node = self.add("graph", *deps)
        self.children[node] = child
        return node

    def run(self, kind: str, num: int, *deps: int) -> int:
        for _ in range(num):
            deps = (self.add(kind, *deps),)
        return deps[0]


class Driver:
    """The calls that ask; as in the bindings, lists are empty where no number is given."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.graphs: list[Graph] = []
        self.errors: dict[str, Any] = {}

    def _call(self, name: str) -> Any:
        self.calls[name] += 1
        return self.errors.get(name, OK)

    def cuGraphGetNodes(self, graph: Graph, num: int = 0) -> Any:
        if graph not in self.graphs:
            self.graphs.append(graph)
        nodes = [real.CUgraphNode(graph.first + at) for at in range(num)]
        return self._call("cuGraphGetNodes"), nodes, len(graph.kinds)

    def _owner(self, node: Any) -> Graph:
        return next(
            graph for graph in self.graphs if 0 <= int(node) - graph.first < len(graph.kinds)
        )

    def cuGraphNodeGetType(self, node: Any) -> Any:
        graph = self._owner(node)
        return self._call("cuGraphNodeGetType"), _TYPES[graph.kinds[int(node) - graph.first]]

    def cuGraphChildGraphNodeGetGraph(self, node: Any) -> Any:
        child = self._owner(node).children[int(node)]
        return self._call("cuGraphChildGraphNodeGetGraph"), child

    def cuGraphGetEdges(self, graph: Graph, num: int = 0) -> Any:
        earlier, later, data = [], [], []
        for before, after, about in graph.edges[:num]:
            earlier.append(real.CUgraphNode(before))
            later.append(real.CUgraphNode(after))
            data.append(about)
        return self._call("cuGraphGetEdges"), earlier, later, data, len(graph.edges)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()
    monkeypatch.setattr(graph_places, "driver", fake)
    return fake


@pytest.mark.parametrize(
    ("kind", "num", "expected"),
    [
        ("kernel", 1, 1),
        ("kernel", 1000, 1),
        ("fill", 1, 1),
        ("fill", 50, 50),
        ("copy", 3, 3),
        ("host", 2, 2),
        ("allocate", 2, 2),
        ("free", 2, 2),
        ("empty", 5, 0),
    ],
)
def test_a_chain_of_one_kind(driver: Driver, kind: str, num: int, expected: int) -> None:
    graph = Graph()
    graph.run(kind, num)
    assert places_of(graph) == expected


def test_no_node_takes_no_place(driver: Driver) -> None:
    assert places_of(Graph()) == 0
    assert driver.calls == {"cuGraphGetNodes": 1}


@pytest.mark.parametrize(("num", "measured"), [(5, 2), (50, 7), (200, 26)])
def test_kernels_side_by_side_are_never_counted_as_less_than_was_measured(
    driver: Driver, num: int, measured: int
) -> None:
    graph = Graph()
    root = graph.add("fill")
    for _ in range(num - 1):
        graph.add("kernel", root)
    assert places_of(graph) == num >= measured


def test_a_run_ends_where_ways_part_or_meet(driver: Driver) -> None:
    graph = Graph()
    root = graph.run("kernel", 20)
    assert places_of(graph) == 1
    sides = [graph.run("kernel", 10, root) for _ in range(3)]
    assert places_of(graph) == 4
    graph.run("kernel", 10, graph.add("kernel", *sides))
    assert places_of(graph) == 5


@pytest.mark.parametrize("between", ["fill", "copy", "host", "empty"])
def test_a_run_ends_at_what_is_no_kernel(driver: Driver, between: str) -> None:
    graph = Graph()
    graph.run("kernel", 5, graph.add(between, graph.run("kernel", 5)))
    assert places_of(graph) == (2 if between == "empty" else 3)


@pytest.mark.parametrize("data", [Data(type=1), Data(from_port=1), Data(to_port=1)])
def test_a_run_ends_at_an_edge_of_another_kind(driver: Driver, data: Data) -> None:
    graph = Graph()
    graph.add("kernel", graph.run("kernel", 5), data=data)
    assert places_of(graph) == 2
    driver.errors["cuGraphGetEdges"] = real.CUresult.CUDA_ERROR_LOSSY_QUERY
    assert places_of(graph) == 6  # nothing is known of its edges


def test_a_graph_that_is_a_node_counts_by_what_is_in_it(driver: Driver) -> None:
    inner = Graph(first=1000)
    inner.run("kernel", 5, inner.add("fill"))
    child = Graph(first=500)
    child.run("fill", 3, child.embed(inner))
    graph = Graph()
    graph.run("kernel", 5, graph.embed(child, graph.run("kernel", 5)))
    assert places_of(graph) == 1 + (2 + 3) + 1


def test_one_call_for_each_node_and_four_for_each_graph(driver: Driver) -> None:
    graph = Graph()
    graph.run("kernel", 1000)
    places_of(graph)
    assert driver.calls == {
        "cuGraphGetNodes": 2,
        "cuGraphNodeGetType": 1000,
        "cuGraphGetEdges": 2,
    }


def test_no_edge_is_asked_for_where_no_kernel_is(driver: Driver) -> None:
    graph = Graph()
    graph.run("fill", 10)
    places_of(graph)
    assert driver.calls["cuGraphGetEdges"] == 0


@pytest.mark.parametrize(
    "call",
    [
        "cuGraphGetNodes",
        "cuGraphNodeGetType",
        "cuGraphGetEdges",
        "cuGraphChildGraphNodeGetGraph",
    ],
)
def test_what_the_driver_refuses_is_raised(driver: Driver, call: str) -> None:
    child = Graph(first=500)
    child.add("fill")
    graph = Graph()
    graph.run("kernel", 2, graph.embed(child))
    driver.errors[call] = FAULT
    with pytest.raises(DriverCallError, match=call):
        places_of(graph)
