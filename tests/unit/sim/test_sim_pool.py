import pytest

from streamflow.errors import Closed, OutOfDeviceMemory

MIB = 1 << 20


def test_the_freeing_stream_gets_its_memory_back_at_once(lab):
    stream = lab.stream()
    lab.mark(stream, "busy")
    for _ in range(100):
        lab.device.deallocate(lab.allocate(stream, MIB), stream)
    assert lab.device.pool_info(lab.pool).reserved_nbytes == MIB
    lab.run()


def test_a_stream_that_waited_for_the_free_reuses_it_before_it_ran(lab):
    a, b = lab.stream(), lab.stream()
    lab.pool.reuse_allow_opportunistic = lab.pool.reuse_allow_internal_dependencies = False
    address = lab.allocate(a, MIB)
    lab.mark(a, "busy")
    lab.device.deallocate(address, a)
    b.wait(lab.record(a))
    assert lab.allocate(b, MIB) == address
    lab.device.fill(address, b"x", MIB, b)
    lab.run()
    lab.device.synchronize_blocking()


def test_following_event_dependencies_can_be_switched_off(lab):
    a, b = lab.stream(), lab.stream()
    lab.pool.reuse_follow_event_dependencies = False
    address = lab.allocate(a, MIB)
    lab.mark(a, "busy")
    lab.device.deallocate(address, a)
    b.wait(lab.record(a))
    assert lab.allocate(b, MIB) != address


def test_memory_whose_free_has_run_is_reused_anywhere(lab):
    a, b = lab.stream(), lab.stream()
    address = lab.allocate(a, MIB)
    lab.device.deallocate(address, a)
    assert lab.allocate(b, MIB) == address


def test_without_opportunism_only_what_a_synchronisation_proved_is_reused(lab):
    a, b = lab.stream(), lab.stream()
    lab.pool.reuse_allow_opportunistic = False
    address = lab.allocate(a, MIB)
    lab.device.deallocate(address, a)
    other = lab.allocate(b, MIB)
    assert other != address
    a.sync()
    assert lab.allocate(b, MIB) == address


def test_new_memory_is_preferred_to_waiting(lab):
    a, b = lab.stream(), lab.stream()
    address = lab.allocate(a, MIB)
    lab.mark(a, "busy")
    lab.device.deallocate(address, a)
    assert lab.allocate(b, MIB) != address


def test_a_full_device_makes_the_allocation_wait_for_a_pending_free(open_lab):
    lab = open_lab(memory_nbytes=MIB)
    a, b = lab.stream(), lab.stream()
    address = lab.allocate(a, MIB)
    lab.mark(a, "a", cost_s=lambda: 5.0)
    lab.device.deallocate(address, a)
    lab.mark(b, "b before", cost_s=lambda: 1.0)
    assert lab.allocate(b, MIB) == address
    lab.mark(b, "b after", cost_s=lambda: 1.0)
    lab.run()
    assert lab.log == ["b before", "a", "b after"]


def test_internal_dependencies_can_be_switched_off(open_lab):
    lab = open_lab(memory_nbytes=MIB)
    lab.pool.reuse_allow_internal_dependencies = False
    a, b = lab.stream(), lab.stream()
    address = lab.allocate(a, MIB)
    lab.mark(a, "a")
    lab.device.deallocate(address, a)
    with pytest.raises(OutOfDeviceMemory):
        lab.allocate(b, MIB)


def test_free_memory_of_other_sizes_makes_room(open_lab):
    lab = open_lab(memory_nbytes=8 * MIB)
    stream = lab.stream()
    small = [lab.allocate(stream, MIB) for _ in range(8)]
    for address in small:
        lab.device.deallocate(address, stream)
    assert lab.allocate(stream, 8 * MIB)


def test_used_and_reserved_keep_their_high_water_marks(lab):
    stream = lab.stream()
    a, b = lab.allocate(stream, MIB), lab.allocate(stream, 2 * MIB)
    lab.device.deallocate(a, stream)
    lab.device.deallocate(b, stream)
    info = lab.device.pool_info(lab.pool)
    assert (info.used_nbytes, info.used_high_nbytes) == (0, 3 * MIB)
    assert (info.reserved_nbytes, info.reserved_high_nbytes) == (3 * MIB, 3 * MIB)


def test_a_threshold_of_zero_gives_memory_back_at_each_synchronisation(lab):
    pool = lab.device.create_pool(release_threshold_nbytes=0)
    stream = lab.stream()
    for _ in range(10):
        lab.device.deallocate(lab.device.allocate(pool, 64 * MIB, stream), stream)
        assert lab.device.pool_info(pool).reserved_nbytes == 64 * MIB
        stream.sync()
        assert lab.device.pool_info(pool).reserved_nbytes == 0
    lab.device.deallocate(lab.device.allocate(pool, MIB, stream), stream)
    lab.record(stream).sync()
    assert lab.device.memory_info()[0] == 1 << 30


def test_a_synchronisation_keeps_up_to_the_threshold(lab):
    pool = lab.device.create_pool(release_threshold_nbytes=3 * MIB)
    stream = lab.stream()
    for address in [lab.device.allocate(pool, MIB, stream) for _ in range(5)]:
        lab.device.deallocate(address, stream)
    lab.device.synchronize_blocking()
    assert lab.device.pool_info(pool).reserved_nbytes == 3 * MIB


def test_trim_keeps_the_floor_and_what_is_in_use_or_pending(lab):
    stream = lab.stream()
    lab.allocate(stream, MIB)
    done = [lab.allocate(stream, MIB) for _ in range(4)]
    for address in done:
        lab.device.deallocate(address, stream)
    lab.device.trim_pool(lab.pool, 4 * MIB)
    assert lab.device.pool_info(lab.pool).reserved_nbytes == 4 * MIB
    pending = lab.allocate(stream, MIB)
    lab.mark(stream, "busy")
    lab.device.deallocate(pending, stream)
    lab.device.trim_pool(lab.pool, 0)
    assert lab.device.pool_info(lab.pool).reserved_nbytes == 2 * MIB
    lab.run()
    lab.device.trim_pool(lab.pool, 0)
    assert lab.device.pool_info(lab.pool).reserved_nbytes == MIB


def test_a_pools_own_bound_holds(lab):
    pool = lab.device.create_pool(release_threshold_nbytes=0, max_nbytes=2 * MIB)
    stream = lab.stream()
    first = lab.device.allocate(pool, 2 * MIB, stream)
    with pytest.raises(OutOfDeviceMemory, match=f"at most {2 * MIB}"):
        lab.device.allocate(pool, 1, stream)
    lab.device.deallocate(first, stream)
    assert lab.device.allocate(pool, 1, stream)


def test_a_destroyed_pool_gives_its_memory_back_as_it_is_freed(lab):
    pool = lab.device.create_pool(release_threshold_nbytes=1 << 40)
    stream = lab.stream()
    live, pending, idle = (lab.device.allocate(pool, MIB, stream) for _ in range(3))
    lab.device.deallocate(idle, stream)
    lab.mark(stream, "busy")
    lab.device.deallocate(pending, stream)
    lab.device.destroy_pool(pool)
    assert lab.device.pool_info(pool).reserved_nbytes == 2 * MIB
    with pytest.raises(Closed):
        lab.device.allocate(pool, MIB, stream)
    lab.run()
    assert lab.device.pool_info(pool).reserved_nbytes == MIB
    lab.device.deallocate(live, stream)
    assert lab.device.pool_info(pool).reserved_nbytes == 0
    assert pool not in lab.device.gpu.pools


def test_a_large_free_block_does_not_serve_a_tiny_request(lab):
    stream = lab.stream()
    big = lab.allocate(stream, 64 * MIB)
    lab.device.deallocate(big, stream)
    assert lab.allocate(stream, 512) != big


def test_memory_reused_before_its_free_ran_survives_its_pool(lab):
    pool = lab.device.create_pool(release_threshold_nbytes=0)
    stream = lab.stream()
    first = lab.device.allocate(pool, 64, stream)
    lab.mark(stream, "busy")
    lab.device.deallocate(first, stream)
    again = lab.device.allocate(pool, 64, stream)
    assert again == first
    lab.device.destroy_pool(pool)
    lab.device.fill(again, b"x", 64, stream)
    assert lab.read(again, 64, stream) == b"x" * 64
    lab.device.deallocate(again, stream)
    assert lab.device.pool_info(pool).reserved_nbytes == 0
