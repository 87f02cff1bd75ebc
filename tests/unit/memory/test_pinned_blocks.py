"""The cache of pinned blocks: sizes, budget, what is dropped first, failures, threads."""

from __future__ import annotations

import gc
import threading
from itertools import pairwise

import numpy as np
import pytest

from streamflow.memory import numa, page_locked
from streamflow.memory.pinned import PinnedBlocks, class_nbytes
from streamflow.scheduler.reaper import run_orphans_blocking

KIB, MIB = 1 << 10, 1 << 20
FIRST_NBYTES = 8 * MIB


class Driver:
    """Real memory that is not page-locked; notes what is pinned."""

    def __init__(self):
        self.ranges = {}
        self.num_calls = 0
        self.fails = 0

    def allocate(self, nbytes):
        self.num_calls += 1
        if self.fails:
            self.fails -= 1
            raise MemoryError("no more pages can be locked")
        memory = np.zeros(nbytes, np.uint8)
        self.ranges[memory.ctypes.data] = memory
        return memory.ctypes.data

    def free(self, address):
        del self.ranges[address]

    @property
    def nbytes(self):
        return sum(memory.nbytes for memory in self.ranges.values())


@pytest.fixture
def driver():
    return Driver()


@pytest.fixture
def make(driver):
    made = []

    def make(budget_nbytes=64 * MIB, prepares=True, **options):
        blocks = PinnedBlocks(driver.allocate, driver.free, budget_nbytes=budget_nbytes, **options)
        if prepares:
            blocks.prepare_blocking()
        made.append(blocks)
        return blocks

    yield make
    for blocks in made:
        blocks.close_blocking()
    gc.collect()
    run_orphans_blocking()
    assert driver.ranges == {}


def take(blocks, nbytes):
    block = blocks.try_acquire(nbytes)
    if block is None:
        assert blocks.reserve(nbytes)
        block = blocks.acquire_reserved_blocking(nbytes)
    return block


# -- sizes ---------------------------------------------------------------------------------


def test_there_are_four_classes_per_doubling_up_to_1_mib():
    sizes = sorted({class_nbytes(n) for n in range(1, MIB + 1, 64)})
    assert sizes[0] == 512
    assert sizes[-1] == MIB
    for low in (2**k for k in range(9, 20)):
        within = [size for size in sizes if low < size <= 2 * low]
        assert within == [low * 5 // 4, low * 3 // 2, low * 7 // 4, 2 * low]


@pytest.mark.parametrize("nbytes", [513, 640, 641, 1023, 1025, 65_537, 700_001, MIB - 1])
def test_a_class_wastes_less_than_a_quarter_of_what_is_asked(nbytes):
    assert nbytes <= class_nbytes(nbytes) < nbytes * 1.25


@pytest.mark.parametrize("nbytes", [MIB + 1, 2 * MIB, 100 * MIB + 1, 2**33 + 5])
def test_above_the_classes_sizes_are_multiples_of_64_kib(nbytes):
    size = class_nbytes(nbytes)
    assert size % (64 * KIB) == 0
    assert nbytes <= size < nbytes + 64 * KIB


def test_a_large_cached_block_serves_what_is_at_most_an_eighth_smaller(make, driver):
    blocks = make()
    block = take(blocks, 9 * MIB)
    block.release()
    assert blocks.try_acquire(8 * MIB - 1) is None
    again = blocks.try_acquire(8 * MIB)
    assert again is block
    again.release()
    assert blocks.try_acquire(9 * MIB + 1) is None
    assert driver.num_calls == 2


def test_the_smallest_large_block_that_serves_is_taken(make):
    blocks = make()
    sizes = (16 * MIB, 17 * MIB, 17 * MIB + 64 * KIB)
    for block in [take(blocks, size) for size in sizes]:
        block.release()
    taken = [take(blocks, 16 * MIB - 5) for _ in range(3)]
    assert [block.nbytes for block in taken] == list(sizes)
    for block in taken:
        block.release()


def test_up_to_1_mib_only_the_class_itself_serves(make):
    blocks = make()
    take(blocks, MIB).release()
    assert blocks.try_acquire(MIB - 200 * KIB) is None
    blocks.try_acquire(MIB - 100 * KIB).release()


def test_every_small_class_is_there_from_the_start(make, driver):
    blocks = make()
    sizes = sorted({class_nbytes(n) for n in range(1, 64 * KIB + 1, 64)})
    taken = [blocks.try_acquire(size) for size in sizes]
    assert [block.nbytes for block in taken] == sizes
    spans = sorted((block.address, block.address + block.nbytes) for block in taken)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))
    assert driver.num_calls == 1
    assert blocks.counted_nbytes == 0
    for block in taken:
        block.release()


@pytest.mark.parametrize("has_view", [False, True])
def test_a_slab_that_nobody_has_any_of_serves_other_classes(make, has_view):
    """Else a budget without room for another slab would never give any block of these."""
    blocks = make(budget_nbytes=64 * KIB)
    held = [take(blocks, 64 * KIB) for _ in range(FIRST_NBYTES // (64 * KIB))]
    held[0].lease(None)
    view = held[0].array((4,), np.dtype(np.uint8))
    if not has_view:
        del view
    for block in held:
        assert blocks.try_acquire(512) is None
        block.revoke()
        block.release()
    other = blocks.try_acquire(512)
    assert (other is None) == has_view  # the view sees mapped memory as long as it lives
    if other is not None:
        blocks.try_acquire(64 * KIB).release()
        other.release()


def test_the_block_used_last_is_reused_first(make):
    blocks = make()
    one, two = take(blocks, MIB), take(blocks, MIB)
    one.release()
    two.release()
    assert blocks.try_acquire(MIB) is two
    two.release()


# -- budget ----------------------------------------------------------------------------------


def test_the_budget_bounds_live_and_cached_bytes(make, driver):
    blocks = make(budget_nbytes=4 * MIB)
    held = [take(blocks, MIB) for _ in range(4)]
    assert blocks.counted_nbytes == 4 * MIB
    assert not blocks.reserve(MIB)
    held.pop().release()
    assert blocks.counted_nbytes == 4 * MIB  # cached ones count
    assert blocks.cached_nbytes == MIB
    other = take(blocks, MIB // 2)  # the cached one has to go
    assert blocks.counted_nbytes == 3 * MIB + MIB // 2
    assert driver.nbytes == FIRST_NBYTES + blocks.counted_nbytes
    for block in (*held, other):
        block.release()


def test_what_was_not_used_for_longest_is_dropped_first(make, driver):
    blocks = make(budget_nbytes=4 * MIB)
    one, two, three = take(blocks, MIB), take(blocks, 3 * MIB // 2), take(blocks, 5 * MIB // 4)
    for block in (two, three, one):
        block.release()
    addresses = {block: block.address for block in (one, two, three)}
    assert blocks.reserve(3 * MIB // 2 + 1)  # needs the room of `two`, which was used first
    blocks.unpin_blocking()
    assert addresses[two] not in driver.ranges
    assert {addresses[one], addresses[three]} < set(driver.ranges)
    blocks.unreserve(3 * MIB // 2 + 1)


def test_small_blocks_count_by_slab_and_idle_slabs_make_room(make, driver):
    blocks = make(budget_nbytes=2 * MIB)
    held = [take(blocks, 64 * KIB) for _ in range(8 * 16 + 5)]  # five more than the first slab has
    assert blocks.counted_nbytes == MIB
    assert not blocks.reserve(2 * MIB)
    for block in held:
        block.release()
    assert blocks.counted_nbytes == MIB
    large = take(blocks, 2 * MIB)
    assert blocks.counted_nbytes == 2 * MIB
    assert driver.nbytes == FIRST_NBYTES + 2 * MIB
    for block in (large, take(blocks, 64 * KIB)):  # the first slab stays
        block.release()


def test_a_budget_of_nothing_pins_nothing_but_the_first_slab(make, driver):
    blocks = make(budget_nbytes=0)
    assert not blocks.reserve(MIB)
    held = []
    while (block := blocks.try_acquire(512)) is not None:
        held.append(block)
    assert len(held) == FIRST_NBYTES // 512
    assert not blocks.reserve(512)
    for block in held:
        block.release()
    assert driver.nbytes == FIRST_NBYTES


def test_while_somebody_waits_others_get_no_large_block_and_no_budget(make):
    blocks = make()
    take(blocks, MIB).release()
    heard = []
    blocks.on_release = lambda: heard.append(1)
    assert blocks.try_acquire(MIB) is None
    assert not blocks.reserve(512)
    small = blocks.try_acquire(512)
    large = blocks.try_acquire(MIB, is_waiter=True)
    assert blocks.reserve(3 * MIB, is_waiter=True)
    assert heard == []
    for block in (small, large):
        block.release()
    blocks.unreserve(3 * MIB)
    assert len(heard) == 3
    blocks.on_release = None


# -- trim and close ---------------------------------------------------------------------------


def test_trim_keeps_what_it_is_told_to_and_what_is_live(make, driver):
    blocks = make()
    live = take(blocks, 2 * MIB)
    for block in [take(blocks, MIB) for _ in range(4)]:
        block.release()
    assert blocks.trim(2 * MIB) == 2 * MIB
    blocks.unpin_blocking()
    assert driver.nbytes == FIRST_NBYTES + 4 * MIB
    assert blocks.trim() == 2 * MIB
    blocks.unpin_blocking()
    assert driver.nbytes == FIRST_NBYTES + 2 * MIB
    assert blocks.trim() == 0
    live.release()


def test_blocks_out_on_loan_are_unpinned_when_they_come_back_after_the_close(make, driver):
    blocks = make()
    large, small = take(blocks, MIB), take(blocks, 512)
    blocks.close_blocking()
    assert driver.nbytes == FIRST_NBYTES + MIB
    large.release()
    small.release()
    run_orphans_blocking()
    assert driver.ranges == {}


def test_memory_with_a_view_left_is_unpinned_when_the_view_has_gone(make, driver):
    blocks = make()
    block = take(blocks, MIB)
    block.lease(None)
    view = block.array((4,), np.dtype(np.float32))[1:]
    block.revoke()
    block.release()
    assert blocks.trim() == MIB
    blocks.unpin_blocking()
    run_orphans_blocking()
    assert driver.nbytes == FIRST_NBYTES + MIB  # the view reads mapped memory still
    assert view.tolist() == [0, 0, 0]
    del view
    gc.collect()
    blocks.unpin_blocking()
    assert driver.nbytes == FIRST_NBYTES


def test_memory_with_a_view_left_at_the_close_is_left_to_a_later_device(make, driver):
    blocks = make()
    block = take(blocks, MIB)
    block.lease(None)
    view = block.array((4,), np.dtype(np.float32))
    block.revoke()
    block.release()
    blocks.close_blocking()
    run_orphans_blocking()
    assert driver.nbytes == MIB
    del view
    gc.collect()
    assert driver.nbytes == MIB  # a finaliser unpins nothing itself (R12)
    run_orphans_blocking()
    assert driver.ranges == {}


# -- failures ----------------------------------------------------------------------------------


def test_a_failed_pin_gives_its_reservation_back(make, driver):
    blocks = make()
    driver.fails = 1
    assert blocks.reserve(2 * MIB)
    with pytest.raises(MemoryError):
        blocks.acquire_reserved_blocking(2 * MIB)
    assert blocks.counted_nbytes == blocks.num_live == 0
    take(blocks, 2 * MIB).release()


def test_a_failed_pin_is_tried_again_without_what_is_cached(make, driver):
    blocks = make()
    take(blocks, 3 * MIB).release()
    driver.fails = 1
    block = take(blocks, 2 * MIB)
    assert driver.nbytes == FIRST_NBYTES + 2 * MIB
    assert blocks.counted_nbytes == 2 * MIB
    block.release()


def test_a_failed_slab_gives_its_reservation_back(make, driver):
    blocks = make(prepares=False)
    driver.fails = 1
    assert blocks.reserve(512)
    with pytest.raises(MemoryError):
        blocks.acquire_reserved_blocking(512)
    assert blocks.counted_nbytes == 0
    take(blocks, 512).release()


# -- whose memory it is ------------------------------------------------------------------------


def test_the_table_knows_leases_and_results_while_they_last(make):
    blocks = make()
    for nbytes in (1000, 2 * MIB):
        block = take(blocks, nbytes)
        block.lease(None)
        array = block.array((nbytes // 4,), np.dtype(np.float32))
        assert page_locked.find(array) is block
        assert page_locked.find(array[10:20:2]) is block
        assert block.region is block.region is not None
        block.revoke()
        with pytest.raises(ValueError, match="lease was released"):
            page_locked.find(array)
        block.release()
        result = take(blocks, nbytes).as_result((nbytes,), np.dtype(np.uint8), None)
        assert page_locked.find(result).region is None
        # The memory is in use again, but not by this lease.
        with pytest.raises(ValueError, match="lease was released"):
            page_locked.find(array)
    assert page_locked.find(np.zeros(10)) is None


def test_a_small_array_over_two_blocks_belongs_to_nobody(make):
    blocks = make()
    one, two = sorted([take(blocks, 512), take(blocks, 512)], key=lambda block: block.address)
    assert one.address + 512 == two.address
    for block in (one, two):
        block.lease(None)
    assert one._slab.usable_at(one.address + 500, 12) is one
    assert one._slab.usable_at(one.address + 500, 13) is None
    assert one._slab.usable_at(one.address + MIB, 1) is None
    for block in (one, two):
        block.release()


# -- threads and nodes --------------------------------------------------------------------------


def test_threads_take_and_give_back_at_once(make):
    blocks = make(budget_nbytes=32 * MIB)
    failures = []

    def work(seed):
        rng = np.random.default_rng(seed)
        mine = []
        try:
            for _ in range(300):
                nbytes = int(rng.choice([100, 5000, 60_000, 90_000, MIB, 3 * MIB]))
                block = blocks.try_acquire(nbytes)
                if block is None and blocks.reserve(nbytes):
                    block = blocks.acquire_reserved_blocking(nbytes)
                if block is not None:
                    mark = int(rng.integers(255))
                    block.view((nbytes,), np.uint8)[:] = mark
                    mine.append((block, nbytes, mark))
                if len(mine) > 4 or block is None:
                    for block, size, mark in mine:
                        assert (block.view((size,), np.uint8) == mark).all()
                        block.release()
                    mine.clear()
            for block, _, _ in mine:
                block.release()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert blocks.num_live == 0
    blocks.trim()
    assert blocks.counted_nbytes == blocks.cached_nbytes == 0


def test_a_pin_waits_for_what_another_thread_unpins(make, driver):
    blocks = make(budget_nbytes=4 * MIB)
    take(blocks, 4 * MIB).release()
    free, may_free, has_begun = driver.free, threading.Event(), threading.Event()

    def free_late(address):
        has_begun.set()
        may_free.wait(10)
        free(address)

    blocks._free_blocking = free_late
    threads, taken = [], []

    def acquire(nbytes):
        taken.append(blocks.acquire_reserved_blocking(nbytes))

    for nbytes in (3 * MIB, MIB):
        assert blocks.reserve(nbytes)  # the first drops what is cached
        threads.append(threading.Thread(target=acquire, args=(nbytes,)))
        threads[-1].start()
        assert has_begun.wait(10)
        threads[-1].join(0.1)
        assert driver.nbytes <= FIRST_NBYTES + 4 * MIB
    may_free.set()
    for thread in threads:
        thread.join()
    assert driver.nbytes == FIRST_NBYTES + 4 * MIB
    for block in taken:
        block.release()


def test_who_waits_hears_of_a_block_without_the_lock_of_the_blocks(make):
    """A loop has a lock as well, within which a finaliser may give a block back."""
    blocks = make()
    block, others = take(blocks, MIB), []

    def hear():
        thread = threading.Thread(target=lambda: others.append(blocks.try_acquire(512)))
        thread.start()
        thread.join(2)

    blocks.on_release = hear
    blocks.reserve(2 * MIB, is_waiter=True)
    for give_back in (block.release, lambda: blocks.unreserve(2 * MIB)):
        give_back()
        assert len(others) == 1
        blocks.on_release = None
        others.pop().release()
        blocks.on_release = hear


def test_a_slab_serves_who_had_it_pinned_before_others_take_all_of_it(make):
    blocks = make(budget_nbytes=MIB, prepares=False)
    acquire, taken = blocks.try_acquire, []

    def take_all():
        taken.extend(acquire(64 * KIB) for _ in range(16))

    greedy = threading.Thread(target=take_all)

    def acquire_late(nbytes):
        greedy.start()
        greedy.join(0.2)
        return acquire(nbytes)

    assert blocks.reserve(64 * KIB)
    blocks.unpin_blocking = lambda: setattr(blocks, "try_acquire", acquire_late)
    mine = blocks.acquire_reserved_blocking(64 * KIB)
    greedy.join()
    del blocks.unpin_blocking
    assert blocks.counted_nbytes == MIB
    for block in (mine, *filter(None, taken)):
        block.release()


def test_results_collected_in_the_midst_of_a_call_come_back_after_it(make, monkeypatch):
    """A finaliser may run between any two steps: it finds the books half changed."""
    blocks = make(budget_nbytes=8 * MIB)
    sizes = [MIB, 2 * MIB, 5 * MIB // 2]
    results = [take(blocks, n).as_result((n,), np.dtype(np.uint8), None) for n in sizes]
    take(blocks, MIB).release()
    seen = []

    def collected(block):
        if results:
            results.pop()
            seen.append((blocks.num_live, dict.fromkeys(blocks._free)))
        return block._last_used

    monkeypatch.setattr("streamflow.memory.pinned._last_used", collected)
    assert blocks.reserve(2 * MIB)
    assert results == [] or seen
    results.clear()
    assert blocks.num_live == 0
    assert [live for live, _ in seen] == [3] * len(seen)
    assert all(5 * MIB // 2 not in free for _, free in seen)
    blocks.unreserve(2 * MIB)
    blocks.trim()
    assert blocks.counted_nbytes == blocks.cached_nbytes == 0


def test_pinning_happens_near_the_device_and_the_thread_goes_back(monkeypatch, make):
    moved, here = [], frozenset({0, 1, 2, 3})
    monkeypatch.setattr(numa, "cpus_of", lambda node: frozenset({2, 3}) if node == 1 else set())
    monkeypatch.setattr(numa.os, "sched_getaffinity", lambda pid: here)
    monkeypatch.setattr(numa.os, "sched_setaffinity", lambda pid, cpus: moved.append(cpus))
    make(numa_node=1)
    assert moved == [{2, 3}, here]
    make(numa_node=0)
    make()
    assert len(moved) == 2


def test_the_processors_of_a_node_are_read_as_the_platform_writes_them(monkeypatch, tmp_path):
    for node, text in enumerate(("0-3,8\n", "\n")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(text)
    monkeypatch.setattr(numa, "_NODES", tmp_path)
    numa.cpus_of.cache_clear()
    assert numa.cpus_of(0) == {0, 1, 2, 3, 8}
    assert numa.cpus_of(1) == numa.cpus_of(7) == frozenset()
    numa.cpus_of.cache_clear()
