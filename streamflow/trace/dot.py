"""A trace's task graph for Graphviz."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from streamflow.trace.groups import Group, synopsis
from streamflow.trace.looks import (
    FAILED_COLOUR,
    EdgeLook,
    colour_of,
    edge_look,
    edge_told,
    group_by_stream,
    group_lines,
    label_lines,
    op_told,
    printable,
)
from streamflow.trace.model import Contents, TracedArray, TracedOp
from streamflow.trace.trace import Trace

__all__ = ["to_dot"]


_LOOKS = {
    EdgeLook.WAIT: 'style=solid, color="#000000"',
    EdgeLook.IMPLIED: 'style=dashed, color="#444444"',
    EdgeLook.ORDER: 'style=dotted, color="#888888", fontcolor="#888888"',
    EdgeLook.HOST: 'style=dashed, color="#0072b2", fontcolor="#0072b2", arrowhead=vee',
    # No order of the program's: it must not move the ops about.
    EdgeLook.CAPACITY: 'style=dotted, color="#cc79a7", fontcolor="#cc79a7", arrowhead=dot, '
    "constraint=false",
}


def to_dot(trace: Trace, *, max_ops: int = 5000) -> str:
    """The graph in the DOT language: one cluster per stream, edges labelled with their reason.

    A solid edge is a wait that was issued on the device, a dashed one was already implied, a
    dotted grey one is the order of one stream. A blue one is the host's, a dotted pink one
    that ends in a dot says who made room for whom.

    Parameters
    ----------
    trace : Trace
        Names in it may hold any text.
    max_ops : int
        Of more ops than this the synopsis is drawn.

    Returns
    -------
    str
        A whole ``digraph``.
    """
    contents = trace._read()
    lines = _ops(contents) if len(contents.ops) <= max_ops else _groups(trace, max_ops)
    return "".join(f"{line}\n" for line in _digraph(lines))


def _digraph(lines: Iterable[str]) -> Iterator[str]:
    yield "digraph streamflow {"
    yield "  rankdir=LR;"
    yield '  node [shape=box, style="rounded,filled", fontname="sans-serif", color="#555555"];'
    yield '  edge [fontname="sans-serif", fontsize=9];'
    yield from lines
    yield "}"


def _ops(contents: Contents) -> Iterator[str]:
    arrays = {each.id: each for each in contents.arrays}
    streams = group_by_stream(contents.ops)
    yield from _clusters({title: [_op(op, arrays) for op in ops] for title, ops in streams.items()})
    for edge in contents.edges:
        tooltip = [edge_told(edge, arrays)]
        yield (
            f'  op{edge.src} -> op{edge.dst} [label="{edge.reason.value}", '
            f"{_LOOKS[edge_look(edge)]}, edgetooltip={_quote(tooltip)}];"
        )


def _groups(trace: Trace, max_ops: int) -> Iterator[str]:
    found = synopsis(trace)
    yield f"  // {found.told(max_ops)}"
    # Without a cluster for each stream: dense graphs with clusters take Graphviz minutes.
    for title, groups in group_by_stream(found.groups).items():
        for group in groups:
            yield f"  {_group(group, title)}"
    for src, dst, edges in found.arrows():
        told = [f"{edge.num} {edge.reason.value}" for edge in edges]
        label = told if len(told) <= 2 else [*told[:2], ".."]
        yield (
            f"  g{src} -> g{dst} [label={_quote(label)}, {_LOOKS[edge_look(edges[0])]}, "
            f"edgetooltip={_quote(told)}];"
        )


def _clusters(streams: Mapping[str, Iterable[str]]) -> Iterator[str]:
    for index, (title, nodes) in enumerate(streams.items()):
        yield f"  subgraph cluster_{index} {{"
        yield f"    label={_quote([title])};"
        yield '    style=rounded; color="#999999"; fontname="sans-serif";'
        for node in nodes:
            yield f"    {node}"
        yield "  }"


def _op(op: TracedOp, arrays: Mapping[int, TracedArray]) -> str:
    return _node(
        f"op{op.id}", label_lines(op), colour_of(op), op_told(op, arrays), op.state == "failed"
    )


def _group(group: Group, stream: str) -> str:
    lines = [stream, *group_lines(group)]
    return _node(f"g{group.id}", lines, colour_of(group), lines, group.num_failed > 0)


def _node(
    ident: str, label: Iterable[str], colour: str, tooltip: Iterable[str], has_failed: bool
) -> str:
    attributes = [
        f"label={_quote(label)}",
        f'fillcolor="{colour}"',
        f"tooltip={_quote(tooltip)}",
    ]
    if has_failed:
        attributes.append(f'color="{FAILED_COLOUR}", penwidth=3')
    return f"{ident} [{', '.join(attributes)}];"


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
