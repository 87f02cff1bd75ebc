"""What all adaptors have in common, and those that are a few lines: retry, prefetch, alignment."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from upstreams import Ground, Upstream, simulated

from streamflow.backends.memory import Location, MemoryKind
from streamflow.errors import DeviceError, OutOfDeviceMemory
from streamflow.memory import (
    AlignedResourceAdaptor,
    CudaMemoryResource,
    FailureCallbackResourceAdaptor,
    LimitingResourceAdaptor,
    LoggingResourceAdaptor,
    ManagedMemoryResource,
    PoolMemoryResource,
    PrefetchResourceAdaptor,
    StatisticsResourceAdaptor,
    TrackingResourceAdaptor,
)
from streamflow.memory.resource import DeviceMemoryResource

Make = Callable[[DeviceMemoryResource], Any]


def never(nbytes: int) -> bool:
    return False


@pytest.fixture
def ground() -> Iterator[Ground]:
    with simulated() as found:
        yield found


@pytest.fixture(
    params=["limiting", "statistics", "tracking", "logging", "callback", "aligned"],
)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    names = iter(range(1000))
    return {
        "limiting": lambda up: LimitingResourceAdaptor(up, 1 << 30),
        "statistics": StatisticsResourceAdaptor,
        "tracking": TrackingResourceAdaptor,
        "logging": lambda up: LoggingResourceAdaptor(up, tmp_path / f"{next(names)}.csv"),
        "callback": lambda up: FailureCallbackResourceAdaptor(up, never, 3),
        "aligned": lambda up: AlignedResourceAdaptor(up, 4096),
    }[request.param]


def test_a_block_goes_back_to_the_upstream(make: Make, ground: Ground) -> None:
    stream = ground.stream()
    upstream = Upstream(device=0)
    adaptor = make(upstream)
    block = adaptor.allocate(100, stream=stream, alignment=512)
    assert (block.nbytes, block.resource) == (100, adaptor)
    assert not block.address % 512
    assert len(upstream.live) == 1
    adaptor.deallocate(block, stream=stream)
    assert not upstream.live


def test_properties_and_device_are_the_upstreams(make: Make) -> None:
    upstream = Upstream(device=1)
    upstream.is_host_accessible, upstream.is_stream_ordered = True, False
    adaptor = make(upstream)
    assert adaptor.device == 1
    assert adaptor.is_device_accessible
    assert adaptor.is_host_accessible
    assert not adaptor.is_stream_ordered
    assert adaptor.get_upstream() is adaptor.upstream_mr is upstream


def test_equal_iff_the_upstreams_are(make: Make, ground: Ground) -> None:
    stream = ground.stream()
    upstream = Upstream(device=0)
    one, same, other = make(upstream), make(upstream), make(Upstream(device=0))
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert one != upstream
    block = one.allocate(64, stream=stream)
    with pytest.raises(ValueError, match="is not a block of"):
        other.deallocate(block, stream=stream)
    same.deallocate(block, stream=stream)  # equal: takes it, for the one that gave it
    assert not upstream.live


def test_parameters_that_matter_tell_equal_ones_apart() -> None:
    up = Upstream()
    assert LimitingResourceAdaptor(up, 1) != LimitingResourceAdaptor(up, 2)
    assert AlignedResourceAdaptor(up, 512) != AlignedResourceAdaptor(up, 1024)
    assert AlignedResourceAdaptor(up, 512, 1) != AlignedResourceAdaptor(up, 512, 2)
    assert FailureCallbackResourceAdaptor(up, never, 1) != FailureCallbackResourceAdaptor(
        up, never, 2
    )
    assert TrackingResourceAdaptor(up) == TrackingResourceAdaptor(up, capture_stacks=True)


def test_an_upstream_is_a_resource(make: Make) -> None:
    with pytest.raises(TypeError, match=r"upstream_mr of .* takes a memory resource, found 5"):
        make(5)  # type: ignore[arg-type]


def test_the_upstreams_device_is_no_other() -> None:
    with pytest.raises(ValueError, match=r"device=0, but the upstream .* on device 1"):
        StatisticsResourceAdaptor(Upstream(device=1), device=0)


def test_calls_without_a_stream_find_the_device_of_the_upstream(make: Make, ground: Ground) -> None:
    upstream = Upstream(device=0)
    adaptor = make(upstream)
    block = adaptor.allocate_sync(300)
    assert adaptor.device == 0
    adaptor.deallocate_sync(block)
    assert not upstream.live


def test_a_dropped_block_is_freed_by_the_next_call(make: Make, ground: Ground) -> None:
    stream = ground.stream()
    upstream = Upstream(device=0)
    adaptor = make(upstream)
    block: Any = adaptor.allocate(100, stream=stream)
    cycle = [block]
    cycle.append(cycle)
    del block, cycle
    gc.collect()
    assert len(upstream.live) == 1
    adaptor.trim()
    assert not upstream.live
    assert upstream.num_trims == 1


def test_a_free_that_the_upstream_refuses_is_made_by_the_next_call(
    make: Make, ground: Ground
) -> None:
    stream = ground.stream()
    upstream = Upstream(device=0)
    adaptor = make(StatisticsResourceAdaptor(TrackingResourceAdaptor(make(upstream))))
    block = adaptor.allocate(8192, stream=stream)
    upstream.num_refusals = 1
    with pytest.raises(OutOfDeviceMemory, match="refused"):
        adaptor.deallocate(block, stream=stream)
    assert len(upstream.live) == 1
    assert ground.space.is_shared
    other = adaptor.allocate(100, stream=stream)
    assert len(upstream.live) == 1
    adaptor.deallocate(other, stream=stream)
    assert not upstream.live
    assert not ground.space.is_shared
    if isinstance(adaptor, LoggingResourceAdaptor):
        assert Path(adaptor.get_file_name()).read_text().count(",free,") == 2


def test_what_could_not_be_trimmed_through_it_is_trimmed_later(make: Make, ground: Ground) -> None:
    stream = ground.stream()
    upstream = Upstream(device=0)
    adaptor = make(TrackingResourceAdaptor(upstream))
    pool = PoolMemoryResource(adaptor, 1 << 20)
    pool.deallocate(pool.allocate(100, stream=stream), stream=stream)
    upstream.num_refusals = 1
    with pytest.raises(OutOfDeviceMemory, match="refused"):
        pool.trim()
    assert pool.reserved_nbytes == 1 << 20
    pool.trim()
    assert pool.reserved_nbytes == 0
    assert not upstream.live
    if isinstance(adaptor, StatisticsResourceAdaptor):
        assert adaptor.resource_counts.current_count == 0


def test_one_that_was_dropped_goes_when_nothing_of_it_is_out(make: Make, ground: Ground) -> None:
    upstream = Upstream(device=0)
    adaptor = make(upstream)
    place = ground.space.place(ground.stream())
    piece = adaptor.take(100, 256, place)
    adaptor._is_dropped = True  # as its finaliser says, in the middle of a collection
    if piece.resource is adaptor and adaptor._is_empty():
        assert isinstance(adaptor, AlignedResourceAdaptor)  # has nothing to remember
    else:
        assert adaptor._reap() == (piece.resource is upstream)
    adaptor.give(piece, place)
    assert adaptor._reap()
    assert not upstream.live
    adaptor._is_dropped = False


def test_no_bytes_never_reach_the_upstream(make: Make, ground: Ground) -> None:
    stream = ground.stream()
    upstream = Upstream(device=0)
    adaptor = make(upstream)
    block = adaptor.allocate(0, stream=stream)
    assert block.address == 0
    adaptor.deallocate(block, stream=stream)
    assert upstream.num_takes == 0


def test_closing_the_device_closes_outer_ones_first(make: Make) -> None:
    upstream = Upstream(device=0)
    adaptors = [make(upstream)]
    for _ in range(4):
        adaptors.append(make(adaptors[-1]))
    with simulated() as ground:
        for number, adaptor in enumerate(reversed(adaptors)):
            adaptor.allocate(100 + number, stream=ground.stream())  # and dropped
        assert upstream.live
    assert not upstream.live


# -- retry ------------------------------------------------------------------------------


def test_the_callback_is_asked_until_it_says_no(ground: Ground) -> None:
    stream = ground.stream()
    answers = [True, True, False]
    asked: list[int] = []

    def callback(nbytes: int) -> bool:
        asked.append(nbytes)
        return answers[len(asked) - 1]

    upstream = Upstream(fails_at=range(3), device=0)
    retrying = FailureCallbackResourceAdaptor(upstream, callback, 10)
    with pytest.raises(OutOfDeviceMemory, match="take 2 fails"):
        retrying.allocate(77, stream=stream)
    assert asked == [77, 77, 77]
    retrying.allocate(77, stream=stream)


def test_the_callback_is_asked_a_bounded_number_of_times(ground: Ground) -> None:
    asked: list[int] = []

    def callback(nbytes: int) -> bool:
        asked.append(nbytes)
        return True

    upstream = Upstream(fails_at=range(10**9), device=0)
    retrying = FailureCallbackResourceAdaptor(upstream, callback, 5)
    with pytest.raises(OutOfDeviceMemory) as caught:
        retrying.allocate(77, stream=ground.stream())
    assert len(asked) == 5
    assert upstream.num_takes == 6
    assert "after 5 retries" in caught.value.__notes__[0]


def test_a_plain_memory_error_is_one_too(ground: Ground) -> None:
    upstream = Upstream(fails_at={0}, device=0)
    upstream.error = MemoryError
    retrying = FailureCallbackResourceAdaptor(upstream, lambda nbytes: True, 1)
    retrying.allocate(1, stream=ground.stream())
    assert upstream.num_takes == 2


def test_other_errors_are_not_for_the_callback(ground: Ground) -> None:
    upstream = Upstream(fails_at={0}, device=0)
    upstream.error = RuntimeError
    retrying = FailureCallbackResourceAdaptor(upstream, lambda nbytes: pytest.fail("asked"), 5)
    with pytest.raises(RuntimeError, match="take 0"):
        retrying.allocate(1, stream=ground.stream())


def test_the_callback_may_free_and_allocate_in_the_same_stack(ground: Ground) -> None:
    stream = ground.stream()
    held: list[Any] = []

    def spill(nbytes: int) -> bool:
        if not held:
            return False
        stack.deallocate(held.pop(0), stream=stream)
        stack.deallocate(stack.allocate(1, stream=stream), stream=stream)
        return True

    upstream = Upstream(device=0)
    limited = LimitingResourceAdaptor(upstream, 1024)
    stack = TrackingResourceAdaptor(
        StatisticsResourceAdaptor(FailureCallbackResourceAdaptor(limited, spill, 100))
    )
    held.extend(stack.allocate(256, stream=stream) for _ in range(4))
    large = stack.allocate(768, stream=stream)
    assert len(held) == 1
    with pytest.raises(OutOfDeviceMemory):
        stack.allocate(2048, stream=stream)
    assert not held
    assert list(stack.get_outstanding_allocations()) == [large.address]
    assert limited.get_allocated_bytes() == upstream.used_nbytes == 768


def test_what_the_callback_raises_goes_to_the_caller(ground: Ground) -> None:
    stream = ground.stream()

    def callback(nbytes: int) -> bool:
        raise LookupError("nothing to spill")

    upstream = Upstream(fails_at={0}, device=0)
    limited = LimitingResourceAdaptor(FailureCallbackResourceAdaptor(upstream, callback, 3), 512)
    with pytest.raises(LookupError, match="nothing to spill") as caught:
        limited.allocate(512, stream=stream)
    assert isinstance(caught.value.__context__, OutOfDeviceMemory)
    limited.allocate(512, stream=stream)


@pytest.mark.parametrize(("callback", "retries"), [(None, 1), (never, -1), (never, 1.5)])
def test_a_callback_and_a_number_of_retries(callback: Any, retries: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        FailureCallbackResourceAdaptor(Upstream(), callback, retries)


# -- prefetch -----------------------------------------------------------------------------


class Movable:
    """Stands for what a backend says of memory; records what is moved."""

    def __init__(self, ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kind = MemoryKind.MANAGED
        self.can_prefetch = True
        self.error: Exception | None = None
        self.moved: list[tuple[int, int, Location, Any]] = []
        for name in ("memory_support", "pointer_attributes", "prefetch"):
            monkeypatch.setattr(ground.backend, name, getattr(self, name), raising=False)

    def memory_support(self) -> Any:
        return SimpleNamespace(has_concurrent_managed_access=self.can_prefetch)

    def pointer_attributes(self, address: int) -> Any:
        return SimpleNamespace(kind=self.kind)

    def prefetch(self, address: int, nbytes: int, location: Location, stream: Any) -> None:
        if self.error is not None:
            raise self.error
        self.moved.append((address, nbytes, location, stream))


@pytest.mark.parametrize("kind", list(MemoryKind))
def test_managed_and_system_memory_is_prefetched(
    kind: MemoryKind, ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Movable(ground, monkeypatch)
    backend.kind = kind
    stream = ground.stream()
    block = PrefetchResourceAdaptor(Upstream(device=0)).allocate(100, stream=stream)
    moves = kind in (MemoryKind.MANAGED, MemoryKind.UNREGISTERED)
    expected = [(block.address, 100, Location("device", 0), stream)] if moves else []
    assert backend.moved == expected


def test_the_simulator_moves_what_can_be_moved(ground: Ground) -> None:
    stream = ground.stream()
    counts: Any = ground.backend.counts  # type: ignore[attr-defined]
    for upstream, num_moves in ((CudaMemoryResource(), 0), (ManagedMemoryResource(), 1)):
        prefetching = PrefetchResourceAdaptor(upstream, device=0)
        before = counts["prefetch"]
        block = prefetching.allocate(100, stream=stream)
        assert counts["prefetch"] - before == num_moves
        prefetching.deallocate(block, stream=stream)


def test_nothing_is_prefetched_where_that_does_not_work(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Movable(ground, monkeypatch)
    backend.can_prefetch = False
    PrefetchResourceAdaptor(Upstream(device=0)).allocate(100, stream=ground.stream())
    assert not backend.moved


def test_a_prefetch_that_fails_leaves_nothing_half_made(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    Movable(ground, monkeypatch).error = RuntimeError("no")
    upstream = Upstream(device=0)
    with pytest.raises(DeviceError, match="prefetching 100 bytes: RuntimeError: no"):
        PrefetchResourceAdaptor(upstream).allocate(100, stream=ground.stream())
    assert not upstream.live


# -- alignment ------------------------------------------------------------------------------


@pytest.mark.parametrize("alignment", [1, 256, 512, 4096, 1 << 20])
def test_blocks_are_aligned_inside_of_larger_ones(alignment: int, ground: Ground) -> None:
    stream = ground.stream()
    upstream = Upstream(device=0)
    aligned = AlignedResourceAdaptor(upstream, alignment)
    blocks = [aligned.allocate(nbytes, stream=stream) for nbytes in (1, 256, 257, 4096, 5000)]
    ends = 0
    for block in blocks:
        assert not block.address % max(alignment, 256)
        assert block.address >= ends
        ends = block.address + block.nbytes
        piece = block._piece.inner or block._piece
        assert piece.address <= block.address
        assert ends <= piece.address + piece.nbytes
        aligned.deallocate(block, stream=stream)
    assert not upstream.live
    if alignment <= 256:
        assert upstream.asked[0] == (1, 256)


def test_below_the_threshold_blocks_are_the_upstreams_own(ground: Ground) -> None:
    stream = ground.stream()
    upstream = Upstream(device=0)
    aligned = AlignedResourceAdaptor(upstream, 4096, "1KiB")
    aligned.allocate(1023, stream=stream)
    aligned.allocate(1024, stream=stream)
    assert upstream.asked == [(1023, 256), (4096 + 4096 - 256, 256)]


def test_alignment_of_more_than_there_is_does_not_call_down(ground: Ground) -> None:
    upstream = Upstream(device=0)
    aligned = AlignedResourceAdaptor(upstream, 1 << 40)
    with pytest.raises(OutOfDeviceMemory):
        aligned.allocate(2**63 - 1 - 256, stream=ground.stream())
    assert upstream.num_takes == 0


@pytest.mark.parametrize("bad", [0, 3, -256, True, 2.0])
def test_an_alignment_is_a_power_of_two(bad: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        AlignedResourceAdaptor(Upstream(), bad)
