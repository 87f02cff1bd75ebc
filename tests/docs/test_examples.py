"""The course of examples runs, in order and unchanged, on the simulator."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = "pytest_streamflow"
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# "# needs: skimage" on a line of its own: a module that an extra brings.
NEEDS = re.compile(r"^# needs: (\w+)$", re.MULTILINE)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path, tmp_path: Path) -> None:
    missing = [n for n in NEEDS.findall(example.read_text(encoding="utf-8")) if not find_spec(n)]
    if missing:
        pytest.skip(f"{example.name} needs {', '.join(missing)}")
    result = subprocess.run(
        # They keep their arrays as locals, as anybody's first program does.
        [sys.executable, "-W", "error", "-W", "ignore:device:ResourceWarning", example],
        cwd=tmp_path,
        env={**os.environ, "STREAMFLOW_BACKEND": "sim"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""


def test_examples_are_numbered_in_order() -> None:
    numbers = [path.name[:3] for path in EXAMPLES]
    assert numbers == [f"{index:02}_" for index in range(1, len(EXAMPLES) + 1)]


def test_the_sample_project_passes_its_tests(tmp_path: Path) -> None:
    # `nox -s sample` runs it with nothing but the wheel; here with what there is.
    is_installed = any(each.value == PLUGIN for each in entry_points(group="pytest11"))
    options = ("-p", "no:cacheprovider", "-p", "no:asyncio")
    env = {**os.environ}
    if not is_installed:
        env["PYTEST_PLUGINS"] = PLUGIN
        paths = [str(ROOT / "streamflow/testing/beside"), env.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, ROOT / "examples/ci_project"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stdout + result.stderr
