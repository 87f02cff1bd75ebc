"""Runs pytest inside a test, with streamflow's plugin loaded once."""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from pathlib import Path
from textwrap import dedent

import hypothesis  # noqa: F401  # pytester forgets what a run has imported: not these, please
import pytest
import trio  # noqa: F401

IS_INSTALLED = any(each.value == "pytest_streamflow" for each in entry_points(group="pytest11"))
NAME = "streamflow" if IS_INSTALLED else "pytest_streamflow"

BESIDE = str(Path(__file__).parents[2] / "streamflow/testing/beside")

OPENING = """\
import asyncio
import gc

import numpy as np
import pytest
import streamflow as sf

"""

STRICT = "[pytest]\nasyncio_default_fixture_loop_scope = function\nfilterwarnings = error\n"


class Runs:
    """Writes a test file, and runs pytest on it in this process, or in another one."""

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pytester = pytester
        self.ini = STRICT
        self.loads = [] if IS_INSTALLED else ["-p", NAME]
        if not IS_INSTALLED:
            monkeypatch.syspath_prepend(BESIDE)
            monkeypatch.setenv("PYTHONPATH", BESIDE, prepend=os.pathsep)

    def __call__(
        self, source: str, *options: str, in_process: bool = True, opening: str = OPENING
    ) -> pytest.RunResult:
        self.pytester.makeini(self.ini)
        path = self.pytester.makepyfile(test_it=opening + dedent(source))
        arguments = [*self.loads, "-p", "no:cacheprovider", *options, str(path)]
        if in_process:
            return self.pytester.runpytest_inprocess(*arguments)
        return self.pytester.runpytest_subprocess(*arguments)
