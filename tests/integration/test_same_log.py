"""R15: the same program and seed do the same at the same time, run after run."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import anyio
import numpy as np
import pytest
from logged_program import LOOPS, event_log
from support import virtual

import streamflow as sf

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_100_runs_of_one_seed_give_the_same_event_log(loop: str) -> None:
    first = event_log(loop, seed=7)
    labels = {entry.label for entry in first}
    assert labels == {"allocate", "copy d2h", "copy h2d", "fill", "free", "mix"}
    assert len({entry.name for entry in first}) > 8  # lanes, streams and staging
    for _ in range(99):
        assert event_log(loop, seed=7) == first


def test_another_seed_and_another_schedule_give_another_log() -> None:
    plain = event_log("asyncio", seed=7)
    assert event_log("asyncio", seed=8) != plain
    assert event_log("asyncio", seed=7, schedule="random:3") != plain


@pytest.mark.parametrize("schedule", ["random:3", "priority-inverting:5", "starved:8"])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_schedule_gives_the_same_event_log_in_every_run(loop: str, schedule: str) -> None:
    first = event_log(loop, seed=0, schedule=schedule)
    for _ in range(9):
        assert event_log(loop, seed=0, schedule=schedule) == first


def test_how_fast_host_functions_run_makes_no_difference(run, add_one) -> None:
    def log_of(seconds: float) -> list[object]:
        async def by_host(dev: sf.Device, made: sf.Op, x: sf.DeviceArray) -> None:
            await dev.host(threading.Event().wait, seconds, after=made)  # it takes a moment
            dev.launch(add_one, x, 16, stream=shared)

        async def by_turns(dev: sf.Device, made: sf.Op, y: sf.DeviceArray) -> None:
            await made
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
            dev.fill(y, 1, stream=shared)

        async def main() -> list[object]:
            nonlocal shared
            async with virtual() as dev:
                x, y, z = (dev.zeros(16, np.float32) for _ in range(3))
                shared = dev.stream("shared")
                await dev.synchronize()
                with dev.sim.log() as log:
                    made = dev.launch(add_one, z, 16)
                    async with anyio.create_task_group() as group:
                        group.start_soon(by_host, dev, made, x)
                        group.start_soon(by_turns, dev, made, y)
                    await dev.synchronize()
                return [entry.label for entry in log]

        shared: sf.Stream
        return run(main)

    assert log_of(0.0) == log_of(0.005) == ["add_one", "add_one", "fill"]


@pytest.mark.parametrize("schedule", ["", "random:3"])
@pytest.mark.parametrize("loop", LOOPS)
def test_other_processes_with_another_hash_seed_give_the_same_event_log(
    loop: str, schedule: str
) -> None:
    here = "".join(" ".join(map(str, entry)) + "\n" for entry in event_log(loop, 7, schedule))
    for hash_seed in ("1", "2"):
        result = subprocess.run(
            [
                sys.executable,
                "-W",
                "error::SyntaxWarning",
                "logged_program.py",
                loop,
                "7",
                schedule,
            ],
            cwd=Path(__file__).parent,
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert result.stderr == ""
        assert result.stdout == here


# -- the log itself -------------------------------------------------------------------------


def test_a_log_has_what_ends_inside_its_block_and_nothing_else(run, add_one) -> None:
    async def main() -> None:
        async with virtual() as dev:
            x = dev.zeros(16, np.float32)
            await x
            with dev.sim.log() as log:
                assert len(log) == 0
                await dev.launch(add_one, x, 16, stream=dev.stream("mine"))
                now_s = dev.sim.clock.now_s
            await dev.get(x)
            assert [(entry.name, entry.label) for entry in log] == [("mine", "add_one")]
            assert log.entries[0].time_s == now_s
            assert str(log) == f"{now_s:.9f} s  device 0  mine: add_one"

    run(main)


def test_a_log_shows_every_device_of_the_loop_but_no_waits(run) -> None:
    async def main() -> None:
        async with virtual(0) as dev, virtual(1) as other:
            with dev.sim.log() as log:
                x = dev.zeros(16, np.float32)
                y = other.empty(16, np.float32)
                await other.copy(y, x)
            found = {(entry.device, entry.label) for entry in log}
            assert found == {
                (0, "allocate"),
                (0, "fill"),
                (1, "allocate"),
                (0, "copy d2h"),  # no access was granted: by the host
                (1, "copy h2d"),
            }

    run(main)


def test_calls_without_a_name_are_logged_without_their_number(run) -> None:
    async def main() -> None:
        async with virtual() as dev:
            with dev.sim.log() as log:
                await dev.call(lambda stream: None, reads=[], writes=[])
            assert [entry.label for entry in log] == ["call"]

    run(main)


def test_two_logs_at_a_time_and_none_afterwards(run, add_one) -> None:
    async def main() -> None:
        async with virtual() as dev:
            x = dev.zeros(16, np.float32)
            await x
            with dev.sim.log() as outer:
                await dev.launch(add_one, x, 16)
                with dev.sim.log() as inner:
                    await dev.launch(add_one, x, 16)
            await dev.launch(add_one, x, 16)
            assert (len(outer), len(inner)) == (2, 1)
            assert dev._core.backend.world.listeners == []  # off is free

    run(main)


def test_a_log_works_on_the_wall_clock_too(run, add_one) -> None:
    async def main() -> None:
        async with virtual(clock="wall") as dev:
            with dev.sim.log() as log:
                await dev.launch(add_one, dev.zeros(16, np.float32), 16)
            assert [entry.label for entry in log][:2] == ["allocate", "fill"]

    run(main)


def test_settings_refuse_a_schedule_that_is_none() -> None:
    for text in ("random", "random:x", "fair:3", "1", "1.2.3.4", "1.2=", "1.2,", "@3", "1.²"):
        with pytest.raises(ValueError, match="schedule is"):
            sf.SimOptions(clock="virtual", schedule=text)
    with pytest.raises(ValueError, match="needs clock='virtual'"):
        sf.SimOptions(clock="wall", schedule="random:1")
    read = sf.SimOptions.from_environment(
        {"STREAMFLOW_SIM_CLOCK": "virtual", "STREAMFLOW_SIM_SCHEDULE": "3.2,@4=0"}
    )
    assert read.schedule == "3.2,@4=0"
