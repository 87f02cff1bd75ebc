"""``streamflow doctor`` looks for the CUDA packages that pyproject.toml asks for."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

from streamflow.testing import installation


def test_the_pair_is_the_one_that_is_required(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bounds = {}
    for line in project["dependencies"]:
        found = re.match(r"(cuda-bindings|cuda-core)(?:==|>=)([\d.]+)", line)
        if found:
            bounds[found[1]] = found[2]
    assert bounds.keys() == installation.CUDA_PAIR.keys()
    for package, version in installation.CUDA_PAIR.items():
        assert f"{bounds[package]}.".startswith(f"{version}.")


@pytest.mark.parametrize(
    ("found", "problem"),
    [("13.4.4", None), ("13.4.40", "is 13.4.40"), ("12.9.0", "is 12.9.0"), (None, "not installed")],
)
def test_another_version_is_told(
    found: str | None, problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(package: str) -> str:
        if package == "cuda-core":
            return "1.2.2"
        if found is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr("sys.platform", "linux")
    told = list(installation.pair_problems())
    assert len(told) == (problem is not None)
    assert all(problem in each and "cuda-bindings" in each for each in told)  # type: ignore[operator]


def test_elsewhere_nothing_is_wrong_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert not list(installation.pair_problems())
