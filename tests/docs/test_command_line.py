"""The page about the command line: its examples run, and it leaves no command or option out."""

from __future__ import annotations

import doctest
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the extra 'cli' is not installed")
pytest.importorskip("igraph", reason="the extra 'viz' is not installed")

import typer
from typer.testing import CliRunner

from streamflow.cli import app

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/command-line.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```console\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def steps() -> Iterator[tuple[str, str]]:
    """(command, what it prints) of all blocks, in order."""
    for block in BLOCKS:
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            yield command, output


def test_the_examples_print_what_the_page_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STREAMFLOW_BACKEND", "sim")
    monkeypatch.setenv("STREAMFLOW_SIM_CLOCK", "virtual")
    monkeypatch.chdir(tmp_path)
    # In a process of its own: the ids of ops count from its start.
    program = (
        "import doc_blocks, pathlib, sys\n"
        "doc_blocks.run_page(doc_blocks.python_blocks(pathlib.Path(sys.argv[1])))"
    )
    path = os.pathsep.join([*sys.path, str(PAGE.parents[1] / "_ext")])
    subprocess.run(
        [sys.executable, "-c", program, PAGE],
        env={**os.environ, "PYTHONPATH": path},
        check=True,
        timeout=60,
    )
    checker, exit_code = doctest.OutputChecker(), 0
    for command, output in steps():
        if command == "echo $?":
            assert output.strip() == str(exit_code)
            exit_code = 0
            continue
        assert exit_code == 0, "the page does not say that this fails"
        program, *args = shlex.split(command)
        assert program == "streamflow"
        result = CliRunner().invoke(app, args, prog_name="streamflow")
        exit_code = result.exit_code
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        assert not output or checker.check_output(output, result.output, flags), (
            f"$ {command}\n{result.output}"
        )


def commands(command: object, path: str) -> Iterator[tuple[str, set[str]]]:
    """(its words, its options and arguments) of each command that does something."""
    inner = getattr(command, "commands", None)
    if inner:
        for name, each in inner.items():
            yield from commands(each, f"{path} {name}")
        return
    names: set[str] = set()
    for param in command.params:  # type: ignore[attr-defined]
        if param.param_type_name == "argument":
            names.add(param.metavar)
        else:
            names.update((*param.opts, *param.secondary_opts))
    yield path, names - {"--help"}


COMMANDS = dict(commands(typer.main.get_command(app), "streamflow"))


@pytest.mark.parametrize("path", COMMANDS)
def test_each_command_has_its_section_with_every_option(path: str) -> None:
    names = COMMANDS[path]
    section = re.search(rf"^##+ `{path}`\n(.*?)(?=^##+ |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert section is not None
    told = set(re.findall(r"`([^`]+?)(?:\.\.\.)?`", section[1]))
    assert names <= told
    table = re.findall(r"^\| (`[^|]+`) \|", section[1], re.MULTILINE)
    listed = {name for cell in table for name in re.findall(r"`(-[^`]+)`", cell)}
    assert listed <= names


def test_the_exit_codes_are_those_that_the_code_promises() -> None:
    import streamflow.cli

    words = r"(all went well|the work failed|a\s+mistake)"
    told = dict(re.findall(rf"^\| (\d) \| {words}", TEXT, re.MULTILINE))
    promised = dict(re.findall(rf"(\d) {words}", streamflow.cli.__doc__))
    assert {code: " ".join(text.split()) for code, text in promised.items()} == told
    assert set(told) == {"0", "1", "2"}
