"""Memory that host and device both reach."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from streamflow import memory
from streamflow.errors import Closed, DeviceError
from streamflow.memory import Location, MemoryAdvice


@pytest.mark.parametrize(
    "make",
    [
        memory.ManagedMemoryResource,
        memory.PinnedHostMemoryResource,
        memory.SystemMemoryResource,
        memory.CudaAsyncManagedMemoryResource,
    ],
)
def test_the_host_reads_what_the_device_wrote_and_the_other_way(lab: Any, make: Any) -> None:
    resource = make(device=0)
    stream = lab.stream()
    block, back = (resource.allocate(64, stream=stream) for _ in range(2))
    lab.device.fill(block.address, b"\x2a", 64, stream)
    lab.device.synchronize_blocking()
    there = (ctypes.c_ubyte * 64).from_address(block.address)
    assert bytes(there) == b"\x2a" * 64
    there[0] = 7
    lab.device.copy_d2d(back.address, block.address, 64, stream)
    lab.device.synchronize_blocking()
    assert (ctypes.c_ubyte * 2).from_address(back.address)[:] == [7, 42]
    resource.deallocate(block, stream=stream)
    resource.deallocate(back, stream=stream)


def advice_of(lab: Any) -> list[tuple[int, int, MemoryAdvice, Location]]:
    """What the device is told from now on."""
    told: list[tuple[int, int, MemoryAdvice, Location]] = []
    advise = lab.device.advise

    def watched(address: int, nbytes: int, advice: MemoryAdvice, location: Location) -> None:
        told.append((address, nbytes, advice, location))
        advise(address, nbytes, advice, location)

    lab.device.advise = watched
    return told


@pytest.mark.parametrize(
    ("nbytes", "free", "headroom", "on_device"),
    [
        (10_000, 100_000, 0, 9984),  # all of it, aligned down
        (10_240, 100_000, 0, 10_240),  # all of it, and no rest
        (10_240, 100_000, 95_000, 4864),  # free - headroom = 5000, aligned down
        (10_240, 100_000, 99_800, 0),  # less than 256 bytes
        (10_240, 100_000, 100_000, 0),
        (10_240, 100_000, 200_000, 0),  # max(free - headroom, 0)
        (255, 100_000, 0, 0),
        (256, 100_000, 0, 256),
    ],
)
def test_headroom_decides_how_much_prefers_the_device(
    lab: Any, nbytes: int, free: int, headroom: int, on_device: int
) -> None:
    resource = memory.SamHeadroomMemoryResource(headroom, device=0)
    lab.device.memory_info = lambda: (free, 1 << 30)
    told = advice_of(lab)
    stream = lab.stream()
    block = resource.allocate(nbytes, stream=stream)
    expected = []
    preferred = MemoryAdvice.PREFERRED_LOCATION
    if on_device:
        expected.append((block.address, on_device, preferred, Location("device", 0)))
    if nbytes > on_device:
        rest = block.address + on_device, nbytes - on_device
        expected.append((*rest, preferred, Location("host")))
    assert told == expected
    resource.deallocate(block, stream=stream)


def test_memory_that_could_not_be_advised_is_given_back(lab: Any) -> None:
    resource = memory.SamHeadroomMemoryResource(0, device=0)

    def refuse(*_: Any) -> None:
        raise DeviceError("no advice")

    lab.device.advise = refuse
    with pytest.raises(DeviceError, match="no advice"):
        resource.allocate(4096, stream=lab.stream())
    assert lab.device.counts["free_system"] == lab.device.counts["allocate_system"] == 1


@pytest.mark.parametrize(
    ("headroom", "error"),
    [(-1, ValueError), (True, TypeError), (1.5, TypeError), (None, TypeError), ("", ValueError)],
)
def test_what_is_no_headroom_is_refused(headroom: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        memory.SamHeadroomMemoryResource(headroom)


def test_headroom_may_be_text() -> None:
    assert memory.SamHeadroomMemoryResource("1GiB").headroom == 1 << 30


@pytest.mark.parametrize("cls", [memory.ManagedMemoryResource, memory.SystemMemoryResource])
def test_a_prefetch_is_ordered_on_its_stream(lab: Any, cls: Any) -> None:
    resource = cls(device=0)
    stream = lab.stream()
    block = resource.allocate(4096, stream=stream)
    gate = lab.hold(stream)
    for location in ("host", 0, Location("device", 0)):
        resource.prefetch(block, location, stream)  # returns at once
    assert lab.device.counts["prefetch"] == 3
    gate.release()
    lab.run()
    resource.advise(block, MemoryAdvice.READ_MOSTLY)
    resource.advise(block, MemoryAdvice.PREFERRED_LOCATION, "host")
    assert lab.device.counts["advise"] == 2
    resource.deallocate(block, stream=stream)
    with pytest.raises(ValueError, match="freed already"):
        resource.prefetch(block, "host", stream)
    with pytest.raises(ValueError, match="freed already"):
        resource.advise(block, MemoryAdvice.READ_MOSTLY)


def test_no_bytes_are_neither_moved_nor_advised(lab: Any) -> None:
    resource = memory.ManagedMemoryResource(device=0)
    stream = lab.stream()
    block = resource.allocate(0, stream=stream)
    resource.prefetch(block, "host", stream)
    resource.advise(block, MemoryAdvice.READ_MOSTLY)
    assert lab.device.counts["prefetch"] == lab.device.counts["advise"] == 0


def test_wrong_places_and_advice_are_refused(lab: Any) -> None:
    resource = memory.ManagedMemoryResource(device=0)
    stream = lab.stream()
    block = resource.allocate(4096, stream=stream)
    with pytest.raises(ValueError, match="host"):
        resource.prefetch(block, "moon", stream)
    with pytest.raises(TypeError):
        resource.prefetch(block, None, stream)
    with pytest.raises(TypeError, match="MemoryAdvice"):
        resource.advise(block, "read-mostly")  # type: ignore[arg-type]
    other = memory.ManagedMemoryResource(device=0)
    resource.close()
    resource.deallocate(block, stream=stream)
    with pytest.raises(Closed):
        resource.allocate(16, stream=stream)
    assert other.allocate(0, stream=stream).address == 0


def test_without_concurrent_access_nothing_is_moved_or_advised(lab: Any) -> None:
    resource = memory.ManagedMemoryResource(device=0)
    stream = lab.stream()
    block = resource.allocate(4096, stream=stream)
    lab.without(has_concurrent_managed_access=False)
    with pytest.raises(DeviceError, match="concurrent managed access"):
        resource.prefetch(block, "host", stream)
    with pytest.raises(DeviceError, match="concurrent managed access"):
        resource.advise(block, MemoryAdvice.READ_MOSTLY)
    resource.deallocate(block, stream=stream)
