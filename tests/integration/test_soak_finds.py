"""Defects that the soak has found, each in as few steps as it takes."""

from __future__ import annotations

import gc

import anyio
import numpy as np
import pytest
from support import turns, virtual

import streamflow as sf


def test_an_overwritten_part_is_clean_however_late_the_older_write_of_the_whole_fails(run, add_one):
    async def main():
        async with virtual() as dev:
            x, never = dev.zeros(64, np.float32), anyio.Event()
            part = x.split(2)[0]
            whole = dev.launch(add_one, x, 64, after=never)  # parked: it fails later
            dev.fill(part, 7)
            read = dev.get(part)
            assert whole.cancel()
            return await read

    assert (run(main) == 7).all()


def test_what_follows_an_op_whose_future_names_a_failed_one_has_its_own_order(run, add_one, saxpy):
    async def main():
        async with virtual() as dev:
            x, y, z = (dev.zeros(64, np.float32) for _ in range(3))
            never, future = anyio.Event(), anyio.Future()
            parked = dev.launch(add_one, x, 64, after=never)
            dev.sim.fail(kind="launch", sticky=False)
            refused = dev.launch(add_one, y, 64)
            failed = dev.launch(saxpy, 1.0, y, x, 64)  # of y, and would come after ``parked``
            waiting = dev.launch(add_one, z, 64, after=future)
            overwrite = dev.fill(z, 5)
            future.return_value = failed
            await turns()
            await overwrite
            for op, error in ((refused, sf.LaunchFailed), (waiting, sf.UpstreamFailed)):
                with pytest.raises(error):
                    await op
            assert parked.cancel()
            return await dev.get(z)

    assert (run(main) == 5).all()


def test_a_gate_of_one_device_holds_what_is_awaited_of_another(run, add_one):
    async def main():
        async with virtual(0) as one, virtual(1) as two:
            x, y = one.zeros(4, np.float32), two.zeros(4, np.float32)
            stream = one.stream()
            gate = one.sim.gate(stream)
            first = one.launch(add_one, x, 4, stream=stream)
            second = two.launch(add_one, y, 4, after=first)

            async def release():
                await turns(50)  # both have nothing to do any more
                gate.release()

            with anyio.fail_after(10):
                async with anyio.create_task_group() as group:
                    group.start_soon(release)
                    await second

    run(main)


def test_the_error_of_a_future_holds_nothing_of_the_op_that_waited(run):
    async def main():
        async with virtual() as dev:
            boom, future = ZeroDivisionError(), anyio.Future()
            read = dev.get(dev.zeros(4))
            await read
            op = dev.host(print, read, after=future)
            del read
            future.exception = boom
            with pytest.raises(sf.UpstreamFailed):
                await op
            del op
            await turns()
            gc.collect()
            assert "pinned block" not in dev.live()
            assert boom.__context__ is None

    run(main)
