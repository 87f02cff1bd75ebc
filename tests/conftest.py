"""What all tests have in common."""

from __future__ import annotations

import gc

import hypothesis  # noqa: F401 (before the freeze: it looks for who refers to trio's dice)
import pytest


@pytest.fixture(autouse=True, scope="module")
def only_what_this_module_makes_is_collected() -> None:
    """Leave the tests, their reports and all modules out of collections.

    Many tests collect: that takes 0.3 s a time in a long run, and next to nothing so.
    """
    gc.collect()
    gc.freeze()
