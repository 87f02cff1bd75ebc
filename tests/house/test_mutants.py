"""The table of mistakes that the tests must notice fits the sources."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from mutants import EDITS, place


def test_every_edit_changes_one_place(root: Path) -> None:
    for edit in EDITS:
        assert place(edit, root) != (root / edit.file).read_text(encoding="utf-8")
        for test in edit.tests.split():
            assert (root / test).exists(), test


def test_each_rule_that_keeps_memory_and_order_has_one() -> None:
    rules = Counter(edit.rule for edit in EDITS)
    assert len(EDITS) >= 15
    assert {"R3", "R4", "R5", "R6", "R7", "R9", "R12"} <= set(rules)
