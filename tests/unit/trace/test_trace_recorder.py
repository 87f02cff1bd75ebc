import pytest

from streamflow.trace import EdgeReason, Recorder, TracedEdge, TracedOp


def submit(recorder: Recorder, op_id: int, now_s: float = 0.0) -> None:
    recorder.op_submitted(
        op_id, "launch", f"k{op_id}", "compute0", "compute", 0, 64, "a.py:1", now_s
    )


def test_an_op_carries_all_that_was_noted() -> None:
    recorder = Recorder(start_s=100.0)
    recorder.op_submitted(7, "put", "x", "h2d", "h2d", 1, 4096, "a.py:3", 100.5)
    recorder.op_timed(7, 0.75, 1.0)
    recorder.op_done(7, "done")
    assert recorder.trace.ops == (
        TracedOp(7, "put", "x", "h2d", "h2d", 1, 4096, 0.5, 0.75, 1.0, "done", "a.py:3"),
    )
    assert recorder.trace.ops[0].duration_s == 0.25


def test_what_is_not_known_yet_is_none() -> None:
    recorder = Recorder()
    submit(recorder, 1)
    (op,) = recorder.trace.ops
    assert (op.start_s, op.end_s, op.duration_s, op.state) == (None, None, None, "submitted")


@pytest.mark.parametrize("reason", EdgeReason)
def test_reasons_come_as_members_or_as_values(reason: EdgeReason) -> None:
    recorder = Recorder()
    submit(recorder, 1)
    submit(recorder, 2)
    recorder.edge(1, 2, reason, True)
    recorder.edge(1, 2, reason.value, False)
    assert recorder.trace.edges == (
        TracedEdge(1, 2, reason, True),
        TracedEdge(1, 2, reason, False),
    )


def test_an_unknown_reason_is_refused_when_read() -> None:
    recorder = Recorder()
    submit(recorder, 1)
    recorder.edge(1, 1, "because", True)
    with pytest.raises(ValueError, match="because"):
        recorder.trace.edges  # noqa: B018


def test_notes_about_ops_from_before_are_dropped() -> None:
    recorder = Recorder()
    submit(recorder, 2)
    recorder.edge(1, 2, "after", True)
    recorder.edge(2, 3, "after", True)
    recorder.op_timed(1, 0.0, 1.0)
    recorder.op_done(1, "done")
    assert [op.id for op in recorder.trace.ops] == [2]
    assert recorder.trace.edges == ()


def test_the_trace_is_alive() -> None:
    recorder = Recorder()
    trace = recorder.trace
    assert repr(trace) == "<Trace of 0 ops, 0 edges>"
    submit(recorder, 1)
    assert [op.state for op in trace.ops] == ["submitted"]
    recorder.op_done(1, "failed")
    assert [op.state for op in trace.ops] == ["failed"]


def test_the_last_note_counts() -> None:
    recorder = Recorder()
    submit(recorder, 1)
    for state, end_s in (("submitted", 2.0), ("done", 3.0)):
        recorder.op_done(1, state)
        recorder.op_timed(1, 1.0, end_s)
    (op,) = recorder.trace.ops
    assert (op.state, op.duration_s) == ("done", 2.0)


def test_records_are_made_once() -> None:
    recorder = Recorder()
    submit(recorder, 1)
    assert recorder.trace.ops is recorder.trace.ops
