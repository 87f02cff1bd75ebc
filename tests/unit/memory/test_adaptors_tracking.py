"""Tracking knows what is out, who asked for it, and refuses frees that it does not know."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import pytest
from upstreams import Ground, Upstream, simulated

from streamflow.memory import StatisticsResourceAdaptor, TrackingResourceAdaptor


@pytest.fixture
def ground() -> Iterator[Ground]:
    with simulated() as found:
        yield found


def test_it_knows_size_and_line_of_what_is_out(ground: Ground) -> None:
    stream = ground.stream()
    tracking = TrackingResourceAdaptor(Upstream(device=0))
    first = tracking.allocate(100, stream=stream)
    second = tracking.allocate(1000, stream=stream)
    assert tracking.get_allocated_bytes() == 1100
    found = tracking.get_outstanding_allocations()
    assert [(address, known.nbytes) for address, known in found.items()] == [
        (first.address, 100),
        (second.address, 1000),
    ]
    assert all(known.line.startswith("test_adaptors_tracking.py:") for known in found.values())
    assert not any(known.stack for known in found.values())
    tracking.deallocate(first, stream=stream)
    assert tracking.get_outstanding_allocations_str() == (
        f"{second.address:#x}: 1000 B : at {found[second.address].line}\n"
    )


def test_it_keeps_stacks_when_told_to(ground: Ground) -> None:
    tracking = TrackingResourceAdaptor(Upstream(device=0), capture_stacks=True)

    def asks() -> object:
        return tracking.allocate(64, stream=ground.stream())

    block = asks()
    (known,) = tracking.get_outstanding_allocations().values()
    assert [frame.name for frame in known.stack][-2:] == [
        "test_it_keeps_stacks_when_told_to",
        "asks",
    ]
    text = tracking.get_outstanding_allocations_str()
    assert " B : callstack:\n" in text
    assert "return tracking.allocate(64" in text
    del block


def test_it_logs_what_is_out(ground: Ground, caplog: pytest.LogCaptureFixture) -> None:
    tracking = TrackingResourceAdaptor(Upstream(device=0))
    block = tracking.allocate(64, stream=ground.stream())
    with caplog.at_level(logging.DEBUG, logger="streamflow"):
        tracking.log_outstanding_allocations()
    assert f"Outstanding Allocations: {block.address:#x}: 64 B" in caplog.text


def test_it_refuses_frees_that_it_does_not_know(ground: Ground) -> None:
    stream = ground.stream()
    upstream = Upstream(device=0)
    tracking, other = TrackingResourceAdaptor(upstream), TrackingResourceAdaptor(Upstream())
    block = tracking.allocate(64, stream=stream)
    with pytest.raises(ValueError, match="is not a block of"):
        other.deallocate(block, stream=stream)
    piece = block._piece
    tracking.deallocate(block, stream=stream)
    with pytest.raises(ValueError, match=r"freed already, at test_adaptors_tracking\.py"):
        tracking.deallocate(block, stream=stream)
    with pytest.raises(ValueError, match=r"64 bytes at .* are not outstanding here"):
        tracking.give(piece, ground.space.place(stream))  # as a wrapping resource would
    assert tracking.get_allocated_bytes() == 0
    assert not upstream.live


def test_an_upstream_that_raises_leaves_no_trace(ground: Ground) -> None:
    tracking = TrackingResourceAdaptor(Upstream(fails_at={0}, device=0))
    with pytest.raises(MemoryError):
        tracking.allocate(64, stream=ground.stream())
    assert not tracking.get_outstanding_allocations()
    assert not tracking.get_outstanding_allocations_str()


def test_cr6_cyclic_garbage_with_the_collector_at_every_allocation(ground: Ground) -> None:
    """Blocks in cycles, dropped while the collector runs inside of each call and elsewhere."""
    stream = ground.stream()
    upstream = Upstream(device=0)
    statistics = StatisticsResourceAdaptor(TrackingResourceAdaptor(upstream))
    tracking = statistics.upstream_mr
    assert isinstance(tracking, TrackingResourceAdaptor)

    class Node:
        def __init__(self, nbytes: int) -> None:
            self.block = statistics.allocate(nbytes, stream=stream)
            self.itself = self

    threshold = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        for turn in range(300):
            node = Node(64 + turn)
            if turn % 7 == 0:
                statistics.deallocate(node.block, stream=stream)
            counts = statistics.allocation_counts
            assert counts.current_bytes == tracking.get_allocated_bytes() == upstream.used_nbytes
            assert counts.current_count == len(upstream.live)
        del node
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    statistics.trim()
    assert not upstream.live
    assert not tracking.get_outstanding_allocations()
    counts = statistics.allocation_counts
    assert (counts.current_bytes, counts.current_count, counts.total_count) == (0, 0, 300)
