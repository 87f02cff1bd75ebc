"""``MemoryPool``: attributes, trimming, places, sharing between devices, and its end."""

from __future__ import annotations

import gc

import anyio
import numpy as np
import pytest
from support import turns, virtual

import streamflow as sf
from streamflow.backends.base import PoolInfo
from streamflow.memory import (
    CudaAsyncMemoryResource,
    CudaAsyncViewMemoryResource,
    CudaMemoryResource,
    Location,
    MemoryKind,
    MemoryPool,
    PoolAccess,
    current_pool,
    default_pool,
    memory_support,
    pointer_attributes,
    require,
    set_current_pool,
)

MIB = 1 << 20
SWITCHES = [
    "reuse_follow_event_dependencies",
    "reuse_allow_opportunistic",
    "reuse_allow_internal_dependencies",
]


async def synchronise(dev, what="device", stream=None):
    """As a program of the driver's would: the thresholds apply at each of these."""
    backend = dev._core.backend
    if what == "device":
        wait = backend.synchronize_blocking
    elif what == "stream":
        wait = stream.backend_stream.sync
    else:
        event = backend.create_event()
        stream.backend_stream.record(event)
        wait = event.sync
    if backend.is_virtual:
        wait()
    else:
        await anyio.to_thread.run_sync(wait)


# -- attributes ------------------------------------------------------------------------------


def test_a_new_pool_is_as_the_driver_makes_it(run, open_device):
    async def main():
        async with open_device() as dev:
            pool = MemoryPool(dev)
            attributes = pool.attributes
            assert [getattr(attributes, name) for name in SWITCHES] == [True] * 3
            assert attributes.release_threshold == 0
            assert attributes.reserved_current == attributes.used_current == 0
            assert attributes.reserved_high == attributes.used_high == 0
            assert "release_threshold=0" in repr(attributes)
            assert pool.is_owned
            assert pool.device == dev.index
            assert pool.location == Location("device", dev.index)
            pool.close()

    run(main)


@pytest.mark.parametrize("name", SWITCHES)
def test_each_reuse_policy_is_switched_by_itself(run, open_device, name):
    async def main():
        async with open_device() as dev:
            pool = MemoryPool(dev)
            setattr(pool.attributes, name, False)
            assert [getattr(pool.attributes, each) for each in SWITCHES] == [
                each != name for each in SWITCHES
            ]
            setattr(pool.attributes, name, True)
            assert getattr(pool.attributes, name) is True
            for wrong in (2, "on", None):
                with pytest.raises(TypeError, match="switched by a bool"):
                    setattr(pool.attributes, name, wrong)
            assert getattr(pool.attributes, name) is True

    run(main)


def test_deterministic_turns_two_policies_off(run, open_device):
    async def main():
        async with open_device() as dev:
            pool = MemoryPool(dev, deterministic=True)
            assert [getattr(pool.attributes, name) for name in SWITCHES] == [True, False, False]

    run(main)


def test_the_threshold_takes_any_size_of_the_driver_s(run, open_device):
    async def main():
        async with open_device() as dev:
            pool = MemoryPool(dev)
            for value in (1, np.int32(5), 2**63 - 1, 2**64 - 1):
                pool.attributes.release_threshold = value
                assert pool.attributes.release_threshold == int(value)
                assert pool.release_threshold_nbytes == int(value)
            pool.attributes.release_threshold = "1GiB"
            assert pool.attributes.release_threshold == 1 << 30
            for wrong, error in ((-1, ValueError), (2**64, ValueError), (True, TypeError)):
                with pytest.raises(error):
                    pool.attributes.release_threshold = wrong
            assert pool.attributes.release_threshold == 1 << 30

    run(main)


def test_counters_tell_what_is_reserved_and_used_and_start_again(run, open_device):
    async def main():
        async with open_device() as dev:
            pool = MemoryPool(dev)
            pool.attributes.release_threshold = 2**64 - 1
            resource, stream = CudaAsyncViewMemoryResource(pool), dev.stream()
            blocks = [resource.allocate(4 * MIB, stream=stream) for _ in range(3)]
            info = pool.snapshot()
            assert isinstance(info, PoolInfo)
            assert info.used_nbytes == info.used_high_nbytes == 12 * MIB
            assert info.reserved_nbytes == info.reserved_high_nbytes >= 12 * MIB
            for block in blocks[:2]:
                resource.deallocate(block, stream=stream)
            await synchronise(dev)
            assert pool.used_nbytes == pool.attributes.used_current == 4 * MIB
            assert pool.used_high_nbytes == pool.attributes.used_high == 12 * MIB
            pool.reset_high()  # with a block that is live
            assert pool.used_high_nbytes == 4 * MIB
            assert pool.reserved_high_nbytes == pool.reserved_nbytes >= 4 * MIB
            resource.deallocate(blocks[2], stream=stream)
            assert pool.used_nbytes == 0
            for name in ("reserved_current", "used_current"):
                with pytest.raises(AttributeError, match="can only be read"):
                    setattr(pool.attributes, name, 0)
            for name in ("reserved_high", "used_high"):
                with pytest.raises(ValueError, match="to 0 only"):
                    setattr(pool.attributes, name, 1)

    run(main)


def test_a_pool_has_the_fields_of_its_snapshot(run):
    async def main():
        async with virtual() as dev:
            pool = MemoryPool(dev)
            CudaAsyncViewMemoryResource(pool).allocate(MIB, stream=dev.stream())
            info = pool.snapshot()
            for name in PoolInfo.__slots__:
                assert getattr(pool, name) == getattr(info, name)

    run(main)


# -- keeping and giving back -----------------------------------------------------------------


@pytest.mark.parametrize("what", ["device", "stream", "event"])
def test_c42_a_threshold_keeps_one_backing_allocation(run, open_device, what):
    async def main():
        async with open_device() as dev:
            pool, stream = MemoryPool(dev), dev.stream()
            pool.attributes.release_threshold = 2**64 - 1
            resource = CudaAsyncViewMemoryResource(pool)
            addresses = set()
            for _ in range(100):
                block = resource.allocate(64 * MIB, stream=stream)
                addresses.add(block.address)
                resource.deallocate(block, stream=stream)
                await synchronise(dev, what, stream)
                assert pool.reserved_nbytes == pool.reserved_high_nbytes >= 64 * MIB
            assert pool.reserved_high_nbytes < 128 * MIB  # one block backs them all
            assert pool.used_nbytes == 0

    run(main)


@pytest.mark.parametrize("what", ["device", "stream", "event"])
def test_c42_without_a_threshold_a_synchronisation_gives_all_back(run, open_device, what):
    async def main():
        async with open_device() as dev:
            pool, stream = MemoryPool(dev), dev.stream()
            resource = CudaAsyncViewMemoryResource(pool)
            block = resource.allocate(64 * MIB, stream=stream)
            assert pool.reserved_nbytes >= 64 * MIB
            resource.deallocate(block, stream=stream)
            await synchronise(dev, what, stream)
            assert pool.reserved_nbytes == 0

    run(main)


@pytest.mark.parametrize("floor", [0, 1, 32 * MIB, "48MiB", 64 * MIB, 1 << 40])
def test_c42_trim_keeps_at_least_what_it_is_told(run, open_device, floor):
    async def main():
        async with open_device() as dev:
            pool, stream = MemoryPool(dev), dev.stream()
            pool.attributes.release_threshold = 2**64 - 1
            resource = CudaAsyncViewMemoryResource(pool)
            blocks = [resource.allocate(16 * MIB, stream=stream) for _ in range(4)]
            for block in blocks:
                resource.deallocate(block, stream=stream)
            await pool.trim(floor)
            kept = pool.reserved_nbytes
            known = {"48MiB": 48 * MIB}.get(floor, floor)
            if known == 0:
                assert kept == 0
            assert kept >= min(known, 64 * MIB)
            for wrong, error in ((-1, ValueError), (True, TypeError), ("much", ValueError)):
                with pytest.raises(error):
                    await pool.trim(wrong)

    run(main)


def test_trim_leaves_what_is_in_use(run, open_device):
    async def main():
        async with open_device() as dev:
            pool, stream = MemoryPool(dev), dev.stream()
            pool.attributes.release_threshold = 2**64 - 1
            resource = CudaAsyncViewMemoryResource(pool)
            kept, freed = (resource.allocate(32 * MIB, stream=stream) for _ in range(2))
            resource.deallocate(freed, stream=stream)
            await pool.trim()
            assert pool.used_nbytes == 32 * MIB
            assert 32 * MIB <= pool.reserved_nbytes < 64 * MIB
            resource.deallocate(kept, stream=stream)

    run(main)


def test_trim_waits_for_frees_off_the_loop(run):
    async def main():
        async with sf.Device(
            0, backend="sim", settings=sf.Settings(sim=sf.SimOptions(clock="wall"))
        ) as dev:
            pool, stream = MemoryPool(dev), dev.stream()
            pool.attributes.release_threshold = 2**64 - 1
            resource = CudaAsyncViewMemoryResource(pool)
            block = resource.allocate(MIB, stream=stream)
            gate = dev.sim.gate(stream)
            resource.deallocate(block, stream=stream)
            done = anyio.Event()

            async def trim():
                await pool.trim()
                done.set()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(trim)
                await turns()  # the loop goes on
                assert not done.is_set()
                assert pool.reserved_nbytes == MIB
                gate.release()
            assert pool.reserved_nbytes == 0

    run(main)


def test_a_cancelled_trim_leaves_the_pool_to_its_thread(run):
    async def main():
        async with sf.Device(
            0, backend="sim", settings=sf.Settings(sim=sf.SimOptions(clock="wall"))
        ) as dev:
            pool, stream = MemoryPool(dev), dev.stream()
            pool.attributes.release_threshold = 2**64 - 1
            resource = CudaAsyncViewMemoryResource(pool)
            block = resource.allocate(MIB, stream=stream)
            gate = dev.sim.gate(stream)
            resource.deallocate(block, stream=stream)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(pool.trim)
                await turns()
                tasks.cancel_scope.cancel()
            pool.close()
            assert pool.is_closed
            assert dev.sim.counters["destroy_pool"] == 0  # the thread is using it
            gate.release()
            with anyio.fail_after(20):
                while dev.sim.counters["destroy_pool"] == 0:
                    await anyio.lowlevel.checkpoint()

    run(main)


def test_trim_synchronises_only_if_that_can_give_anything_back(run):
    async def main():
        async with virtual() as dev:
            pool, stream = MemoryPool(dev), dev.stream()
            pool.attributes.release_threshold = 2**64 - 1
            resource = CudaAsyncViewMemoryResource(pool)
            await pool.trim()
            block = resource.allocate(MIB, stream=stream)
            gate = dev.sim.gate(stream)
            await pool.trim()  # all of it is in use
            resource.deallocate(block, stream=stream)
            await pool.trim("2MiB")  # no more than that is there
            assert dev.sim.counters["synchronize_blocking"] == 0
            with pytest.raises(sf.DeviceError):  # on virtual time nobody would open the gate
                await pool.trim()
            gate.release()
            await pool.trim()
            assert pool.reserved_nbytes == 0

    run(main)


def test_max_size_bounds_the_pool(run, open_device):
    async def main():
        async with open_device() as dev:
            pool, stream = MemoryPool(dev, max_size="64MiB"), dev.stream()
            resource = CudaAsyncViewMemoryResource(pool)
            block = resource.allocate(32 * MIB, stream=stream)
            with pytest.raises(sf.OutOfDeviceMemory):
                resource.allocate(128 * MIB, stream=stream)
            resource.deallocate(block, stream=stream)

    run(main)


# -- places ----------------------------------------------------------------------------------


def test_the_location_follows_the_pool_never_the_current_device(run):
    async def main():
        async with virtual(0) as one, virtual(1) as two:
            pools = MemoryPool(one), MemoryPool(two)
            with two.stream():  # the current device is the second
                for dev, pool in zip((one, two), pools, strict=True):
                    resource = CudaAsyncViewMemoryResource(pool, device=dev)
                    block = resource.allocate(MIB, stream=dev.stream())
                    found = pointer_attributes(block)
                    assert found.device_index == dev.index
                    assert found.pool is pool.handle
                    assert pointer_attributes(dev.zeros(4)).device_index == dev.index

    run(main)


def test_a_view_belongs_to_the_device_that_its_pool_lies_on(run):
    async def main():
        async with virtual(0) as one, virtual(1) as two:
            view = CudaAsyncViewMemoryResource(MemoryPool(one))
            assert view.device == 0
            with pytest.raises(ValueError, match="made for device 0, not 1"):
                two.zeros(10, memory=view)
            await one.zeros(10, memory=view)

    run(main)


def test_views_of_a_closed_pool_compare_and_allocate_no_more(run):
    async def main():
        async with virtual() as dev:
            pool, stream = MemoryPool(dev), dev.stream()
            view, same = (CudaAsyncViewMemoryResource(pool) for _ in range(2))
            block = view.allocate(512, stream=stream)
            pool.close()
            assert view == same
            assert view != CudaAsyncViewMemoryResource(MemoryPool(dev))
            with pytest.raises(sf.Closed, match="pool is closed"):
                view.allocate(512, stream=stream)
            with pytest.raises(sf.Closed, match="pool is closed"):
                CudaAsyncViewMemoryResource(pool)
            view.deallocate(block, stream=stream)

    run(main)


def test_a_view_says_whether_the_host_reaches_its_pool(run):
    async def main():
        async with virtual() as dev:
            on_host = CudaAsyncViewMemoryResource(MemoryPool(dev, location="host"))
            assert require(on_host, host=True, device=True) is on_host
            with pytest.raises(ValueError, match="not host accessible"):
                require(CudaAsyncViewMemoryResource(MemoryPool(dev)), host=True)

    run(main)


def test_what_is_no_pool_is_refused_by_name(run):
    async def main():
        async with virtual() as dev:
            with pytest.raises(TypeError, match=r"pool_handle\(\)"):
                CudaAsyncViewMemoryResource(CudaAsyncMemoryResource())
            for wrong in (5, object()):
                view = CudaAsyncViewMemoryResource(wrong)
                with pytest.raises(TypeError, match="not a pool"):
                    view.allocate(512, stream=dev.stream())
            with pytest.raises(TypeError, match="found None"):
                MemoryPool(None)
            with pytest.raises(ValueError, match="to 0 only"):
                dev.memory.attributes.used_high = None

    run(main)


@pytest.mark.parametrize("place", ["host", 0])
def test_a_pool_on_the_host(run, place):
    async def main():
        async with virtual() as dev:
            pool, stream = MemoryPool(dev, location=place), dev.stream()
            await pool.set_access(dev)
            free = dev._core.backend.memory_info()[0]
            block = CudaAsyncViewMemoryResource(pool, device=dev).allocate(MIB, stream=stream)
            assert dev._core.backend.memory_info()[0] == free
            found = pointer_attributes(block)
            assert found.kind is MemoryKind.HOST
            assert found.is_host_accessible
            assert found.device_index is None
            assert pool.location == Location("host" if place == "host" else "numa")
            with pytest.raises(ValueError, match="lies there"):
                set_current_pool(dev, pool)

    run(main)


def test_what_does_not_go_together_is_refused(run):
    async def main():
        async with virtual() as dev:
            assert MemoryPool(dev, exportable=True).is_exportable
            for location in ("host", 0):
                with pytest.raises(ValueError, match="shared with other processes"):
                    MemoryPool(dev, location=location, exportable=True)
            for wrong in ("gpu", True, 1.0, None):
                with pytest.raises(TypeError, match="location="):
                    MemoryPool(dev, location=wrong)
            with pytest.raises(ValueError, match="NUMA"):
                MemoryPool(dev, location=-1)
            with pytest.raises(sf.DeviceError, match="NUMA"):
                MemoryPool(dev, location=7)
            with pytest.raises(ValueError, match="max_size"):
                MemoryPool(dev, max_size=-1)

    run(main)


def test_support_is_asked_before_anything_is_made(run, monkeypatch):
    async def main():
        async with virtual() as dev:
            support = memory_support(dev)
            assert support == memory_support()
            assert support == memory_support(dev.index)
            assert support.has_pools
            backend = dev._core.backend
            cases = [
                ({"has_pools": False}, {}, "no stream-ordered pools"),
                ({"has_host_pools": False}, {"location": "host"}, "no pools on the host"),
                ({"pool_handle_types": frozenset()}, {"exportable": True}, "can't be shared"),
            ]
            for missing, options, words in cases:
                fields = {name: getattr(support, name) for name in support.__slots__}
                less = type(support)(**{**fields, **missing})
                monkeypatch.setattr(backend, "memory_support", lambda less=less: less)
                before = dev.sim.counters["create_pool"]
                with pytest.raises(sf.DeviceError, match=words):
                    MemoryPool(dev, **options)
                assert dev.sim.counters["create_pool"] == before

    run(main)


# -- the device's own pools --------------------------------------------------------------------


def test_c42_the_default_pool_is_left_as_found(run, open_device):
    async def main():
        async with open_device() as dev:
            pool = default_pool(dev)
            before = [getattr(pool.attributes, name) for name in (*SWITCHES, "release_threshold")]
            assert not pool.is_owned
            assert pool == default_pool(dev.index) == current_pool(dev)
            x = dev.zeros(MIB)
            await dev.get(x)
            assert pool.used_nbytes == 0  # our arrays are not from there
            other = MemoryPool(dev, deterministic=True)
            other.attributes.release_threshold = 1 << 30
            other.close()
            after = [getattr(pool.attributes, name) for name in (*SWITCHES, "release_threshold")]
            assert before == after
            pool.close()  # forgets it, and no more
            assert default_pool(dev).reserved_nbytes == 0
        async with open_device() as dev:
            after = [
                getattr(default_pool(dev).attributes, name)
                for name in (*SWITCHES, "release_threshold")
            ]
            assert before == after

    run(main)


def test_its_user_may_set_attributes_of_the_default_pool(run):
    async def main():
        async with virtual() as dev:
            default_pool(dev).attributes.release_threshold = 77
            assert default_pool(dev).release_threshold_nbytes == 77

    run(main)


def test_the_current_pool_is_set_kept_and_put_back(run, open_device):
    async def main():
        async with open_device() as dev:
            pool = MemoryPool(dev)
            assert set_current_pool(dev, pool) == default_pool(dev)
            assert current_pool(dev) == pool != default_pool(dev)
            del pool
            gc.collect()
            MemoryPool(dev).close()  # gives back what was dropped, but for that one
            assert current_pool(dev) != default_pool(dev)
            assert current_pool(dev).attributes.release_threshold == 0
            assert set_current_pool(dev, default_pool(dev)) != default_pool(dev)
            assert current_pool(dev) == default_pool(dev)
            another = MemoryPool(dev)
            set_current_pool(dev, another)
            another.close()
            await turns()
            if dev._core.backend.is_virtual:
                assert current_pool(dev) == default_pool(dev)

    run(main)


def test_a_pool_that_cannot_be_current_is_refused(run):
    async def main():
        async with virtual(0) as one, virtual(1) as two:
            with pytest.raises(ValueError, match="lies there"):
                set_current_pool(one, MemoryPool(two))
            for wrong in (None, one, 7):
                with pytest.raises(TypeError, match="takes a MemoryPool"):
                    set_current_pool(one, wrong)
            closed = MemoryPool(one)
            closed.close()
            with pytest.raises(sf.Closed):
                set_current_pool(one, closed)
            assert current_pool(one) == default_pool(one)
            for call in (default_pool, current_pool):
                with pytest.raises(TypeError, match="device="):
                    call(None)
                with pytest.raises(sf.Closed, match="not open"):
                    call(5)

    run(main)


# -- access of other devices -------------------------------------------------------------------


def test_access_is_granted_told_and_taken_back(run):
    async def main():
        async with virtual(0) as one, virtual(1) as two:
            pool = MemoryPool(one)
            assert pool.get_access(one) is PoolAccess.READ_WRITE
            assert pool.get_access(two) is PoolAccess.NONE
            await pool.set_access(two)
            assert pool.get_access(1) is PoolAccess.READ_WRITE
            await pool.set_access(1, "read")
            assert pool.get_access(two) is PoolAccess.READ
            await pool.set_access(two, PoolAccess.NONE)
            assert pool.get_access(two) is PoolAccess.NONE
            for bad in ("all", None, 3):
                with pytest.raises(ValueError, match="'none', 'read', 'read-write'"):
                    await pool.set_access(two, bad)

    run(main)


def test_the_owner_s_access_cannot_be_taken_away(run, open_device):
    async def main():
        async with open_device() as dev:
            pool = MemoryPool(dev)
            for access in ("none", "read"):
                with pytest.raises(ValueError, match="owns this pool"):
                    await pool.set_access(dev, access)
            await pool.set_access(dev)
            assert pool.get_access(dev) is PoolAccess.READ_WRITE

    run(main)


def test_the_capability_is_asked_before_a_grant(run, monkeypatch):
    async def main():
        async with virtual(0) as one, virtual(1) as two:
            pool = MemoryPool(one)
            asked = []

            def no_peer(index):
                asked.append(index)
                return False

            monkeypatch.setattr(two._core.backend, "can_access_peer", no_peer)
            with pytest.raises(sf.DeviceError, match="no peers"):
                await pool.set_access(two)
            assert asked == [0]
            assert one.sim.counters["set_pool_access_blocking"] == 0
            await pool.set_access(two, "none")  # there is nothing to be able to

    run(main)


def test_access_of_a_device_that_is_not_there_is_a_clear_error(run, open_device):
    async def main():
        async with open_device() as dev:
            pool = MemoryPool(dev)
            with pytest.raises(sf.Closed, match="device 7 is not open"):
                await pool.set_access(7)
            with pytest.raises(ValueError, match="ordinal"):
                await pool.set_access(-1)
            for wrong in (None, "1"):
                with pytest.raises(TypeError):
                    await pool.set_access(wrong)

    run(main)


def test_a_grant_covers_blocks_before_and_after_it(run, add_one):
    async def main():
        async with virtual(0) as one, virtual(1) as two:
            x, y = one.put(np.arange(4.0)), two.zeros(4)
            pool = MemoryPool._view(one._core.space, one._core.memory.pool)
            await pool.set_access(two, "read")
            await two.copy(y, x)
            await two.copy(y, one.put(np.ones(4)))
            assert two.sim.counters["copy_peer"] == 2
            await pool.set_access(two, "none")
            await two.copy(y, x)
            assert two.sim.counters["copy_peer"] == 2
            assert (await two.get(y)).tolist() == [0, 1, 2, 3]

    run(main)


# -- pointers --------------------------------------------------------------------------------


def test_pointer_attributes_tell_pool_memory_from_the_rest(run, open_device):
    async def main():
        async with open_device() as dev:
            pool, stream = MemoryPool(dev), dev.stream()
            resource = CudaAsyncViewMemoryResource(pool)
            block = resource.allocate(MIB, stream=stream)
            found = pointer_attributes(block)
            assert found == pointer_attributes(block.address, device=dev)
            assert found.kind is MemoryKind.DEVICE
            assert found.device_index == dev.index
            assert not found.has_context
            assert MemoryPool._view(dev._core.space, found.pool) == pool
            linear = CudaMemoryResource(device=dev.index)
            plain = linear.allocate(MIB, stream=stream)
            found = pointer_attributes(plain)
            assert found.has_context
            assert found.pool is None
            x = dev.zeros(16)
            assert pointer_attributes(x[4:]).device_index == dev.index
            linear.deallocate(plain, stream=stream)
            resource.deallocate(block, stream=stream)

    run(main)


def test_pointer_attributes_of_freed_memory_are_refused(run):
    async def main():
        async with virtual() as dev:
            pool, stream = MemoryPool(dev), dev.stream()
            resource = CudaAsyncViewMemoryResource(pool)
            block = resource.allocate(MIB, stream=stream)
            gate = dev.sim.gate(stream)
            resource.deallocate(block, stream=stream)  # also while the free is to run
            with pytest.raises(sf.Closed, match="freed"):
                pointer_attributes(block)
            gate.release()
            x = dev.zeros(4)
            x.free()
            with pytest.raises(sf.Closed, match="freed"):
                pointer_attributes(x)
            for nothing in (resource.allocate(0, stream=stream), dev.zeros(0), 0, -4):
                with pytest.raises(ValueError, match="no bytes"):
                    pointer_attributes(nothing)
            for wrong in (None, True, "0x0", 1.5):
                with pytest.raises(TypeError, match="takes a Block"):
                    pointer_attributes(wrong)

    run(main)


# -- the end ---------------------------------------------------------------------------------


def test_a_closed_pool_refuses_everything_and_its_blocks_go_back(run):
    async def main():
        async with virtual() as dev:
            pool, stream = MemoryPool(dev), dev.stream()
            resource = CudaAsyncViewMemoryResource(pool)
            block = resource.allocate(MIB, stream=stream)
            free = dev._core.backend.memory_info()[0]
            pool.close()
            pool.close()
            for call in (
                pool.snapshot,
                pool.reset_high,
                lambda: pool.handle,
                lambda: pool.attributes.release_threshold,
                lambda: pool.get_access(dev),
            ):
                with pytest.raises(sf.Closed, match="memory pool is closed"):
                    call()
            with pytest.raises(sf.Closed):
                await pool.trim()
            assert "closed" in repr(pool)
            resource.deallocate(block, stream=stream)
            await dev.synchronize()
            await synchronise(dev)
            assert dev._core.backend.memory_info()[0] == free + MIB

    run(main)


def test_a_dropped_pool_is_destroyed_without_a_finaliser_calling_the_driver(run):
    async def main():
        async with virtual() as dev:
            MemoryPool(dev)
            gc.collect()
            assert dev.sim.counters["destroy_pool"] == 0
            other = MemoryPool(dev)
            assert dev.sim.counters["destroy_pool"] == 1
            other.close()
            assert dev.sim.counters["destroy_pool"] == 2

    run(main)


def test_a_device_closes_its_pools_and_they_say_so(run, open_device):
    async def main():
        async with open_device() as dev:
            pool = MemoryPool(dev)
            view = default_pool(dev)
            MemoryPool(dev)  # dropped
        for each in (pool, view):
            with pytest.raises(sf.Closed, match="device 0, which this memory pool is on"):
                each.snapshot()
            each.close()
        with pytest.raises(sf.Closed, match="not open"):
            MemoryPool(0)

    run(main)
