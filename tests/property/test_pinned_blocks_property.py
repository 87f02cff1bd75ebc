"""The cache of pinned blocks against a model of its books, whatever is asked of it."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from streamflow.memory.pinned import PinnedBlocks, class_nbytes

MIB = 1 << 20
BUDGET_NBYTES = 12 * MIB
FIRST_NBYTES = 8 * MIB
SIZES = st.one_of(
    st.integers(1, 70_000),
    st.integers(60_000, MIB + 70_000),
    st.integers(MIB, 5 * MIB),
)


class PinnedBlocksMachine(RuleBasedStateMachine):
    """Addresses are numbers here: the cache itself never touches the memory."""

    def __init__(self):
        super().__init__()
        self.pinned = {}
        self.next_address = 1 << 50
        self.fails = False
        self.blocks = PinnedBlocks(self.allocate, self.free, budget_nbytes=BUDGET_NBYTES)
        self.blocks.prepare_blocking()
        self.live = []
        self.reserved = []

    def allocate(self, nbytes):
        if self.fails:
            raise MemoryError("planted")
        address = self.next_address
        self.next_address += nbytes + 4096
        self.pinned[address] = nbytes
        return address

    def free(self, address):
        nbytes = self.pinned.pop(address)
        assert not any(address <= block.address < address + nbytes for block, _ in self.live)

    @rule(nbytes=SIZES)
    def acquire(self, nbytes):
        block = self.blocks.try_acquire(nbytes)
        if block is not None:
            self.live.append((block, nbytes))

    @rule(nbytes=SIZES)
    def reserve(self, nbytes):
        if self.blocks.reserve(nbytes):
            self.reserved.append(nbytes)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), fails=st.booleans())
    def use_reserved(self, data, fails):
        nbytes = self.reserved.pop(data.draw(st.integers(0, len(self.reserved) - 1)))
        self.fails = fails
        try:
            self.live.append((self.blocks.acquire_reserved_blocking(nbytes), nbytes))
        except MemoryError:
            assert fails
        self.fails = False

    @precondition(lambda self: self.reserved)
    @rule()
    def unreserve(self):
        self.blocks.unreserve(self.reserved.pop())

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data):
        self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))[0].release()

    @rule(keep=st.sampled_from([0, MIB, 4 * MIB]))
    def trim(self, keep):
        before = self.blocks.counted_nbytes
        assert self.blocks.trim(keep) == before - self.blocks.counted_nbytes
        assert self.blocks.cached_nbytes <= keep
        self.blocks.unpin_blocking()

    @invariant()
    def nothing_overlaps_and_every_block_is_pinned(self):
        spans = sorted((block.address, block.address + block.nbytes) for block, _ in self.live)
        assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))
        for start, stop in spans:
            assert any(low <= start and stop <= low + nbytes for low, nbytes in self.pinned.items())

    @invariant()
    def waste_is_bounded(self):
        for block, nbytes in self.live:
            assert block.nbytes >= nbytes
            if nbytes > MIB:
                assert block.nbytes <= max(nbytes * 9 / 8, class_nbytes(nbytes))
            else:
                assert block.nbytes == class_nbytes(nbytes) <= max(512, nbytes * 1.25)

    @invariant()
    def the_books_are_right(self):
        blocks = self.blocks
        assert blocks.counted_nbytes <= BUDGET_NBYTES
        assert blocks.num_live == len(self.live)
        reserved = sum(n if n > MIB // 16 else MIB for n in map(class_nbytes, self.reserved))
        waiting = sum(memory.nbytes for memory in blocks._to_unpin)
        pinned = sum(self.pinned.values()) - FIRST_NBYTES - waiting
        assert blocks.counted_nbytes == pinned + reserved
        large = sum(block.nbytes for block, _ in self.live if block._slab is None)
        slabs = sum(slab.nbytes for slab in blocks._slabs if slab.is_counted)
        assert blocks.cached_nbytes == pinned - large - slabs

    def teardown(self):
        for block, _ in self.live:
            block.release()
        self.live.clear()
        for nbytes in self.reserved:
            self.blocks.unreserve(nbytes)
        self.blocks.close_blocking()
        assert self.pinned == {}


PinnedBlocksMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
TestPinnedBlocks = PinnedBlocksMachine.TestCase
