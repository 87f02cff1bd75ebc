"""The command line as a user has it: in this process, or as one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the extra 'cli' is not installed")

from typer.testing import CliRunner, Result

from streamflow.cli import app

PROGRAM = "import sys; sys.argv[0] = 'streamflow'; from streamflow.cli import main; main()"


def invoke(*args: object, env: Mapping[str, str | None] | None = None) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(app, list(map(str, args)), env=env)


def run_process(
    *args: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, whose output goes into pipes."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, args)],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=60,
    )


def assert_mistake(result: Result, message: str) -> None:
    """It ended with 2, in a sentence, and printed no result."""
    assert result.exit_code == 2, result.output
    assert result.stderr.splitlines()[-1].startswith(("Error: ", "streamflow: ")), result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""
