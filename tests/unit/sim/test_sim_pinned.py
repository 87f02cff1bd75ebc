import numpy as np
import pytest

from streamflow.backends.sim import host_memory
from streamflow.errors import DeviceError


def test_pinned_memory_is_page_aligned_host_memory(lab):
    address, array = lab.host(10_000)
    assert address % 4096 == 0
    array[:] = 3
    assert int(array.sum()) == 30_000


def test_copies_touch_pinned_memory_only(lab):
    stream = lab.stream()
    device = lab.allocate(stream, 64)
    pageable = np.zeros(64, np.uint8)
    with pytest.raises(DeviceError, match="only copies from and to pinned memory"):
        lab.device.copy_h2d(device, pageable.ctypes.data, 64, stream)
    with pytest.raises(DeviceError, match="only copies from and to pinned memory"):
        lab.device.copy_d2h(pageable.ctypes.data, device, 64, stream)
    assert lab.run() == 0


def test_a_copy_past_the_end_of_a_pinned_block_is_refused(lab):
    stream = lab.stream()
    host, _ = lab.host(64)
    with pytest.raises(DeviceError, match="not inside one pinned block"):
        lab.device.copy_h2d(lab.allocate(stream, 128), host + 1, 64, stream)


def test_any_part_of_a_block_can_be_copied(lab):
    stream = lab.stream()
    host, array = lab.host(64)
    array[:] = np.arange(64)
    device = lab.allocate(stream, 8)
    lab.device.copy_h2d(device, host + 40, 8, stream)
    assert lab.read(device, 8, stream) == bytes(range(40, 48))


@pytest.mark.parametrize("way", ["in", "out"])
def test_a_block_used_by_an_unfinished_copy_cannot_be_freed(lab, way):
    stream = lab.stream()
    host = lab.device.allocate_pinned_blocking(64)
    address = lab.allocate(stream, 64)
    if way == "in":
        lab.device.copy_h2d(address, host, 64, stream)
    else:
        lab.device.copy_d2h(host, address, 64, stream)
    with pytest.raises(RuntimeError, match="used by an unfinished copy"):
        lab.device.free_pinned_blocking(host)
    lab.run()
    lab.device.free_pinned_blocking(host)
    with pytest.raises(DeviceError, match="not the address"):
        lab.device.free_pinned_blocking(host)


def test_a_refused_copy_does_not_keep_its_block(lab):
    stream = lab.stream()
    host = lab.device.allocate_pinned_blocking(64)
    device = lab.allocate(stream, 64)
    lab.device.controls().fail("copy_h2d", sticky=False)
    with pytest.raises(DeviceError, match="injected"):
        lab.device.copy_h2d(device, host, 64, stream)
    lab.device.free_pinned_blocking(host)


@pytest.mark.parametrize("how", ["fault", "close"])
def test_dropped_copies_let_go_of_their_blocks(open_lab, how):
    lab = open_lab()
    stream, other = lab.stream(), lab.stream()
    host = lab.device.allocate_pinned_blocking(64)
    device = lab.allocate(stream, 64)
    lab.device.copy_h2d(device, host, 64, stream)
    lab.device.world.next_s()  # the first is running, the second queued
    lab.device.copy_h2d(device, host, 64, stream)
    if how == "fault":
        lab.launch(other, lambda: 1 / 0, cost_s=lambda: 0.0)
        lab.device.advance(0)
        assert lab.device.gpu.fault is not None
    else:
        lab.device.close()
    host_memory.free(host)


def test_pinned_memory_outlives_the_device(open_lab):
    lab = open_lab()
    address, array = lab.host(16)
    array[:] = 9
    lab.device.close()
    again = open_lab()
    stream = again.stream()
    device = again.allocate(stream, 16)
    again.device.copy_h2d(device, address, 16, stream)
    assert again.read(device, 16, stream) == b"\x09" * 16
