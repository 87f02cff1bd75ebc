"""Sub-allocators against a plain model, on the simulator with its race checker on."""

from __future__ import annotations

import itertools
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from fake_memory import Machine
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from streamflow.errors import Closed, OutOfDeviceMemory
from streamflow.memory import (
    ArenaMemoryResource,
    BinningMemoryResource,
    CudaAsyncMemoryResource,
    CudaMemoryResource,
    FixedSizeMemoryResource,
    PoolMemoryResource,
)

KIB, MIB = 1 << 10, 1 << 20
NUM_STREAMS = 4


class Flaky:
    """Makes an upstream's calls fail where it is told to, before they do anything."""

    def __init__(self, upstream: Any, fails_at: set[int]) -> None:
        self.num_calls = 0
        self.fails_at = fails_at
        self.take, self.give = upstream._take, upstream._give
        upstream._take, upstream._give = self._take, self._give

    def _count(self) -> None:
        self.num_calls += 1
        if self.num_calls in self.fails_at:
            raise OutOfDeviceMemory("as told")

    def _take(self, *args: Any) -> Any:
        self._count()
        return self.take(*args)

    def _give(self, *args: Any) -> None:
        self._count()
        self.give(*args)


MAKERS = {
    "pool": lambda source: PoolMemoryResource(source, 16 * KIB, 512 * KIB),
    "arena": lambda source: ArenaMemoryResource(source, 6 * MIB),
    "fixed": lambda source: FixedSizeMemoryResource(source, 8 * KIB, 4),
    "binning": lambda source: BinningMemoryResource(source, 9, 12),
}
LARGEST = {"pool": 64 * KIB, "arena": 3 * MIB, "fixed": 8 * KIB, "binning": 16 * KIB}


class SubAllocation(RuleBasedStateMachine):
    """Whatever is allocated is written to at once; whatever is freed was written to before."""

    kind = "pool"
    source: type = CudaMemoryResource

    @initialize(fails_at=st.sets(st.sampled_from(range(1, 30, 2)), max_size=3))
    def begin(self, fails_at: set[int]) -> None:
        self.machine = Machine(memory_nbytes=64 * MIB)
        self.upstream = self.source(device=0)
        self.flaky = Flaky(self.upstream, fails_at)
        self.resource: Any = MAKERS[self.kind](self.upstream)
        self.streams = [self.machine.stream() for _ in range(NUM_STREAMS)]
        self.live: list[Any] = []  # blocks, each with the stream that used it last
        self.gates = ExitStack()
        self.closed = False

    @rule(data=st.data(), stream=st.integers(0, NUM_STREAMS - 1), power=st.integers(0, 6))
    def allocate(self, data: st.DataObject, stream: int, power: int) -> None:
        nbytes = data.draw(st.integers(1, max(1, LARGEST[self.kind] >> power)))
        alignment = data.draw(st.sampled_from([256, 256, 512, 1024]))
        on = self.streams[stream]
        try:
            block = self.resource.allocate(nbytes, stream=on, alignment=alignment)
        except OutOfDeviceMemory:
            return
        except Closed:
            assert self.closed
            return
        assert not self.closed
        assert block.address % alignment == 0
        self.machine.write(block, on)
        self.live.append((block, on))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def deallocate(self, data: st.DataObject) -> None:
        block, on = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        try:
            self.resource.deallocate(block, stream=on)
        except OutOfDeviceMemory:  # the upstream's own block; the next call tries again
            assert self.kind == "binning"
            self.resource._drain()

    @precondition(lambda self: self.live)
    @rule(data=st.data(), stream=st.integers(0, NUM_STREAMS - 1))
    def use_and_free_elsewhere(self, data: st.DataObject, stream: int) -> None:
        """The other stream waits, as whoever frees has promised."""
        block, on = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        event, elsewhere = self.machine.backend.create_event(), self.streams[stream]
        on.record(event)
        elsewhere.wait(event)
        self.machine.write(block, elsewhere)
        self.live.append((block, elsewhere))

    @precondition(lambda self: self.live)
    @rule()
    def drop(self) -> None:
        block, on = self.live[-1]
        if block.stream is on:  # it is freed there
            self.live.pop()
            del block
            try:
                self.machine.space.reap()
            except OutOfDeviceMemory:
                assert self.kind == "binning"
                self.resource._drain()

    @rule(stream=st.integers(0, NUM_STREAMS - 1))
    def hold(self, stream: int) -> None:
        self.gates.enter_context(self.machine.sim.gate(self.streams[stream]))

    @rule()
    def let_go(self) -> None:
        self.gates.close()
        self.machine.run()

    @rule()
    def run_some(self) -> None:
        self.machine.backend.advance(0)

    @rule()
    def trim(self) -> None:
        with suppress(OutOfDeviceMemory):
            self.resource.trim()

    @precondition(lambda self: len(self.live) > 8)
    @rule()
    def close(self) -> None:
        self.closed = True
        with suppress(OutOfDeviceMemory):
            self.resource.close()

    @invariant()
    def nothing_overlaps_nothing_races_and_the_sums_are_right(self) -> None:
        if not hasattr(self, "machine"):
            return
        spans = sorted((block.address, block.address + block.nbytes) for block, _ in self.live)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert self.machine.races() == []
        found = self.resource.info()
        assert found.live_nbytes + found.free_nbytes + found.pending_nbytes == found.reserved_nbytes
        assert found.live_nbytes == sum(block.capacity_nbytes for block, _ in self.live)
        assert 0 <= found.fragmentation <= 1
        assert min(found.free_nbytes, found.pending_nbytes, found.live_nbytes) >= 0

    def teardown(self) -> None:
        if not hasattr(self, "machine"):
            return
        self.let_go()
        self.flaky.fails_at.clear()
        assert self.resource.info().pending_nbytes == 0, "all frees have passed"
        while self.live:
            block, on = self.live.pop()
            self.resource.deallocate(block, stream=on)
        self.machine.run()
        self.resource.trim()
        found = self.resource.info()
        assert (found.live_nbytes, found.reserved_nbytes) == (0, 0)
        assert self.machine.races() == []
        self.machine.close()


@pytest.mark.parametrize("source", [CudaMemoryResource, CudaAsyncMemoryResource])
@pytest.mark.parametrize("kind", MAKERS)
def test_no_block_is_in_two_hands(kind: str, source: type) -> None:
    case = type("Case", (SubAllocation,), {"kind": kind, "source": source})
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        case,
        settings=settings(
            max_examples=25,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
