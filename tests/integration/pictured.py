"""What each picture of a trace says, read back with tools that know the formats."""

from __future__ import annotations

import re
import warnings
from xml.etree import ElementTree as ET

import pytest

from streamflow.trace import Trace, TracedOp
from streamflow.trace.dot import to_dot
from streamflow.trace.mermaid import to_mermaid
from streamflow.trace.svg import to_svg

SVG = "{http://www.w3.org/2000/svg}"
Edges = list[tuple[int, int, str]]


def lane(op: TracedOp) -> tuple[int, int, str]:
    return op.process, op.device, op.stream


def all_edges(trace: Trace) -> Edges:
    return sorted((edge.src, edge.dst, edge.reason.value) for edge in trace.edges)


def crossing(trace: Trace) -> Edges:
    """The edges between streams."""
    ops = {op.id: op for op in trace.ops}
    return [each for each in all_edges(trace) if lane(ops[each[0]]) != lane(ops[each[1]])]


def dot_graph(trace: Trace, **options: int) -> tuple[set[str], list[tuple[str, str, str]]]:
    """Nodes, and edges with their labels, as pydot reads them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it calls pyparsing by old names
        pydot = pytest.importorskip("pydot", reason="needs the extra test")
        (graph,) = pydot.graph_from_dot_data(to_dot(trace, **options))
    parts = [graph, *graph.get_subgraphs()]
    nodes = {node.get_name() for part in parts for node in part.get_nodes()}
    edges = [
        (edge.get_source(), edge.get_destination(), edge.get_label().strip('"'))
        for part in parts
        for edge in part.get_edges()
    ]
    return nodes - {"node", "edge", "graph", r'"\n"'}, edges


def dot_edges(trace: Trace) -> Edges:
    nodes, edges = dot_graph(trace)
    assert nodes == {f"op{op.id}" for op in trace.ops}
    return sorted((int(src[2:]), int(dst[2:]), reason) for src, dst, reason in edges)


def mermaid_edges(trace: Trace) -> Edges:
    found = re.findall(r"^  op(\d+) \S+\|(.*)\| op(\d+)$", to_mermaid(trace), re.MULTILINE)
    return sorted((int(src), int(dst), reason) for src, reason, dst in found)


def svg_edges(trace: Trace) -> Edges:
    root = ET.fromstring(to_svg(trace))
    found = [path.attrib["data-edge"].split() for path in root.iter(f"{SVG}path")
             if "data-edge" in path.attrib]  # fmt: skip
    return sorted((int(src), int(dst), reason) for src, dst, reason in found)
