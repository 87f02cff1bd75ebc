import pytest

from streamflow.trace import EdgeReason, Trace, TracedEdge, TracedOp
from streamflow.trace.dot import to_dot
from streamflow.trace.groups import synopsis
from streamflow.trace.mermaid import to_mermaid
from streamflow.trace.svg import to_svg


def op(
    op_id: int, name: str, stream: str = "s", scope: str | None = None, device: int = 0
) -> TracedOp:
    return TracedOp(
        op_id, "launch", name, stream, "compute", device, 10, 0.0, op_id * 1.0, op_id + 0.5,
        "done", None, scope=scope,
    )  # fmt: skip


def test_groups_have_stream_scope_and_name_in_common() -> None:
    ops = [op(i, "ab"[i % 2], "st"[i // 2 % 2], ["x", None][i // 4]) for i in range(8)]
    found = synopsis(Trace.of(ops), max_groups=8)
    assert found.by == ("stream", "scope", "name")
    assert {(each.stream, each.scope, each.name) for each in found.groups} == {
        (each.stream, each.scope, each.name) for each in ops
    }
    assert all(len({ops[i].name for i in each.ops}) == 1 for each in found.groups)


def test_a_group_says_what_its_ops_took() -> None:
    (group,) = synopsis(Trace.of([op(i, "k") for i in range(3)]), max_groups=1).groups
    assert (group.num_ops, group.nbytes, group.start_s, group.end_s) == (3, 30, 0.0, 2.5)
    assert group.busy_s == 1.5
    assert (group.label, group.engine, group.device) == ("3 x k", "compute", 0)


def test_groups_are_cut_at_the_same_moments() -> None:
    ops = [op(i, "ab"[i % 2]) for i in range(16)]
    found = synopsis(Trace.of(ops), max_groups=9)
    assert found.num_slices == 4
    assert [each.ops for each in found.groups[:2]] == [(0, 2), (4, 6)]
    assert str(found) == "16 ops in 8 groups by stream, scope, name in 4 slices of time"


def test_names_that_differ_in_numbers_are_alike_where_they_are_too_many() -> None:
    found = synopsis(
        Trace.of([op(i, f"layer {i}", scope=f"r{i}") for i in range(20)]), max_groups=1
    )
    assert [(each.name, each.scope) for each in found.groups] == [("layer *", "r*")]


def test_names_of_the_runtimes_own_are_one() -> None:
    ops = [op(i, f"launch#{i}") for i in range(20)]
    assert [each.name for each in synopsis(Trace.of(ops), max_groups=1).groups] == ["launch"]


@pytest.mark.parametrize("max_groups", [1, 2, 5, 40])
def test_there_are_never_more_groups_than_asked_for(max_groups: int) -> None:
    ops = [op(i, f"n{i}", f"s{i % 30}", f"x{'y' * i}", device=i % 3) for i in range(60)]
    found = synopsis(Trace.of(ops), max_groups=max_groups)
    assert 1 <= len(found.groups) <= max_groups


def test_edges_are_counted_by_reason() -> None:
    ops = [op(0, "a"), op(1, "a"), op(2, "b"), op(3, "b")]
    edges = [
        TracedEdge(0, 2, EdgeReason.AFTER, True),
        TracedEdge(1, 3, EdgeReason.AFTER, False),
        TracedEdge(1, 2, EdgeReason.HOST, False),
        TracedEdge(0, 1, EdgeReason.STREAM_ORDER, False),
    ]
    found = synopsis(Trace.of(ops, edges), max_groups=2)
    assert [(e.src, e.dst, e.reason, e.num, e.num_issued) for e in found.edges] == [
        (0, 0, EdgeReason.STREAM_ORDER, 1, 0),
        (0, 1, EdgeReason.AFTER, 2, 1),
        (0, 1, EdgeReason.HOST, 1, 0),
    ]


def test_a_group_can_be_looked_at_in_detail() -> None:
    ops = [op(i, "ab"[i % 2]) for i in range(8)]
    edges = [TracedEdge(i, i + 2, EdgeReason.AFTER, False) for i in range(6)]
    trace = Trace.of(ops, edges)
    whole = synopsis(trace, max_groups=2)
    part = synopsis(trace, ops=whole.groups[1].ops, max_groups=4)
    assert [each.ops for each in part.groups] == [(1,), (3,), (5,), (7,)]
    assert [(each.src, each.dst) for each in part.edges] == [(0, 1), (1, 2), (2, 3)]


def test_a_synopsis_needs_a_group() -> None:
    with pytest.raises(ValueError, match="at least 1, not 0"):
        synopsis(Trace.of(()), max_groups=0)


def test_nothing_has_no_groups() -> None:
    assert synopsis(Trace.of(())).groups == ()


def test_c48_pictures_of_100_000_ops_stay_small() -> None:
    num = 100_000
    ops = [op(i, f"k{i % 7}", f"compute{i % 4}", f"r{i % 300}") for i in range(num)]
    edges = [
        TracedEdge(i - back, i, reason, back == 1)
        for i in range(5, num)
        for back, reason in ((1, EdgeReason.AFTER), (4, EdgeReason.STREAM_ORDER))
    ]
    trace = Trace.of(ops, edges)
    found = synopsis(trace)
    assert len(found.groups) <= 100
    assert sum(each.num_ops for each in found.groups) == num
    assert sum(each.num for each in found.edges) == len(edges)
    for text in (to_dot(trace), to_mermaid(trace)):
        assert len(text) < 200_000
        assert str(found) in text
    assert len(to_svg(trace)) < 2_000_000
