"""The caching host allocator against its rules written down plainly, with streams that stall."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any

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

from streamflow.errors import OutOfDeviceMemory
from streamflow.memory import CachingHostAllocator
from streamflow.scheduler.reaper import run_orphans_blocking

NUM_STREAMS = 3
INVALID_BIN = CachingHostAllocator.INVALID_BIN


@dataclass(eq=False)
class Entry:
    """A block, as the model has it."""

    address: int
    nbytes: int
    bin: int
    pinned_nbytes: int
    streams: set[int] = field(default_factory=set)
    gates: set[Any] = field(default_factory=set)

    @property
    def is_ready(self) -> bool:
        return all(gate.is_open for gate in self.gates)


class Model:
    """The semantics, one rule after the other; a list per state, searched from the front."""

    def __init__(self, growth: int, min_bin: int, max_bin: int, limit: int) -> None:
        self.growth, self.min_bin, self.max_bin, self.limit = growth, min_bin, max_bin, limit
        self.cached: list[Entry] = []
        self.live: list[Entry] = []
        self.pending: list[Entry] = []
        self.num_hits = self.num_misses = self.num_pinned = self.num_unpinned = 0

    def size_of(self, nbytes: int) -> tuple[int, int]:
        order = self.min_bin
        while self.growth**order < nbytes:
            order += 1
            if order > self.max_bin:
                return nbytes, INVALID_BIN
        return self.growth**order, order

    def pinned_size_of(self, nbytes: int) -> int:
        """The least that serves ``nbytes`` of 512, 1024 and so on: four sizes a doubling."""
        size, order = self.size_of(nbytes)
        if order == INVALID_BIN:
            return nbytes
        at = 512
        while at < nbytes:
            power = 2 ** (len(f"{at:b}") - 1)
            at += max(512, power // 4)
        return min(size, at)

    @staticmethod
    def total(entries: list[Entry]) -> int:
        return sum(entry.nbytes for entry in entries)

    def find(self, order: int) -> Entry | None:
        for entry in self.cached:
            if entry.bin == order and entry.is_ready:
                return entry
        return None

    def free(self, entry: Entry, gates: dict[int, Any]) -> None:
        self.live.remove(entry)
        entry.gates = {gates[stream] for stream in entry.streams if stream in gates}
        if entry.bin == INVALID_BIN or entry.nbytes > self.limit:
            self.pending.append(entry)
            return
        while self.total(self.cached) + entry.nbytes > self.limit:
            self.pending.append(self.cached.pop(0))
        self.cached.append(entry)

    def empty(self) -> None:
        self.pending += self.cached
        self.cached = []

    def reclaim(self) -> None:
        waiting = [entry for entry in self.pending if not entry.is_ready]
        self.num_unpinned += len(self.pending) - len(waiting)
        self.pending = waiting


class CachingHost(RuleBasedStateMachine):
    """Blocks are written to by the device as soon as they are handed out, and until the free."""

    @initialize(
        growth=st.sampled_from([2, 3, 8]),
        min_bin=st.integers(0, 3),
        num_bins=st.integers(0, 4),
        has_largest=st.booleans(),
        limit=st.sampled_from([0, 1, 700, 5000, 200_000, CachingHostAllocator.INVALID_SIZE]),
    )
    def begin(
        self, growth: int, min_bin: int, num_bins: int, has_largest: bool, limit: int
    ) -> None:
        max_bin = min_bin + num_bins if has_largest else INVALID_BIN
        self.machine = Machine(memory_nbytes=64 << 20)
        self.backend: Any = self.machine.backend
        self.allocator = CachingHostAllocator(growth, min_bin, max_bin, limit, device=0)
        self.model = Model(growth, min_bin, max_bin, limit)
        self.streams = [self.machine.stream() for _ in range(NUM_STREAMS)]
        pool = self.backend.create_pool(release_threshold_nbytes=0)
        self.device_memory = [self.backend.allocate(pool, 256, one) for one in self.streams]
        for address, on in zip(self.device_memory, self.streams, strict=True):
            self.backend.fill(address, b"\1", 256, on)
        self.gates: dict[int, Any] = {}
        self.blocks: dict[Entry, Any] = {}
        self.pin = self.backend.allocate_pinned_blocking
        self.num_refusals = self.num_pinned = 0
        self.backend.allocate_pinned_blocking = self._pin

    def _pin(self, nbytes: int) -> int:
        if self.num_refusals:
            self.num_refusals -= 1
            raise OutOfDeviceMemory("as told")
        self.num_pinned += 1
        return int(self.pin(nbytes))

    @rule(
        nbytes=st.one_of(st.integers(1, 40), st.integers(1, 5000), st.integers(1, 40_000)),
        stream=st.one_of(st.none(), st.integers(0, NUM_STREAMS - 1)),
        num_refusals=st.sampled_from([0, 0, 0, 0, 1, 2]),
    )
    def allocate(self, nbytes: int, stream: int | None, num_refusals: int) -> None:
        model = self.model
        self.machine.run()
        self.num_refusals = num_refusals
        size, order = model.size_of(nbytes)
        model.reclaim()
        expected = model.find(order) if order != INVALID_BIN else None
        is_too_small = expected is not None and expected.pinned_nbytes < nbytes
        if is_too_small:
            model.cached.remove(expected)
            model.num_unpinned += 1
        if (expected is None or is_too_small) and num_refusals:
            model.empty()
            model.reclaim()
        on = None if stream is None else self.streams[stream]
        try:
            block = self.allocator.host_allocate(nbytes, on)
        except OutOfDeviceMemory:
            assert expected is None or is_too_small
            assert num_refusals == 2
            return
        finally:
            self.num_refusals = 0
        assert num_refusals < 2 or (expected is not None and not is_too_small)
        assert (block.nbytes, block.bin_nbytes, block.bin) == (nbytes, size, order)
        model.num_misses += expected is None
        model.num_hits += expected is not None
        if expected is None or is_too_small:
            model.num_pinned += 1
            entry = Entry(block.address, size, order, model.pinned_size_of(nbytes))
        else:
            model.cached.remove(expected)
            entry = expected
        assert (block.address, block.capacity_nbytes) == (entry.address, entry.pinned_nbytes)
        entry.streams, entry.gates = set() if stream is None else {stream}, set()
        model.live.append(entry)
        self.blocks[entry] = block
        block.array[:] = 0
        if stream is not None:
            self.backend.copy_d2h(
                block.address, self.device_memory[stream], min(nbytes, 256), self.streams[stream]
            )

    def _some(self, data: st.DataObject) -> Entry:
        return self.model.live[data.draw(st.integers(0, len(self.model.live) - 1))]

    @precondition(lambda self: self.model.live)
    @rule(data=st.data(), stream=st.integers(0, NUM_STREAMS - 1))
    def use_elsewhere(self, data: st.DataObject, stream: int) -> None:
        entry = self._some(data)
        block, on = self.blocks[entry], self.streams[stream]
        block.record_stream(on)
        for other in entry.streams:
            event = self.backend.create_event()
            self.streams[other].record(event)
            on.wait(event)
        nbytes = min(block.nbytes, 256)
        self.backend.copy_d2h(block.address, self.device_memory[stream], nbytes, on)
        # What it waits for, whoever waits for it waits for, too.
        entry.streams.add(stream)
        held = [self.gates[other] for other in entry.streams if other in self.gates]
        if held:
            self.gates[stream] = _All(held)

    @precondition(lambda self: self.model.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        entry = self._some(data)
        self.machine.run()
        self.allocator.host_free(self.blocks.pop(entry))
        self.model.free(entry, self.gates)
        self.model.reclaim()

    @precondition(lambda self: self.model.live)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        entry = self._some(data)
        self.machine.run()
        del self.blocks[entry]
        assert self.allocator.cached_bytes.live == self.model.total(self.model.live)
        self.machine.space.reap()
        self.model.free(entry, self.gates)
        self.model.reclaim()

    @rule()
    def free_all_cached(self) -> None:
        self.machine.run()
        self.allocator.free_all_cached()
        self.model.empty()
        self.model.reclaim()

    @rule(limit=st.sampled_from([0, 300, 5000, 50_000]))
    def set_max_cached_bytes(self, limit: int) -> None:
        self.allocator.set_max_cached_bytes(limit)
        self.model.limit = limit

    @rule(stream=st.integers(0, NUM_STREAMS - 1))
    def stall(self, stream: int) -> None:
        if stream not in self.gates:
            self.gates[stream] = self.machine.sim.gate(self.streams[stream])

    @rule(stream=st.integers(0, NUM_STREAMS - 1))
    def go_on(self, stream: int) -> None:
        if stream in self.gates:
            self.gates[stream].release()
            self.machine.run()
            self.gates = {key: gate for key, gate in self.gates.items() if not gate.is_open}

    @invariant()
    def they_agree(self) -> None:
        if not hasattr(self, "machine"):
            return
        allocator, model = self.allocator, self.model
        assert allocator.cached_bytes.free == model.total(model.cached)
        assert allocator.cached_bytes.live == model.total(model.live)
        assert allocator.pending_bytes == sum(entry.pinned_nbytes for entry in model.pending)
        pinned = sum(entry.pinned_nbytes for entry in model.live)
        assert allocator.pinned_bytes.live == pinned <= model.total(model.live)
        cached = [(info.pointer, info.nbytes, info.bin) for info in allocator.cached_blocks]
        by_size = sorted(model.cached, key=lambda entry: entry.nbytes)  # keeps the order of age
        assert cached == [(entry.address, entry.nbytes, entry.bin) for entry in by_size]
        live = [(info.pointer, info.nbytes, info.bin) for info in allocator.live_blocks]
        by_address = sorted(model.live, key=lambda entry: entry.address)
        assert live == [(entry.address, entry.nbytes, entry.bin) for entry in by_address]
        assert (allocator.num_hits, allocator.num_misses) == (model.num_hits, model.num_misses)
        assert self.num_pinned == model.num_pinned
        assert self.backend.counts["free_pinned_blocking"] == model.num_unpinned
        assert self.machine.races() == []

    def teardown(self) -> None:
        if not hasattr(self, "machine"):
            return
        try:
            self._end()
        finally:
            del self.allocator
            self.machine.close()
            gc.collect(0)
            run_orphans_blocking()

    def _end(self) -> None:
        for stream in tuple(self.gates):
            self.go_on(stream)
        self.machine.run()
        for block in self.blocks.values():
            self.allocator.host_free(block)
        self.machine.run()
        self.blocks.clear()
        self.allocator.free_all_cached()
        assert self.backend.counts["free_pinned_blocking"] == self.num_pinned


class _All:
    """Several gates as one."""

    def __init__(self, gates: list[Any]) -> None:
        self._gates = gates

    @property
    def is_open(self) -> bool:
        return all(gate.is_open for gate in self._gates)

    def release(self) -> None:
        for gate in self._gates:
            gate.release()


def test_it_does_what_its_rules_say() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        CachingHost,
        settings=settings(
            max_examples=100,
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
