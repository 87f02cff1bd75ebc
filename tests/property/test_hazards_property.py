"""Hazards of random arrays, views and splits against a brute-force model on byte intervals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import event, given, settings
from hypothesis import strategies as st

from streamflow.scheduler.hazards import Region
from streamflow.scheduler.timeline import Ticket, Timeline, needed_waits

NBYTES = 24
NUM_LINES = 4


@dataclass
class Done:
    """One op: the bytes it reads and writes, and what it is known to come after."""

    ticket: Ticket
    reads: set[int]
    writes: set[int]
    edges: set[int] = field(default_factory=set)

    def conflicts(self, other: Done) -> bool:
        return bool(self.writes & (other.reads | other.writes) or self.reads & other.writes)


class Lab:
    """Allocations, their regions, and every op so far."""

    def __init__(self, num_arrays: int) -> None:
        self.lines = [Timeline(i, name=f"s{i}") for i in range(NUM_LINES)]
        self.last: list[set[int]] = [set() for _ in self.lines]
        self.ops: list[Done] = []
        self.roots: list[Region] = []
        self.regions: list[tuple[int, Region]] = []
        self.has_failed = False
        for number in range(num_arrays):
            op = self.submit(number % NUM_LINES, [], set(), self.bytes_of(number, 0, NBYTES))
            root = Region(op.ticket, 0, NBYTES)
            self.roots.append(root)
            self.regions.append((number, root))

    @staticmethod
    def bytes_of(number: int, start: int, stop: int) -> set[int]:
        return set(range(number * NBYTES + start, number * NBYTES + stop))

    def split(self, choice: int, num_parts: int) -> None:
        """As ``DeviceArray.split`` does it."""
        number, region = self.regions[choice % len(self.regions)]
        start, nbytes = region.start, region.stop - region.start
        for part in range(num_parts):
            stop = start + nbytes // num_parts + (part < nbytes % num_parts)
            carved = region.carve(self.roots[number], start, stop)
            assert (carved.start, carved.stop) == (start, stop)
            if not any(known is carved for _, known in self.regions):
                self.regions.append((number, carved))
            start = stop

    def run(self, line: int, reads: list[int], writes: list[int], fails: bool) -> None:
        """As ``Parking.submit`` does it, for ops that do not park."""
        read = [self.regions[c % len(self.regions)] for c in reads]
        written = [self.regions[c % len(self.regions)] for c in writes]
        deps: list[Ticket] = []
        for _, region in read:
            region.before_read(deps)
        for _, region in written:
            region.before_write(deps)
        bytes_read, bytes_written = set(), set()
        for number, region in read:
            bytes_read |= self.bytes_of(number, region.start, region.stop)
        for number, region in written:
            bytes_written |= self.bytes_of(number, region.start, region.stop)
        if fails:
            self.has_failed = True
            ticket = Ticket(len(self.ops))
            ticket.failure = RuntimeError("never ran")
            ticket.inherited = tuple(deps)
            self.ops.append(Done(ticket, set(), set()))
        else:
            op = self.submit(line, deps, bytes_read, bytes_written)
            ticket = op.ticket
            if not self.has_failed and op.reads | op.writes:
                self.check_no_false(op, deps)
        for _, region in read:
            region.record_read(ticket)
        for _, region in written:
            region.record_write(ticket)

    def submit(self, line: int, deps: list[Ticket], reads: set[int], writes: set[int]) -> Done:
        timeline = self.lines[line]
        assert not any(dep.is_parked for dep in deps)
        waits = needed_waits(timeline, deps)
        timeline.join(waits)
        op = Done(Ticket(len(self.ops)), reads, writes)
        op.edges = self.last[line] | {wait.seq for wait in waits}
        ordered = set(self.before(op.edges))
        for earlier in self.ops:
            if op.conflicts(earlier) and not earlier.ticket.is_passed:
                event("a hazard")
                assert earlier.ticket.seq in ordered, f"{earlier} is not before {op}"
        timeline.advance(op.ticket, 1, None)
        self.ops.append(op)
        self.last[line] = {op.ticket.seq}
        return op

    def before(self, roots: set[int]) -> Iterator[int]:
        found: set[int] = set()
        stack = list(roots)
        while stack:
            seq = stack.pop()
            if seq not in found:
                found.add(seq)
                yield seq
                stack.extend(self.ops[seq].edges)

    def check_no_false(self, op: Done, deps: list[Ticket]) -> None:
        for dep in deps:
            assert op.conflicts(self.ops[dep.seq]), f"{op} need not wait for {self.ops[dep.seq]}"

    def retire(self, line: int) -> None:
        """The oldest op of a stream and all that is before it have finished."""
        inflight = self.lines[line].inflight
        if inflight:
            for seq in self.before({inflight[0].seq}):
                ticket = self.ops[seq].ticket
                passed = ticket.timeline.inflight
                while passed and ticket.position > ticket.timeline.watermark:
                    ticket.timeline.retire(1)


small = st.integers(0, 1 << 16)
lines = st.integers(0, NUM_LINES - 1)
some = st.lists(small, max_size=2)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("run"), lines, some, some, st.just(False)),
        st.tuples(st.just("run"), lines, some, some, st.just(False)),
        st.tuples(st.just("run"), lines, some, some, st.just(False)),
        st.tuples(st.just("run"), lines, some, some, st.booleans()),
        st.tuples(st.just("split"), small, st.integers(1, 5)),
        st.tuples(st.just("retire"), lines),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=400, derandomize=True)
@given(num_arrays=st.integers(1, 2), program=actions)
def test_conflicting_ops_are_ordered_and_disjoint_ones_are_not(
    num_arrays: int, program: list[tuple]
) -> None:
    lab = Lab(num_arrays)
    for kind, *args in program:
        getattr(lab, kind)(*args)
    # A free writes everything: it must come after all that is still outstanding.
    for number, root in enumerate(lab.roots):
        deps: list[Ticket] = []
        root.before_write(deps)
        lab.submit(0, deps, set(), lab.bytes_of(number, 0, NBYTES))


@settings(deadline=None, max_examples=100, derandomize=True)
@given(reads=st.lists(lines, min_size=1, max_size=60))
def test_reads_are_thinned_to_a_few_per_stream(reads: list[int]) -> None:
    lab = Lab(1)
    for line in reads:
        lab.run(line, [0], [], False)
    assert len(lab.roots[0].reads) <= 8 + NUM_LINES
