import html
import re
import subprocess
from pathlib import Path
from shutil import which
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pictured import dot_graph

from streamflow.trace import EdgeReason, Trace, TracedArray, TracedEdge, TracedOp
from streamflow.trace.dot import to_dot
from streamflow.trace.mermaid import to_mermaid

AWKWARD = [
    'say "hi"',
    "back\\slash\\",
    "\\N",
    "two\nlines\r\t",
    "<b>&amp;</b>",
    "semi;colon",
    "ünï→漢",
    "end",
    "1. list",
    "- dash",
    "`code` **bold** __init__",
    "style: a;#b;",
    "%%{init}%%",
    "{x}[y](z)|w|",
    "a:::b",
    "#35;",
    "\x00\ud800",
    "-->",
    "",
]


def op(op_id: int, kind: str, name: str, stream: str, engine: str | None, **more: Any) -> TracedOp:
    facts = {"nbytes": 0, "start_s": None, "end_s": None, "state": "submitted", "where": None}
    return TracedOp(
        id=op_id,
        kind=kind,
        name=name,
        stream=stream,
        engine=engine,
        device=0,
        submitted_s=0.0,
        **{**facts, **more},
    )


def small_trace() -> Trace:
    return Trace.of(
        (
            op(
                1, "put", "x", "h2d", "h2d",
                nbytes=2048, start_s=0.0, end_s=0.001, state="done", where="a.py:3",
            ),
            op(2, "launch", "saxpy", "compute0", "compute", reads=(7,), writes=(8,)),
            op(3, "free", "x", "free", None),
            op(4, "launch", "again", "compute0", "compute", state="failed"),
        ),
        (
            TracedEdge(1, 2, EdgeReason.READ_AFTER_WRITE, True, 7),
            TracedEdge(2, 3, EdgeReason.FREE, False),
            TracedEdge(2, 4, EdgeReason.STREAM_ORDER, False),
            TracedEdge(3, 4, EdgeReason.HOST, False),
            TracedEdge(1, 4, EdgeReason.CAPACITY, False),
        ),
        [TracedArray(7, 64, 0, "b.py:4")],
    )  # fmt: skip


def named(*names: str, device_of_second: int = 0) -> Trace:
    return Trace.of(
        tuple(
            TracedOp(
                i,
                "launch",
                name,
                name,
                "compute",
                device_of_second * i,
                0,
                0,
                None,
                None,
                "done",
                name,
            )
            for i, name in enumerate(names)
        )
    )


def test_dot_golden() -> None:
    assert (
        to_dot(small_trace())
        == r"""digraph streamflow {
  rankdir=LR;
  node [shape=box, style="rounded,filled", fontname="sans-serif", color="#555555"];
  edge [fontname="sans-serif", fontsize=9];
  subgraph cluster_0 {
    label="h2d";
    style=rounded; color="#999999"; fontname="sans-serif";
    op1 [label="x\n2.00 KiB, 1.00 ms", fillcolor="#56b4e9", tooltip="x, 2.00 KiB, 1.00 ms\nput, done, on h2d\na.py:3"];
  }
  subgraph cluster_1 {
    label="compute0";
    style=rounded; color="#999999"; fontname="sans-serif";
    op2 [label="saxpy", fillcolor="#009e73", tooltip="saxpy\nlaunch, submitted, on compute0\nreads array 7 (64 B, made at b.py:4)\nwrites array 8"];
    op4 [label="again", fillcolor="#009e73", tooltip="again\nlaunch, failed, on compute0", color="#d55e00", penwidth=3];
  }
  subgraph cluster_2 {
    label="free";
    style=rounded; color="#999999"; fontname="sans-serif";
    op3 [label="x", fillcolor="#dddddd", tooltip="x\nfree, submitted, on free"];
  }
  op1 -> op2 [label="read-after-write", style=solid, color="#000000", edgetooltip="read-after-write on array 7 (64 B, made at b.py:4)"];
  op2 -> op3 [label="free", style=dashed, color="#444444", edgetooltip="free"];
  op2 -> op4 [label="stream-order", style=dotted, color="#888888", fontcolor="#888888", edgetooltip="stream-order"];
  op3 -> op4 [label="host", style=dashed, color="#0072b2", fontcolor="#0072b2", arrowhead=vee, edgetooltip="host"];
  op1 -> op4 [label="capacity", style=dotted, color="#cc79a7", fontcolor="#cc79a7", arrowhead=dot, constraint=false, edgetooltip="capacity"];
}
"""  # noqa: E501
    )


def test_mermaid_golden() -> None:
    assert (
        to_mermaid(small_trace())
        == """flowchart LR
  subgraph s0["h2d"]
    op1["x<br/>2.00 KiB, 1.00 ms"]:::h2d
  end
  subgraph s1["compute0"]
    op2["saxpy"]:::compute
    op4["again"]:::compute
  end
  subgraph s2["free"]
    op3["x"]:::other
  end
  op1 ==>|read-after-write| op2
  op2 -->|free| op3
  op2 -.->|stream-order| op4
  op3 --o|host| op4
  op1 -.-o|capacity| op4
  linkStyle 3 stroke:#0072b2
  linkStyle 4 stroke:#cc79a7
  classDef h2d fill:#56b4e9,stroke:#555555,color:#000000
  classDef d2h fill:#e69f00,stroke:#555555,color:#000000
  classDef compute fill:#009e73,stroke:#555555,color:#000000
  classDef other fill:#dddddd,stroke:#555555,color:#000000
  classDef failed stroke:#d55e00,stroke-width:4px
  class op4 failed
"""
    )


DOT_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')


def read_dot_label(line: str) -> str:
    """What Graphviz shows: quotes, then its escapes, then entities."""
    match = re.search(r"label=" + DOT_STRING.pattern, line)
    assert match is not None
    text = re.sub(r"\\(.)", lambda m: {"n": "\n"}.get(m[1], m[1]), match[1])
    return html.unescape(text)


@settings(deadline=None)
@given(st.text(max_size=60) | st.sampled_from(AWKWARD))
def test_c48_any_name_survives_dot(name: str) -> None:
    (line,) = (each for each in to_dot(named(name)).split("\n") if "op0 [" in each)
    assert read_dot_label(line) == shown(name)
    # Outside its strings the line is the plain statement it is for any name.
    assert re.fullmatch(r"\s*op0 \[label=S, fillcolor=S, tooltip=S\];", DOT_STRING.sub("S", line))


@settings(deadline=None)
@given(st.text(max_size=60) | st.sampled_from(AWKWARD))
def test_c48_any_name_survives_mermaid(name: str) -> None:
    (line,) = (each for each in to_mermaid(named(name)).split("\n") if "op0[" in each)
    match = re.fullmatch(r'    op0\["([^"]*)"\]:::compute', line)
    assert match is not None
    # Only character codes use marks that the grammar or its pre-processing knows.
    assert re.fullmatch(r"(?:[\w ,./()-]|#\d+;)*", match[1])
    assert re.sub(r"#(\d+);", lambda m: chr(int(m[1])), match[1]) == shown(name)


def shown(name: str) -> str:
    return "".join(
        char if char.isprintable() else " " if char.isspace() else "\ufffd" for char in name
    )


@pytest.mark.parametrize("name", ["1. list", "- dash", "__init__", "    code", "end."])
def test_mermaid_names_start_no_markdown(name: str) -> None:
    (line,) = (each for each in to_mermaid(named(name)).split("\n") if "op0[" in each)
    assert re.search(r'\["(#\d+;|end\.)', line)


def test_long_names_are_shortened() -> None:
    line = next(each for each in to_dot(named("x" * 500)).split("\n") if "op0 [" in each)
    assert read_dot_label(line) == "x" * 79 + "…"


def test_several_devices_are_told_apart() -> None:
    trace = named("s", "s", device_of_second=1)
    for title in ("gpu0", "gpu1"):
        assert f'label="{title}: s"' in to_dot(trace)
        assert f'["{title}#58; s"]' in to_mermaid(trace)


@pytest.mark.parametrize(
    ("name", "first"), [("a.dot", "digraph"), ("a.DOT", "digraph"), ("a.mmd", "flowchart")]
)
def test_save_chooses_by_ending(tmp_path: Path, name: str, first: str) -> None:
    named(*AWKWARD).save(tmp_path / name)
    named(*AWKWARD).save(str(tmp_path / name))
    assert (tmp_path / name).read_text(encoding="utf-8").startswith(first)


def test_save_names_the_known_endings(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'a\.png'.* \.dot, \.mmd, \.svg"):
        small_trace().save(tmp_path / "a.png")


@pytest.mark.parametrize(("name", "node"), [("a.dot", "g0 "), ("a.mmd", "g0[")])
def test_c48_of_too_many_ops_the_synopsis_is_drawn(tmp_path: Path, name: str, node: str) -> None:
    trace = small_trace()
    trace.save(tmp_path / name, max_ops=4)
    assert node not in (tmp_path / name).read_text(encoding="utf-8")
    trace.save(tmp_path / name, max_ops=3)
    text = (tmp_path / name).read_text(encoding="utf-8")
    assert node in text
    assert "4 ops in 4 groups by stream, scope, name" in text
    assert "more than max_ops=3" in text
    assert "all 5 are drawn" in text


def test_mermaid_warns_of_its_viewers_limit() -> None:
    ops = [op(number, "launch", "k", "s", "compute") for number in range(502)]
    edges = [TracedEdge(number - 1, number, EdgeReason.AFTER, False) for number in range(1, 502)]
    assert "%% 501 edges" in to_mermaid(Trace.of(ops, edges))
    assert "%%" not in to_mermaid(small_trace())


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(max_size=20) | st.sampled_from(AWKWARD), min_size=1, max_size=4))
def test_c48_any_names_parse_as_dot(names: list[str]) -> None:
    ops = [
        op(i, name, name, name, "compute", where=name, scope=name, task=name, needs=(name,))
        for i, name in enumerate(names)
    ]
    edges = [TracedEdge(i - 1, i, EdgeReason.AFTER, False) for i in range(1, len(ops))]
    for max_ops, letter in ((9, "op"), (0, "g")):
        nodes, found = dot_graph(Trace.of(ops, edges), max_ops=max_ops)
        assert {node.rstrip("0123456789") for node in nodes} == {letter}
        assert len(nodes) == len(ops)
        assert len(found) == len(edges)


@pytest.mark.skipif(which("dot") is None, reason="Graphviz is not installed")
def test_c48_graphviz_draws_any_names() -> None:
    text = to_dot(named(*AWKWARD))
    done = subprocess.run(["dot", "-Tplain"], input=text.encode(), capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(b"\nnode ") == len(AWKWARD)
