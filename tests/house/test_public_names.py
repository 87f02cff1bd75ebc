"""What the package shows to those who use it, and what importing it costs them."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import streamflow


def public_objects() -> Iterator[tuple[str, object]]:
    """Each public class and function, and the public methods of ours that they define."""
    for name in streamflow.__all__:
        found = getattr(streamflow, name)
        if not (inspect.isclass(found) or inspect.isroutine(found)):
            continue
        yield name, found
        if not inspect.isclass(found):
            continue
        for attribute, member in vars(found).items():
            if attribute.startswith("_"):
                continue
            inner = getattr(member, "fget", None) or getattr(member, "__func__", member)
            if inspect.isroutine(inner):
                yield f"{name}.{attribute}", inner


def test_every_public_name_exists() -> None:
    missing = [name for name in streamflow.__all__ if not hasattr(streamflow, name)]
    assert not missing


def test_every_public_name_has_a_docstring_of_its_own() -> None:
    silent = [name for name, found in public_objects() if not getattr(found, "__doc__", None)]
    assert not silent


def test_the_version_is_written_in_one_place(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert version(project["name"]) == project["version"]
    assert getattr(streamflow, "__version__", project["version"]) == project["version"]


def test_importing_touches_no_driver_and_no_backend() -> None:
    program = (
        "import sys, streamflow\n"
        "print(*sorted(n for n in sys.modules if n.split('.')[0] == 'cuda' or\n"
        "    n.startswith(('streamflow.backends.cuda', 'streamflow.backends.sim'))))"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if not k.startswith("STREAMFLOW_")},
        timeout=60,
    )
    assert result.stderr == ""
    assert result.stdout.split() == []  # R13
