"""``explore``: bugs of order that a plain run misses are found, shrunk and replayed."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import anyio
import numpy as np
import pytest
from logged_program import work
from planted import BUGS, SETTINGS, Library, N, early_reuse, missing_edge, right, scale, slow
from support import virtual

import streamflow as sf
from streamflow.backends.sim.schedule import Plan
from streamflow.testing import ExplorationFailed, Explored, explore
from streamflow.testing.runs import Runner

ROOT = Path(__file__).resolve().parents[2]
STRATEGIES = ("random", "priority-inverting", "starved")


def found(fn, **options) -> ExplorationFailed:
    options.setdefault("settings", SETTINGS)
    with pytest.raises(ExplorationFailed) as caught:
        explore(fn, **options)
    return caught.value


# -- planted bugs -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUGS)
def test_a_plain_run_misses_each_planted_bug(name: str, run) -> None:
    async def main() -> None:
        async with sf.Device(0, backend="sim", settings=SETTINGS) as dev:
            await BUGS[name](dev)

    for _ in range(5):
        run(main)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", BUGS)
def test_each_planted_bug_is_found_within_200_seeds(name: str, strategy: str, loop: str) -> None:
    failure = found(BUGS[name], strategy=strategy, loop=loop)  # 200 is the default
    assert failure.seed is not None
    assert 0 <= failure.seed < 200
    assert isinstance(failure.__cause__, AssertionError)
    assert len(failure.deviations) == 1  # one command held back is all it takes
    assert "was held back; meanwhile ran:" in failure.deviations[0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_right_program_passes_every_schedule(strategy: str, loop: str) -> None:
    report = explore(right, settings=SETTINGS, strategy=strategy, loop=loop)
    assert report.num_schedules == 201
    assert report.num_distinct > 5


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_program_that_uses_everything_passes_every_schedule(strategy: str, loop: str) -> None:
    explored = explore(work, seeds=15, strategy=strategy, loop=loop, timeout_s=30)
    assert explored.num_distinct > 5


# -- what a failure says ----------------------------------------------------------------------


def test_a_failure_says_what_happened_and_how_to_have_it_again() -> None:
    failure = found(missing_edge)
    text = str(failure)
    assert re.match(r"missing_edge fails under schedule random:\d+, after \d+ that passed; ", text)
    assert re.search(
        r"'scale' on a, command 1 there, was held back; meanwhile ran: .*'add' on b", text
    )
    assert re.search(r"^  0\.\d{9} s  device 0  a: scale$", text, re.MULTILINE)
    nodeid = "test_explore.py::test_a_failure_says_what_happened_and_how_to_have_it_again"
    assert failure.replay.startswith(f"STREAMFLOW_EXPLORE={failure.schedule} python -m pytest ")
    assert failure.replay.endswith(nodeid)
    assert failure.replay in text.splitlines()[-1]
    assert re.fullmatch(r"\d+\.1", failure.schedule)
    assert isinstance(failure, AssertionError)
    assert isinstance(failure, sf.StreamflowError)


def test_the_schedule_of_a_failure_is_a_setting_too() -> None:
    failure = found(missing_edge)
    for schedule in (failure.schedule, f"random:{failure.seed}"):

        async def main(schedule=schedule) -> None:
            async with virtual(schedule=schedule, staging_threads=2) as dev:
                await missing_edge(dev)

        with pytest.raises(AssertionError):
            asyncio.run(main())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_deviations_of_a_run_make_the_same_run(strategy: str) -> None:
    async def main(dev: sf.Device) -> None:
        for number in range(3):
            x, y = dev.put(np.full(N, number, np.float32)), dev.zeros(N, np.float32)
            dev.launch(scale, x, 1.0, N, stream=dev.stream())
            dev.copy(y, x)
            out = dev.get(x)
            x.free()
            await out

    runner = Runner(main, SETTINGS, "asyncio", 10.0)
    for seed in range(20):
        run = runner.run(Plan(strategy, seed))
        told = Plan(deviations=tuple(deviation for deviation, _ in run.imposed.story))
        assert run.log == runner.run(told).log, f"{strategy}:{seed} {told}"


def test_the_first_failing_seed_is_told() -> None:
    seeds = [failure.seed for failure in (found(missing_edge) for _ in range(3))]
    assert len(set(seeds)) == 1  # R15
    assert found(missing_edge, seeds=[seeds[0]]).seed == seeds[0]
    if seeds[0]:
        assert (
            explore(missing_edge, seeds=seeds[0], settings=SETTINGS).num_schedules == seeds[0] + 1
        )


def test_what_fails_in_a_plain_run_needs_no_exploring() -> None:
    async def wrong(dev: sf.Device) -> None:
        raise KeyError("plain")

    failure = found(wrong)
    assert "fails in the plain run" in str(failure)
    assert (failure.seed, failure.schedule, failure.deviations) == (None, "plain", ())
    assert isinstance(failure.__cause__, KeyError)


def test_a_failure_that_needs_two_deviations_keeps_two() -> None:
    async def two_races(dev: sf.Device) -> None:
        seen: list[str] = []
        log = [functools.partial(lambda name, stream: seen.append(name), name) for name in "abcd"]
        for call in log:
            dev.call(call, reads=[], writes=[], stream=dev.stream())
        await dev.synchronize()
        assert seen.index("a") < seen.index("b") or seen.index("c") < seen.index("d")

    failure = found(two_races)
    assert len(failure.deviations) == 2


def test_shrinking_keeps_the_failure_that_was_found() -> None:
    async def two_bugs(dev: sf.Device) -> None:
        seen: list[str] = []
        for name in "abcd":
            dev.call(lambda stream, name=name: seen.append(name), stream=dev.stream())
        await dev.synchronize()
        if seen.index("a") > seen.index("b"):
            raise ValueError if seen.index("c") > seen.index("d") else KeyError

    needed: dict[type, set[int]] = {ValueError: set(), KeyError: set()}
    for seed in range(60):
        try:
            explore(two_bugs, seeds=[seed])
        except ExplorationFailed as failure:
            needed[type(failure.__cause__)].add(len(failure.deviations))
    assert needed == {ValueError: {2}, KeyError: {1}}


def test_a_fault_and_a_failed_op_are_failures_too(loop: str) -> None:
    async def unseen(dev: sf.Device) -> None:
        library = Library()
        x, y = dev.put(np.ones(16, np.float32)), dev.zeros(16, np.float32)
        await dev.call(library.bind, x, reads=[x], writes=[])

        def check(stream: sf.CallStream, y: np.ndarray) -> None:
            if library.x[0] != 3:
                raise LookupError("too early")

        await y
        stream = dev.stream("a")
        dev.launch(scale, x, 3.0, 16, stream=stream)
        dev.launch(slow, x, 16, stream=stream)
        dev.call(check, y, writes=[y], stream=dev.stream("b"))  # nobody awaits it

    failure = found(unseen, loop=loop)
    assert len(failure.deviations) == 1
    leaf = failure.__cause__
    while leaf.__cause__ is not None or isinstance(leaf, BaseExceptionGroup):
        leaf = leaf.exceptions[0] if isinstance(leaf, BaseExceptionGroup) else leaf.__cause__
    assert isinstance(leaf, LookupError)
    assert "LookupError: too early" in str(failure)


def test_a_hang_is_a_failure_with_a_report(loop: str) -> None:
    async def hangs(dev: sf.Device) -> None:
        library = Library()
        x, y = dev.put(np.ones(16, np.float32)), dev.put(np.ones(16, np.float32))
        await dev.call(library.bind, x, reads=[x], writes=[])
        dev.launch(scale, x, 3.0, 16, stream=dev.stream("a"))
        dev.call(library.add, y, writes=[y], stream=dev.stream("b"))
        if (await dev.get(y))[0] != 4:
            never = anyio.Event()
            await dev.launch(scale, y, 1.0, 16, after=never, name="stuck")

    failure = found(hangs, loop=loop, timeout_s=0.3)
    assert isinstance(failure.__cause__, sf.DeadlineExceeded)
    assert "had not ended after 0.3 s" in str(failure)
    assert re.search(r"stuck .* waits for Event", str(failure))


def test_what_depends_on_something_else_is_told_so() -> None:
    runs: list[int] = []

    async def flaky(dev: sf.Device) -> None:
        runs.append(1)
        await dev.zeros(16)
        assert len(runs) != 5

    failure = found(flaky)
    assert failure.seed == 3
    assert "did not fail again when run once more" in str(failure)


def test_a_failing_pytest_raises_counts_and_a_skip_goes_through() -> None:
    async def expects(dev: sf.Device) -> None:
        with pytest.raises(ValueError, match="never"):
            await dev.zeros(16)

    assert "DID NOT RAISE" in str(found(expects).__cause__)

    async def skips(dev: sf.Device) -> None:
        pytest.skip("not here")

    with pytest.raises(pytest.skip.Exception):
        explore(skips)

    async def stops(dev: sf.Device) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        explore(stops)
    assert caught.value.__notes__[-1].endswith("stops was running under schedule plain")


def test_a_failure_that_is_no_exception_is_found_in_a_group_and_by_itself(loop: str) -> None:
    async def order(dev: sf.Device) -> list[str]:
        seen: list[str] = []
        for name in "ab":
            dev.call(lambda stream, name=name: seen.append(name), stream=dev.stream())
        await dev.synchronize()
        return seen

    async def in_a_group(dev: sf.Device) -> None:
        async def check() -> None:
            if await order(dev) != ["a", "b"]:
                pytest.fail("another order")

        async with anyio.create_task_group() as group:
            group.start_soon(check)

    async def cancelled(dev: sf.Device) -> None:
        if await order(dev) != ["a", "b"]:
            raise asyncio.CancelledError

    failure = found(in_a_group, loop=loop)
    assert "another order" in str(failure)
    assert len(failure.deviations) == 1
    assert isinstance(found(cancelled, loop=loop).__cause__, asyncio.CancelledError)


# -- devices ----------------------------------------------------------------------------------


def test_as_many_devices_as_parameters(loop: str) -> None:
    seen: list[tuple[int, ...]] = []

    async def main(first, second, third, *, optional=None) -> None:
        seen.append(tuple(dev.index for dev in (first, second, third)))
        assert all(dev.sim.clock.is_virtual for dev in (first, second, third))
        x = first.put(np.ones(16, np.float32))
        y = third.empty(16, np.float32)
        third.copy(y, x)
        assert (await third.get(y)).all()

    assert explore(main, seeds=3, loop=loop).num_schedules == 4
    assert seen == [(0, 1, 2)] * 4


def test_devices_that_the_program_opens_follow_the_schedule(loop: str) -> None:
    async def main() -> None:
        for clock in ("wall", "virtual"):  # one machine after the other
            settings = sf.Settings(sim=sf.SimOptions(clock=clock, check_races=False))
            async with sf.Device(0, backend="sim", settings=settings) as dev:
                assert dev.sim.clock.is_virtual
                if clock == "virtual":
                    await missing_edge(dev)

    failure = found(main, loop=loop)
    assert failure.schedule.startswith("1.")  # of the second machine
    assert len(failure.deviations) == 1
    assert isinstance(failure.__cause__, AssertionError)


def test_devices_outside_are_left_alone() -> None:
    explore(right, seeds=1, settings=SETTINGS)

    async def main() -> None:
        async with virtual() as dev:
            assert dev._core.backend.world.schedule is None

    asyncio.run(main())


def test_settings_are_those_given_but_for_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[sf.Settings] = []

    async def main(dev: sf.Device) -> None:
        seen.append(dev.settings)
        await dev.zeros(16)

    explore(main, seeds=0, settings=sf.Settings(compute_lanes=2, sim=sf.SimOptions(seed=3)))
    assert (seen[0].compute_lanes, seen[0].sim.seed, seen[0].sim.clock) == (2, 3, "virtual")
    monkeypatch.setenv("STREAMFLOW_COMPUTE_LANES", "3")
    explore(main, seeds=0)
    assert (seen[1].compute_lanes, seen[1].staging_threads) == (3, 2)
    monkeypatch.setenv("STREAMFLOW_STAGING_THREADS", "1")
    explore(main, seeds=0)
    assert seen[2].staging_threads == 1


def test_the_garbage_collector_drops_no_array_during_a_run() -> None:
    seen: list[bool] = []

    async def main(dev: sf.Device) -> None:
        seen.append(gc.isenabled())  # it would come at another moment of each run (R15)
        await dev.zeros(16)

    explore(main, seeds=1)
    assert seen == [False, False]
    assert gc.isenabled()


def test_what_cannot_be_explored_is_refused(run) -> None:
    async def main(dev: sf.Device) -> None:
        raise AssertionError("never run")

    async def named(*, dev: sf.Device) -> None:
        raise AssertionError("never run")

    async def nothing() -> None:
        pass

    with pytest.raises(ValueError, match="strategy is one of random, priority-inverting, starved"):
        explore(main, strategy="fair")
    with pytest.raises(ValueError, match="loop is one of"):
        explore(main, loop="curio")
    for seeds in (-1, [3, -1]):
        with pytest.raises(ValueError, match="found -1"):
            explore(main, seeds=seeds)
    with pytest.raises(TypeError):
        explore(main, seeds=[1.5])  # type: ignore[list-item]
    predicting = sf.Settings(sim=sf.SimOptions(clock="virtual", predict=True))
    with pytest.raises(ValueError, match="predict=True tells the time of that"):
        explore(main, settings=predicting)
    with pytest.raises(TypeError, match="keyword-only"):
        explore(named)
    with pytest.raises(TypeError, match="takes a coroutine function"):
        explore(lambda dev: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(ValueError, match="opened no simulated device"):
        explore(nothing)

    async def inside() -> None:
        explore(main)

    with pytest.raises(RuntimeError, match="call it from plain code"):
        run(inside)


# -- replay -----------------------------------------------------------------------------------


def test_the_variable_runs_one_schedule_once_and_its_error_comes_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schedule = found(missing_edge).schedule
    runs: list[int] = []

    async def counted(dev: sf.Device) -> None:
        runs.append(1)
        await missing_edge(dev)

    monkeypatch.setenv("STREAMFLOW_EXPLORE", schedule)
    with pytest.raises(AssertionError) as caught:
        explore(counted, settings=SETTINGS)
    assert not isinstance(caught.value, ExplorationFailed)
    assert len(runs) == 1
    monkeypatch.setenv("STREAMFLOW_EXPLORE", "plain")
    assert explore(counted, settings=SETTINGS) == Explored(1, 1)
    monkeypatch.setenv("STREAMFLOW_EXPLORE", "nonsense")
    with pytest.raises(ValueError, match="a schedule is"):
        explore(counted, settings=SETTINGS)
    monkeypatch.setenv("STREAMFLOW_EXPLORE", "")
    with pytest.raises(ExplorationFailed):
        explore(counted, settings=SETTINGS)


PROGRAM = """
from planted import *
from streamflow.testing import explore

def test_it():
    explore({bug}, settings=SETTINGS, loop={loop!r})

if __name__ == "__main__":
    test_it()
"""


def shell(line: str, cwd: Path, hash_seed: str) -> subprocess.CompletedProcess[str]:
    here = Path(__file__).parent
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        ["/bin/bash", "-c", line],
        cwd=cwd,
        env={
            **{k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"},
            "PATH": path,
            "PYTHONHASHSEED": hash_seed,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(here)]),
            "PYTEST_ADDOPTS": "-p no:cacheprovider",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )


COMMANDS = {
    "pytest": "python -m pytest -q test_found.py",
    "script": "python test_found.py",
    "module": "python -m test_found",
    "text": "python -c 'import test_found\ntest_found.test_it()'",
}


@pytest.mark.parametrize(
    ("name", "how", "loop"),
    [
        ("missing_edge", "pytest", "trio"),
        ("early_reuse", "script", "asyncio"),
        ("late_free", "module", "uvloop"),
        ("early_reuse", "text", "trio"),
    ],
)
def test_the_line_replays_a_failure_in_a_fresh_process(
    name: str, how: str, loop: str, tmp_path: Path
) -> None:
    (tmp_path / "test_found.py").write_text(PROGRAM.format(bug=name, loop=loop))
    first = shell(COMMANDS[how], tmp_path, "1")
    output = first.stdout + first.stderr
    assert first.returncode == 1, output
    assert "ExplorationFailed" in output
    (line,) = set(re.findall(r"^[E\s]*(STREAMFLOW_EXPLORE=.+?)\s*$", output, re.MULTILINE))
    second = shell(line, tmp_path, "2")
    again = second.stdout + second.stderr
    assert second.returncode == 1, again
    assert "AssertionError" in again or "assert" in again
    assert "ExplorationFailed" not in again
    plain = shell(re.sub(r"EXPLORE=\S+", "EXPLORE=plain", line), tmp_path, "2")
    assert plain.returncode == 0, plain.stdout + plain.stderr


def test_the_line_quotes_what_a_shell_would_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from streamflow.testing.replay import replay_line

    monkeypatch.setenv("PYTEST_CURRENT_TEST", "tests/a b.py::test[x y-'z'] (call)")
    line = replay_line("3.1,@2=0")
    assert shlex.split(line) == [
        "STREAMFLOW_EXPLORE=3.1,@2=0",
        *("python", "-m", "pytest", "tests/a b.py::test[x y-'z']"),
    ]


# -- exploring is what finds them --------------------------------------------------------------


def test_without_deviations_200_seeds_find_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from streamflow.backends.sim.schedule import Schedule

    monkeypatch.setattr(Schedule, "holds", lambda self, command: False)
    monkeypatch.setattr(Schedule, "next_turn", lambda self: 1)
    assert explore(early_reuse, settings=SETTINGS) == Explored(201, 1)
