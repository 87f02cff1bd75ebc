"""Chrome traces, read by Perfetto's own trace processor."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from perfetto_engine import Processor
from pictured import svg_edges

from streamflow.trace import EdgeReason, Trace, TracedDevice, TracedEdge, TracedMemory, TracedOp
from streamflow.trace.chrome import to_chrome

PUT = TracedOp(
    1, "put", "x", "h2d", "h2d", 0, 64, 0.0, 0.001, 0.002, "done", "a.py:3",
    begun_s=0.0005, issued_s=0.0008, is_staged=True, scope="s", task="t", needs=("memory",),
)  # fmt: skip
KERNEL = TracedOp(2, "launch", "k", "c", "compute", 0, 0, 0, 0.002, 0.005, "done", None)
FREE = TracedOp(3, "free", "x", "c", None, 0, 64, 0, 0.005, 0.005, "done", None)
FAILED = TracedOp(
    4, "launch", "bad", "d", "compute", 0, 0, 0.001, None, None, "failed", None, seen_s=0.006
)
HOST = TracedOp(5, "host", "f", "host", None, 0, 0, 0, 0.007, 0.008, "done", None)
FAR = TracedOp(6, "launch", "k", "c", "compute", 1, 0, 0, 0.008, 0.009, "done", None)
AFTER = EdgeReason.AFTER


def trace_of(*ops: TracedOp, edges: list[tuple[int, int]] = []) -> Trace:  # noqa: B006
    return Trace.of(
        ops,
        [TracedEdge(src, dst, AFTER, True) for src, dst in edges],
        memory=[TracedMemory(0.001, 10, 3, 0), TracedMemory(0.004, 20, 5, 0)],
        devices=[TracedDevice(0, "a device", "sim", True, 0.0, 0.0)],
    )


def test_each_op_is_a_slice_in_the_thread_of_its_stream() -> None:
    with Processor(to_chrome(trace_of(PUT, KERNEL, FREE, FAILED, HOST, FAR))) as processor:
        assert processor.slices("op") == {
            1: ("x", 1_000_000, 1_000_000, "h2d"),
            2: ("k", 2_000_000, 3_000_000, "c"),
            3: ("x", 5_000_000, 0, "c (took no time)"),
            4: ("bad", 6_000_000, 0, "d (took no time)"),
            6: ("k", 8_000_000, 1_000_000, "c"),
        }
        assert processor.slices("host") == {5: ("f", 7_000_000, 1_000_000, "host")}
        assert processor.slices("staging") == {1: ("x", 500_000, 300_000, "host: staging")}
        processes = "select name as name from process where name is not null order by pid"
        assert processor.rows(processes) == [("gpu0: a device",), ("gpu1",)]
        assert processor.complaints() == []


def test_a_stream_may_be_named_like_a_lane_of_the_hosts() -> None:
    ops = [replace(PUT, stream="host: staging"), replace(KERNEL, stream="host")]
    trace = trace_of(*ops, edges=[(1, 2)])
    with Processor(to_chrome(trace)) as processor:
        assert processor.flows() == [(1, 2, "after")]
    assert svg_edges(trace) == [(1, 2, "after")]


def test_a_clock_that_goes_back_gives_no_negative_time() -> None:
    with Processor(to_chrome(trace_of(replace(PUT, end_s=0.0005)))) as processor:
        assert processor.slices("op")[1][1:3] == (1_000_000, 0)


def test_args_say_what_an_op_was() -> None:
    with Processor(to_chrome(trace_of(PUT))) as processor:
        sql = (
            "select key as key, display_value as value from args join slice using (arg_set_id) "
            "where category = 'op'"
        )
        assert dict(processor.rows(sql)) == {
            "args.op": "1", "args.kind": "put", "args.state": "done", "args.bytes": "64",
            "args.where": "a.py:3", "args.scope": "s", "args.task": "t", "args.needs": "memory",
            "args.staged": "true", "args.queued_us": "200.0",
        }  # fmt: skip


def test_memory_is_two_counters() -> None:
    with Processor(to_chrome(trace_of(PUT))) as processor:
        sql = (
            "select t.name as name, ts as ts, value as value from counter c "
            "join counter_track t on t.id = c.track_id order by 1, 2"
        )
        assert processor.rows(sql) == [
            ("memory in use", 1_000_000, 10.0),
            ("memory in use", 4_000_000, 20.0),
            ("memory pinned", 1_000_000, 3.0),
            ("memory pinned", 4_000_000, 5.0),
        ]


def test_edges_between_streams_are_flows() -> None:
    edges = [(1, 2), (2, 3), (2, 4), (3, 5), (4, 5), (2, 6)]
    with Processor(to_chrome(trace_of(PUT, KERNEL, FREE, FAILED, HOST, FAR, edges=edges))) as found:
        between = [edge for edge in edges if edge != (2, 3)]  # these two are of one stream
        assert found.flows() == sorted((*edge, "after") for edge in between)


def test_ops_of_one_moment_are_told_apart() -> None:
    """A reader binds a flow to what it read last, also where all have the same time."""
    ops = [replace(FREE, id=number, stream="ab"[number % 2]) for number in range(10, 20)]
    edges = [(src, dst) for src in range(10, 20) for dst in range(10, 20) if (dst - src) % 2]
    forward = [edge for edge in edges if edge[0] < edge[1]]
    with Processor(to_chrome(trace_of(*ops, edges=forward))) as processor:
        assert processor.flows() == [(*edge, "after") for edge in forward]
    # Room that a later one makes for one that was called for earlier:
    with Processor(to_chrome(trace_of(*ops, edges=[(19, 10), (13, 12)]))) as processor:
        assert processor.flows() == [(13, 12, "after"), (19, 10, "after")]


def test_an_edge_back_in_time_is_left_out() -> None:
    text = to_chrome(trace_of(PUT, KERNEL, edges=[(2, 1)]))
    assert not [each for each in json.loads(text)["traceEvents"] if each["ph"] in "sf"]


def test_overlapping_ops_of_a_stream_are_in_rows() -> None:
    ops = [replace(PUT, id=i, start_s=i * 1e-3, end_s=(i + 2) * 1e-3) for i in range(4)]
    with Processor(to_chrome(trace_of(*ops))) as processor:
        lanes = [lane for _, (*_, lane) in sorted(processor.slices("op").items())]
        assert lanes == ["h2d", "h2d (2)", "h2d", "h2d (2)"]


@settings(max_examples=4, deadline=None, derandomize=True, phases=[Phase.generate])
@given(st.lists(st.integers(0, 10**15), min_size=30, max_size=60))
def test_times_are_exact_to_the_nanosecond(times_ns: list[int]) -> None:
    ops = [
        replace(PUT, id=i, start_s=time / 1e9, end_s=time / 1e9 + 1e-6)
        for i, time in enumerate(times_ns)
    ]
    with Processor(to_chrome(trace_of(*ops))) as processor:
        found = {i: (ts, dur) for i, (_, ts, dur, _) in processor.slices("op").items()}
    for i, op in enumerate(ops):
        assert op.start_s is not None
        assert op.end_s is not None
        start, end = round(op.start_s * 1e9), round(op.end_s * 1e9)
        assert found[i] == (start, end - start)


@settings(max_examples=6, deadline=None, derandomize=True, phases=[Phase.generate])
@given(st.lists(st.text(max_size=30), min_size=20, max_size=20))
def test_c48_any_name_survives_perfetto(names: list[str]) -> None:
    names = [*names, '"\\', "\x00\ud800", "</script>", "a\nb", "漢→\U0001f600"]
    ops = [
        replace(PUT, id=i, name=name, stream=name or "s", scope=name, task=name, where=name)
        for i, name in enumerate(names)
    ]
    shown = []
    for name in names:
        text = "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in name)
        shown.append(text + " " * text.endswith("\\") or "[No name]")
    with Processor(to_chrome(trace_of(*ops))) as processor:
        found = processor.slices("op")
        for i, text in enumerate(shown):  # it leaves backslashes doubled in some
            assert found[i][0] in (text, text.replace("\\", "\\\\"))
        assert processor.complaints() == []


def test_the_same_trace_gives_the_same_text(tmp_path: Path) -> None:
    trace = trace_of(PUT, KERNEL, FREE, edges=[(1, 2)])
    trace.save(tmp_path / "a.chrome.json")
    trace.save(tmp_path / "b.CHROME.JSON")
    first, second = ((tmp_path / name).read_bytes() for name in ("a.chrome.json", "b.CHROME.JSON"))
    assert first == second
    assert first.startswith(b'{"displayTimeUnit":"ns"')


def test_nothing_is_a_trace_too() -> None:
    with Processor(to_chrome(Trace.of(()))) as processor:
        assert processor.slices("op") == {}


@pytest.mark.parametrize("reason", EdgeReason)
def test_flows_are_named_for_their_reason(reason: EdgeReason) -> None:
    trace = Trace.of([PUT, KERNEL], [TracedEdge(1, 2, reason, True, 7)])
    (begin,) = (e for e in json.loads(to_chrome(trace))["traceEvents"] if e["ph"] == "s")
    assert begin["name"] == reason.value
    assert begin["args"] == {"issued": True, "array": 7}
