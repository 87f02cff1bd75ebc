"""The rules at their thresholds, on traces made by hand."""

from __future__ import annotations

from typing import Any

import pytest
from traces_by_hand import edge, op

from streamflow.trace import Trace, TracedArray
from streamflow.trace import hints as rules


def kinds(trace: Trace) -> list[str]:
    return [hint.kind.value for hint in trace.hints()]


def starved(num: int, wait_s: float) -> Trace:
    """Staged copies, each of which begins ``wait_s`` after the last."""
    ops, at_s = [], 0.0
    for number in range(num):
        facts: dict[str, Any] = {"submitted_s": 0.0, "begun_s": at_s, "issued_s": at_s + 2}
        ops.append(op(number, "h2d", at_s + wait_s, at_s + wait_s + 1, is_staged=True, **facts))
        at_s += wait_s + 1
    return Trace.of(ops)


def test_staging_that_starves_is_named() -> None:
    (hint,) = starved(rules.NUM_STARVED, 1.0).hints()
    assert hint.kind is rules.HintKind.STAGING
    assert "waited 3.00 s for staging while the h2d engine had nothing to do" in hint.text
    assert "staging_threads" in hint.text
    assert [each.id for each in hint.ops] == [0, 1, 2]


@pytest.mark.parametrize(("num", "wait_s"), [(rules.NUM_STARVED - 1, 1.0), (8, 0.05), (8, 0.0)])
def test_staging_that_hardly_waits_is_not(num: int, wait_s: float) -> None:
    assert kinds(starved(num, wait_s)) == []


def test_an_engine_that_keeps_several_waiting_is_idle_once() -> None:
    at_once: dict[str, Any] = {"is_staged": True, "begun_s": 0.0, "issued_s": 9.0}
    ops = [op(n, "h2d", 3.0 + n, 4.0 + n, where="prog.py:1", **at_once) for n in range(3)]
    (hint,) = Trace.of([op(9, "compute0", 0.0, 1.0), *ops]).hints()
    assert hint.kind is rules.HintKind.STAGING
    assert "3 copies of pageable arrays at prog.py:1 waited 3.00 s for staging" in hint.text


def pageable(num: int, nbytes: int, **facts: Any) -> Trace:
    more = {"is_staged": True, "begun_s": 0.0, "where": "prog.py:3", "nbytes": nbytes, **facts}
    return Trace.of([op(i, "h2d", float(i), i + 1.0, **more) for i in range(num)])


def test_large_pageable_copies_of_one_line() -> None:
    num, nbytes = rules.NUM_PAGEABLE, rules.PAGEABLE_NBYTES
    assert "pageable" in kinds(pageable(num, nbytes))
    assert "pageable" not in kinds(pageable(num - 1, nbytes))
    assert "pageable" not in kinds(pageable(num, nbytes - 1))
    assert "pageable" not in kinds(pageable(num, nbytes, is_staged=False))


def reused(num: int, **facts: Any) -> Trace:
    """Copies into one array, each of which waits for a kernel that reads it."""
    ops, edges = [], []
    for turn in range(num):
        copy, kernel, at_s = 2 * turn + 1, 2 * turn + 2, 2.0 * turn
        more: dict[str, Any] = {"writes": (99,), "nbytes": 8, **facts}
        ops.append(op(copy, "h2d", at_s, at_s + 1, **more))
        ops.append(op(kernel, "compute0", at_s + 1, at_s + 2, reads=(99,)))
        edges.append(edge(copy, kernel, array=99))
        if turn:
            edges.append(edge(kernel - 2, copy, "write-after-read", 99))
    return Trace.of(ops, edges, [TracedArray(99, 8, 0, "prog.py:9")])


def test_an_array_that_is_overwritten_while_in_use() -> None:
    num = rules.NUM_REUSED + 1  # the first copy waits for nobody
    (hint,) = reused(num).hints()
    assert hint.kind is rules.HintKind.FALSE_DEPENDENCY
    assert "array #99 (8 B) made at prog.py:9" in hint.text
    assert kinds(reused(num - 1)) == []


@pytest.mark.parametrize("facts", [{"nbytes": 4}, {"reads": (99,)}])
def test_an_array_that_keeps_some_of_its_contents_is_no_reuse(facts: dict[str, Any]) -> None:
    assert kinds(reused(8, **facts)) == []


def small(num: int, length_s: float, lines: int = 1) -> Trace:
    return Trace.of(
        [
            op(i, "compute0", i * 1e-4, i * 1e-4 + length_s, where=f"prog.py:{i % lines}")
            for i in range(num)
        ]
    )


def test_small_launches() -> None:
    num, length_s = rules.NUM_SMALL, 0.9 * rules.SMALL_S
    assert kinds(small(num, length_s)) == ["small-ops"]
    assert kinds(small(num - 1, length_s)) == []
    assert kinds(small(num, 1.1 * rules.SMALL_S)) == []
    assert kinds(small(num, length_s, lines=num)) == []  # each line once: nothing to record
    copies = [op(1000 + i, "h2d", i * 1e-4, i * 1e-4 + 1e-5) for i in range(num + 1)]
    assert kinds(Trace.of([*small(num, length_s).ops, *copies])) == []


def awaited(num: int, num_ahead: int) -> Trace:
    """Batches of ``num_ahead`` ops that are called for at once, each after the last's end."""
    ops = []
    for number in range(num):
        called_s = float(number - number % num_ahead)
        facts: dict[str, Any] = {"submitted_s": called_s, "issued_s": called_s}
        ops.append(op(number, "compute0", float(number), number + 1.0, **facts))
    return Trace.of(ops)


def test_ops_awaited_one_by_one() -> None:
    num = rules.NUM_AWAITED + 1
    assert kinds(awaited(num, 1)) == ["await-each"]
    assert kinds(awaited(num - 1, 1)) == []
    assert kinds(awaited(4 * num, 2)) == []
