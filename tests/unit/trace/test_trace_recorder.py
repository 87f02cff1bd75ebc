import pytest

from streamflow.runtime.instrument import Note
from streamflow.trace import EdgeReason, Recorder, TracedArray, TracedDevice, TracedEdge, TracedOp

DEVICE = TracedDevice(1, "a device", "sim", True, 100.0, 1e9)


def call(recorder: Recorder, seq: int, kind: str = "launch", called_s: float = 100.0) -> Note:
    origin = (call.__code__, 0)
    note = Note(seq, kind, None, origin, 1, called_s)
    recorder.op_called(note)
    return note


def test_an_op_carries_all_that_was_noted() -> None:
    recorder = Recorder(DEVICE)
    note = call(recorder, 7, "put", 100.5)
    note.label, note.origin = "x", "a.py:3"
    note.writes = ((5, 4096),)
    note.issued_s, note.stream, note.position, note.seen_s = 100.625, "h2d", 3, 101.25
    note.span_s, note.state = (0.75, 1.0), "done"
    note.scope, note.task, note.needs = "scope", "task", ("room on h2d",)
    expected = TracedOp(
        7, "put", "x", "h2d", "h2d", 1, 4096, 0.5, 0.75, 1.0, "done", "a.py:3",
        None, 0.625, 1.25, 3, "scope", "task", ("room on h2d",), False, (), (5,),
    )  # fmt: skip
    assert recorder.trace.ops == (expected,)
    assert recorder.trace.ops[0].duration_s == 0.25
    assert recorder.trace.arrays == (TracedArray(5, 4096, 1, None),)


def test_what_is_not_known_yet_is_none() -> None:
    recorder = Recorder(DEVICE)
    call(recorder, 1)
    (op,) = recorder.trace.ops
    assert (op.start_s, op.end_s, op.duration_s, op.state) == (None, None, None, "parked")
    assert (op.stream, op.engine) == ("host", None)


@pytest.mark.parametrize("reason", EdgeReason)
def test_reasons_come_by_their_values(reason: EdgeReason) -> None:
    recorder = Recorder(DEVICE)
    call(recorder, 1)
    call(recorder, 2)
    note = call(recorder, 3)
    note.edges = [(1, reason.value, 9), (2, reason.value, None)]
    note.waited = [1]
    assert recorder.trace.edges == (
        TracedEdge(1, 3, reason, True, 9),
        TracedEdge(2, 3, reason, False),
    )


def test_the_first_reason_for_an_edge_counts() -> None:
    recorder = Recorder(DEVICE)
    call(recorder, 1)
    call(recorder, 2).edges = [(1, "read-after-write", 4), (1, "stream-order", None)]
    assert recorder.trace.edges == (TracedEdge(1, 2, EdgeReason.READ_AFTER_WRITE, False, 4),)


def test_edges_to_ops_from_before_are_left_for_a_merge() -> None:
    recorder = Recorder(DEVICE)
    call(recorder, 2).edges = [(1, "after", None)]
    assert recorder.trace.edges == ()
    assert recorder.trace._read().loose == (TracedEdge(1, 2, EdgeReason.AFTER, False),)


def test_the_ring_keeps_the_newest() -> None:
    recorder = Recorder(DEVICE, max_ops=2)
    for seq in (1, 2, 3):
        call(recorder, seq).edges = [(seq - 1, "after", None)]
    assert [op.id for op in recorder.trace.ops] == [2, 3]
    assert recorder.trace.num_dropped == 1
    assert [(edge.src, edge.dst) for edge in recorder.trace.edges] == [(2, 3)]


def test_the_trace_is_alive() -> None:
    recorder = Recorder(DEVICE)
    trace = recorder.trace
    assert repr(trace) == "<Trace of 0 ops, 0 edges>"
    note = call(recorder, 1)
    assert [op.state for op in trace.ops] == ["parked"]
    note.state = "failed"
    assert [op.state for op in trace.ops] == ["failed"]


def test_records_are_made_once_when_nothing_can_change() -> None:
    recorder = Recorder(DEVICE)
    note = call(recorder, 1)
    trace = recorder.trace
    recorder.is_over = True
    assert trace.ops is not trace.ops
    note.seen_s = 101.0
    assert trace.ops is trace.ops


def test_the_memory_curve_follows_the_device() -> None:
    recorder = Recorder(DEVICE, nbytes=10)
    taken = call(recorder, 1, "empty")
    taken.allocated_nbytes, taken.issued_s, taken.span_s = 100, 100.1, (0.5, 0.6)
    given = call(recorder, 2, "free")
    given.freed_nbytes, given.issued_s, given.span_s = 100, 100.2, (0.7, 0.9)
    recorder.pinned(100.55, 7)
    call(recorder, 3, "empty").allocated_nbytes = 1000  # parked: it holds nothing yet
    curve = [(each.time_s, each.nbytes, each.pinned_nbytes) for each in recorder.trace.memory]
    assert curve == [(0.5, 110, 0), (pytest.approx(0.55), 110, 7), (0.9, 10, 7)]
