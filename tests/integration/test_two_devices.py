"""Devices of one loop that depend on each other, when one of them is lost (R2, R9, R11)."""

from __future__ import annotations

import numpy as np
import pytest
from support import error_of, turns, virtual

import streamflow as sf


@pytest.mark.parametrize("how", ["after", "copy", "after, parked"])
def test_c2_work_on_lost_data_fails_on_the_other_device_too(run, add_one, how):
    async def main():
        one = virtual(0)
        await one.__aenter__()
        async with virtual(1) as two:
            x, y, z, w = one.zeros(4, "f4"), *(two.zeros(4, np.float32) for _ in range(3))
            await sf.gather(x.ready, y.ready, z.ready, w.ready)
            stream = one.stream()
            gate = one.sim.gate(stream)
            one.sim.fail("launch")
            bad = one.launch(add_one, x, 4, stream=stream)
            if how == "copy":
                first = two.copy(y, x)
            elif how == "after":
                first = two.launch(add_one, y, 4, after=bad)
            else:
                first = two.launch(add_one, y, 4, after=[bad, two.host(turns)])
            second = two.launch(add_one, y, 4)
            copied = two.copy(z, y)
            other = two.launch(add_one, w, 4)  # has nothing to do with it
            await turns()
            gate.release()
            assert isinstance(await error_of(bad), sf.DeviceLost)
            for op in (first, second, copied):
                error = await error_of(op)
                assert isinstance(error, sf.UpstreamFailed), op
                assert isinstance(error.__cause__, sf.DeviceLost)
            await other
            two.fill(y, 3)  # a full overwrite clears it
            assert (await two.get(y)).tolist() == [3, 3, 3, 3]
            assert two.is_healthy
            assert not two._core.abroad
            assert two._core.is_fast
        with pytest.raises(sf.DeviceLost):
            await one.synchronize()
        await one.__aexit__(None, None, None)

    run(main)


def test_work_between_healthy_devices_leaves_no_trace_of_it(run, add_one):
    async def main():
        async with virtual(0) as one, virtual(1) as two:
            x, y = one.zeros(4, np.float32), two.zeros(4, np.float32)
            one.launch(add_one, x, 4)
            two.copy(y, x)
            two.launch(add_one, y, 4)
            assert (await two.get(y)).tolist() == [2, 2, 2, 2]
            await two.synchronize()
            assert not two._core.abroad
            assert two._core.is_fast

    run(main)
