"""``streamflow replay``, as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the extra 'cli' is not installed")

from typer.testing import CliRunner, Result
from upstreams import simulated

from streamflow.cli import app
from streamflow.memory import CudaMemoryResource, LoggingResourceAdaptor, PoolMemoryResource

HEADER = "Thread,Time,Action,Pointer,Size,Stream\n"


def run_replay(*args: object, columns: int = 300) -> Result:
    command = ["replay", *map(str, args)]
    return CliRunner().invoke(app, command, env={"COLUMNS": str(columns), "TERM": "dumb"})


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Of a program on two streams, whose blocks come to 3 MiB at most."""
    path = tmp_path / "log.csv"
    with simulated() as ground:
        logged = LoggingResourceAdaptor(
            PoolMemoryResource(CudaMemoryResource(device=0), "8MiB"), path
        )
        streams = [ground.stream(), ground.stream()]
        blocks = []
        for turn in range(30):
            blocks.append(logged.allocate(1 << 20, stream=streams[turn % 2]))
            if len(blocks) == 3:
                logged.deallocate(blocks.pop(0), stream=streams[turn % 2])
        for block in blocks:
            logged.deallocate(block, stream=streams[0])
    return path


def test_it_compares_stacks_side_by_side(log: Path) -> None:
    result = run_replay(log, "--resource", "cuda", "--resource", "pool(cuda, 8MiB)", "--lag", 0)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    facts = dict(line.split(maxsplit=1) for line in lines[:7])
    assert (facts["blocks"], facts["streams"], facts["threads"]) == ("30", "2", "1")
    table = lines[-3:]
    assert table[0].startswith("peak reserved  fragmentation  waits  ")
    assert table[1].split()[:3] == ["3.00", "MiB", "-"]
    assert table[2].split()[:2] == ["8.00", "MiB"]
    assert table[2].split()[2].endswith("%")
    assert table[1].endswith(" us  cuda")
    assert table[2].endswith(" us  pool(cuda, 8MiB)")


def test_a_narrow_terminal_loses_nothing(log: Path) -> None:
    stack = "limiting(pool(cuda, initial_pool_size=8MiB, maximum_pool_size=64MiB), 64MiB)"
    result = run_replay(log, "--resource", stack, columns=20)
    assert result.exit_code == 0, result.output
    header, row = (line.rstrip() for line in result.stdout.splitlines()[-2:])
    assert header.split()[-3:] == ["allocate", "free", "resource"]
    assert row.endswith(f" us  {stack}")


def test_as_json_it_is_for_programs(log: Path) -> None:
    result = run_replay(
        log,
        "--resource",
        "cuda",
        "--resource",
        "limiting(async, 64MiB)",
        "--memory",
        "1GiB",
        "--json",
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["memory_nbytes"], found["peak_live_nbytes"]) == (1 << 30, 3 << 20)
    assert found["problems"] == []
    one, other = found["resources"]
    assert (one["resource"], other["resource"]) == ("cuda", "limiting(async, 64MiB)")
    assert one["num_allocations"] == one["num_frees"] == 30
    assert {"peak_reserved_nbytes", "fragmentation", "num_waits", "allocate_us", "free_us"} <= set(
        one
    )


def test_a_stack_that_cannot_serve_the_log_fails(log: Path) -> None:
    result = run_replay(log, "--resource", "limiting(cuda, 2MiB)", "--resource", "cuda")
    assert result.exit_code == 1
    assert "not enough memory in limiting(cuda, 2MiB)\n" in result.stderr
    assert "limiting(cuda, 2MiB)" in result.stdout


def test_the_memory_bounds_the_device(log: Path) -> None:
    result = run_replay(log, "--resource", "cuda", "--memory", "2MiB")
    assert result.exit_code == 1
    assert "not enough memory in cuda" in result.stderr


def test_frees_of_nothing_are_told_and_not_fatal(tmp_path: Path) -> None:
    path = tmp_path / "odd.csv"
    path.write_text(
        f"{HEADER}1,10:00:00.000001,free,0x10,8,0\n"
        "1,10:00:00.000002,allocate,0x20,8,0\n"
        "1,10:00:00.000003,free,0x20,8,0\n"
        "1,10:00:00.000004,free,0x20,8,0\n"
    )
    result = run_replay(path, "--resource", "cuda")
    assert result.exit_code == 0, result.output
    assert "line 2: 0x10 was never allocated" in result.stderr
    assert "line 5: 0x20 was freed before, on line 4" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--resource", "pol(cuda)"), "no resource 'pol'"),
        (("--resource", "aligned(cuda, 3)"), "a power of two"),
        (("--resource", "cuda", "--memory", "much"), "number of bytes above 0"),
        (("--resource", "cuda", "--lag", "-1"), "--lag"),
        ((), "--resource"),
    ],
)
def test_a_mistake_in_the_command_line_is_2(
    log: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = run_replay(log, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "a log begins with"), (f"{HEADER}1,2\n", ":2: 6 fields are needed, found 2")],
)
def test_a_file_that_is_no_log_is_2(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "no.csv"
    path.write_text(text)
    result = run_replay(path, "--resource", "cuda")
    assert result.exit_code == 2
    assert message in result.stderr.replace("\n", "")
    assert run_replay(tmp_path / "none.csv", "--resource", "cuda").exit_code == 2
