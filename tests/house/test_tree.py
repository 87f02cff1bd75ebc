"""The tree stays small: few names at the top, no long module, no room that holds nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

MAX_LINES = 600
ALLOWED_AT_TOP = {
    "README.md",
    "docs",
    "examples",
    "noxfile.py",
    "pyproject.toml",
    "streamflow",
    "tests",
}
NOT_TRACKED = ("__pycache__", "_build", "_generated", ".")


def tracked_files(root: Path) -> list[str]:
    """What git tracks or would; every file, where this isn't a git checkout."""
    if (root / ".git").exists():
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
            cwd=root,
            capture_output=True,
            check=True,
        )
        names = [name for name in listed.stdout.decode().split("\0") if name]
        return [name for name in names if (root / name).exists()]
    paths = [path.relative_to(root) for path in root.rglob("*") if path.is_file()]
    return [
        path.as_posix()
        for path in paths
        if not any(part.startswith(NOT_TRACKED) for part in path.parts)
    ]


def test_the_top_level_holds_only_the_agreed_names(root: Path) -> None:
    top = {name.split("/")[0] for name in tracked_files(root)}
    assert {name for name in top if not name.startswith(".")} <= ALLOWED_AT_TOP


def test_no_module_is_longer_than_the_limit(root: Path) -> None:
    too_long = {
        path.relative_to(root).as_posix(): num_lines
        for path in (root / "streamflow").rglob("*.py")
        if (num_lines := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert not too_long, f"split these by idea; the limit is {MAX_LINES} lines"


@pytest.mark.parametrize("top", ["streamflow", "docs", "examples", "tests"])
def test_no_room_is_empty(root: Path, top: str) -> None:
    suffixes = {".py", ".md", ".json", ".svg", ".js", ".css", ".html"}
    files = [Path(name) for name in tracked_files(root) if name.startswith(f"{top}/")]
    rooms = {parent for file in files for parent in file.parents if parent != Path()}
    for room in rooms:
        texts = [
            (root / file).read_text(encoding="utf-8").strip()
            for file in files
            if room in file.parents and file.suffix in suffixes
        ]
        assert any(texts), f"{room} holds nothing to read"


def test_the_package_ships_its_type_marker() -> None:
    import streamflow

    assert (Path(streamflow.__file__).parent / "py.typed").is_file()
