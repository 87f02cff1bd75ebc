"""Memory that the program's own functions allocate and free."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from streamflow import memory
from streamflow.errors import OutOfDeviceMemory

Call = tuple[Any, ...]


class Recorder:
    """Two functions that note how they are called."""

    def __init__(self, address: int = 1 << 20) -> None:
        self.address = address
        self.allocated: list[Call] = []
        self.freed: list[Call] = []

    def allocate(self, *args: Any) -> int:
        self.allocated.append(args)
        return self.address

    def deallocate(self, *args: Any) -> None:
        self.freed.append(args)


def test_both_get_their_arguments_in_rmms_order(lab: Any) -> None:
    calls, arg = Recorder(), object()
    resource = memory.CallbackMemoryResource(calls.allocate, calls.deallocate, arg, device=0)
    stream = lab.stream()
    block = resource.allocate(1000, stream=stream, alignment=512)
    other = lab.stream()
    resource.deallocate(block, stream=other)
    assert calls.allocated == [(stream, 1000, 512, arg)]
    assert calls.freed == [(other, 1 << 20, 1000, 512, arg)]


def test_sizes_alignments_and_zero_bytes_never_reach_them(lab: Any) -> None:
    calls = Recorder()
    resource = memory.CallbackMemoryResource(calls.allocate, calls.deallocate, device=0)
    stream = lab.stream()
    for alignment in (0, 3, -1):
        with pytest.raises(ValueError, match="power of two"):
            resource.allocate(16, stream=stream, alignment=alignment)
    resource.deallocate(resource.allocate(0, stream=stream), stream=stream)
    assert calls.allocated == calls.freed == []


@pytest.mark.parametrize(
    ("given", "error"),
    [(0, OutOfDeviceMemory), (None, TypeError), (True, TypeError), ("0x100", TypeError)],
)
def test_what_is_no_address_is_refused(lab: Any, given: Any, error: type[Exception]) -> None:
    calls = Recorder(given)
    resource = memory.CallbackMemoryResource(calls.allocate, calls.deallocate, device=0)
    with pytest.raises(error, match="allocate_func"):
        resource.allocate(16, stream=lab.stream())
    assert calls.freed == []


def test_an_address_that_is_not_aligned_is_handed_back(lab: Any) -> None:
    calls = Recorder(1 << 20 | 128)
    resource = memory.CallbackMemoryResource(calls.allocate, calls.deallocate, device=0)
    stream = lab.stream()
    with pytest.raises(ValueError, match="not a multiple of 256"):
        resource.allocate(16, stream=stream)
    assert calls.freed == [(stream, 1 << 20 | 128, 16, 256, None)]
    assert resource.allocate(16, stream=stream, alignment=128).address == 1 << 20 | 128


def test_what_the_allocating_one_raises_reaches_its_caller(lab: Any) -> None:
    def refuse(*_: Any) -> int:
        raise LookupError("none today")

    resource = memory.CallbackMemoryResource(refuse, lambda *_: None, device=0)
    with pytest.raises(LookupError, match="none today"):
        resource.allocate(16, stream=lab.stream())


def test_what_the_freeing_one_raises_is_reported_and_not_fatal(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: reported.append(args.exc_value))

    def refuse(*_: Any) -> None:
        raise LookupError("keeps it")

    resource = memory.CallbackMemoryResource(lambda *_: 4096, refuse, device=0)
    stream = lab.stream()
    block = resource.allocate(16, stream=stream)
    resource.deallocate(block, stream=stream)
    assert block.is_freed
    assert [type(error) for error in reported] == [LookupError]
    assert "16 bytes at 0x1000" in reported[0].__notes__[0]
    resource.allocate(16, stream=stream)  # dropped: freed by the next call, which works
    assert resource.allocate(16, stream=stream).address == 4096
    assert len(reported) == 2
    resource.trim()
    assert len(reported) == 3


def test_they_may_call_other_resources_and_this_one(lab: Any) -> None:
    upstream = memory.CudaMemoryResource(device=0)
    blocks: dict[int, memory.Block] = {}

    def allocate(stream: Any, nbytes: int, alignment: int, arg: Any) -> int:
        if nbytes < 1000:
            inner = resource.allocate(1000, stream=stream)
            resource.deallocate(inner, stream=stream)
        block = upstream.allocate(nbytes, stream=stream, alignment=alignment)
        blocks[block.address] = block
        return block.address

    def deallocate(stream: Any, address: int, nbytes: int, alignment: int, arg: Any) -> None:
        upstream.deallocate(blocks.pop(address), stream=stream)

    resource = memory.CallbackMemoryResource(allocate, deallocate, device=0)
    stream = lab.stream()
    block = resource.allocate(100, stream=stream)
    lab.device.fill(block.address, b"\x07", 100, stream)
    resource.deallocate(block, stream=stream)
    assert blocks == {}


def test_functions_are_asked_for() -> None:
    with pytest.raises(TypeError, match="allocate_func"):
        memory.CallbackMemoryResource(None, lambda *_: None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="deallocate_func"):
        memory.CallbackMemoryResource(lambda *_: 1, 5)  # type: ignore[arg-type]


def test_their_types_can_be_named() -> None:
    def allocate(stream: Any, nbytes: int, alignment: int, arg: Any) -> int:
        return 1 << 20

    def deallocate(stream: Any, address: int, nbytes: int, alignment: int, arg: Any) -> None:
        return None

    one: memory.AllocateCallback = allocate
    two: memory.DeallocateCallback = deallocate
    assert memory.CallbackMemoryResource(one, two).device is None
