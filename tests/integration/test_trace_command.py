"""``streamflow trace``, as a user runs it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import assert_mistake, invoke, run_process
from support import virtual

import streamflow as sf
from streamflow.trace import writers

NAMED = 'say "no" \x1b]0;title\x07\n\ud800\u2603'  # what a terminal and an encoder would choke on


@sf.kernel(
    'extern "C" __global__ void twice(float* x, unsigned long long n) {}', cost=lambda x, n: 1e-3
)
def twice(x, n):
    x *= 2


def record(path: Path, name: str | None = None) -> sf.Trace:
    async def main() -> sf.Trace:
        async with virtual() as dev:
            with dev.trace() as trace:
                for value in range(3):
                    x = dev.put(np.full(1 << 16, value, np.float32))
                    dev.launch(twice, x, x.size, name=name)
                    await dev.get(x)
                del x
                await dev.synchronize()
        return trace

    trace = asyncio.run(main())
    trace.save(path)
    return trace


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.json"
    record(path)
    return path


# -- summary -------------------------------------------------------------------------------


def test_a_summary_counts_by_kind_and_names_the_longest(file: Path) -> None:
    result = invoke("trace", "summary", file, "--longest", "3")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["launch", "3", "768", "KiB", "3.00", "ms"] in lines
    assert ["put", "3", "768", "KiB"] in [line[:4] for line in lines]
    assert any(line[:1] == ["compute"] for line in lines)  # the overlap report
    longest = lines[lines.index(["id", "time", "name", "stream", "where"]) + 1 :][:3]
    assert [line[1:4] for line in longest] == [["1.00", "ms", "twice"]] * 3
    assert all(line[-1].startswith("test_trace_command.py:") for line in longest)


def test_a_summary_as_json_has_the_same_and_nothing_else(file: Path) -> None:
    result = run_process("trace", "summary", file, "--json")
    found = json.loads(result.stdout)
    trace = sf.Trace.load(file)
    assert found["num_ops"] == len(trace.ops) == sum(each["num_ops"] for each in found["kinds"])
    assert found["num_edges"] == len(trace.edges)
    assert found["overlap"]["span_s"] == trace.overlap().span_s
    assert found["memory"][0]["peak_nbytes"] == max(each.nbytes for each in trace.memory)
    assert {op["name"] for op in found["longest"][:3]} == {"twice"}
    assert result.stderr == ""


def test_peaks_are_told_for_each_device_and_process(tmp_path: Path) -> None:
    def numbered(trace: sf.Trace, index: int) -> sf.Trace:
        return sf.Trace.of(
            [replace(op, device=index) for op in trace.ops],
            trace.edges,
            memory=[replace(each, device=index) for each in trace.memory],
            devices=[replace(each, index=index, process_key=str(index)) for each in trace.devices],
        )

    one = record(tmp_path / "one.json")
    for index in (0, 1):
        numbered(one, index).save(tmp_path / f"{index}.json")
    both = tmp_path / "both.json"
    assert invoke("trace", "convert", tmp_path / "0.json", tmp_path / "1.json", both).exit_code == 0
    found = json.loads(invoke("trace", "summary", both, "--json").stdout)
    assert [(each["process"], each["device"]) for each in found["memory"]] == [(0, 0), (1, 1)]
    for engine in ("gpu0:compute", "gpu1:compute"):
        assert any(name.endswith(engine) for name in found["overlap"]["busy_s"])
    assert "device 1: " in invoke("trace", "summary", both).stdout


def test_a_trace_of_nothing_has_a_summary(tmp_path: Path) -> None:
    path = tmp_path / "nothing.json"
    sf.Trace.of([]).save(path)
    result = invoke("trace", "summary", path)
    assert result.exit_code == 0, result.output
    assert json.loads(invoke("trace", "summary", path, "--json").stdout)["num_ops"] == 0


def test_odd_names_can_be_printed_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "odd.json"
    record(path, NAMED)
    result = run_process("trace", "summary", path, env={"PYTHONIOENCODING": "latin-1"})
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout
    assert r'say "no" \ufffd]0;title\ufffd \ufffd\u2603  ' in result.stdout


def test_a_pipe_gets_whole_lines(file: Path) -> None:
    deep = file.parent / ("long" * 40 + ".json")
    deep.write_bytes(file.read_bytes())
    result = run_process("trace", "summary", deep, env={"COLUMNS": "40"})
    assert str(deep) in result.stdout


def test_a_summary_has_the_critical_path(file: Path) -> None:
    trace = sf.Trace.load(file)
    path = trace.critical_path()
    assert path.steps
    text = invoke("trace", "summary", file).stdout
    assert all(line in text for line in str(path).splitlines())
    found = json.loads(invoke("trace", "summary", file, "--json").stdout)
    assert found["critical_path"]["length_s"] == path.length_s
    assert [step["id"] for step in found["critical_path"]["steps"]] == [
        step.op.id for step in path.steps
    ]
    assert found["hints"] == []
    assert "hint" not in text


@pytest.fixture
def awaited(tmp_path: Path) -> Path:
    """Of a program that awaits each launch."""

    async def main() -> sf.Trace:
        async with virtual() as dev:
            x = dev.put(np.zeros(256, np.float32))
            with dev.trace() as trace:
                for _ in range(40):
                    await dev.launch(twice, x, x.size)
        return trace

    path = tmp_path / "long.json"
    asyncio.run(main()).save(path)
    return path


def test_hints_come_last(awaited: Path) -> None:
    (hint,) = sf.Trace.load(awaited).hints()
    assert invoke("trace", "summary", awaited).stdout.endswith(f"\n\nhint: {hint.text}\n")
    found = json.loads(invoke("trace", "summary", awaited, "--json").stdout)
    assert found["hints"] == [{"kind": "await-each", "text": hint.text}]


def test_of_a_long_path_the_first_steps_are_shown_and_the_length(awaited: Path) -> None:
    lines = str(sf.Trace.load(awaited).critical_path()).splitlines()
    shown = invoke("trace", "summary", awaited).stdout.splitlines()
    begin = shown.index("the critical path") + 1
    assert shown[begin : begin + 21] == lines[:21]
    assert shown[begin + 21 : begin + 23] == [f"and {len(lines) - 22} steps more", lines[-1]]


# -- explain -------------------------------------------------------------------------------


def test_an_op_is_explained_by_its_id_and_by_its_name(file: Path) -> None:
    trace = sf.Trace.load(file)
    op = next(op for op in trace.ops if op.kind == "get")
    result = invoke("trace", "explain", file, op.id)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{trace.explain(op)}\n"
    assert invoke("trace", "explain", file, op.name).stdout == result.stdout


def test_an_explanation_as_json_names_the_op(file: Path) -> None:
    op = next(op for op in sf.Trace.load(file).ops if op.kind == "get")
    found = json.loads(invoke("trace", "explain", file, op.id, "--json").stdout)
    assert found["op"]["id"] == op.id


def test_a_name_wins_over_an_id(tmp_path: Path) -> None:
    trace = record(tmp_path / "run.json", name="1")
    launches = [op for op in trace.ops if op.name == "1"]
    assert_mistake(invoke("trace", "explain", tmp_path / "run.json", "1"), "3 ops are named '1'")
    assert launches[0].id != 1


# -- convert -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["graph.dot", "graph.mmd", "again.json"])
def test_the_ending_is_the_format(file: Path, tmp_path: Path, name: str) -> None:
    result = invoke("trace", "convert", file, tmp_path / name)
    assert result.exit_code == 0, result.output
    sf.Trace.load(file).save(tmp_path / f"by-hand-{name}")
    assert (tmp_path / name).read_bytes() == (tmp_path / f"by-hand-{name}").read_bytes()


def test_several_traces_become_one(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    record(other)
    # Of this process too: told apart, as those of two processes are.
    other.write_text(other.read_text().replace(f'"{os.getpid()}-', '"elsewhere-'))
    result = invoke("trace", "convert", file, other, tmp_path / "both.json")
    assert result.exit_code == 0, result.output
    both = sf.Trace.load(tmp_path / "both.json")
    assert len(both.ops) == len(sf.Trace.load(file).ops) + len(sf.Trace.load(other).ops)
    assert {op.process for op in both.ops} == {0, 1}


def test_pictures_draw_no_more_single_ops_than_they_are_told(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr(sf.Trace, "save", lambda self, path, *, max_ops: told.append(max_ops))
    for option in ((), ("--max-ops", 7)):
        assert invoke("trace", "convert", file, tmp_path / "graph.dot", *option).exit_code == 0
    assert told == [5000, 7]


# -- view ----------------------------------------------------------------------------------


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pages that a browser was asked for."""
    pages: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: pages.append(url) or True)
    # What the page is like is tested elsewhere.
    monkeypatch.setitem(writers._WRITERS, ".html", "dot:to_dot")
    return pages


def test_the_page_is_written_beside_the_trace_and_opened(file: Path, opened: list[str]) -> None:
    result = invoke("trace", "view", file)
    assert result.exit_code == 0, result.output
    page = file.with_suffix(".html")
    assert result.stdout == f"{page}\n"
    assert page.read_text().startswith("digraph")
    assert opened == [page.as_uri()]


def test_the_page_is_written_where_it_is_wanted_and_not_opened(
    file: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    result = invoke("trace", "view", "run.json", "--output", "other.html", "--no-open")
    assert (result.stdout, opened) == ("other.html\n", [])
    assert Path("other.html").exists()
    assert not Path("run.html").exists()


def test_a_trace_with_the_name_of_a_page_is_not_overwritten(file: Path, opened: list[str]) -> None:
    odd = file.rename(file.with_suffix(".html"))
    before = odd.read_bytes()
    assert_mistake(invoke("trace", "view", odd), "is also what is read")
    assert odd.read_bytes() == before


def test_no_browser_is_told_and_no_failure(
    file: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("webbrowser.open", lambda url: False)
    result = invoke("trace", "view", file)
    assert result.exit_code == 0
    assert "no browser was found" in result.stderr


def test_a_page_that_cannot_be_written_is_not_opened(file: Path, opened: list[str]) -> None:
    assert_mistake(
        invoke("trace", "view", file, "--output", "missing/run.html"), "missing/run.html"
    )
    assert opened == []


def test_a_package_that_the_page_needs_is_named(
    file: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(trace: sf.Trace) -> str:
        raise ModuleNotFoundError("the page needs igraph: pip install 'streamflow-cuda[viz]'")

    monkeypatch.setattr("streamflow.trace.dot.to_dot", missing)
    result = invoke("trace", "view", file)
    assert (result.exit_code, result.stdout, opened) == (1, "", [])
    assert "streamflow-cuda[viz]" in result.stderr


def test_the_page_is_one(file: Path) -> None:
    pytest.importorskip("igraph", reason="the extra 'viz' is not installed")
    result = invoke("trace", "view", file, "--no-open")
    assert result.exit_code == 0, result.output
    assert file.with_suffix(".html").read_text(encoding="utf-8").count("twice") >= 1


# -- mistakes ------------------------------------------------------------------------------


COMMANDS = {
    "summary": (),
    "convert": ("out.dot",),
    "view": ("--no-open",),
    "explain": ("1",),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "does not exist"),
        ("", "it is no JSON"),
        ('{"traceEvents": []}', "is not a trace"),
        ('{"format": "streamflow-trace", "version": 99}', "has version 99"),
        ('{"format": "streamflow-trace", "version": 1}', "is a damaged trace"),
        (b"\xff\xfe\x00", "it is no JSON"),
    ],
    ids=["missing", "empty", "chrome", "newer", "damaged", "binary"],
)
def test_a_file_that_is_no_trace_is_a_mistake(
    command: str,
    text: str | bytes | None,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("bad.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    result = invoke("trace", command, "bad.json", *COMMANDS[command])
    assert_mistake(result, message)
    assert "bad.json" in result.stderr
    assert {path.name for path in tmp_path.iterdir()} <= {"bad.json"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("convert", "run.json"), "Missing argument"),
        (("convert", "run.json", "out.txt"), "must end in one of"),
        (("convert", "run.json", "missing/out.dot"), "missing/out.dot"),
        (("convert", "run.json", "."), "is a directory"),
        (("convert", "run.json", "./run.json"), "is also what is read"),
        (("convert", "run.json", "run.json", "both.json"), "hold the same op"),
        (("convert", ".", "out.dot"), "is a directory"),
        (("view", "run.json", "--output", "run.dot"), "ends in .html"),
        (("summary", "run.json", "--longest", "-1"), "--longest"),
        (("explain", "run.json"), "Missing argument"),
        (("explain", "run.json", "99999"), "no op 99999"),
        (("explain", "run.json", "nothing"), "no op 'nothing'"),
        (("explain", "run.json", "twise"), "did you mean 'twice'?"),
        (("explain", "run.json", "twice"), "say which by id"),
        (("sumary", "run.json"), "No such command"),
    ],
)
def test_a_mistake_in_the_command_line_is_2(
    args: tuple[str, ...], message: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    before = file.read_bytes()
    assert_mistake(invoke("trace", *args), message)
    assert file.read_bytes() == before


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_a_full_disk_is_told(file: Path, tmp_path: Path) -> None:
    (tmp_path / "full.dot").symlink_to("/dev/full")
    assert_mistake(invoke("trace", "convert", file, tmp_path / "full.dot"), "No space left")
