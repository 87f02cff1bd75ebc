"""The commands that the README gives are the commands that CI runs."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def commands(root: Path) -> list[str]:
    """The bash blocks above the README's first heading of second level."""
    opening = (root / "README.md").read_text(encoding="utf-8").split("\n## ")[0]
    return [block.strip() for block in re.findall(r"```bash\n(.*?)```", opening, re.DOTALL)]


def test_the_readme_opens_with_two_commands_of_one_line(commands: list[str]) -> None:
    assert [command.rpartition(" ")[2] for command in commands] == ["demo", "tests"]
    assert not [command for command in commands if "\n" in command]


def test_ci_runs_the_second_command_word_for_word(root: Path, commands: list[str]) -> None:
    lines = (root / ".ci/run").read_text(encoding="utf-8").splitlines()
    assert [line.strip() for line in lines].count(commands[1]) == 1


def test_ci_can_be_executed(root: Path) -> None:
    assert os.access(root / ".ci/run", os.X_OK)


def test_every_session_that_is_named_exists(root: Path) -> None:
    tree = ast.parse((root / "noxfile.py").read_text(encoding="utf-8"))
    sessions = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        if any("nox.session" in ast.unparse(decorator) for decorator in node.decorator_list)
    }
    named = set()
    for name in ("README.md", ".ci/run", "docs/explanation/performance.md", "pyproject.toml"):
        text = (root / name).read_text(encoding="utf-8")
        for words in re.findall(r"nox -s ((?:[a-z]+ ?)+)", text):
            named.update(words.split())
    assert {"demo", "tests", "lint", "types", "layers", "docs", "sample"} <= sessions
    assert named <= sessions
