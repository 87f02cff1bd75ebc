"""A long random program over streams, lanes and devices equals the same in NumPy (R2 to R9)."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from tests.stress.soak import check_shares, soak_simulated

LOOPS = {
    "asyncio": {"backend": "asyncio"},
    "uvloop": {"backend": "asyncio", "backend_options": {"use_uvloop": True}},
    "trio": {"backend": "trio"},
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ten_thousand_random_ops_equal_a_serial_model(seed: int, loop: str) -> None:
    counts = anyio.run(soak_simulated, 10_000, seed, "virtual", **LOOPS[loop])
    check_shares(counts, 10_000)


@pytest.mark.stress
@pytest.mark.timeout(900)
def test_two_hundred_thousand_random_ops_equal_a_serial_model() -> None:
    counts = asyncio.run(soak_simulated(200_000, 7, "virtual"))
    check_shares(counts, 200_000)


@pytest.mark.stress
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1])
def test_random_ops_that_overlap_in_real_time_equal_a_serial_model(seed: int) -> None:
    counts = asyncio.run(soak_simulated(20_000, seed, "wall"))
    check_shares(counts, 20_000)
