"""The controls as a program's own tests use them, through ``dev.sim``."""

from __future__ import annotations

import numpy as np
import pytest
from support import error_of, until, virtual

import streamflow as sf
import streamflow.backends
from streamflow.backends import open_backend
from streamflow.errors import DeadlineExceeded


def test_a_failure_finds_an_op_by_its_name(run, add_one):
    async def main():
        async with virtual() as dev:
            x = dev.zeros(8, np.float32)
            rule = dev.sim.fail(name="the third", sticky=False)
            for name in ("the first", None, "the third", "the fourth"):
                op = dev.launch(add_one, x, 8, name=name)
                assert (await error_of(op) is not None) is (name == "the third")
                dev.fill(x, 0)
            assert rule.num_fired == 1
            assert isinstance(op, sf.Op)

    run(main)


@pytest.mark.parametrize("name", ["get", "put", "copy", "fill"])
def test_a_failure_finds_an_op_without_a_name_by_what_it_does(run, name):
    async def main():
        async with virtual() as dev:
            x, y = dev.zeros(8, np.float32), dev.zeros(8, np.float32)
            await dev.synchronize()
            source = np.ones(1 << 18, np.float32)  # staged
            with dev.sim.fail(name=name, sticky=False) as rule:
                made = dev.put(source)
                ops = {"copy": dev.copy(y, x), "get": dev.get(x), "put": made.ready}
                ops["fill"] = dev.fill(y, 1)
                errors = {each: await error_of(op) for each, op in ops.items()}
            assert rule.num_fired == 1
            assert [each for each, error in errors.items() if error is not None] == [name]

    run(main)


def test_a_failure_finds_an_op_that_was_parked(run, add_one):
    """It is looked for when the op is submitted, whoever's turn that is."""

    async def main():
        async with virtual() as dev:
            stream = dev.stream("s")
            x = dev.put(np.zeros(1 << 18, np.float32), stream=stream)
            ops = [dev.launch(add_one, x, 8, stream=stream, name=f"op{n}") for n in range(4)]
            dev.sim.fail(name="op2")
            assert [op.state for op in ops] == [sf.OpState.PARKED] * 4
            error = await error_of(ops[3])
            assert isinstance(error, sf.DeviceLost)
            assert error.suspects == ("add_one",)
            assert await error_of(ops[1]) is None

    run(main)


def test_a_failure_finds_a_kernel_by_its_name(run, add_one):
    async def main():
        async with virtual() as dev:
            x = dev.zeros(8, np.float32)
            dev.sim.fail(name="add_one", sticky=False)
            dev.empty(4).free()
            await error_of(dev.get(x))
            op = dev.launch(add_one, x, 8, name="named otherwise")
            assert isinstance(await error_of(op), sf.LaunchFailed)
            op = dev.launch(add_one, x, 8, name="add_one")
            assert await error_of(op) is not None  # upstream: x was never made right

    run(main)


def test_the_short_cuts_are_back_once_no_rule_asks_for_a_name(run, add_one):
    async def main():
        async with virtual() as dev:
            x = dev.zeros(8, np.float32)
            core = x._core
            assert core.is_fast
            with dev.sim.fail(name="nobody"):
                assert not core.is_fast
                await dev.launch(add_one, x, 8)
            assert core.is_fast
            dev.sim.fail(kind="fill", sticky=False)
            assert core.is_fast
            assert await error_of(dev.fill(x, 0)) is not None

    run(main)


def test_a_stalled_engine_runs_into_a_deadline(run):
    async def main():
        async with virtual() as dev:
            x = dev.zeros(8, np.float32)
            await x
            dev.sim.stall("d2h", 60.0)
            with pytest.raises(DeadlineExceeded) as caught:
                async with dev.scope(deadline=5.0):
                    await dev.get(x)
            assert "get" in str(caught.value.report)
            assert 5.0 <= dev.sim.clock.now_s < 5.1  # on every loop the program goes on then
            assert (await dev.get(x)).tolist() == [0] * 8
            assert 60.0 < dev.sim.clock.now_s < 60.1

    run(main)


def test_a_stalled_lane_is_told_from_the_engine_of_its_name(run):
    async def main():
        async with virtual() as dev:
            source = np.ones(8, np.float32)
            stream = dev.stream("mine")
            with dev.sim.stall(dev.lanes["h2d"], 60.0):
                await dev.put(source, stream=stream)  # the engine serves other streams
                assert dev.sim.clock.now_s < 1.0
            with dev.sim.stall("h2d", 60.0):
                await dev.put(source, stream=stream)
                assert dev.sim.clock.now_s > 60.0

    run(main)


def test_ending_a_stall_wakes_whoever_awaits_its_work(run, add_one):
    async def main():
        for clock in ("virtual", "wall"):
            async with virtual(clock=clock) as dev:
                x = dev.zeros(8, np.float32)
                stall = dev.sim.stall("compute", 3600.0)
                op = dev.launch(add_one, x, 8)
                await until(lambda op=op: op.state is sf.OpState.SUBMITTED)
                stall.end()
                await op

    run(main)


def test_the_memory_map_agrees_with_the_device(run):
    async def main():
        async with virtual() as dev:
            kept = dev.zeros(1000, np.float32)
            dropped = dev.empty(1000, np.float32)
            await kept
            del dropped
            await dev.synchronize()
            rows = dev.sim.memory_map()
            assert [row.state.name for row in rows] == ["LIVE", "FREED"]
            assert rows[0].address == kept.address
            assert sum(row.nbytes for row in rows) == dev.memory.used_nbytes
            assert sum(row.capacity_nbytes for row in rows) == dev.memory.reserved_nbytes

    run(main)


class Hardware:
    """A backend without controls, as CUDA's is."""

    name = "hardware"

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, verb):
        return getattr(self._inner, verb)

    def controls(self):
        return None


def test_there_are_no_controls_of_hardware(run, monkeypatch):
    monkeypatch.setattr(streamflow.backends, "_OPENERS", dict(streamflow.backends._OPENERS))
    sf.register_backend("hardware", lambda *args: Hardware(open_backend("sim", *args)))

    async def main():
        async with sf.Device(0, backend="hardware") as dev:
            with pytest.raises(AttributeError, match=r"'hardware'.*backend='sim'"):
                dev.sim  # noqa: B018

    run(main)


@pytest.mark.gpu
def test_there_are_no_controls_of_a_gpu(run):
    async def main():
        async with sf.Device(0, backend="cuda") as dev:
            with pytest.raises(AttributeError, match=r"'cuda'.*backend='sim'"):
                dev.sim  # noqa: B018

    run(main)


def test_a_report_names_the_gate_or_stall_that_holds_work_up(run, add_one):
    async def main():
        async with virtual() as dev:
            x, y, z = (dev.zeros(8, np.float32) for _ in range(3))
            await dev.synchronize()
            first, second = dev.stream("first"), dev.stream("second")
            with dev.sim.gate(first), dev.sim.stall(second, 60.0), dev.sim.stall("d2h", 60.0):
                dev.launch(add_one, x, 8, stream=first)
                dev.launch(add_one, y, 8, stream=second)
                dev.get(z)
                found = {row.stream: row.waits_for for row in dev.report().rows}
                assert found == {
                    "first": "a gate on first (dev.sim)",
                    "second": "a stall on second (dev.sim)",
                    "d2h": "the stall of engine d2h (dev.sim)",
                }

    run(main)
