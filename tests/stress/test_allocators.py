"""Eight threads on every sub-allocator: a moment in every run, a minute in the session stress."""

from __future__ import annotations

import pytest

from tests.stress.allocators import ALLOCATORS, main, soak


@pytest.mark.parametrize("name", ALLOCATORS)
def test_eight_threads_keep_the_invariants(name: str) -> None:
    counts = soak(name, seconds=1.0, backend="sim")
    assert counts["allocate"]
    assert counts["free"]


@pytest.mark.stress
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ALLOCATORS)
def test_eight_threads_keep_the_invariants_for_a_minute(name: str) -> None:
    counts = soak(name, seconds=60.0, backend="sim", seed=1)
    assert counts["checked"]


@pytest.mark.gpu
@pytest.mark.stress
@pytest.mark.timeout(600)
def test_eight_threads_keep_the_invariants_on_a_gpu() -> None:
    assert main(["--seconds", "60", "--backend", "cuda"]) == 0
