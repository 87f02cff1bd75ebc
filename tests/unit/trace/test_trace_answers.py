import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamflow.trace import Overlap, Trace, TracedOp, overlap


def op(
    engine: str | None, start_s: float | None, end_s: float | None, *, device: int = 0
) -> TracedOp:
    return TracedOp(0, "launch", "k", "s", engine, device, 0, 0.0, start_s, end_s, "done", None)


def test_half_of_a_copy_runs_beside_a_kernel() -> None:
    answer = overlap(Trace.of((op("h2d", 0.0, 2.0), op("compute", 1.0, 5.0))))
    assert answer == Overlap(
        busy_s={"compute": 4.0, "h2d": 2.0},
        overlapped_s=1.0,
        span_s=5.0,
        ideal_s=4.0,
        ratio=0.5,
    )


def test_one_engine_has_nothing_to_overlap() -> None:
    answer = overlap(Trace.of((op("compute", 0.1, 0.4), op("compute", 0.2, 0.7))))
    assert (answer.overlapped_s, answer.ratio) == (0.0, 0.0)
    assert answer.busy_s == {"compute": pytest.approx(0.6)}


def test_an_engine_that_was_never_busy_has_nothing_to_overlap() -> None:
    answer = overlap(Trace.of((op("compute", 0.1, 0.4), op("h2d", 0.2, 0.2))))
    assert (answer.overlapped_s, answer.ratio) == (0.0, 0.0)


def test_everything_at_once_is_the_whole_of_it() -> None:
    answer = overlap(Trace.of(tuple(op(engine, 0.1, 0.7) for engine in ("h2d", "d2h", "compute"))))
    assert answer.ratio == pytest.approx(1.0)
    assert answer.span_s == answer.ideal_s


def test_ops_without_engine_or_time_occupy_nothing() -> None:
    answer = overlap(Trace.of((op(None, 0.0, 9.0), op("h2d", None, None), op("d2h", 1.0, 2.0))))
    assert answer.busy_s == {"d2h": 1.0}
    assert answer.span_s == 9.0


def test_an_empty_trace_is_all_zeros() -> None:
    assert Trace.of(()).overlap() == Overlap({}, 0.0, 0.0, 0.0, 0.0)


def test_engines_of_several_devices_are_kept_apart() -> None:
    answer = overlap(Trace.of((op("h2d", 0.0, 1.0), op("h2d", 0.0, 1.0, device=1))))
    assert answer.busy_s == {"gpu0:h2d": 1.0, "gpu1:h2d": 1.0}
    assert answer.ratio == 1.0


def test_str_is_a_table() -> None:
    answer = overlap(Trace.of((op("h2d", 0.0, 0.002), op("compute", 0.001, 0.005))))
    assert str(answer) == (
        "engine        busy  of span\n"
        "compute    4.00 ms     80%\n"
        "h2d        2.00 ms     40%\n"
        "span 5.00 ms, ideal 4.00 ms, overlapped 1.00 ms (50% of what could be)"
    )


def test_str_of_nothing() -> None:
    assert "span 0 s" in str(overlap(Trace.of(())))
    assert "0%" in str(overlap(Trace.of((op("h2d", 1.0, 1.0),))))


SLOTS = 20
intervals = st.tuples(st.integers(0, SLOTS), st.integers(0, SLOTS)).map(sorted)


@given(st.lists(st.tuples(st.sampled_from(["h2d", "d2h", "compute"]), intervals)))
def test_agrees_with_counting_slots(drawn: list[tuple[str, list[int]]]) -> None:
    answer = overlap(
        Trace.of(tuple(op(engine, start / 4, end / 4) for engine, (start, end) in drawn))
    )
    used = {engine: set[int]() for engine, _ in drawn}
    for engine, (start, end) in drawn:
        used[engine] |= set(range(start, end))
    busy = {engine: len(slots) / 4 for engine, slots in used.items()}
    union = len(set().union(*used.values())) / 4
    assert answer.busy_s == busy
    assert answer.ideal_s == max(busy.values(), default=0)
    assert answer.overlapped_s == sum(busy.values()) - union
    possible = sum(busy.values()) - answer.ideal_s
    assert answer.ratio == (answer.overlapped_s / possible if possible else 0.0)


seconds = st.floats(0, 1e3)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["h2d", "d2h", "compute"]), st.tuples(seconds, seconds).map(sorted)
        )
    )
)
def test_stays_within_bounds(drawn: list[tuple[str, list[float]]]) -> None:
    answer = overlap(Trace.of(tuple(op(engine, start, end) for engine, (start, end) in drawn)))
    assert 0.0 <= answer.ratio <= 1.0
    assert answer.overlapped_s >= 0.0
    assert answer.ideal_s <= answer.span_s * (1 + 1e-9)
