from collections import Counter

from streamflow.backends.sim.memory_map import MemoryState

LIVE, ALLOCATING = MemoryState.LIVE, MemoryState.ALLOCATING
FREEING, FREED = MemoryState.FREEING, MemoryState.FREED


def states(lab):
    return [row.state for row in lab.device.controls().memory_map()]


def test_a_block_goes_through_its_states_as_its_stream_runs(lab):
    sim, stream = lab.device.controls(), lab.stream()
    with sim.gate(stream):
        address = lab.allocate(stream, 100)
        assert states(lab) == [ALLOCATING]
    assert states(lab) == [LIVE]
    (row,) = sim.memory_map()
    assert (row.address, row.nbytes, row.capacity_nbytes) == (address, 512, 512)
    assert (row.pool, row.generation) == (0, 1)
    with sim.gate(stream):
        lab.device.deallocate(address, stream)
        assert states(lab) == [FREEING]
        assert sim.memory_map()[0].nbytes == 0
        lab.allocate(stream, 100)  # its memory, handed out again before the free has run
        assert states(lab) == [ALLOCATING]
        assert sim.memory_map()[0].generation == 2
    assert states(lab) == [LIVE]
    lab.device.deallocate(address, stream)
    assert states(lab) == [FREED]
    lab.device.trim_pool(lab.pool, 0)
    assert states(lab) == []


def test_an_old_free_says_nothing_of_a_later_use(lab):
    """The free of one use is queued behind a gate; on another stream the block is in use."""
    sim, stream, other = lab.device.controls(), lab.stream(), lab.stream()
    address = lab.allocate(stream, 1 << 29)
    with sim.gate(stream):
        lab.device.deallocate(address, stream)
        lab.allocate(stream, 1 << 29)
        lab.device.deallocate(address, stream)
        lab.allocate(other, 1 << 29)
        assert states(lab) in ([FREEING, LIVE], [ALLOCATING])


def test_the_sums_are_those_of_the_pools_and_of_the_device(lab):
    sim, stream = lab.device.controls(), lab.stream()
    other = lab.device.create_pool(release_threshold_nbytes=1 << 30)
    addresses = [lab.allocate(stream, 1000 * n) for n in range(1, 8)]
    addresses += [lab.device.allocate(other, 5000 * n, stream) for n in range(1, 4)]
    for address in addresses[::2]:
        lab.device.deallocate(address, stream)
    rows = sim.memory_map()
    assert [row.address for row in rows] == sorted(row.address for row in rows)
    in_use, reserved = Counter(), Counter()
    for row in rows:
        in_use[row.pool] += row.nbytes
        reserved[row.pool] += row.capacity_nbytes
    for number, pool in enumerate((lab.pool, other)):
        info = lab.device.pool_info(pool)
        assert (info.used_nbytes, info.reserved_nbytes) == (in_use[number], reserved[number])
        assert info.used_nbytes > 0
    free, total = lab.device.memory_info()
    assert sum(reserved.values()) == total - free


def test_a_row_prints_as_a_line(lab):
    lab.allocate(lab.stream(), 100)
    (row,) = lab.device.controls().memory_map()
    text = str(row)
    assert f"{row.address:#x}" in text
    assert "live" in text
    assert "\n" not in text
