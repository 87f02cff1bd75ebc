"""A trace's task graph for Graphviz."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from streamflow.trace.looks import (
    FAILED_COLOUR,
    colour_of,
    group_by_stream,
    label_lines,
    printable,
)
from streamflow.trace.model import EdgeReason, TracedEdge, TracedOp
from streamflow.trace.trace import Trace

__all__ = ["to_dot"]


def to_dot(trace: Trace) -> str:
    """The graph in the DOT language: one cluster per stream, edges labelled with their reason.

    A solid edge is a wait that was issued on the device, a dashed one was already implied, a
    dotted grey one is the order of one stream.

    Parameters
    ----------
    trace : Trace
        Names in it may hold any text.

    Returns
    -------
    str
        A whole ``digraph``.
    """
    return "".join(f"{line}\n" for line in _lines(trace))


def _lines(trace: Trace) -> Iterator[str]:
    yield "digraph streamflow {"
    yield "  rankdir=LR;"
    yield '  node [shape=box, style="rounded,filled", fontname="sans-serif", color="#555555"];'
    yield '  edge [fontname="sans-serif", fontsize=9];'
    for index, (title, ops) in enumerate(group_by_stream(trace.ops).items()):
        yield f"  subgraph cluster_{index} {{"
        yield f"    label={_quote([title])};"
        yield '    style=rounded; color="#999999"; fontname="sans-serif";'
        for op in ops:
            yield f"    {_node(op)}"
        yield "  }"
    for edge in trace.edges:
        yield f"  {_edge(edge)}"
    yield "}"


def _node(op: TracedOp) -> str:
    tooltip = [op.kind, op.state, *([op.where] if op.where else [])]
    attributes = [
        f"label={_quote(label_lines(op))}",
        f'fillcolor="{colour_of(op)}"',
        f"tooltip={_quote(tooltip)}",
    ]
    if op.state == "failed":
        attributes.append(f'color="{FAILED_COLOUR}", penwidth=3')
    return f"op{op.id} [{', '.join(attributes)}];"


def _edge(edge: TracedEdge) -> str:
    if edge.reason is EdgeReason.STREAM_ORDER:
        look = 'style=dotted, color="#888888", fontcolor="#888888"'
    elif edge.issued:
        look = 'style=solid, color="#000000"'
    else:
        look = 'style=dashed, color="#444444"'
    return f'op{edge.src} -> op{edge.dst} [label="{edge.reason.value}", {look}];'


def _quote(lines: Iterable[str]) -> str:
    """A DOT string of these lines.

    Even inside quotes a label's backslash starts an escape and ``&`` an HTML entity, so both
    are escaped along with the quote itself.
    """
    escaped = (
        printable(line).replace("&", "&amp;").replace("\\", "\\\\").replace('"', '\\"')
        for line in lines
    )
    return '"' + "\\n".join(escaped) + '"'
