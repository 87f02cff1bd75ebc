"""The simulator's memory that comes from no pool, and who is caught misusing it."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from streamflow.backends.memory import Location, MemoryAdvice, MemoryKind, PoolAccess
from streamflow.backends.sim import host_memory
from streamflow.backends.sim.memory_map import MemoryState
from streamflow.backends.sim.report import RaceKind
from streamflow.errors import Closed, DeviceError, DeviceLost, OutOfDeviceMemory

MIB = 1 << 20


def lost_reason(lab):
    lab.run()
    with pytest.raises(DeviceLost) as caught:
        lab.device.synchronize_blocking()
    return str(caught.value)


def bytes_of(address, nbytes):
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)


def allocate(device, kind, nbytes):
    if kind == "linear":
        return device.allocate_linear_blocking(nbytes)
    if kind == "managed":
        return device.allocate_managed_blocking(nbytes)
    return device.allocate_system(nbytes, 256)


def free(device, kind, address):
    if kind == "system":
        device.free_system(address)
    else:
        device.free_linear_blocking(address)


KINDS = pytest.mark.parametrize("kind", ["linear", "managed", "system"])


def test_linear_memory_takes_of_the_devices(lab):
    before, total = lab.device.memory_info()
    address = lab.device.allocate_linear_blocking(MIB)
    assert lab.device.memory_info() == (before - MIB, total)
    lab.device.free_linear_blocking(address)
    assert lab.device.memory_info() == (before, total)


def test_linear_memory_is_taken_from_what_pools_keep(open_lab):
    lab = open_lab(memory_nbytes=8 * MIB)
    stream = lab.stream()
    lab.device.deallocate(lab.allocate(stream, 8 * MIB), stream)
    address = lab.device.allocate_linear_blocking(8 * MIB)
    with pytest.raises(OutOfDeviceMemory, match="0 of"):
        lab.device.allocate_linear_blocking(1)
    lab.device.free_linear_blocking(address)


def test_memory_of_a_pool_is_taken_from_what_others_keep(open_lab):
    lab = open_lab(memory_nbytes=8 * MIB)
    stream = lab.stream()
    address = lab.allocate(stream, 4 * MIB)
    other = lab.device.create_pool(release_threshold_nbytes=1 << 62)
    lab.device.deallocate(lab.device.allocate(other, 4 * MIB, stream), stream)
    again = lab.allocate(stream, 4 * MIB)
    assert lab.device.pool_info(other).reserved_nbytes == 0
    with pytest.raises(OutOfDeviceMemory, match="0 of"):
        lab.device.allocate(other, 1, stream)
    for held in (address, again):
        lab.device.deallocate(held, stream)


def test_a_bound_takes_nothing_from_other_pools(lab):
    stream = lab.stream()
    lab.device.deallocate(lab.allocate(stream, 4 * MIB), stream)
    bounded = lab.device.create_pool(release_threshold_nbytes=0, max_nbytes=MIB)
    with pytest.raises(OutOfDeviceMemory, match="at most"):
        lab.device.allocate(bounded, 2 * MIB, stream)
    assert lab.device.pool_info(lab.pool).reserved_nbytes == 4 * MIB


@pytest.mark.parametrize("kind", ["linear", "managed"])
def test_fresh_memory_is_poisoned(lab, kind):
    stream = lab.stream()
    address = allocate(lab.device, kind, 1000)
    assert lab.read(address, 1000, stream) == b"\xa5" * 1000
    free(lab.device, kind, address)


@KINDS
def test_memory_that_was_freed_faults(lab, kind):
    stream = lab.stream()
    address = allocate(lab.device, kind, 64)
    lab.device.fill(address, b"x", 64, stream)
    lab.run()
    free(lab.device, kind, address)
    lab.device.fill(address, b"x", 64, stream)
    assert "illegal address" in lost_reason(lab)


@KINDS
def test_running_past_the_end_faults(lab, kind):
    address = allocate(lab.device, kind, 100)
    lab.device.fill(address + 90, b"x", 11, lab.stream())
    assert "illegal address" in lost_reason(lab)
    if kind != "linear":
        host_memory.free(address, host_memory.HostKind(kind))


@KINDS
def test_a_free_before_a_use_was_seen_to_end_is_a_race(lab, kind):
    stream = lab.stream()
    address = allocate(lab.device, kind, 64)
    lab.device.fill(address, b"x", 64, stream)
    event = lab.record(stream)
    lab.run()
    free(lab.device, kind, address)  # it has run, but nobody asked
    (race,) = lab.device.controls().races
    assert race.kind is RaceKind.USE_AFTER_FREE
    assert "the host" in str(race)
    assert event.is_done


def test_pinned_memory_freed_before_a_use_was_seen_to_end_is_a_race(lab):
    stream = lab.stream()
    address = lab.device.allocate_pinned_blocking(64)
    lab.device.fill(address, b"x", 64, stream)
    lab.run()
    lab.device.free_pinned_blocking(address)
    (race,) = lab.device.controls().races
    assert race.kind is RaceKind.USE_AFTER_FREE


@pytest.mark.parametrize("end", ["lost", "closed"])
def test_what_a_device_did_is_over_once_it_is_lost_or_closed(open_lab, end):
    lab, other = (open_lab(index, devices=2) for index in (0, 1))
    address = lab.device.allocate_pinned_blocking(64)
    stream = lab.stream()
    lab.device.fill(address, b"x", 64, stream)
    if end == "lost":
        lab.device.fill(1, b"x", 64, lab.stream())
        assert "illegal address" in lost_reason(lab)
        for _ in range(300):  # as many as have the checker forget what is gone
            other.stream().close()
    else:
        lab.device.close()
    other.device.free_pinned_blocking(address)
    assert other.device.controls().races == ()
    del stream


@pytest.mark.parametrize("kind", ["managed", "system"])
def test_a_free_that_a_copy_forbids_changes_nothing(lab, kind):
    stream = lab.stream()
    address, there = allocate(lab.device, kind, 64), lab.allocate(stream, 64)
    with lab.device.controls().gate(stream):
        lab.device.copy_h2d(there, address, 64, stream)
        with pytest.raises(DeviceError, match="unfinished copy"):
            free(lab.device, kind, address)
    event = lab.record(stream)
    lab.run()
    assert event.is_done
    free(lab.device, kind, address)
    assert lab.device.controls().races == ()


def test_a_free_of_another_kind_changes_nothing(lab):
    stream = lab.stream()
    host, _ = lab.host(64)
    with pytest.raises(DeviceError, match="not the address of a system block"):
        lab.device.free_system(host)
    lab.device.fill(host, b"x", 64, stream)
    event = lab.record(stream)
    lab.run()
    assert event.is_done
    assert lab.device.controls().races == ()


@pytest.mark.parametrize("way", ["deallocate", "free_linear_blocking"])
def test_memory_of_another_loops_pool_is_not_freed_here(open_lab, way):
    lab, foreign = open_lab(), open_lab(key="another loop")
    theirs = foreign.stream()
    pool = foreign.device.create_pool(release_threshold_nbytes=0, location=Location("host"))
    address = foreign.device.allocate(pool, 64, theirs)
    args = (lab.stream(),) if way == "deallocate" else ()
    with pytest.raises(DeviceError, match="not allocated"):
        getattr(lab.device, way)(address, *args)
    foreign.device.deallocate(address, theirs)


@pytest.mark.parametrize("way", ["copy_h2d", "copy_d2h"])
def test_a_copy_needs_no_access_to_a_pool_on_the_host(open_lab, way):
    lab, guest = (open_lab(index, devices=2) for index in (0, 1))
    stream, theirs = lab.stream(), guest.stream()
    pool = lab.device.create_pool(release_threshold_nbytes=0, location=Location("host"))
    address = lab.device.allocate(pool, 64, stream)
    there = guest.allocate(theirs, 64)
    args = (there, address) if way == "copy_h2d" else (address, there)
    getattr(guest.device, way)(*args, 64, theirs)
    guest.run()
    guest.device.synchronize_blocking()


@KINDS
def test_a_free_after_the_use_was_seen_to_end_is_none(lab, kind):
    stream = lab.stream()
    address = allocate(lab.device, kind, 64)
    lab.device.fill(address, b"x", 64, stream)
    event = lab.record(stream)
    lab.run()
    assert event.is_done
    free(lab.device, kind, address)
    assert not lab.device.controls().races


def test_a_premature_free_of_pool_memory_by_hand_is_a_race(lab):
    stream = lab.stream()
    address = lab.allocate(stream, 64)
    lab.device.fill(address, b"x", 64, stream)
    lab.run()
    lab.device.free_linear_blocking(address)
    races = lab.device.controls().races
    assert {race.kind for race in races} == {
        RaceKind.USE_AFTER_FREE,
        RaceKind.USE_BEFORE_ALLOCATION,
    }


def test_unordered_writes_to_linear_memory_are_a_race(lab):
    a, b = lab.stream(), lab.stream()
    address = lab.device.allocate_linear_blocking(64)
    lab.device.fill(address, b"x", 64, a)
    lab.device.fill(address, b"y", 64, b)
    (race,) = lab.device.controls().races
    assert race.kind is RaceKind.WRITE_WRITE


@pytest.mark.parametrize("kind", ["linear", "managed", "system", "host pool"])
def test_what_the_host_may_have_written_was_written(lab, kind):
    stream = lab.stream()
    if kind == "host pool":
        pool = lab.device.create_pool(release_threshold_nbytes=0, location=Location("host"))
        address = lab.device.allocate(pool, 64, stream)
    else:
        address = allocate(lab.device, kind, 64)
    lab.read(address, 64, stream)
    stream.sync()
    assert not lab.device.controls().races
    if kind != "host pool":
        free(lab.device, kind, address)


def test_memory_of_a_pool_freed_by_hand_serves_any_stream(lab):
    a, b = lab.stream(), lab.stream()
    lab.pool.reuse_follow_event_dependencies = lab.pool.reuse_allow_opportunistic = False
    address = lab.allocate(a, MIB)
    a.sync()
    lab.device.free_linear_blocking(address)
    with pytest.raises(DeviceError, match="not allocated"):
        lab.device.free_linear_blocking(address)
    assert lab.allocate(b, MIB) == address
    lab.device.fill(address, b"x", MIB, b)
    lab.run()
    lab.device.synchronize_blocking()


def test_what_a_destroyed_pool_lent_may_be_freed_by_hand(lab):
    pool = lab.device.create_pool(release_threshold_nbytes=0)
    stream = lab.stream()
    address = lab.device.allocate(pool, MIB, stream)
    stream.sync()
    lab.device.destroy_pool(pool)
    lab.device.free_linear_blocking(address)
    assert pool not in lab.device.gpu.pools
    assert lab.device.memory_info()[0] == 1 << 30


def test_linear_memory_freed_on_a_stream_is_given_back_when_that_runs(lab):
    stream = lab.stream()
    address = lab.device.allocate_linear_blocking(MIB)
    lab.mark(stream, "busy")
    lab.device.deallocate(address, stream)
    (row,) = lab.device.controls().memory_map()
    assert (row.state, row.pool, row.nbytes) == (MemoryState.FREEING, None, 0)
    assert "no pool" in str(row)
    with pytest.raises(DeviceError, match="not allocated"):
        lab.device.deallocate(address, stream)
    lab.run()
    assert lab.device.memory_info()[0] == 1 << 30
    assert not lab.device.controls().memory_map()


@pytest.mark.parametrize("kind", ["managed", "system"])
def test_only_the_devices_memory_is_freed_on_a_stream(lab, kind):
    address = allocate(lab.device, kind, 64)
    with pytest.raises(DeviceError, match="not allocated"):
        lab.device.deallocate(address, lab.stream())
    free(lab.device, kind, address)


def test_each_kind_is_freed_by_its_own_verb(lab):
    pinned = lab.device.allocate_pinned_blocking(64)
    system = lab.device.allocate_system(64, 256)
    managed = lab.device.allocate_managed_blocking(64)
    for wrong in (pinned, system):
        with pytest.raises(DeviceError, match="memory"):
            lab.device.free_linear_blocking(wrong)
    for wrong in (pinned, managed):
        with pytest.raises(DeviceError, match="not the address of a system block"):
            lab.device.free_system(wrong)
    with pytest.raises(DeviceError, match="not the address of a pinned block"):
        lab.device.free_pinned_blocking(managed)
    lab.device.free_pinned_blocking(pinned)
    lab.device.free_system(system)
    lab.device.free_linear_blocking(managed)


def test_another_devices_linear_memory_is_its_own_affair(lab, open_lab):
    other = open_lab(1)
    address = other.device.allocate_linear_blocking(64)
    with pytest.raises(DeviceError, match="memory of device 1"):
        lab.device.free_linear_blocking(address)
    with pytest.raises(DeviceError, match="not allocated on device 0"):
        lab.device.deallocate(address, lab.stream())
    lab.device.fill(address, b"x", 1, lab.stream())
    assert "no access" in lost_reason(lab)


@pytest.mark.parametrize("alignment", [1, 256, 4096, 1 << 20])
def test_system_memory_is_aligned(lab, alignment):
    addresses = [lab.device.allocate_system(100, alignment) for _ in range(4)]
    assert all(address % alignment == 0 for address in addresses)
    for address in addresses:
        bytes_of(address, 100)[:] = 1
        lab.device.free_system(address)


@pytest.mark.parametrize("alignment", [0, -256, 3, 384])
def test_an_alignment_is_a_power_of_two(lab, alignment):
    with pytest.raises(ValueError, match="power of two"):
        lab.device.allocate_system(64, alignment)


@pytest.mark.parametrize("kind", ["linear", "managed", "system"])
@pytest.mark.parametrize("nbytes", [0, -1])
def test_no_bytes_are_refused(lab, kind, nbytes):
    with pytest.raises(ValueError, match="at least 1 byte"):
        allocate(lab.device, kind, nbytes)


@pytest.mark.parametrize("kind", ["managed", "system"])
def test_more_than_the_host_has_is_out_of_memory(lab, kind):
    with pytest.raises(OutOfDeviceMemory):
        allocate(lab.device, kind, 1 << 62)


@KINDS
def test_allocations_fail_when_told_to(lab, kind):
    with lab.device.controls().out_of_memory(after=1):
        address = allocate(lab.device, kind, 64)
        with pytest.raises(OutOfDeviceMemory):
            allocate(lab.device, kind, 64)
    free(lab.device, kind, address)


def test_a_free_fails_when_told_to(lab):
    address = lab.device.allocate_linear_blocking(64)
    lab.device.controls().fail("free", sticky=False)
    with pytest.raises(DeviceError, match="injected"):
        lab.device.free_linear_blocking(address)
    lab.device.free_linear_blocking(address)


@KINDS
def test_a_closed_device_allocates_nothing(open_lab, kind):
    lab = open_lab()
    lab.device.close()
    with pytest.raises(Closed):
        allocate(lab.device, kind, 64)


def test_system_memory_is_freed_after_its_device(open_lab):
    lab = open_lab()
    address = lab.device.allocate_system(64, 256)
    lab.device.close()
    lab.device.free_system(address)


def test_linear_memory_is_shared_by_those_who_opened_the_device(lab, open_lab):
    again = open_lab()
    address = again.device.allocate_linear_blocking(64)
    again.device.close()
    stream = lab.stream()
    lab.device.fill(address, b"x", 64, stream)
    assert lab.read(address, 64, stream) == b"x" * 64
    stream.sync()
    lab.device.free_linear_blocking(address)


class TestPointers:
    def test_a_submitted_free_ends_what_is_known(self, lab):
        stream = lab.stream()
        address = lab.allocate(stream, 64)
        assert lab.device.pointer_attributes(address + 63).pool is lab.pool
        lab.mark(stream, "busy")
        lab.device.deallocate(address, stream)
        with pytest.raises(DeviceError, match="was freed"):
            lab.device.pointer_attributes(address)
        lab.run()
        with pytest.raises(DeviceError, match="was freed"):
            lab.device.pointer_attributes(address)
        lab.device.trim_pool(lab.pool, 0)
        with pytest.raises(DeviceError, match="no memory of a device"):
            lab.device.pointer_attributes(address)

    def test_a_devices_address_that_never_was(self, lab):
        with pytest.raises(DeviceError, match="no memory of a device"):
            lab.device.pointer_attributes(7 << 52)

    def test_whose_memory_it_is(self, lab, open_lab):
        other = open_lab(1)
        address = other.allocate(other.stream(), 64)
        assert lab.device.pointer_attributes(address).device_index == 1

    def test_plain_memory(self, lab):
        array = np.zeros(4)
        found = lab.device.pointer_attributes(array.ctypes.data)
        assert found.kind is MemoryKind.UNREGISTERED
        assert not found.is_device_accessible


class TestMovingMemory:
    @pytest.mark.parametrize(
        ("location", "error", "words"),
        [
            (Location("device", 2), DeviceError, "no simulated device 2"),
            (Location("device", -1), DeviceError, "no simulated device -1"),
            (Location("numa", 1), DeviceError, "one NUMA node"),
            (Location("moon"), ValueError, "'moon'"),
        ],
    )
    def test_places_that_are_not_there(self, lab, location, error, words):
        address = lab.device.allocate_managed_blocking(64)
        with pytest.raises(error, match=words):
            lab.device.prefetch(address, 64, location, lab.stream())
        with pytest.raises(error, match=words):
            lab.device.advise(address, 64, MemoryAdvice.PREFERRED_LOCATION, location)
        lab.device.advise(address, 64, MemoryAdvice.NO_PREFERRED_LOCATION, location)
        lab.device.free_linear_blocking(address)

    @pytest.mark.parametrize("nbytes", [0, 65])
    def test_only_what_was_allocated(self, lab, nbytes):
        address = lab.device.allocate_managed_blocking(64)
        with pytest.raises((DeviceError, ValueError)):
            lab.device.prefetch(address, nbytes, Location("host"), lab.stream())
        lab.device.free_linear_blocking(address)

    def test_pinned_memory_stays_where_it_is(self, lab):
        address, _ = lab.host(64)
        with pytest.raises(DeviceError, match="not managed or system memory"):
            lab.device.prefetch(address, 64, Location("device", 0), lab.stream())

    def test_system_memory_moves(self, lab):
        address, stream = lab.device.allocate_system(64, 256), lab.stream()
        lab.device.prefetch(address, 64, Location("device", 1), stream)
        lab.device.advise(address, 64, MemoryAdvice.READ_MOSTLY, Location("host"))
        stream.sync()
        lab.device.free_system(address)

    def test_a_prefetch_of_memory_that_is_gone_faults(self, lab):
        address, stream = lab.device.allocate_managed_blocking(64), lab.stream()
        with lab.device.controls().gate(stream):
            lab.device.prefetch(address, 64, Location("device", 0), stream)
            lab.device.free_linear_blocking(address)
        assert "'prefetch'" in lost_reason(lab)


class TestAccess:
    def test_without_access_a_kernel_faults(self, lab, open_lab):
        other = open_lab(1)
        address = other.allocate(other.stream(), 64)
        lab.launch(lab.stream(), lambda x: None, "r", lab.view(address, 16))
        assert "which device 0 has no access to" in lost_reason(lab)

    def test_access_to_read_is_none_to_write(self, lab, open_lab):
        other = open_lab(1)
        there, stream = other.stream(), lab.stream()
        address = other.allocate(there, 64)
        other.device.fill(address, b"\x01", 64, there)
        there.sync()
        other.device.set_pool_access_blocking(other.pool, 0, PoolAccess.READ)
        seen = []
        lab.launch(stream, lambda x: seen.append(int(x[0])), "r", lab.view(address, 64, np.uint8))
        lab.run()
        assert seen == [1]
        lab.device.fill(address, b"x", 1, stream)
        assert "which device 0 may only read" in lost_reason(lab)

    def test_access_that_was_taken_back_is_gone(self, lab, open_lab):
        other = open_lab(1)
        address = other.allocate(other.stream(), 64)
        other.run()
        for access in (PoolAccess.READ_WRITE, PoolAccess.NONE):
            other.device.set_pool_access_blocking(other.pool, 0, access)
        lab.device.fill(address, b"x", 1, lab.stream())
        assert "no access" in lost_reason(lab)

    def test_a_copy_between_devices_needs_none(self, lab, open_lab):
        other = open_lab(1)
        there, here = other.stream(), lab.stream()
        a, b = lab.allocate(here, 16), other.allocate(there, 16)
        lab.device.fill(a, b"\x07", 16, here)
        lab.device.copy_peer(b, 1, a, 0, 16, here)
        lab.run()
        assert other.read(b, 16, there) == b"\x07" * 16

    def test_a_pool_of_the_host_lets_in_whom_it_was_told(self, lab, open_lab):
        other = open_lab(1)
        there = other.stream()
        pool = lab.device.create_pool(release_threshold_nbytes=0, location=Location("host"))
        address = lab.device.allocate(pool, 64, lab.stream())
        lab.run()
        lab.device.set_pool_access_blocking(pool, 1, PoolAccess.READ_WRITE)
        other.device.fill(address, b"\x02", 64, there)
        lab.run()
        assert bytes(bytes_of(address, 64)) == b"\x02" * 64
        lab.device.set_pool_access_blocking(pool, 1, PoolAccess.NONE)
        other.device.fill(address, b"\x02", 64, there)
        other.run()
        assert other.device.gpu.fault is not None
        assert "memory of the host, which device 1 has no access to" in str(
            other.device.gpu.fault.cause
        )

    def test_managed_pools_and_plain_memory_let_everybody_in(self, lab, open_lab):
        other = open_lab(1)
        here, there = lab.stream(), other.stream()
        pool = lab.device.create_pool(release_threshold_nbytes=0, is_managed=True)
        taken = lab.device.allocate(pool, 64, here), lab.device.allocate_system(64, 256)
        lab.run()
        for address in taken:
            other.device.fill(address, b"\x02", 64, there)
        there.sync()
        lab.device.free_system(taken[1])

    def test_a_pool_serves_streams_of_other_devices(self, lab, open_lab):
        """The location follows the pool."""
        other = open_lab(1)
        there = other.stream()
        lab.device.set_pool_access_blocking(lab.pool, 1, PoolAccess.READ_WRITE)
        address = other.device.allocate(lab.pool, MIB, there)
        assert other.device.pointer_attributes(address).device_index == 0
        other.device.fill(address, b"x", MIB, there)
        assert other.read(address, 1, there) == b"x"
        other.device.deallocate(address, there)
        lab.run()
        assert lab.device.pool_info(lab.pool).used_nbytes == 0

    def test_a_pool_serves_one_loops_devices(self, lab, open_lab):
        other = open_lab(key="another loop")
        with pytest.raises(ValueError, match="its own event loop"):
            other.device.allocate(lab.pool, 64, other.stream())


class TestPools:
    def test_memory_of_a_host_pool_is_gone_with_its_pool(self, lab):
        before = host_memory.num_blocks()
        pool = lab.device.create_pool(release_threshold_nbytes=0, location=Location("numa", 0))
        stream = lab.stream()
        for _ in range(3):
            lab.device.deallocate(lab.device.allocate(pool, MIB, stream), stream)
        assert host_memory.num_blocks() == before + 1
        stream.sync()
        assert host_memory.num_blocks() == before
        lab.device.allocate(pool, MIB, stream)
        lab.device.close()
        assert host_memory.num_blocks() == before

    def test_host_pools_take_nothing_of_the_device(self, lab):
        pool = lab.device.create_pool(release_threshold_nbytes=0, is_managed=True)
        free_nbytes = lab.device.memory_info()[0]
        lab.device.allocate(pool, MIB, lab.stream())
        assert lab.device.memory_info()[0] == free_nbytes
        assert not lab.device.controls().memory_map()

    @pytest.mark.parametrize("side", ["from", "to"])
    def test_memory_of_a_host_pool_faults_before_its_allocation_has_run(self, lab, side):
        pool = lab.device.create_pool(release_threshold_nbytes=0, location=Location("host"))
        first, other = lab.stream(), lab.stream()
        target = lab.allocate(other, 64)
        lab.mark(first, "slow", cost_s=lambda: 9.0)
        address = lab.device.allocate(pool, 64, first)
        if side == "from":
            lab.device.copy_h2d(target, address, 64, other)
        else:
            lab.device.copy_h2d(address, lab.host(64)[0], 64, other)
        assert "has not run yet" in lost_reason(lab)

    def test_a_copy_from_a_host_pool_runs_after_its_allocation(self, lab):
        pool = lab.device.create_pool(release_threshold_nbytes=0, location=Location("host"))
        stream = lab.stream()
        lab.mark(stream, "busy")
        address, target = lab.device.allocate(pool, 64, stream), lab.allocate(stream, 64)
        lab.device.copy_h2d(target, address, 64, stream)
        lab.device.fill(address, b"\x05", 64, stream)
        assert lab.read(target, 64, stream) == b"\xa5" * 64
        assert not lab.device.controls().races  # what the allocation changed, the host did not

    def test_a_bounded_host_pool(self, lab):
        pool = lab.device.create_pool(
            release_threshold_nbytes=0, max_nbytes=MIB, location=Location("host")
        )
        lab.device.allocate(pool, MIB, lab.stream())
        with pytest.raises(OutOfDeviceMemory, match=f"at most {MIB}"):
            lab.device.allocate(pool, 1, lab.stream())

    def test_the_freeing_streams_block_comes_before_a_smaller_one_of_another(self, lab):
        """The ways of reuse are tried one after the other over all sizes that fit."""
        a, b = lab.stream(), lab.stream()
        large, small = lab.allocate(a, 3 * MIB // 2), lab.allocate(b, MIB)
        lab.mark(a, "busy")
        lab.device.deallocate(large, a)
        lab.device.deallocate(small, b)
        lab.run()
        assert lab.allocate(a, MIB) == large

    def test_switches_count_from_the_next_allocation_on(self, lab):
        a, b = lab.stream(), lab.stream()
        address = lab.allocate(a, MIB)
        lab.device.deallocate(address, a)
        lab.pool.reuse_allow_opportunistic = False
        assert lab.allocate(b, MIB) != address
        lab.pool.reuse_allow_opportunistic = True
        assert lab.allocate(b, MIB) == address

    def test_the_default_pool_is_the_devices(self, lab, open_lab):
        again, other = open_lab(), open_lab(1)
        pool = lab.device.default_pool()
        assert pool is again.device.default_pool()
        assert pool is not other.device.default_pool()
        assert lab.device.pool_info(pool).release_threshold_nbytes == 0
        stream = again.stream()
        again.device.allocate(pool, 64, stream)
        (row,) = lab.device.controls().memory_map()
        assert row.pool == -1
        again.device.close()
        assert lab.device.pool_info(pool).used_nbytes == 512

    def test_another_devices_pool_is_never_current(self, lab, open_lab):
        other = open_lab(1)
        with pytest.raises(DeviceError, match="lies there"):
            lab.device.set_current_pool(other.pool)

    @pytest.mark.parametrize(
        ("options", "error", "words"),
        [
            ({"location": Location("device", 1)}, ValueError, "made by that device"),
            ({"location": Location("numa", 3)}, DeviceError, "one NUMA node"),
            ({"location": Location("moon")}, ValueError, "'moon'"),
            ({"is_managed": True, "max_nbytes": 1}, ValueError, "no bound"),
            ({"release_threshold_nbytes": 1 << 64}, ValueError, "threshold"),
        ],
    )
    def test_pools_that_can_not_be(self, lab, options, error, words):
        with pytest.raises(error, match=words):
            lab.device.create_pool(**{"release_threshold_nbytes": 0, **options})


class TestRegistered:
    """Memory of the program's own that it had page-locked."""

    @pytest.fixture
    def own(self, lab):
        array = np.zeros(256, np.uint8)
        lab.device.register_host_blocking(array.ctypes.data, 256, False)
        yield array
        if host_memory.find(array.ctypes.data) is not None:
            host_memory.free(array.ctypes.data, host_memory.HostKind.REGISTERED)

    def test_it_stays_the_programs(self, lab, own):
        before = host_memory.num_blocks()
        lab.device.unregister_host_blocking(own.ctypes.data)
        assert host_memory.num_blocks() == before - 1
        own[:] = 1

    def test_a_copy_that_has_not_ended_keeps_it(self, lab, own):
        stream = lab.stream()
        address = lab.allocate(stream, 256)
        lab.device.copy_h2d(address, own.ctypes.data, 256, stream)
        with pytest.raises(DeviceError, match="used by an unfinished copy"):
            lab.device.unregister_host_blocking(own.ctypes.data)
        lab.run()
        stream.sync()
        lab.device.unregister_host_blocking(own.ctypes.data)
        with pytest.raises(DeviceError, match="not inside one pinned block"):
            lab.device.copy_h2d(address, own.ctypes.data, 256, stream)

    def test_a_kernel_that_was_not_seen_to_end_is_a_race(self, lab, own):
        stream = lab.stream()
        lab.device.fill(own.ctypes.data, b"x", 256, stream)
        lab.run()
        lab.device.unregister_host_blocking(own.ctypes.data)
        (race,) = lab.device.controls().take_races()
        assert race.kind is RaceKind.USE_AFTER_FREE

    @pytest.mark.parametrize(("start", "stop"), [(0, 256), (10, 20), (0, 1), (255, 256)])
    def test_no_byte_is_registered_twice(self, lab, own, start, stop):
        with pytest.raises(DeviceError, match=r"in a registered block of 256 bytes"):
            lab.device.register_host_blocking(own[start:].ctypes.data, stop - start, False)

    def test_bytes_beside_it_may_be(self, lab):
        array = np.zeros(64, np.uint8)
        at = array.ctypes.data
        for start in (16, 0, 32):
            lab.device.register_host_blocking(at + start, 16, False)
        lab.device.map_pinned(at + 16, 16)
        with pytest.raises(DeviceError, match="not page-locked"):
            lab.device.map_pinned(at + 16, 17)
        for start in (0, 16, 32):
            lab.device.unregister_host_blocking(at + start)

    def test_pinned_memory_is_refused(self, lab):
        address = lab.device.allocate_pinned_blocking(64)
        with pytest.raises(DeviceError, match="in a pinned block"):
            lab.device.register_host_blocking(address + 8, 8, False)
        with pytest.raises(DeviceError, match="not the address of a registered block"):
            lab.device.unregister_host_blocking(address)
        lab.device.free_pinned_blocking(address)

    @pytest.mark.parametrize("verb", ["copy", "fill"])
    def test_a_device_can_not_write_what_is_read_only(self, lab, verb):
        own, stream = np.zeros(256, np.uint8), lab.stream()
        at = own.ctypes.data
        lab.device.register_host_blocking(at, 256, True)
        address = lab.allocate(stream, 256)
        lab.device.copy_h2d(address, at, 256, stream)
        if verb == "copy":
            lab.device.copy_d2h(at, address, 256, stream)
        else:
            lab.device.fill(at, b"x", 256, stream)
        assert "for reading only" in lost_reason(lab)
        host_memory.free(at, host_memory.HostKind.REGISTERED)

    @pytest.mark.parametrize(("address", "nbytes"), [(0, 16), (4096, 0)])
    def test_no_memory_is_refused(self, lab, address, nbytes):
        with pytest.raises(ValueError, match="page-locking needs memory"):
            lab.device.register_host_blocking(address, nbytes, False)
