import numpy as np
import pytest

from streamflow.backends.sim.memory import AddressSpace, IllegalAddress
from streamflow.errors import DeviceError, DeviceLost, OutOfDeviceMemory


def lost_reason(lab):
    """Run dry; the text of the fault the device was lost to."""
    lab.run()
    with pytest.raises(DeviceLost) as caught:
        lab.device.synchronize_blocking()
    return str(caught.value)


def test_addresses_are_aligned_and_outside_any_host_range(lab):
    stream = lab.stream()
    for nbytes in (1, 511, 512, 513, 4096):
        address = lab.allocate(stream, nbytes)
        assert address % 512 == 0
        assert address >= 1 << 52


def test_devices_have_disjoint_addresses(lab, open_lab):
    other = open_lab(1)
    a, b = lab.allocate(lab.stream(), 512), other.allocate(other.stream(), 512)
    assert a >> 52 != b >> 52


def test_fresh_memory_is_poisoned(lab):
    stream = lab.stream()
    address = lab.allocate(stream, 1000)
    assert lab.read(address, 1000, stream) == b"\xa5" * 1000


def test_freed_memory_is_poisoned_when_the_free_runs(lab):
    stream = lab.stream()
    address = lab.allocate(stream, 64)
    block = lab.device.gpu.memory.block_at(address)
    lab.launch(stream, lambda x: x.fill(1), "w", lab.view(address, 16))
    lab.device.deallocate(address, stream)
    assert bytes(block.backing[:64]) == b"\xa5" * 64
    lab.run()
    assert bytes(block.backing[:64]) == b"\xdd" * 64


def test_a_copy_reads_its_source_when_it_runs(lab):
    stream = lab.stream()
    address = lab.allocate(stream, 4)
    host, array = lab.host(4)
    array[:] = 1
    lab.device.copy_h2d(address, host, 4, stream)
    array[:] = 2  # a race, and the simulator shows it
    assert lab.read(address, 4, stream) == b"\x02" * 4


def test_copies_and_fills_write_what_they_should(lab):
    stream = lab.stream()
    a, b = lab.allocate(stream, 64), lab.allocate(stream, 64)
    lab.device.fill(a, b"\x01\x02\x03\x04", 16, stream)
    lab.device.copy_d2d(b + 8, a, 32, stream)
    assert lab.read(b + 8, 32, stream) == b"\x01\x02\x03\x04" * 8
    for pattern in (b"x", b"xy", b"8bytes..", b"sixteen bytes..."):
        lab.device.fill(a, pattern, 4, stream)
        assert lab.read(a, 4 * len(pattern), stream) == pattern * 4


def test_a_pattern_of_another_size_is_refused(lab):
    stream = lab.stream()
    with pytest.raises(ValueError, match="pattern"):
        lab.device.fill(lab.allocate(stream, 64), b"abc", 1, stream)


def test_peer_copies_cross_devices(lab, open_lab):
    other = open_lab(1)
    stream, there = lab.stream(), other.stream()
    a, b = lab.allocate(stream, 16), other.allocate(there, 16)
    lab.device.fill(a, b"\x07", 16, stream)
    lab.device.copy_peer(b, 1, a, 0, 16, stream)
    lab.run()
    assert other.read(b, 16, there) == b"\x07" * 16


def test_a_peer_copy_needs_an_open_device(lab):
    stream = lab.stream()
    address = lab.allocate(stream, 16)
    with pytest.raises(DeviceError, match="not open"):
        lab.device.copy_peer(address, 0, address, 1, 16, stream)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_sizes_below_one_never_reach_the_machine(lab, nbytes):
    stream = lab.stream()
    host, _ = lab.host(8)
    address = lab.allocate(stream, 8)
    with pytest.raises(ValueError, match="at least 1"):
        lab.allocate(stream, nbytes)
    with pytest.raises(ValueError, match="at least 1"):
        lab.device.copy_h2d(address, host, nbytes, stream)
    with pytest.raises(ValueError, match="at least 1"):
        lab.device.fill(address, b"x", nbytes, stream)
    with pytest.raises(ValueError, match="at least 1"):
        lab.device.allocate_pinned_blocking(nbytes)


def test_use_after_free_faults(lab):
    stream = lab.stream()
    address = lab.allocate(stream, 64)
    lab.device.deallocate(address, stream)
    lab.device.fill(address, b"x", 64, stream)
    assert "freed" in lost_reason(lab)


def test_use_before_the_allocation_has_run_faults(lab):
    first, other = lab.stream(), lab.stream()
    lab.mark(first, "slow", cost_s=lambda: 9.0)
    address = lab.allocate(first, 64)
    lab.device.fill(address, b"x", 64, other)  # nothing orders it after the allocation
    assert "has not run yet" in lost_reason(lab)


def test_running_past_the_end_faults(lab):
    stream = lab.stream()
    address = lab.allocate(stream, 100)
    lab.device.fill(address + 90, b"x", 11, stream)
    reason = lost_reason(lab)
    assert "past the end of an allocation of 100 bytes" in reason
    assert "'fill'" in reason


def test_an_address_never_allocated_faults(lab):
    lab.device.fill(0x7000, b"x", 1, lab.stream())
    assert "never allocated" in lost_reason(lab)


def test_another_devices_address_faults(lab, open_lab):
    other = open_lab(1)
    address = other.allocate(other.stream(), 64)
    lab.device.fill(address, b"x", 64, lab.stream())
    assert "memory of device 1, which device 0 has no access to" in lost_reason(lab)


def test_a_misaligned_array_faults(lab):
    stream = lab.stream()
    address = lab.allocate(stream, 64)
    lab.launch(stream, lambda x: None, "r", lab.view(address + 2, 4))
    assert "misaligned" in lost_reason(lab)


def test_an_interior_address_finds_its_block_among_many():
    memory = AddressSpace(0, 1 << 30, 1 << 20)
    blocks = [memory.reserve(512 * (i % 3 + 1), None) for i in range(50)]
    for i, block in enumerate(blocks):
        memory.on_allocate(block, block.capacity)
        block.backing[100] = i
    for block in blocks[::7]:
        memory.release(block)
    for i, block in enumerate(blocks):
        if i % 7:
            assert memory.bytes_at(block.address + 100, 1)[0] == i
        else:
            with pytest.raises(IllegalAddress):
                memory.bytes_at(block.address + 100, 1)


def test_huge_allocations_touch_only_what_is_used(open_lab):
    lab = open_lab(memory_nbytes=1 << 36)
    stream = lab.stream()
    nbytes = 2**32 + 4
    address = lab.allocate(stream, nbytes)
    lab.device.fill(address + 2**32, b"\x05", 4, stream)
    lab.launch(
        stream, lambda x: x.__setitem__(-2, 7), "w", lab.view(address, nbytes // 4, np.uint32)
    )
    assert lab.read(address + 2**32 - 4, 8, stream) == b"\x07\0\0\0" + b"\x05" * 4


def test_more_than_the_device_has_is_out_of_memory(lab):
    stream = lab.stream()
    with pytest.raises(OutOfDeviceMemory, match=str(1 << 31)):
        lab.allocate(stream, 1 << 31)
    assert lab.allocate(stream, 1 << 20)
    assert lab.device.memory_info() == ((1 << 30) - (1 << 20), 1 << 30)


def test_freeing_what_is_not_allocated_is_refused(lab):
    stream = lab.stream()
    address = lab.allocate(stream, 64)
    with pytest.raises(DeviceError, match="not allocated"):
        lab.device.deallocate(address + 8, stream)
    lab.device.deallocate(address, stream)
    with pytest.raises(DeviceError, match="not allocated"):
        lab.device.deallocate(address, stream)
