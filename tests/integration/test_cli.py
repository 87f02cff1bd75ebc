"""What all commands of ``streamflow`` have in common."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import PROGRAM, app, assert_mistake, invoke, run_process

import streamflow as sf

typer = pytest.importorskip("typer", reason="the extra 'cli' is not installed")


def commands(command: object, *words: str) -> Iterator[tuple[str, object]]:
    inner = getattr(command, "commands", None)
    if not inner:
        yield " ".join(words), command
    for name, each in (inner or {}).items():
        yield from commands(each, *words, name)


COMMANDS = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("path", COMMANDS)
def test_help_has_examples_of_options_that_there_are(path: str) -> None:
    result = invoke(*path.split(), "--help")
    assert result.exit_code == 0, result.output
    examples = re.findall(r"^ +streamflow (.*)$", result.stdout, re.MULTILINE)
    assert examples
    options: set[str] = set()
    for param in COMMANDS[path].params:  # type: ignore[attr-defined]
        options.update((*param.opts, *param.secondary_opts))
    for example in examples:
        words = shlex.split(example.split(" | ")[0])
        assert words[: len(path.split())] == path.split()
        assert {word for word in words if word.startswith("--")} <= options


@pytest.mark.parametrize("path", ["", "trace"])
def test_groups_name_each_of_their_commands_in_a_whole_sentence(path: str) -> None:
    listed = invoke(*path.split(), "--help").stdout.split("Commands:\n")[1]
    lines = [line.split(maxsplit=1) for line in listed.splitlines()]
    inner = typer.main.get_command(app).commands
    assert [name for name, _ in lines] == list(inner if not path else inner[path].commands)
    assert all(text.endswith(".") and not text.endswith("...") for _, text in lines)


@pytest.mark.parametrize("path", ["", "trace"])
def test_without_a_command_help_is_given(path: str) -> None:
    result = invoke(*path.split())
    assert "Commands:" in result.output
    assert "Traceback" not in result.output


def test_the_version_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "7.8.9")
    assert invoke("--version").stdout == "streamflow 7.8.9\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [(("inof",), "No such command"), (("info", "--jsn"), "--json"), (("info", "more"), "more")],
)
def test_a_word_that_is_not_known_is_a_mistake(args: tuple[str, ...], message: str) -> None:
    assert_mistake(invoke(*args), message)


def test_exit_codes_and_streams_are_the_process_own() -> None:
    good, bad = run_process("--version"), run_process("trace", "summary", "missing.json")
    assert (good.returncode, good.stderr) == (0, "")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.splitlines()[-1].startswith("Error: ")


def test_a_reader_that_leaves_early_is_no_traceback() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "info"],
        env={**os.environ, "STREAMFLOW_BACKEND": "sim"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        process.wait(timeout=60)


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo terminal")
def test_a_narrow_terminal_folds_and_loses_nothing(tmp_path: Path) -> None:
    import pty

    path = tmp_path / ("long" * 20 + ".json")
    sf.Trace.of([]).save(path)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "trace", "summary", str(path)],
        env={**os.environ, "COLUMNS": "40", "TERM": "xterm", "NO_COLOR": "1"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    output = b""
    try:
        while chunk := os.read(ours, 4096):
            output += chunk
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(ours)
    assert process.wait(timeout=60) == 0
    text = output.decode()
    assert not re.search(r"\x1b\[[\d;]*3\dm", text)  # no colours
    facts = text.split("edges")[0]
    assert all(len(line) <= 40 for line in facts.splitlines())
    assert str(path) in re.sub(r"\s+", "", facts).replace("file", "", 1)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is full")
def test_an_output_that_is_full_is_a_mistake() -> None:
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM, "info", "--json"],
            env={**os.environ, "STREAMFLOW_BACKEND": "sim"},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert "could not be written" in ended.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell of POSIX")
def test_an_output_that_is_closed_is_no_failure() -> None:
    ended = subprocess.run(
        ["sh", "-c", 'exec "$0" "$@" >&-', sys.executable, "-c", PROGRAM, "info"],
        env={**os.environ, "STREAMFLOW_BACKEND": "sim"},
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_an_interrupt_in_the_middle_of_a_copy_ends_with_130(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(memory: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("streamflow.backends.sim.device.checksum", interrupt)
    ended = invoke("bench", "--largest", "16", env={"STREAMFLOW_BACKEND": "sim"})
    assert (ended.exit_code, ended.output) == (130, "")
