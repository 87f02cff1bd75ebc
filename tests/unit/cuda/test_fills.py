"""Fills written by the driver's three widths leave the bytes that were asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamflow.backends.cuda.fills import Column, Copy, Row, narrowed, plan_fill

_BASE = 4096


def _written(steps: tuple[Row | Column | Copy, ...], nbytes: int) -> bytes:
    """What a driver that does as the plan says leaves in memory that was all 0xEE."""
    memory = bytearray(b"\xee" * nbytes)
    for step in steps:
        if isinstance(step, Copy):
            source = step.source - _BASE
            at = step.address - _BASE
            assert source + step.nbytes <= at, "a copy reads what was written before it"
            memory[at : at + step.nbytes] = memory[source : source + step.nbytes]
            continue
        width = step.width if isinstance(step, Row) else 4
        pitch = step.width if isinstance(step, Row) else step.pitch
        value = step.value.to_bytes(width, "little")
        for index in range(step.num_values):
            at = step.address - _BASE + index * pitch
            assert at % width == 0, "the driver wants aligned addresses"
            memory[at : at + width] = value
    return bytes(memory)


@given(
    unit=st.binary(min_size=1, max_size=1)
    | st.binary(min_size=2, max_size=2)
    | st.binary(min_size=4, max_size=4)
    | st.binary(min_size=8, max_size=8)
    | st.binary(min_size=16, max_size=16),
    doublings=st.integers(0, 4),
    count=st.integers(0, 9),
    offset=st.integers(0, 3),
)
def test_the_plan_writes_the_pattern(unit: bytes, doublings: int, count: int, offset: int) -> None:
    pattern = unit * (1 << doublings)
    if len(pattern) > 16:
        pattern = unit
    at = offset * len(pattern)
    steps = plan_fill(_BASE + at, pattern, count)
    nbytes = at + len(pattern) * count + 16
    expected = b"\xee" * at + pattern * count + b"\xee" * 16
    assert _written(steps, nbytes) == expected
    assert len(steps) <= 4


@pytest.mark.parametrize(
    ("pattern", "num_calls"),
    [
        (b"\x01", 1),
        (b"\x01\x02\x03\x04", 1),
        (bytes(16), 1),
        (b"abcd" * 4, 1),
        (b"abcdefgh" * 2, 2),
        (b"abcdefgh", 2),
        (b"0123456789abcdef", 4),
    ],
)
def test_as_few_calls_as_the_pattern_allows(pattern: bytes, num_calls: int) -> None:
    assert len(plan_fill(_BASE, pattern, 1000)) == num_calls


def test_wide_zeros_stay_four_bytes_wide() -> None:
    """Wider stores are faster, so a pattern is narrowed no further than needed."""
    assert plan_fill(_BASE, bytes(8), 3) == (Row(_BASE, 4, 0, 6),)


def test_a_pattern_that_repeats_may_start_anywhere() -> None:
    assert plan_fill(_BASE + 1, b"\x07\x07\x07\x07", 2) == (Row(_BASE + 1, 1, 7, 8),)
    assert plan_fill(_BASE + 2, b"\x07\x08\x07\x08", 2) == (Row(_BASE + 2, 2, 0x0807, 4),)


def test_narrowed_keeps_what_does_not_repeat() -> None:
    assert narrowed(b"aabaaaba", 1) == b"aaba"
    assert narrowed(b"aaaa", 2) == b"aa"


@pytest.mark.parametrize(
    ("address", "pattern", "count", "match"),
    [
        (_BASE, b"abc", 1, "found 3"),
        (_BASE, b"", 1, "found 0"),
        (_BASE, b"a", -1, "found -1"),
        (_BASE + 1, b"abcd", 1, "multiple of 4"),
        (_BASE + 2, b"abcdefgh", 1, "multiple of 4"),
        (_BASE + 1, b"ab", 1, "multiple of 2"),
    ],
)
def test_what_cannot_be_filled_is_refused(
    address: int, pattern: bytes, count: int, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        plan_fill(address, pattern, count)


@pytest.mark.parametrize("count", [4095, 4096, 4097, 3 * 4096 + 5])
def test_long_runs_of_wide_patterns_are_doubled_by_copies(count: int) -> None:
    pattern = b"01234567"
    steps = plan_fill(_BASE, pattern, count)
    assert _written(steps, 8 * count) == pattern * count
    assert len(plan_fill(_BASE, pattern, 1 << 27)) == 2 + 15
