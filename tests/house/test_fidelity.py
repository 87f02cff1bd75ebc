"""The table of what the simulator has in common with a GPU is the list of tests that show it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from streamflow.testing.contract import BackendContract, PeerContract, fidelity_rows

ROW = re.compile(r"^\| (.+?) \| (.+?) \| (.*?) ?\| `(\w+\.test_\w+)` \|$", re.MULTILINE)


def rows_on_page(root: Path) -> dict[str, str]:
    page = (root / "docs/reference/fidelity.md").read_text(encoding="utf-8")
    shown = page.partition("\n## What is not the same")[0]
    lines = [line for line in shown.splitlines() if line.startswith("|")]
    rows = [match for line in lines if (match := ROW.match(line))]
    num_heads = 2 * shown.count("| test |")
    assert len(rows) == len(lines) - num_heads  # every line was understood
    assert len({row[4] for row in rows}) == len(rows)
    return {row[4]: row[1] for row in rows}


def test_the_rows_are_the_tests(root: Path) -> None:
    assert rows_on_page(root) == fidelity_rows()
    assert len(fidelity_rows()) >= 20


def test_every_claim_is_a_sentence() -> None:
    wrong = [claim for claim in fidelity_rows().values() if not claim.rstrip().endswith(".")]
    assert not wrong


def test_both_backends_run_the_whole_contract(root: Path) -> None:
    """A class that a module of tests defines as ``class X(.., BackendContract)``, on each side."""
    for module in ("test_sim_backend.py", "test_cuda_backend.py"):
        tree = ast.parse((root / "tests/contract" / module).read_text(encoding="utf-8"))
        bases = {
            ast.unparse(base)
            for node in tree.body
            if isinstance(node, ast.ClassDef)
            for base in node.bases
        }
        assert {BackendContract.__name__, PeerContract.__name__} <= bases, module


def test_no_backend_leaves_out_a_row(root: Path) -> None:
    """A subclass that defines a row's test anew would run something else under its name."""
    names = {row.partition(".")[2] for row in fidelity_rows()}
    for path in (root / "tests/contract").glob("test_*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert not names & defined, path.name
