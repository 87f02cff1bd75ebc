"""What is cited exists: case ids in names of tests, rules in code, decisions, settings, rooms."""

from __future__ import annotations

import re
from pathlib import Path

import doc_cases
import doc_layers
import doc_settings

TEXTS = ("*.py", "*.md")


def texts_under(root: Path, *tops: str) -> list[Path]:
    found = [root / "README.md"]
    for top in tops:
        for pattern in TEXTS:
            found += (root / top).rglob(pattern)
    return [path for path in found if not {"_build", "_generated"} & set(path.parts)]


def test_every_case_that_a_test_names_is_on_the_page(root: Path) -> None:
    on_page = doc_cases.cases_on_page(root / "docs/reference/cases.md")
    assert len(on_page) == len(set(on_page))
    by_case = doc_cases.tests_by_case(root)
    unknown = {case: tests for case, tests in by_case.items() if case not in on_page}
    assert not unknown


def test_every_rule_that_is_cited_exists(root: Path) -> None:
    page = (root / "docs/explanation/rules.md").read_text(encoding="utf-8")
    rules = set(re.findall(r"^## R(\d+) ", page, re.MULTILINE))
    assert rules == {str(number) for number in range(1, 16)}
    wrong = {
        f"{path.relative_to(root)}: R{number}"
        for path in texts_under(root, "streamflow", "tests", "docs", "examples")
        for number in re.findall(r"\bR(\d+)\b", path.read_text(encoding="utf-8"))
        if number not in rules
    }
    assert not wrong


def test_decisions_are_numbered_without_gaps_and_stay_short(root: Path) -> None:
    pages = sorted((root / "docs/decisions").glob("[0-9]*.md"))
    assert [page.name[:4] for page in pages] == [f"{n:04}" for n in range(1, len(pages) + 1)]
    for page in pages:
        lines = page.read_text(encoding="utf-8").splitlines()
        assert len(lines) < 60, page.name
        assert lines[0].startswith(f"# {int(page.name[:4])}. "), page.name
        headings = [line for line in lines if line.startswith("## ")]
        assert headings == [
            "## Context",
            "## Decision",
            "## Consequences",
            "## What would change our mind",
        ], page.name


def test_every_setting_is_documented() -> None:
    assert all(meaning for *_, meaning in doc_settings.settings_rows())


def test_what_the_readme_calls_not_built_is_not_in_the_tree(root: Path) -> None:
    readme = (root / "README.md").read_text(encoding="utf-8")
    sentence = re.search(r"\*\*Not built yet:\*\*(.*?)\.\s", readme, re.DOTALL)
    claimed = set(re.findall(r"`(\w+)`", sentence[1])) if sentence else set()
    rooms = set(doc_layers.read_rooms(root / "streamflow"))
    planned = {name for row in doc_layers.layers_of(root / "pyproject.toml") for name in row}
    assert claimed == planned - rooms


def test_links_between_pages_lead_somewhere(root: Path) -> None:
    broken = [
        f"{page.relative_to(root)}: {target}"
        for page in texts_under(root, "docs")
        if page.suffix == ".md"
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert not broken
