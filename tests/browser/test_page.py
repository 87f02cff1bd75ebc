"""The page of a trace, as a user meets it."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from programs_traced import ancestors, pipeline
from shown import Shown

import streamflow as sf
from streamflow.trace import EdgeReason
from streamflow.trace.explain import sentences_of
from streamflow.trace.gaps import gap_in_words, idle_gaps
from streamflow.trace.index import Index
from streamflow.trace.lanes import lane_of
from streamflow.trace.looks import COLOURS

Show = Callable[[sf.Trace], Shown]
FOCUS = "0072b2"  # page.css


@pytest.fixture(scope="module")
def trace() -> sf.Trace:
    return pipeline()


def named(trace: sf.Trace, kind: str, nth: int = 0) -> int:
    return [op.id for op in trace.ops if op.kind == kind][nth]


def test_opens_from_a_file_and_shows_every_op(show: Show, trace: sf.Trace) -> None:
    shown = show(trace)
    assert shown.state()["numNodes"] == len(trace.ops)
    assert f"{len(trace.ops)} ops" in shown.page.inner_text("#facts")
    assert shown.state()["selected"] is None


def test_search_finds_an_op_and_brings_it_to_the_middle(show: Show, trace: sf.Trace) -> None:
    shown = show(trace)
    wanted = trace.op(named(trace, "get", 5))
    shown.page.fill("#query", wanted.name)
    shown.press("Enter")
    assert shown.state()["selected"] == wanted.id
    box = shown.page.locator("#graph-canvas").bounding_box()
    place = shown.page.evaluate("id => streamflow.whereInGraph(id)", wanted.id)
    assert place["x"] == pytest.approx(box["x"] + box["width"] / 2, abs=2)
    assert place["y"] == pytest.approx(box["y"] + box["height"] / 2, abs=2)


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("launch", "kind", "launch"),
        ("programs_traced.py", "where", None),
        ("pipeline", "scope", "pipeline"),
    ],
)
def test_search_looks_at_kind_line_and_scope(
    show: Show, trace: sf.Trace, words: str, field: str, value: str | None
) -> None:
    shown = show(trace)
    shown.page.fill("#query", words)
    expected = {
        op.id
        for op in trace.ops
        if (getattr(op, field) == value if value else words in (op.where or ""))
    }
    assert expected
    assert set(shown.state()["matches"]) == expected


def test_search_goes_on_and_back_and_says_where(show: Show, trace: sf.Trace) -> None:
    shown = show(trace)
    launches = [op.id for op in trace.ops if op.kind == "launch"]
    shown.page.fill("#query", "launch")
    shown.press("Enter", "Enter")
    assert shown.state()["selected"] == launches[1]
    shown.page.click("#previous-match")
    shown.page.click("#previous-match")
    assert shown.state()["selected"] == launches[-1]
    assert shown.page.inner_text("#found") == f"{len(launches)} of {len(launches)}"
    shown.page.fill("#query", "no such op")
    assert shown.announced() == "No op found"


@pytest.mark.parametrize("kind", ["put", "launch", "get", "free"])
def test_a_click_lights_exactly_the_ancestors(show: Show, trace: sf.Trace, kind: str) -> None:
    shown = show(trace)
    op_id = named(trace, kind, 5)
    shown.click_in_graph(op_id)
    state = shown.state()
    assert state["selected"] == op_id
    assert set(state["lit"]) == ancestors(trace, op_id)
    assert 0 < len(state["lit"]) < len(trace.ops) - 1
    assert state["numLit"] == [len(state["lit"])] * 2


def test_a_click_on_the_timeline_selects_in_the_graph_too(show: Show, trace: sf.Trace) -> None:
    shown = show(trace)
    op_id = named(trace, "launch", 3)
    shown.point_on_timeline(op_id)
    assert shown.state()["hovered"] == op_id
    assert "read-after-write" in shown.page.inner_text("#tip")
    shown.page.mouse.down()
    shown.page.mouse.up()
    assert shown.state()["selected"] == op_id
    assert set(shown.state()["lit"]) == ancestors(trace, op_id)


def test_without_stream_order_only_other_edges_light(show: Show, trace: sf.Trace) -> None:
    shown = show(trace)
    op_id = named(trace, "get", 5)
    shown.click_in_graph(op_id)
    shown.page.uncheck("#order")
    lit = set(shown.state()["lit"])
    assert lit == ancestors(trace, op_id, without=EdgeReason.STREAM_ORDER)
    assert lit < ancestors(trace, op_id)


def test_a_click_beside_all_ops_lights_everything_again(show: Show, trace: sf.Trace) -> None:
    shown = show(trace)
    shown.click_in_graph(named(trace, "launch"))
    box = shown.page.locator("#graph-canvas").bounding_box()
    shown.page.mouse.click(box["x"] + 2, box["y"] + 2)
    assert shown.state()["selected"] is None
    assert shown.state()["lit"] is None


def test_the_panel_says_what_the_op_waited_for_and_why(show: Show, trace: sf.Trace) -> None:
    shown = show(trace)
    op = trace.op(named(trace, "get"))
    shown.click_in_graph(op.id)
    panel = shown.panel()
    edge = next(
        edge
        for edge in trace.edges
        if edge.dst == op.id and edge.reason is EdgeReason.READ_AFTER_WRITE
    )
    array = next(array for array in trace.arrays if array.id == edge.array)
    assert f"read-after-write on array #{array.id} (256 KiB) made at {array.where}" in panel
    for word in ("pipeline", op.task, "called", "queued for", "ran for", "256 KiB"):
        assert str(word) in panel
    assert shown.page.inner_text("#panel dt:text-is('line') + dd") == op.where


def test_the_panel_says_of_every_op_what_explain_says(show: Show, trace: sf.Trace) -> None:
    shown = show(trace)
    shown.click_in_graph(trace.ops[0].id)
    index = Index(trace)
    for op in trace.ops:
        assert shown.state()["selected"] == op.id
        told = shown.page.locator("#panel .why p, #panel .why li").all_inner_texts()
        expected = [str(sentence) for sentence in sentences_of(index, op)]
        assert sorted(told) == sorted(expected or ["It waited for nothing."])
        assert all(f"  {line}" in trace.explain(op).lines for line in expected)
        shown.press("]")


def test_the_panel_leads_from_op_to_op(show: Show, trace: sf.Trace) -> None:
    shown = show(trace)
    op_id = named(trace, "get")
    shown.click_in_graph(op_id)
    shown.page.click("#panel .why button")
    selected = shown.state()["selected"]
    assert trace.op(selected).kind == "launch"
    assert selected in ancestors(trace, op_id)


def test_wheel_and_buttons_zoom_the_graph(show: Show, trace: sf.Trace) -> None:
    shown = show(trace)
    before = shown.state()["graph"]["scale"]
    shown.page.click('[data-zoom="graph in"]')
    larger = shown.state()["graph"]["scale"]
    assert larger > before
    shown.page.hover("#graph-canvas")
    shown.page.mouse.wheel(0, 400)
    shown.page.wait_for_function("scale => streamflow.state().graph.scale < scale", arg=larger)
    shown.page.click('[data-zoom="graph fit"]')
    assert shown.state()["graph"]["scale"] == pytest.approx(before)


def test_the_whole_stays_in_sight_when_the_window_changes(show: Show, trace: sf.Trace) -> None:
    shown = show(trace)
    before = shown.state()["graph"]["scale"]
    shown.page.set_viewport_size({"width": 1000, "height": 700})
    shown.page.wait_for_function("scale => streamflow.state().graph.scale < scale", arg=before)
    shown.page.click('[data-zoom="graph in"]')
    zoomed = shown.state()["graph"]["scale"]
    shown.page.set_viewport_size({"width": 1280, "height": 800})
    shown.page.wait_for_function("document.documentElement.clientWidth === 1280")
    assert shown.state()["graph"]["scale"] == zoomed


def test_dragging_moves_the_graph_and_selects_nothing(show: Show, trace: sf.Trace) -> None:
    shown = show(trace)
    before = shown.state()["graph"]
    shown.page.mouse.move(
        **shown.page.evaluate("id => streamflow.whereInGraph(id)", trace.ops[0].id)
    )
    begin = shown.in_canvas("graph-canvas", trace.ops[0].id)
    shown.page.mouse.down()
    shown.page.mouse.move(400, 300, steps=4)
    shown.page.mouse.up()
    after = shown.state()["graph"]
    end = shown.in_canvas("graph-canvas", trace.ops[0].id)
    box = shown.page.locator("#graph-canvas").bounding_box()
    assert begin != end == pytest.approx((400 - box["x"], 300 - box["y"]), abs=2)
    assert after["scale"] == before["scale"]
    assert shown.state()["selected"] is None


def test_the_timeline_zooms_around_the_pointer(show: Show, trace: sf.Trace) -> None:
    shown = show(trace)
    op = trace.op(named(trace, "launch", 3))
    assert op.start_s is not None
    assert op.end_s is not None
    shown.point_on_timeline(op.id)
    low, high = shown.state()["range"]
    shown.page.mouse.wheel(0, -600)
    shown.page.wait_for_function(
        "span => { const [low, high] = streamflow.state().range; return high - low < span / 2; }",
        arg=high - low,
    )
    low, high = shown.state()["range"]
    assert low < (op.start_s + op.end_s) / 2 < high


@pytest.mark.parametrize(
    ("view", "group", "num_members", "num"),
    [("name", "work", 8, 5), ("scope", "pipeline", 32, 2)],
)
def test_collapse_puts_ops_into_groups_that_open(
    show: Show, trace: sf.Trace, view: str, group: str, num_members: int, num: int
) -> None:
    shown = show(trace)
    shown.choose(view)
    state = shown.state()
    assert state["numNodes"] == num
    assert group in state["labels"]
    shown.click_in_graph(named(trace, "launch"))
    state = shown.state()
    assert state["depth"] == 1
    assert state["numNodes"] == num_members
    shown.press("Escape")
    assert shown.state()["numNodes"] == num


def test_an_open_group_may_be_shown_with_its_neighbours(show: Show, trace: sf.Trace) -> None:
    shown = show(trace)
    shown.choose("name")
    launch = named(trace, "launch")
    shown.click_in_graph(launch)
    assert shown.state()["numNodes"] == 8
    shown.page.check("#around")
    launches = {op.id for op in trace.ops if op.kind == "launch"}
    tied = {
        end
        for edge in trace.edges
        if edge.reason is not EdgeReason.STREAM_ORDER and {edge.src, edge.dst} & launches
        for end in (edge.src, edge.dst)
    }
    assert shown.state()["numNodes"] == len(tied | launches) > 8
    before = min(tied - launches)
    shown.click_in_graph(before)
    assert shown.state()["selected"] == before


def test_a_selection_stays_when_ops_are_collapsed(show: Show, trace: sf.Trace) -> None:
    shown = show(trace)
    op_id = named(trace, "get", 4)
    shown.click_in_graph(op_id)
    shown.choose("name")
    assert shown.state()["selected"] == op_id
    assert set(shown.state()["lit"]) == ancestors(trace, op_id)


def test_idle_gaps_say_their_cause(show: Show, trace: sf.Trace) -> None:
    shown = [(gap["lane"], gap["cause"]) for gap in show(trace).state()["gaps"]]
    index = Index(trace)
    assert shown == [
        (gap.place[2], gap_in_words(index, gap.op, gap.before)) for gap in idle_gaps(index, lane_of)
    ]
    assert any("for work on compute" in cause for lane, cause in shown if lane == "d2h")
    assert any("until the end of" in cause for lane, cause in shown if lane == "h2d")


def test_the_critical_path_ends_with_the_last_op(show: Show, trace: sf.Trace) -> None:
    path = show(trace).state()["critical"]
    assert trace.op(path[-1]).end_s == max(op.end_s for op in trace.ops if op.end_s is not None)
    assert len(path) > 3


def test_all_of_it_can_be_reached_by_keyboard(show: Show, trace: sf.Trace) -> None:
    shown = show(trace)
    shown.press("/")
    shown.page.keyboard.type("get#")
    shown.press("Enter", "Escape")  # find, and on to the graph
    focused = "document.activeElement.id"
    assert shown.page.evaluate(focused) == "graph-canvas"
    found = shown.state()["selected"]
    assert trace.op(found).kind == "get"
    shown.press("p")
    assert shown.state()["selected"] in ancestors(trace, found)
    shown.press("]")
    before = shown.state()
    shown.press("[", "+", "ArrowRight", "ArrowDown")
    after = shown.state()
    assert after["selected"] < before["selected"]
    assert after["graph"]["scale"] > before["graph"]["scale"]
    shown.press("Escape")
    assert shown.state()["selected"] is None
    shown.press("0", "Enter")
    assert shown.state()["selected"] is not None
    assert "ancestor" in shown.announced()
    reached = set()
    for _ in range(20):
        shown.press("Tab")
        reached.add(shown.page.evaluate(focused))
    assert "lanes-canvas" in reached
    shown.page.focus("#lanes-canvas")
    low, high = shown.state()["range"]
    shown.press("+")
    nearer = shown.state()["range"]
    assert nearer[1] - nearer[0] < high - low
    shown.press("ArrowRight")
    assert shown.state()["range"][0] > nearer[0]


def test_keys_act_wherever_the_focus_is_but_in_fields(show: Show, trace: sf.Trace) -> None:
    shown = show(trace)
    shown.press("]", "]")  # nothing has the focus yet
    assert shown.state()["selected"] == trace.ops[1].id
    op_id = named(trace, "get", 3)
    shown.click_in_graph(op_id)
    shown.page.click("#panel .why button")
    assert shown.focused() == "panel"  # the button is gone
    before = shown.state()["selected"]
    shown.press("p")
    assert shown.state()["selected"] in ancestors(trace, before)
    shown.press("Escape")
    assert shown.state()["selected"] is None
    shown.page.focus("#query")
    shown.page.keyboard.type("p]-")
    assert shown.state()["selected"] is None
    assert shown.page.input_value("#query") == "p]-"


def test_the_way_back_out_of_a_group_keeps_the_focus(show: Show, trace: sf.Trace) -> None:
    shown = show(trace)
    shown.choose("name")
    shown.click_in_graph(named(trace, "launch"))
    shown.page.focus("#trail button")
    shown.press("Enter")
    assert shown.state()["depth"] == 0
    assert shown.focused() == "graph-canvas"


def test_canvases_say_reasons_causes_and_memory(show: Show, trace: sf.Trace) -> None:
    shown = show(trace)
    assert "read-after-write" not in shown.written()
    shown.page.fill("#query", trace.op(named(trace, "get", 3)).name)
    shown.press("Enter")  # so near that there is room
    written = shown.written()
    assert "read-after-write" in written
    assert {"critical path", "h2d", "d2h", "memory"} <= written
    assert any(re.match(r"waited \S+ us for work on compute0: r", words) for words in written)
    box = shown.page.locator("#memory-canvas").bounding_box()
    shown.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 40)
    assert re.fullmatch(r"in use \S+ \w+, pinned \S+ \w+", shown.page.inner_text("#tip"))


def test_what_a_click_lights_is_seen(show: Show, trace: sf.Trace) -> None:
    shown = show(trace)
    op_id = named(trace, "get", 3)
    others = {op.id for op in trace.ops} - ancestors(trace, op_id) - {op_id}
    lit, dim = max(ancestors(trace, op_id)), max(others)

    def colours(canvas: str, op_id: int) -> set[str]:
        x, y = shown.in_canvas(canvas, op_id)
        return shown.pixels(canvas, x - 8, y - 2, 17, 5)

    assert "faint" not in colours("graph-canvas", dim)
    shown.click_in_graph(op_id)
    assert "faint" not in colours("graph-canvas", lit)
    assert colours("graph-canvas", dim) == {"faint"}
    x, y = shown.in_canvas("lanes-canvas", op_id)
    assert FOCUS in shown.pixels("lanes-canvas", x - 40, y - 15, 80, 30)


def test_pointing_at_an_op_draws_its_dependencies(show: Show, trace: sf.Trace) -> None:
    shown = show(trace)
    op_id = named(trace, "get", 3)
    tied = max(ancestors(trace, op_id, without=EdgeReason.STREAM_ORDER))
    x, end = shown.in_canvas("lanes-canvas", op_id)
    _, begin = shown.in_canvas("lanes-canvas", tied)
    top, bottom = sorted((begin, end))
    between = ("lanes-canvas", x - 60, (top + bottom) / 2, 70)
    before = shown.pixels(*between)
    shown.point_on_timeline(op_id)
    assert shown.pixels(*between) - before


def test_the_critical_path_and_memory_are_seen(show: Show, trace: sf.Trace) -> None:
    shown = show(trace)
    op_id = named(trace, "launch", 7)
    assert op_id in shown.state()["critical"]
    x, _ = shown.in_canvas("lanes-canvas", op_id)
    assert COLOURS["compute"][1:] in shown.pixels("lanes-canvas", x, 8, 1, 10)
    assert FOCUS in shown.pixels("memory-canvas", 200, 24, 400, 48)  # its line has that colour


def test_edges_of_stream_order_can_be_left_out(show: Show, trace: sf.Trace) -> None:
    shown = show(trace)
    shown.press("0")
    picture = "document.getElementById('graph-canvas').toDataURL()"
    before = shown.page.evaluate(picture)
    shown.page.uncheck("#order")
    shown.page.wait_for_function(f"before => {picture} !== before", arg=before)


def test_the_latest_of_what_an_op_comes_after_is_listed_first(show: Show, trace: sf.Trace) -> None:
    ends = {op.id: op.end_s or -1.0 for op in trace.ops}
    before: dict[int, set[int]] = {}
    for edge in trace.edges:
        before.setdefault(edge.dst, set()).add(edge.src)
    op_id = max(before, key=lambda dst: len({ends[src] for src in before[dst]}))
    assert len({ends[src] for src in before[op_id]}) > 1
    shown = show(trace)
    shown.click_in_graph(op_id)
    listed = shown.page.locator("#panel ul").first.locator("button")
    first = trace.ops[int(listed.first.get_attribute("data-op"))]
    assert ends[first.id] == max(ends[src] for src in before[op_id])


def test_a_selected_op_is_scrolled_to_in_its_lane(show: Show, trace: sf.Trace) -> None:
    shown = show(trace)
    shown.page.set_viewport_size({"width": 1000, "height": 400})
    shown.page.wait_for_function("document.documentElement.clientHeight === 400")
    assert shown.page.evaluate("document.getElementById('lanes').scrollTop") == 0
    lanes = shown.page.locator("#lanes").bounding_box()
    for kind in ("get", "put"):  # of the lowest lane, and of the highest
        shown.page.fill("#query", trace.op(named(trace, kind, 5)).name)
        shown.press("Enter")
        place = shown.page.evaluate("id => streamflow.whereOnTimeline(id)", named(trace, kind, 5))
        assert lanes["y"] < place["y"] < lanes["y"] + lanes["height"]


def test_texts_can_be_read_in_light_and_dark(show: Show, trace: sf.Trace) -> None:
    """WCAG AA: 4.5 to 1, also of what canvases write on papers and colours."""
    shown = show(trace)
    for scheme, paper in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(22, 24, 29)")):
        shown.page.emulate_media(color_scheme=scheme)
        assert shown.page.evaluate("getComputedStyle(document.body).backgroundColor") == paper
        ratios = shown.page.evaluate(CONTRASTS)
        assert len(ratios) == 13
        assert {pair: ratio for pair, ratio in ratios.items() if ratio < 4.5} == {}


CONTRASTS = """() => {
    const css = getComputedStyle(document.documentElement);
    const light = (colour) => {
        const [red, green, blue] = [1, 3, 5].map((at) => {
            const part = parseInt(colour.slice(at, at + 2), 16) / 255;
            return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
        });
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
    };
    const ratio = (one, other) => {
        const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
        return (high + 0.05) / (low + 0.05);
    };
    const found = {};
    for (const ink of ["--ink", "--soft", "--lit"]) {
        for (const paper of ["--paper", "--shade", "--gap"]) {
            const pair = [ink, paper].map((each) => css.getPropertyValue(each).trim());
            found[`${ink} on ${paper}`] = ratio(...pair);
        }
    }
    const { colours } = JSON.parse(document.getElementById("data").textContent);
    for (const name of ["h2d", "d2h", "compute", "other"]) {
        found[name] = ratio("#000000", colours[name]);
    }
    return found;
}"""


def test_focus_is_visible_and_controls_have_names(show: Show, trace: sf.Trace) -> None:
    shown = show(trace)
    shown.press("Tab")
    assert shown.page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    nameless = shown.page.evaluate(
        """[...document.querySelectorAll("button, input, select, canvas")].filter((each) =>
            !each.ariaLabel && !each.textContent.trim() && !each.labels?.length).length"""
    )
    assert nameless == 0
