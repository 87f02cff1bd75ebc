"""A trace's task graph for Mermaid."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from streamflow.trace.looks import (
    COLOURS,
    FAILED_COLOUR,
    group_by_stream,
    label_lines,
    look_of,
    printable,
)
from streamflow.trace.model import EdgeReason, TracedEdge
from streamflow.trace.trace import Trace

__all__ = ["to_mermaid"]

_NUM_EDGES_SHOWN_MAX = 500
# All but word characters and marks that mean nothing anywhere; the outer `_` of a word and
# what could begin a list, which Mermaid's Markdown pass would read.
_SPECIAL = re.compile(r"[^\w ,./()-]|(?<![^\W_])_|_(?![^\W_])|^[^\w]|^\d(?=\d*[.)] )")


def to_mermaid(trace: Trace) -> str:
    """The graph as a Mermaid flowchart: one subgraph per stream, edges labelled with their reason.

    A thick edge is a wait that was issued on the device, a plain one was already implied, a
    dotted one is the order of one stream.

    Parameters
    ----------
    trace : Trace
        Names in it may hold any text.

    Returns
    -------
    str
        A whole ``flowchart``.

    Source
    ------
    The limit on edges: ``maxEdges`` in Mermaid's configuration schema, 500 by default; a
    diagram's own text cannot raise it.
    """
    return "".join(f"{line}\n" for line in _lines(trace))


def _lines(trace: Trace) -> Iterator[str]:
    edges = trace.edges
    yield "flowchart LR"
    if len(edges) > _NUM_EDGES_SHOWN_MAX:
        yield (
            f"  %% {len(edges)} edges. Viewers stop at {_NUM_EDGES_SHOWN_MAX} "
            "unless maxEdges and maxTextSize are raised in their configuration."
        )
    for index, (title, ops) in enumerate(group_by_stream(trace.ops).items()):
        yield f"  subgraph s{index}[{_quote([title])}]"
        for op in ops:
            yield f"    op{op.id}[{_quote(label_lines(op))}]:::{look_of(op)}"
        yield "  end"
    for edge in edges:
        yield f"  {_edge(edge)}"
    for look, colour in COLOURS.items():
        yield f"  classDef {look} fill:{colour},stroke:#555555,color:#000000"
    yield f"  classDef failed stroke:{FAILED_COLOUR},stroke-width:4px"
    failed = [f"op{op.id}" for op in trace.ops if op.state == "failed"]
    if failed:
        yield f"  class {','.join(failed)} failed"


def _edge(edge: TracedEdge) -> str:
    if edge.reason is EdgeReason.STREAM_ORDER:
        arrow = "-.->"
    else:
        arrow = "==>" if edge.issued else "-->"
    return f"op{edge.src} {arrow}|{edge.reason.value}| op{edge.dst}"


def _quote(lines: Iterable[str]) -> str:
    """A Mermaid string of these lines.

    Every mark that the grammar, its pre-processing or HTML might read is written as a
    character code.
    """
    return '"' + "<br/>".join(_SPECIAL.sub(_code, printable(line)) for line in lines) + '"'


def _code(match: re.Match[str]) -> str:
    return f"#{ord(match[0])};"
