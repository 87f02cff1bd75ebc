"""What the package shows to those who use it, and what importing it costs them."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import streamflow

# "Parameters" and what stands under it, up to the next heading.
PARAMETERS = re.compile(r"^Parameters\n-+\n(.*?)(?=^\w[\w ]*\n-+\n|\Z)", re.MULTILINE | re.DOTALL)
AS_ELSEWHERE = re.compile(r"Parameters and errors are those of\s+:\w+:`")


def public_objects() -> Iterator[tuple[str, object]]:
    """Each public class and function, and the public methods of ours that they define."""
    rooms = [(streamflow, ""), (streamflow.memory, "memory.")]
    for name, found in [
        (prefix + name, getattr(room, name)) for room, prefix in rooms for name in room.__all__
    ]:
        if not (inspect.isclass(found) or inspect.isroutine(found)):
            continue
        yield name, found
        if not inspect.isclass(found):
            continue
        for attribute, member in vars(found).items():
            if attribute.startswith("_"):
                continue
            inner = getattr(member, "fget", None) or getattr(member, "__func__", member)
            is_declared_above = any(attribute in vars(base) for base in found.__mro__[1:])
            if inspect.isroutine(inner) and not is_declared_above:
                yield f"{name}.{attribute}", inner


def test_every_public_name_exists() -> None:
    missing = [name for name in streamflow.__all__ if not hasattr(streamflow, name)]
    assert not missing


def test_every_public_name_has_a_docstring_of_its_own() -> None:
    silent = [name for name, found in public_objects() if not getattr(found, "__doc__", None)]
    assert not silent


def test_every_parameter_of_a_public_function_is_described() -> None:
    missing: dict[str, list[str]] = {}
    for name, found in public_objects():
        if inspect.isclass(found):
            continue
        text = inspect.getdoc(found) or ""
        section = PARAMETERS.search(text)
        lines = section[1].splitlines() if section else []
        described = {
            word for line in lines if line[:1].strip() for word in re.findall(r"\w+", line)
        }
        takes = set(inspect.signature(found).parameters) - {"self", "cls"}
        left_out = sorted(takes - described)
        if left_out and not AS_ELSEWHERE.search(text):
            missing[name] = left_out
    assert not missing


def test_every_public_name_is_in_the_reference(root: Path) -> None:
    page = (root / "docs/reference/api.md").read_text(encoding="utf-8")
    shown = set(
        re.findall(r"^\.\. auto(?:class|function):: streamflow\.(\w+)$", page, re.MULTILINE)
    )
    errors = {name for name in streamflow.__all__ if _is_error(name)}
    assert ".. automodule:: streamflow.errors" in page  # all of them at once
    assert shown == set(streamflow.__all__) - errors


def test_every_name_of_memory_and_testing_is_in_the_reference(root: Path) -> None:
    """Under its room, under ``streamflow``, or under the module that it comes from."""
    shown: set[str] = set()
    for page in (root / "docs/reference").glob("*.md"):
        text = page.read_text(encoding="utf-8")
        shown.update(re.findall(r"^\.\. auto\w+:: ([\w.]+)$", text, re.MULTILINE))
    missing = []
    for room in (streamflow.memory, streamflow.testing):
        for name in room.__all__:
            home = getattr(getattr(room, name), "__module__", room.__name__)
            if not {f"{top}.{name}" for top in ("streamflow", room.__name__, home)} & shown:
                missing.append(f"{room.__name__}.{name}")
    assert not missing


def _is_error(name: str) -> bool:
    found = getattr(streamflow, name)
    return inspect.isclass(found) and found.__module__ == "streamflow.errors"


def test_the_version_is_written_in_one_place(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    repeated = [
        path.relative_to(root).as_posix()
        for path in (root / "streamflow").rglob("*.py")
        if f'"{project["version"]}"' in path.read_text(encoding="utf-8")
    ]
    assert not repeated
    try:
        installed = version(project["name"])
    except PackageNotFoundError:  # run from a checkout: there is no metadata to agree with
        return
    assert installed == project["version"]
    assert streamflow.__version__ == project["version"]


def test_importing_touches_no_driver_and_no_backend() -> None:
    program = (
        "import sys, streamflow\n"
        "print(*sorted(n for n in sys.modules if n.split('.')[0] == 'cuda' or\n"
        "    n.startswith(('streamflow.backends.cuda', 'streamflow.backends.sim',\n"
        "    'streamflow.testing'))))"
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


def test_the_testing_kit_is_loaded_when_it_is_asked_for_and_brings_no_test_runner() -> None:
    program = (
        "import sys, streamflow\n"
        "assert 'streamflow.testing' not in sys.modules\n"
        "streamflow.testing.explore\n"
        "print(*sorted({'pytest', 'hypothesis', 'trio', 'uvloop', 'cuda'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60
    )
    assert result.stderr == ""
    assert result.stdout.split() == []


def test_each_name_of_memory_is_found_when_it_is_asked_for() -> None:
    memory = streamflow.memory
    found = {name: getattr(memory, name) for name in memory.__all__}
    assert set(memory._MODULES) <= found.keys()
    assert not [name for name, value in found.items() if value is None]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        memory.nothing  # noqa: B018
