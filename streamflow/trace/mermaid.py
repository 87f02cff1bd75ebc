"""A trace's task graph for Mermaid."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from streamflow.trace.groups import synopsis
from streamflow.trace.looks import (
    COLOURS,
    FAILED_COLOUR,
    EdgeLook,
    edge_look,
    group_by_stream,
    group_lines,
    label_lines,
    look_of,
    printable,
)
from streamflow.trace.model import Contents
from streamflow.trace.trace import Trace

__all__ = ["to_mermaid"]

_NUM_EDGES_SHOWN_MAX = 500
# All but word characters and marks that mean nothing anywhere; the outer `_` of a word and
# what could begin a list, which Mermaid's Markdown pass would read.
_SPECIAL = re.compile(r"[^\w ,./()-]|(?<![^\W_])_|_(?![^\W_])|^[^\w]|^\d(?=\d*[.)] )")


_ARROWS = {
    EdgeLook.WAIT: "==>",
    EdgeLook.IMPLIED: "-->",
    EdgeLook.ORDER: "-.->",
    EdgeLook.HOST: "--o",
    EdgeLook.CAPACITY: "-.-o",
}
_STROKES = {EdgeLook.HOST: "#0072b2", EdgeLook.CAPACITY: "#cc79a7"}


def to_mermaid(trace: Trace, *, max_ops: int = 5000) -> str:
    """The graph as a Mermaid flowchart: one subgraph per stream, edges labelled with their reason.

    A thick edge is a wait that was issued on the device, a plain one was already implied, a
    dotted one is the order of one stream. One that ends in a dot is the host's, or, if dotted
    too, says who made room for whom.

    Parameters
    ----------
    trace : Trace
        Names in it may hold any text.
    max_ops : int
        Of more ops than this the synopsis is drawn.

    Returns
    -------
    str
        A whole ``flowchart``.

    Source
    ------
    The limit on edges: ``maxEdges`` in Mermaid's configuration schema, 500 by default; a
    diagram's own text cannot raise it.
    """
    contents = trace._read()
    lines = _ops(contents) if len(contents.ops) <= max_ops else _groups(trace, max_ops)
    return "".join(f"{line}\n" for line in lines)


def _ops(contents: Contents) -> Iterator[str]:
    streams = {
        title: [(f"op{op.id}", label_lines(op), look_of(op)) for op in ops]
        for title, ops in group_by_stream(contents.ops).items()
    }
    arrows = [
        (f"op{edge.src}", f"op{edge.dst}", edge.reason.value, edge_look(edge))
        for edge in contents.edges
    ]
    failed = [f"op{op.id}" for op in contents.ops if op.state == "failed"]
    yield from _flowchart(None, streams, arrows, failed)


def _groups(trace: Trace, max_ops: int) -> Iterator[str]:
    found = synopsis(trace)
    streams = {
        title: [(f"g{each.id}", group_lines(each), look_of(each)) for each in groups]
        for title, groups in group_by_stream(found.groups).items()
    }
    arrows = [
        (
            f"g{src}",
            f"g{dst}",
            "<br/>".join(f"{edge.num} {edge.reason.value}" for edge in edges),
            edge_look(edges[0]),
        )
        for src, dst, edges in found.arrows()
    ]
    failed = [f"g{each.id}" for each in found.groups if each.num_failed]
    yield from _flowchart(found.told(max_ops), streams, arrows, failed)


def _flowchart(
    comment: str | None,
    streams: Mapping[str, Iterable[tuple[str, Iterable[str], str]]],
    arrows: Sequence[tuple[str, str, str, EdgeLook]],
    failed: Sequence[str],
) -> Iterator[str]:
    yield "flowchart LR"
    if comment is not None:
        yield f"  %% {comment}"
    if len(arrows) > _NUM_EDGES_SHOWN_MAX:
        yield (
            f"  %% {len(arrows)} edges. Viewers stop at {_NUM_EDGES_SHOWN_MAX} "
            "unless maxEdges and maxTextSize are raised in their configuration."
        )
    for index, (title, nodes) in enumerate(streams.items()):
        yield f"  subgraph s{index}[{_quote([title])}]"
        for ident, label, look in nodes:
            yield f"    {ident}[{_quote(label)}]:::{look}"
        yield "  end"
    for src, dst, told, kind in arrows:
        yield f"  {src} {_ARROWS[kind]}|{told}| {dst}"
    for drawn, stroke in _STROKES.items():
        places = [str(place) for place, arrow in enumerate(arrows) if arrow[3] is drawn]
        if places:
            yield f"  linkStyle {','.join(places)} stroke:{stroke}"
    for name, colour in COLOURS.items():
        yield f"  classDef {name} fill:{colour},stroke:#555555,color:#000000"
    yield f"  classDef failed stroke:{FAILED_COLOUR},stroke-width:4px"
    if failed:
        yield f"  class {','.join(failed)} failed"


def _quote(lines: Iterable[str]) -> str:
    """A Mermaid string of these lines.

    Every mark that the grammar, its pre-processing or HTML might read is written as a
    character code.
    """
    return '"' + "<br/>".join(_SPECIAL.sub(_code, printable(line)) for line in lines) + '"'


def _code(match: re.Match[str]) -> str:
    return f"#{ord(match[0])};"
