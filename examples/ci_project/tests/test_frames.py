"""The right program. Each test leaves its device, which has to find nothing to complain of."""

import anyio
import frames
import numpy as np
import pytest

import streamflow as sf

pytestmark = pytest.mark.anyio  # on asyncio, and on trio where that is installed


async def test_every_frame_is_brightened(device):
    results = await frames.brighten_all(device, frames.TestPattern(), 6)
    assert [float(result.max()) for result in results] == [0, 0.25, 0.5, 0.75, 1, 1]
    assert all(result.shape == frames.SHAPE for result in results)


async def test_slow_copies_out_do_not_hold_up_the_camera(sim_device):
    camera = frames.TestPattern()
    async with anyio.create_task_group() as group:
        with sim_device.sim.gate("d2h"):  # nothing gets out
            group.start_soon(frames.brighten_all, sim_device, camera, 4)
            while camera.num_read < 4:
                await anyio.lowlevel.checkpoint()


async def test_a_launch_that_is_refused_reaches_the_caller(sim_device):
    sim_device.sim.fail(kind="launch", name="brighten", nth=2, sticky=False)
    with pytest.raises(sf.UpstreamFailed) as caught:  # of the copy out, which needs its result
        await frames.brighten_all(sim_device, frames.TestPattern(), 3)
    assert isinstance(caught.value.__cause__, sf.LaunchFailed)


async def test_a_lost_device_reaches_the_caller(sim_device):
    sim_device.sim.fail(kind="copy_d2h", nth=3)
    with pytest.raises(sf.DeviceLost):
        await frames.brighten_all(sim_device, frames.TestPattern(), 3)


async def test_it_does_without_much_memory(sim_device):
    x = sim_device.put(np.zeros(frames.SHAPE, np.float32))
    with sim_device.sim.out_of_memory(), pytest.raises(sf.OutOfDeviceMemory):
        await frames.brighten_all(sim_device, frames.TestPattern(), 1)
    await x
