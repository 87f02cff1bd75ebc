"""C48: as many ops as come, named as they may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from programs_traced import ancestors, long, pipeline
from shown import Shown

import streamflow as sf
from streamflow.trace import EdgeReason, TracedArray, TracedEdge, TracedOp

Show = Callable[[sf.Trace], Shown]

ODD_NAMES = [
    "</script><script>alert(1)</script>",
    "<!-- x",
    "<img src=x onerror=alert(1)>",
    "'\"&amp;&#60;",
    "{} $& ${1}`",
    "snow \N{SNOWMAN} man",
]


@pytest.mark.timeout(300)
def test_c48_a_hundred_thousand_ops_open_as_groups_that_open(show: Show) -> None:
    trace = long(100_000)
    shown = show(trace)  # Playwright waits for 30 s at most
    state = shown.state()
    assert state["view"] == "synopsis"
    assert state["numNodes"] <= 120
    op_id = 50_000
    while shown.state()["numNodes"] != 1 and shown.state()["selected"] is None:
        before = shown.state()
        shown.click_in_graph(op_id)
        after = shown.state()
        assert after["depth"] > before["depth"] or after["selected"] == op_id
        assert after["numNodes"] <= 900  # with neighbours
    assert shown.state()["selected"] == op_id
    assert set(shown.state()["lit"]) == ancestors(trace, op_id)


@pytest.mark.timeout(300)
def test_c48_search_finds_one_of_a_hundred_thousand(show: Show) -> None:
    shown = show(long(100_000))
    shown.page.fill("#query", "put#70000")
    shown.press("Enter")
    assert shown.state()["selected"] == 70_000
    low, high = shown.state()["range"]
    assert low < 0.7 < high
    assert high - low < 0.1


def test_five_thousand_ops_are_drawn_one_by_one(show: Show) -> None:
    trace = long(5000)
    shown = show(trace)
    assert shown.state()["numNodes"] == 5000
    shown.page.fill("#query", "get#3000")
    shown.press("Enter")
    assert set(shown.state()["lit"]) == ancestors(trace, 3000)


@pytest.mark.parametrize("num_ops", [0, 1])
def test_a_trace_of_hardly_anything_opens(show: Show, num_ops: int) -> None:
    unfinished = [replace(op, start_s=None, end_s=None, state="parked") for op in odd().ops]
    shown = show(sf.Trace.of(unfinished[:num_ops]))
    assert shown.state()["numNodes"] == num_ops
    shown.press("/", "Escape", "Enter", "+", "]", "p", "Tab", "Tab")
    if num_ops:
        assert shown.state()["selected"] == 0
        assert "parked: waits for the host to submit it" in shown.panel()


def test_a_failed_op_has_a_sign_of_its_own(show: Show) -> None:
    ops = [replace(op, state="failed") if op.id == 1 else op for op in odd().ops]
    shown = show(sf.Trace.of(ops))
    shown.click_in_graph(1)
    assert shown.panel().startswith("\N{MULTIPLICATION X}")
    shown.click_in_graph(2)
    assert shown.panel().startswith("\N{BLACK SQUARE}")


def odd() -> sf.Trace:
    ops = [
        TracedOp(
            id=number,
            kind="launch",
            name=name,
            stream=name,
            engine="compute",
            device=0,
            nbytes=1,
            submitted_s=0.0,
            start_s=number * 1e-3,
            end_s=(number + 1) * 1e-3,
            state="done",
            where=f"{name}:1",
            scope=name,
            task=name,
        )
        for number, name in enumerate(ODD_NAMES)
    ]
    edges = [
        TracedEdge(number, number + 1, EdgeReason.AFTER, issued=True, array=7)
        for number in range(len(ops) - 1)
    ]
    return sf.Trace.of(ops, edges, [TracedArray(7, 1, 0, ODD_NAMES[0])])


def test_c48_odd_names_are_text(show: Show) -> None:
    shown = show(odd())
    num_elements = shown.page.evaluate("document.querySelectorAll('script, img').length")
    assert shown.state()["labels"] == ODD_NAMES
    for number, name in enumerate(ODD_NAMES):
        shown.page.fill("#query", name)
        shown.press("Enter")
        assert shown.state()["selected"] == number
        assert name in shown.panel()
    for view in ("scope", "name"):
        shown.choose(view)
        shown.click_in_graph(1)
    assert shown.page.evaluate("document.querySelectorAll('script, img').length") == num_elements


def test_the_notebook_shows_the_page_in_a_frame(
    opened: Callable[[Path], Shown], chromium: object, tmp_path: Path
) -> None:
    trace = pipeline(3)
    notebook = tmp_path / "notebook.html"
    notebook.write_text(
        f"<!doctype html><script>streamflow = 1</script>{trace._repr_html_()}", encoding="utf-8"
    )
    page = opened(notebook).page
    frame = page.frames[1]
    frame.wait_for_function("window.streamflow")
    frame.wait_for_function("streamflow.state().graph.scale > 0.2")  # it knows its size later
    assert frame.evaluate("streamflow.state().numNodes") == len(trace.ops)
