"""C48: as many ops as come, named as they may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from programs_traced import ancestors, long, pipeline
from shown import Shown

import streamflow as sf
from streamflow.trace import EdgeReason, TracedArray, TracedEdge, TracedMemory, TracedOp

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
        assert "1 B, parked" in shown.written()
        assert "parked" in shown.announced()


def test_a_failed_op_has_a_sign_of_its_own(show: Show) -> None:
    ops = [replace(op, state="failed") if op.id == 1 else op for op in odd().ops]
    shown = show(sf.Trace.of(ops))
    shown.click_in_graph(1)
    assert shown.panel().startswith("\N{MULTIPLICATION X}")
    shown.click_in_graph(2)
    assert shown.panel().startswith("\N{BLACK SQUARE}")


def merged(num_processes: int, num_devices: int) -> sf.Trace:
    """The same few ops in several processes, on several devices."""
    places = [(p, d) for p in range(num_processes) for d in range(num_devices)]
    ops = [
        replace(op, id=number * 100 + op.id, process=process, device=device)
        for number, (process, device) in enumerate(places)
        for op in long(3).ops
    ]
    memory = [TracedMemory(0.0, 2**20, 2**20, device=d, process=p) for p, d in places]
    return sf.Trace.of(ops, (), (), memory)


def test_lanes_of_several_processes_and_devices_can_be_told_apart(show: Show) -> None:
    shown = show(merged(2, 2))
    titles = {f"process {process} gpu{device}" for process in (0, 1) for device in (0, 1)}
    streams = ("h2d", "compute0", "d2h")
    assert titles | {f"{title} {stream}" for title in titles for stream in streams} <= (
        shown.written()
    )
    shown.point_at_lane_title(1)
    assert shown.page.inner_text("#tip") == "process 0 gpu0 h2d"


@pytest.mark.parametrize("size", [(1000, 600), (1280, 800), (2560, 1440)])
def test_eight_devices_fit_into_the_window(show: Show, size: tuple[int, int]) -> None:
    shown = show(merged(1, 8))
    width, height = size
    shown.page.set_viewport_size({"width": width, "height": height})
    shown.page.wait_for_function(
        "width => document.documentElement.clientWidth === width", arg=width
    )
    boxes = shown.page.evaluate(
        """() => ["graph-canvas", "lanes", "memory", "panel"].map((id) => {
            const { width, height, right, bottom } =
                document.getElementById(id).getBoundingClientRect();
            return [width, height, right, bottom];
        })"""
    )
    for box_width, box_height, right, bottom in boxes:
        assert box_width > 200
        assert box_height > 60
        assert right <= width
        assert bottom <= height
    narrow = shown.page.evaluate(
        "[...document.querySelectorAll('#panel dd')].filter(({ offsetWidth }) => offsetWidth < 60)"
        ".length"
    )
    assert narrow == 0  # the terms beside them are long


def test_an_op_that_all_others_depend_on_does_not_flood_an_open_group(show: Show) -> None:
    hubs = [replace(op, name="hub", id=number) for number, op in enumerate(long(4).ops[::3])]
    ops = hubs + [replace(long(3).ops[1], id=number) for number in range(2, 3000)]
    edges = [TracedEdge(0, op.id, EdgeReason.READ_AFTER_WRITE, issued=True) for op in ops[2:]]
    shown = show(sf.Trace.of(ops, edges))
    shown.choose("name")
    shown.click_in_graph(0)
    shown.page.check("#around")
    assert shown.state()["numNodes"] == 602
    assert "without 2,398 neighbours" in shown.page.inner_text("#trail")


def test_other_screens_and_paper(chromium: Any, tmp_path: Path) -> None:
    """Dark, twice as sharp, small, and on paper."""
    pipeline(3).save(tmp_path / "run.html")
    context = chromium.new_context(
        color_scheme="dark",
        device_scale_factor=2,
        offline=True,
        viewport={"width": 700, "height": 500},
    )
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto((tmp_path / "run.html").as_uri())
    page.wait_for_function("window.streamflow && streamflow.state().graph.scale > 0")
    shown = Shown(page)
    assert "critical path" in shown.written()
    ratios = page.evaluate(
        """[...document.querySelectorAll("canvas")].map((each) => each.width / each.clientWidth)"""
    )
    assert ratios == pytest.approx([2, 2, 2], abs=0.01)
    assert page.pdf()[:4] == b"%PDF"
    context.close()
    assert not wrong


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
