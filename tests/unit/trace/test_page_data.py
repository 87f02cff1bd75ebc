"""What the page is told, and what of it could do harm."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamflow.trace import EdgeReason, Trace, TracedArray, TracedEdge, TracedMemory, TracedOp
from streamflow.trace.gaps import gap_in_words
from streamflow.trace.html import to_html
from streamflow.trace.index import Index
from streamflow.trace.page_data import _pack, page_data


def op(number: int, name: str = "f", **others: Any) -> TracedOp:
    known: dict[str, Any] = {
        "kind": "launch",
        "stream": "compute0",
        "engine": "compute",
        "device": 0,
        "nbytes": 0,
        "submitted_s": 0.0,
        "start_s": number * 1e-3,
        "end_s": number * 1e-3 + 1e-3,
        "state": "done",
        "where": None,
    }
    return TracedOp(id=number, name=name, **{**known, **others})


def column(packed: Any) -> list[int]:
    if "list" in packed:
        return list(packed["list"])
    written, size = base64.b64decode(packed["base64"]), packed["bits"] // 8
    return [
        int.from_bytes(written[at : at + size], "little", signed=True)
        for at in range(0, len(written), size)
    ]


def data_of(page: str) -> Any:
    found = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert len(found) == 1
    return json.loads(found[0])


@settings(deadline=None)
@given(
    st.integers(2, 20).flatmap(
        lambda num: st.tuples(
            st.just(num),
            st.lists(
                st.tuples(
                    st.integers(0, num - 1),
                    st.integers(0, num - 1),
                    st.sampled_from(EdgeReason),
                    st.booleans(),
                ).filter(lambda edge: edge[0] != edge[1]),
                max_size=40,
            ),
        )
    )
)
def test_the_page_has_the_edges_of_the_trace(case: tuple[int, list[Any]]) -> None:
    num, drawn = case
    ids = [7 * number + 3 for number in range(num)]
    edges = [TracedEdge(ids[src], ids[dst], *rest) for src, dst, *rest in drawn]
    data: Any = page_data(Trace.of(map(op, ids), edges))
    told = data["edges"]
    assert [
        TracedEdge(ids[src], ids[dst], EdgeReason(data["reasons"][reason]), bool(issued))
        for src, dst, reason, issued in zip(
            *(column(told[key]) for key in ("src", "dst", "reason", "issued")), strict=True
        )
    ] == edges
    shown = data["views"][0]
    assert shown["key"] == "ops"
    pairs = zip(column(shown["src"]), column(shown["dst"]), strict=True)
    assert sorted(pairs) == sorted({(src, dst) for src, dst, *_ in drawn})
    assert sum(column(shown["num"])) == len(edges)


def said(data: Any, table: Any, item: int) -> tuple[str, list[str]]:
    """The headline and all sentences of an op or a gap, as the page puts them together."""
    texts, ops = data["texts"], data["ops"]
    nums = column(table["num"])
    rows = range(sum(nums[:item]), sum(nums[: item + 1]))
    found = []
    for form, length, other, array_words in zip(
        *(column(table[key])[rows.start : rows.stop] for key in ("form", "length", "op", "array")),
        strict=True,
    ):
        words = texts[form]
        words = words.replace("{length}", texts[length], 1) if length >= 0 else words
        name = texts[column(data["names"])[other]] + texts[column(ops["on"])[other]]
        words = words.replace("{op}", name) if other >= 0 else words
        found.append(words.replace("{array}", texts[array_words]))
    headline = column(table["headline"])[item]
    return (found[headline] if found else ""), found


def test_the_page_says_of_ops_what_explain_says() -> None:
    at = {"start_s": 6.0, "end_s": 7.0}
    ops = [
        op(1, start_s=0.0, end_s=1.0, seen_s=1.5),
        op(2, start_s=1.0, end_s=4.0, stream="h2d", engine="h2d"),
        op(3, **at, stream="compute1", issued_s=3.0, needs=("pinned memory",)),
        op(4, "late", **at, submitted_s=5.0, seen_s=9.0),
        op(5, start_s=None, end_s=None, state="parked"),
        op(6, start_s=None, end_s=None, state="failed", error="{op} {length}"),
        op(7, start_s=5.0, end_s=8.0, stream="h2d", engine="h2d"),
        op(8, start_s=6.0, end_s=9.0, stream="h2d", engine="h2d"),
        op(9, start_s=0.0, end_s=0.0, stream="host", kind="host", engine=None),
        op(10, start_s=8.0, end_s=9.0, stream="host", kind="host", engine=None),
    ]
    edges = [
        TracedEdge(1, 2, EdgeReason.READ_AFTER_WRITE, issued=True, array=77),
        TracedEdge(2, 3, EdgeReason.WRITE_AFTER_READ, issued=True, array=78),
        TracedEdge(1, 4, EdgeReason.AFTER, issued=True),
        TracedEdge(5, 6, EdgeReason.AFTER, issued=True),
        TracedEdge(9, 10, EdgeReason.HOST, issued=True),
    ]
    trace = Trace.of(ops, edges, [TracedArray(77, 4096, 0, "{op}.py:3")])
    data: Any = page_data(trace)
    own = ("called for ", "ran ", "seen to have ended ")
    for place, each in enumerate(ops):
        told = trace.explain(each)
        sentences = [line.strip() for line in told.lines[1:]]
        headline, found = said(data, data["said"], place)
        assert found == [line for line in sentences if not line.startswith(own)]
        if told.waits and not told.late_s and not told.engine_wait:
            assert headline == max(told.waits, key=lambda wait: wait.length_s).text
    assert said(data, data["said"], 3)[0].startswith("called 4.00 s after all")


def test_the_page_says_of_gaps_what_is_said_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = [
        op(1, start_s=0.0, end_s=1.0),
        op(2, start_s=2.0, end_s=3.0),
        op(3, start_s=5.0, end_s=6),
    ]
    index = Index(Trace.of(ops))
    monkeypatch.setattr("streamflow.trace.page_data._NUM_GAPS_TOLD_MAX", 1)
    data: Any = page_data(Trace.of(ops))
    gaps = data["gaps"]
    assert column(gaps["before"]) == [2, 1]
    assert said(data, gaps, 0)[1] == gap_in_words(index, ops[2], ops[1]).split("; ") != []
    assert said(data, gaps, 1) == ("", [])


@pytest.mark.parametrize("number", [-1, 127, 128, 1 << 15, (1 << 23) - 1, 1 << 23, 1 << 31])
def test_columns_hold_numbers_of_any_size(number: int) -> None:
    assert column(_pack([number, -1, 0])) == [number, -1, 0]


def test_times_and_bytes_keep_their_size() -> None:
    ops = [op(1, nbytes=3 << 40, start_s=100.0, end_s=3600.0), op(2, start_s=None, end_s=None)]
    data: Any = page_data(Trace.of(ops))
    starts = column(data["ops"]["start"])
    assert starts[0] * data["tick_s"] == pytest.approx(100.0, abs=1e-5)
    assert column(data["ops"]["end"])[0] * data["tick_s"] == pytest.approx(3600.0, abs=1e-5)
    assert starts[1] == -1
    assert column(data["ops"]["nbytes"]) == [3 << 40, 0]


def test_memory_is_a_curve_for_each_device() -> None:
    memory = [TracedMemory(0.0, 1, 2, 0), TracedMemory(0.0, 3, 4, 0), TracedMemory(1.0, 5, 6, 1)]
    data: Any = page_data(Trace.of([op(1)], memory=memory))
    assert [curve["title"] for curve in data["memory"]] == ["gpu0", "gpu1"]
    assert column(data["memory"][0]["used"]) == [3]  # the last of one moment


def test_an_empty_trace_is_a_page() -> None:
    assert data_of(to_html(Trace.of([])))["lanes"] == []


@pytest.mark.parametrize(
    "name", ["</script><script>", "<!--", "]]>", "\u2028\u2029", "\ud800", "/*data*/", "\x00\x1b"]
)
def test_c48_no_name_ends_the_script_it_stands_in(name: str) -> None:
    page = to_html(Trace.of([op(1, name, scope=name, task=name, where=name, stream=name)]))
    plain = to_html(Trace.of([op(1)]))
    for mark in ("<script", "</script", "<!--", "\u2028", "\u2029", "\x00"):
        assert page.count(mark) == plain.count(mark)
    page.encode()  # a lone surrogate would not be written
    assert data_of(page)["texts"]


def test_above_the_limit_the_graph_begins_with_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamflow.trace.page_data.NUM_OPS_DRAWN_MAX", 10)
    data: Any = page_data(Trace.of([op(number, f"f#{number}") for number in range(200)]))
    first = data["views"][0]
    assert first["key"] == "synopsis"
    assert len(first["labels"]) < 200
    assert len(column(first["of_op"])) == 200


def test_a_notebook_gets_a_table_where_the_page_is_large() -> None:
    assert "<iframe" in Trace.of([op(1)])._repr_html_()
    table = Trace.of([op(number) for number in range(2001)])._repr_html_()
    assert "<table>" in table
    assert "trace.save" in table
    assert len(table) < 2000


def test_a_notebook_without_igraph_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "igraph", None)
    table = Trace.of([op(1)])._repr_html_()
    assert "streamflow-cuda[viz]" in table


def test_lanes_come_in_the_order_of_their_numbers() -> None:
    names = ["compute10", "compute2", "h2d", "compute1"]
    ops = [
        op(number, stream=name, engine="h2d" if name == "h2d" else "compute")
        for number, name in enumerate(names)
    ]
    table: Any = page_data(Trace.of(ops))
    assert table["lanes"] == ["h2d", "compute1", "compute2", "compute10"]
