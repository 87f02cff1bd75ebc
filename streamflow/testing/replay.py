"""The line that runs one schedule again, in a fresh process."""

from __future__ import annotations

import os
import shlex
import sys

__all__ = ["VARIABLE", "replay_line"]

VARIABLE = "STREAMFLOW_EXPLORE"


def replay_line(schedule: str) -> str:
    """What to type: the variable, and the command that runs this test or program again."""
    return f"{VARIABLE}={schedule} {_command()}"


def _command() -> str:
    test = os.environ.get("PYTEST_CURRENT_TEST")
    if test is not None:  # "file.py::test[id] (call)"
        return f"python -m pytest {shlex.quote(test.rpartition(' (')[0] or test)}"
    words = [sys.executable or "python", *sys.orig_argv[1:]]
    return " ".join(_quoted(word) for word in words)


def _quoted(word: str) -> str:
    if "\n" not in word:
        return shlex.quote(word)
    escaped = word.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"$'{escaped}'"  # a program given by -c: one line all the same
