"""Cached handles are right for every stream, also for one that got an old one's handle."""

from __future__ import annotations

from typing import Any

import pytest

from streamflow.errors import Closed

streams = pytest.importorskip(
    "streamflow.backends.cuda.streams", reason="no cuda.core on this platform"
)


class FakeStream:
    """Hashes and compares by handle, which reads as zero once closed: as cuda.core's."""

    def __init__(self, address: int) -> None:
        self.address = address
        self.num_handles_made = 0

    @property
    def handle(self) -> Any:
        self.num_handles_made += 1
        return ("CUstream", self.address)

    @property
    def is_closed(self) -> bool:
        return self.address == 0

    def close(self) -> None:
        self.address = 0

    def __hash__(self) -> int:
        return hash(self.address)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeStream) and other.address == self.address


class FakeDevice:
    def __init__(self) -> None:
        self.made: list[FakeStream] = []
        self.priorities: list[int] = []

    def create_stream(self, *, options: Any) -> FakeStream:
        assert options.nonblocking
        self.priorities.append(options.priority)
        self.made.append(FakeStream(0x1000 + 16 * len(self.made)))
        return self.made[-1]


def test_a_handle_is_made_once() -> None:
    table, device = streams.StreamTable(), FakeDevice()
    stream = table.create(device, -3)
    assert [table[stream] for _ in range(5)] == [("CUstream", 0x1000)] * 5
    assert stream.num_handles_made == 1
    assert device.priorities == [-3]


def test_streams_made_elsewhere_are_cached_and_not_owned() -> None:
    table = streams.StreamTable()
    foreign = FakeStream(0x77)
    assert table[foreign] == table[foreign] == ("CUstream", 0x77)
    assert foreign.num_handles_made == 1
    table.close()
    assert not foreign.is_closed


def test_cr1_a_closed_stream_is_refused() -> None:
    table = streams.StreamTable()
    stream = table.create(FakeDevice(), 0)
    stream.close()
    with pytest.raises(Closed):
        table[stream]


def test_cr1_a_reused_handle_finds_its_own_entry() -> None:
    table = streams.StreamTable()
    old = table.create(FakeDevice(), 0)
    again = FakeStream(old.address)
    old.close()
    assert table[again] == ("CUstream", again.address)
    with pytest.raises(Closed):
        table[old]


def test_closed_streams_are_dropped_as_the_table_grows() -> None:
    table, device = streams.StreamTable(), FakeDevice()
    kept = table.create(device, 0)
    for _ in range(1000):
        table.create(device, 0).close()
    assert len(table._handles) + len(table._owned) < 200
    assert table[kept] == ("CUstream", 0x1000)
    assert kept.num_handles_made == 1


def test_close_destroys_what_it_made_and_forget_leaves_it() -> None:
    device = FakeDevice()
    table = streams.StreamTable()
    stream = table.create(device, 0)
    table.close()
    assert stream.is_closed
    table = streams.StreamTable()
    stream = table.create(device, 0)
    table.forget()
    assert not stream.is_closed
