"""How long engines were busy with the ops of a trace, and would be at other rates."""

from __future__ import annotations

import pytest

from streamflow.trace import TracedOp
from streamflow.trace.durations import Rates, durations

MIB = 1 << 20


def op(place: int, start_s: float, end_s: float, kind: str = "put", nbytes: int = 0) -> TracedOp:
    engine = {"put": "h2d", "get": "d2h"}.get(kind, "compute")
    return TracedOp(
        place, kind, kind, engine, engine, 0, nbytes, 0.0, start_s, end_s, "done", None
    )  # fmt: skip


def copy_s(nbytes: int) -> float:
    return 1e-5 + nbytes / 1e10


def queued(*sizes: int) -> list[TracedOp]:
    """Copies that have all begun at 0, one after the other on the engine."""
    ops, end_s = [], 0.0
    for place, nbytes in enumerate(sizes):
        end_s += copy_s(nbytes)
        ops.append(op(place, 0.0, end_s, "put", nbytes))
    return ops


def test_only_kernels_follow_the_kernel_speed() -> None:
    ops = [op(n, n, n + 0.5, kind) for n, kind in enumerate(["launch", "call", "graph", "fill"])]
    assert durations(ops, Rates(kernel_speed=2)) == {0: 0.25, 1: 0.25, 2: 0.25, 3: 0.5}


def test_copies_that_wait_for_each_other_are_told_apart() -> None:
    sizes = [MIB, 4 * MIB, 2 * MIB]
    assert durations(queued(*sizes), Rates()) == pytest.approx(
        {place: copy_s(nbytes) for place, nbytes in enumerate(sizes)}
    )


def test_the_fixed_part_stays_where_the_rate_changes() -> None:
    ops = [op(n, n, n + copy_s(n * MIB), "put", n * MIB) for n in range(1, 5)]
    assert durations(ops, Rates(h2d_rate=1e9)) == pytest.approx(
        {n: 1e-5 + n * MIB / 1e9 for n in range(1, 5)}
    )
    assert durations(ops, Rates(d2h_rate=1e9)) == pytest.approx(
        {n: copy_s(n * MIB) for n in range(1, 5)}
    )


def test_two_that_took_turns_share_the_time_by_their_bytes() -> None:
    total_s = 2 * copy_s(64 * MIB)
    ops = [op(0, 0.0, total_s - 1e-4, "put", 64 * MIB), op(1, 0.0, total_s, "put", 64 * MIB)]
    assert durations(ops, Rates()) == pytest.approx({0: total_s / 2, 1: total_s / 2})


def test_no_copy_is_faster_than_its_rate() -> None:
    ops = [op(0, 0.0, 1.0, "put", MIB), op(1, 2.0, 2.001, "put", 100 * MIB)]
    found = durations(ops, Rates(h2d_rate=1e9))
    assert found[1] >= 100 * MIB / 1e9


def test_empty_copies_take_what_they_took() -> None:
    assert durations([op(0, 0.0, 1.0), op(1, 0.5, 2.0)], Rates(h2d_rate=1.0)) == {0: 1.0, 1: 1.0}
