"""Which test covers which case: read from the names of the tests, never kept by hand.

A test covers case C5 when its name has ``c5`` between underscores:
``test_c5_a_dropped_source_keeps_its_block``.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

__all__ = ["cases_on_page", "tests_by_case"]

_ID_IN_NAME = re.compile(r"(?<=_)(cr?\d+)(?=_|$)")
_ID_IN_HEADING = re.compile(r"^### (CR?\d+)\b", re.MULTILINE)


def cases_on_page(page: Path) -> list[str]:
    """The ids that the headings of the page define, in order."""
    return _ID_IN_HEADING.findall(page.read_text(encoding="utf-8"))


def tests_by_case(root: Path) -> dict[str, list[str]]:
    """For each id, the tests that carry it, as ``path::name`` relative to ``root``.

    Also those of the backend contract, which the modules of tests/contract run.
    """
    found: dict[str, list[str]] = {}
    contract = (root / "streamflow/testing/contract").glob("*.py")
    for path in sorted([*(root / "tests").rglob("test_*.py"), *contract]):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if not node.name.startswith("test_"):
                continue
            where = f"{path.relative_to(root).as_posix()}::{node.name}"
            for case in _ID_IN_NAME.findall(node.name):
                found.setdefault(case.upper(), []).append(where)
    return found
