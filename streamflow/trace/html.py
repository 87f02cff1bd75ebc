"""A trace as one page for a browser, which needs nothing else."""

from __future__ import annotations

import html
import json
from importlib.resources import files

from streamflow.runtime.units import spell_bytes, spell_seconds
from streamflow.trace.page_data import page_data
from streamflow.trace.trace import Trace

__all__ = ["to_html", "to_notebook"]

# In this order: each may use what those before it define.
_SCRIPTS = ("data.js", "views.js", "graph.js", "timeline.js", "memory.js", "panel.js", "main.js")

_NUM_NOTEBOOK_OPS_MAX = 2000
_NOTEBOOK_HEIGHT_PX = 720


def to_html(trace: Trace) -> str:
    """The graph, the timeline and the memory curve, on one page without network access.

    Parameters
    ----------
    trace : Trace
        Names in it may hold any text.

    Raises
    ------
    ModuleNotFoundError
        igraph is not installed: it lays the graph out.
    """
    scripts = "\n".join(_asset(name) for name in _SCRIPTS)
    page = _asset("page.html")
    for mark, text in (
        ("/*style*/", _asset("page.css")),
        ("/*script*/", scripts),
        ("/*data*/", _inert(json.dumps(page_data(trace), separators=(",", ":")))),
    ):
        before, after = page.split(mark)
        page = before + text + after
    return page


def to_notebook(trace: Trace) -> str:
    """The page in a frame of fixed height; a table, where it would be large."""
    if len(trace.ops) > _NUM_NOTEBOOK_OPS_MAX:
        return _table(trace, "more than a notebook should carry")
    try:
        page = to_html(trace)
    except ModuleNotFoundError as error:
        return _table(trace, str(error))
    return (
        f'<iframe title="{html.escape(repr(trace))}" srcdoc="{html.escape(page)}" '
        f'style="width:100%;height:{_NOTEBOOK_HEIGHT_PX}px;border:1px solid #8888" '
        'sandbox="allow-scripts"></iframe>'
    )


def _table(trace: Trace, why: str) -> str:
    overlap = trace.overlap()
    rows = [
        ("ops", str(len(trace.ops))),
        ("edges", str(len(trace.edges))),
        ("bytes", spell_bytes(sum(op.nbytes for op in trace.ops if op.engine in ("h2d", "d2h")))),
        ("span", spell_seconds(overlap.span_s)),
        ("overlap", f"{overlap.ratio:.0%} of what could be"),
        *((f"{engine} busy", spell_seconds(busy)) for engine, busy in overlap.busy_s.items()),
    ]
    cells = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
        for name, value in rows
    )
    return (
        f"<table>{cells}</table><p>No picture here ({html.escape(why)}): "
        '<code>trace.save("run.html")</code> writes the page to a file.</p>'
    )


def _inert(text: str) -> str:
    """JSON that neither ends the script it stands in nor opens a comment there."""
    return (
        text.replace("<", "\\u003c")
        .replace(">", "\\u003e")
        .replace("\u2028", "\\u2028")
        .replace("\u2029", "\\u2029")
    )


def _asset(name: str) -> str:
    return files("streamflow.trace").joinpath("page", name).read_text(encoding="utf-8")
