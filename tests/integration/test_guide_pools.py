"""The CUDA guide's programs for stream-ordered memory, written with streams, pools and arrays.

The stream in the middle is held, so that an order which only happens to come about fails.
Which address an allocation gets is nobody's promise: what a pool reserves tells of reuse.

Source: CUDA programming guide, stream-ordered memory allocator.
"""

from __future__ import annotations

import anyio
import numpy as np
import pytest
from support import turns, virtual, wanted

import streamflow as sf
from streamflow.memory import CudaAsyncViewMemoryResource, MemoryPool, PoolAccess

MIB = 1 << 20
NUM = MIB // 4  # floats


class Lab:
    """A device, a pool that keeps what it has, and streams by number."""

    def __init__(self, dev, **options):
        self.dev = dev
        self.pool = MemoryPool(dev, **options)
        self.pool.attributes.release_threshold = 2**64 - 1
        self.resource = CudaAsyncViewMemoryResource(self.pool)
        self.streams = [dev.stream(f"s{n}") for n in range(3)]

    def empty(self, stream, num=NUM):
        return self.dev.empty(num, np.float32, memory=self.resource, stream=self.streams[stream])

    async def values(self, array):
        return set((await self.dev.get(array)).tolist())


def off_but(pool, *names):
    """Switch every reuse policy off that is not named."""
    for name in (
        "reuse_follow_event_dependencies",
        "reuse_allow_opportunistic",
        "reuse_allow_internal_dependencies",
    ):
        setattr(pool.attributes, name, name in names)


def test_allocate_use_and_free_on_one_stream(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            lab = Lab(dev)
            stream = lab.streams[0]
            for _ in range(3):
                x = lab.empty(0)
                dev.fill(x, 1, stream=stream)
                dev.launch(add_one, x, NUM, stream=stream)
                result = dev.get(x, stream=stream)
                x.free(stream=stream)
                assert set((await result).tolist()) == {2}
            assert lab.pool.used_nbytes == 0
            assert lab.pool.reserved_high_nbytes < 64 * MIB  # the stream has it back each time

    run(main)


def test_allocate_here_use_there_free_on_a_third_stream(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            lab = Lab(dev)
            one, two, three = lab.streams
            x = lab.empty(0)
            allocated = dev.fill(x, 1, stream=one)
            two.wait_for(allocated)
            held = open_device.stall(dev, two)
            used = dev.launch(add_one, x, NUM, stream=two)
            result = dev.get(x, stream=two)
            three.wait_for(used)
            freed = x.free(stream=three)
            later = lab.empty(0)  # may not get what the kernel is to write
            dev.fill(later, 7, stream=one)
            if dev.backend == "sim":
                await allocated
                wanted(used, freed)
                await turns(50)
                assert not used.done()
                assert not freed.done()
            held.release()
            assert set((await result).tolist()) == {2}
            await freed
            assert await lab.values(later) == {7}
            later.free()
            await dev.synchronize()
            assert lab.pool.used_nbytes == 0

    run(main)


@pytest.mark.parametrize("is_on", [True, False])
def test_reuse_after_an_event(run, is_on):
    async def main():
        async with virtual() as dev:
            lab = Lab(dev)
            off_but(lab.pool, *["reuse_follow_event_dependencies"] * is_on)
            x = lab.empty(0)
            held = dev.sim.gate(lab.streams[0])
            freed = x.free(stream=lab.streams[0])
            lab.streams[1].wait_for(freed)
            y = lab.empty(1)
            dev.fill(y, 5, stream=lab.streams[1])
            assert lab.pool.reserved_nbytes == (MIB if is_on else 2 * MIB)
            held.release()
            assert await lab.values(y) == {5}

    run(main)


@pytest.mark.parametrize("is_on", [True, False])
def test_reuse_of_what_happens_to_be_free(run, is_on):
    async def main():
        async with virtual() as dev:
            lab = Lab(dev)
            off_but(lab.pool, *["reuse_allow_opportunistic"] * is_on)
            x = lab.empty(0)
            await x.free(stream=lab.streams[0])  # it has run, and the second stream knows nothing
            y = lab.empty(1)
            dev.fill(y, 5, stream=lab.streams[1])
            assert lab.pool.reserved_nbytes == (MIB if is_on else 2 * MIB)
            assert await lab.values(y) == {5}

    run(main)


@pytest.mark.parametrize("is_on", [True, False])
def test_reuse_by_a_wait_that_the_driver_adds(run, is_on):
    async def main():
        async with virtual() as dev:
            lab = Lab(dev, max_size=MIB)
            off_but(lab.pool, *["reuse_allow_internal_dependencies"] * is_on)
            x, kept = lab.empty(0), dev.zeros(NUM, np.float32)
            await kept
            dev.fill(x, 1, stream=lab.streams[0])
            held = dev.sim.gate(lab.streams[0])
            dev.copy(kept, x, stream=lab.streams[0])
            x.free(stream=lab.streams[0])
            if not is_on:
                with pytest.raises(sf.OutOfDeviceMemory):
                    lab.empty(1)
                held.release()
                assert await lab.values(kept) == {1}
                return
            y = lab.empty(1)
            filled = dev.fill(y, 5, stream=lab.streams[1])
            wanted(filled)
            await turns(50)
            assert not filled.done()  # after the free, which after the gate
            held.release()
            assert await lab.values(kept) == {1}
            assert await lab.values(y) == {5}
            assert lab.pool.reserved_high_nbytes == MIB

    run(main)


def test_what_a_synchronisation_has_proven_free_is_reused_with_every_policy_off(run):
    async def main():
        async with virtual() as dev:
            lab = Lab(dev, deterministic=True)
            off_but(lab.pool)
            lab.empty(0).free(stream=lab.streams[0])
            dev._core.backend.synchronize_blocking()
            lab.empty(1)
            assert lab.pool.reserved_nbytes == MIB

    run(main)


def test_deterministic_pools_reserve_the_same_however_far_the_device_is(run):
    async def main():
        async with virtual() as dev:
            reserved = []
            for is_ahead in (False, True):
                lab = Lab(dev, deterministic=True)
                freed = lab.empty(0).free(stream=lab.streams[0])
                if is_ahead:
                    await freed
                lab.empty(1)
                reserved.append(lab.pool.reserved_nbytes)
            assert reserved == [2 * MIB, 2 * MIB]

    run(main)


def test_trim_after_a_phase(run, open_device):
    async def main():
        async with open_device() as dev:
            lab = Lab(dev)
            for phase in range(3):
                arrays = [lab.empty(n % 3) for n in range(6)]
                for number, array in enumerate(arrays):
                    dev.fill(array, number)
                results = [await dev.get(array) for array in arrays]
                assert [result[0] for result in results] == list(range(6))
                for number, array in enumerate(arrays):
                    array.free(stream=lab.streams[number % 3])
                del array, arrays
                high = lab.pool.reserved_high_nbytes
                await lab.pool.trim(2 * MIB if phase < 2 else 0)
                assert lab.pool.used_nbytes == 0
                assert lab.pool.reserved_nbytes >= (2 * MIB if phase < 2 else 0)
                lab.pool.reset_high()
                assert lab.pool.reserved_high_nbytes <= high
            assert lab.pool.reserved_nbytes == 0

    run(main)


@pytest.mark.parametrize("access", [PoolAccess.READ_WRITE, PoolAccess.READ])
def test_a_pool_whose_access_was_granted_serves_the_other_device(run, add_one, access):
    async def main():
        async with virtual(0) as one, virtual(1) as two:
            lab = Lab(one)
            x, y = lab.empty(0), two.zeros(NUM, np.float32)
            filled = one.fill(x, 3, stream=lab.streams[0])
            await lab.pool.set_access(two, access)  # covers what was handed out before
            held = one.sim.gate(lab.streams[1])
            lab.streams[1].wait_for(filled)
            one.launch(add_one, x, NUM, stream=lab.streams[1])
            copied = two.copy(y, x)
            x.free(stream=lab.streams[2])
            wanted(copied)
            await turns(50)
            assert not copied.done()
            held.release()
            assert set((await two.get(y)).tolist()) == {4}
            assert two.sim.counters["copy_peer"] == 1
            z = lab.empty(0)  # and what is handed out later
            one.fill(z, 9, stream=lab.streams[0])
            await two.copy(y, z)
            assert set((await two.get(y)).tolist()) == {9}
            assert two.sim.counters["copy_peer"] == 2
            assert two.sim.counters["copy_h2d"] == 0

    run(main)


def test_c42_through_arrays_of_a_pool(run, open_device):
    async def main():
        async with open_device() as dev:
            for threshold in (2**64 - 1, 0):
                lab = Lab(dev)
                lab.pool.attributes.release_threshold = threshold
                backend = dev._core.backend
                for _ in range(100):
                    lab.empty(0, 16 * MIB).free(stream=lab.streams[0])  # 64 MiB
                    wait = backend.synchronize_blocking
                    if backend.is_virtual:
                        wait()
                    else:
                        await anyio.to_thread.run_sync(wait)
                    reserved = lab.pool.reserved_nbytes
                    assert reserved == 0 if not threshold else 64 * MIB <= reserved < 128 * MIB
                lab.pool.close()

    run(main)
