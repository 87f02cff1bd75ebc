"""Reads, writes and frees of regions, and regions that overlap (R3, R5, R9)."""

from __future__ import annotations

import pytest

from streamflow.scheduler.hazards import Region
from streamflow.scheduler.timeline import Ticket, Timeline

seqs = iter(range(1, 1 << 30))


@pytest.fixture
def line() -> Timeline:
    return Timeline(1, name="a")


@pytest.fixture
def other() -> Timeline:
    return Timeline(2, name="b")


@pytest.fixture
def root(line: Timeline) -> Region:
    return Region(submitted(line), 0, 100)


def submitted(line: Timeline) -> Ticket:
    ticket = Ticket(next(seqs))
    line.advance(ticket, 1, None)
    return ticket


def failed(*inherited: Ticket) -> Ticket:
    ticket = Ticket(next(seqs))
    ticket.failure = RuntimeError()
    ticket.inherited = inherited
    return ticket


def before_read(region: Region) -> list[Ticket]:
    deps: list[Ticket] = []
    region.before_read(deps)
    return deps


def before_write(region: Region) -> list[Ticket]:
    deps: list[Ticket] = []
    region.before_write(deps)
    return deps


def test_a_first_use_comes_after_the_allocation(root: Region) -> None:
    assert before_read(root) == before_write(root) == [root.allocation]


def test_a_read_comes_after_the_last_write_only(root: Region, line: Timeline) -> None:
    write = submitted(line)
    root.record_write(write)
    root.record_read(submitted(line))
    assert before_read(root) == [write]


def test_a_write_comes_after_the_last_write_and_all_reads_since(
    root: Region, line: Timeline, other: Timeline
) -> None:
    root.record_read(submitted(line))  # before the write: no longer of interest
    write, one, two = submitted(line), submitted(line), submitted(other)
    root.record_write(write)
    root.record_read(one)
    root.record_read(two)
    assert before_write(root) == [write, one, two]


def test_a_newer_read_of_a_stream_replaces_an_older_one(root: Region, line: Timeline) -> None:
    for _ in range(5):
        root.record_read(submitted(line))
    assert len(root.reads) == 1


def test_reads_of_alternating_streams_are_thinned(
    root: Region, line: Timeline, other: Timeline
) -> None:
    for _ in range(50):
        root.record_read(submitted(line))
        root.record_read(newest := submitted(other))
    assert len(root.reads) <= 9
    assert newest in root.reads


def test_thinning_keeps_every_parked_read(root: Region, line: Timeline, other: Timeline) -> None:
    parked = [Ticket(next(seqs)) for _ in range(3)]
    for ticket in parked:
        root.record_read(ticket)
    for _ in range(20):
        root.record_read(submitted(line))
        root.record_read(submitted(other))
    assert set(parked) <= set(before_write(root))


def test_what_has_completed_orders_nothing(root: Region, line: Timeline) -> None:
    root.record_write(submitted(line))
    root.record_read(submitted(line))
    line.retire(3)
    assert before_write(root) == []


def test_a_read_that_never_ran_orders_nothing(root: Region) -> None:
    root.record_read(failed())
    assert before_write(root) == [root.allocation]


def test_the_followers_of_a_write_that_never_ran_inherit_its_dependencies(
    root: Region, line: Timeline, other: Timeline
) -> None:
    read = submitted(other)
    root.record_read(read)
    root.record_write(failed(*before_write(root)))
    assert before_read(root) == [root.allocation, read]
    line.retire(1)
    assert before_write(root) == [read]


def test_inheritance_goes_through_several_failures(root: Region) -> None:
    root.record_write(failed(failed(root.allocation)))
    assert before_read(root) == [root.allocation]


def test_parts_are_not_ordered_against_each_other(root: Region, line: Timeline) -> None:
    one, two = root.carve(root, 0, 50), root.carve(root, 50, 100)
    one.record_write(submitted(line))
    one.record_read(submitted(line))
    assert before_write(two) == [root.allocation, root.allocation]


def test_the_whole_is_ordered_against_all_its_parts(root: Region, line: Timeline) -> None:
    one, two = root.carve(root, 0, 50), root.carve(root, 50, 100)
    write, read = submitted(line), submitted(line)
    one.record_write(write)
    two.record_read(read)
    assert set(before_read(root)) == {root.allocation, write}
    assert set(before_write(root)) == {root.allocation, write, read}


def test_a_part_is_ordered_against_the_whole(root: Region, line: Timeline) -> None:
    part = root.carve(root, 0, 50)
    read, write = submitted(line), submitted(line)
    root.record_read(read)
    assert read in before_write(part)
    root.record_write(write)
    assert set(before_write(part)) == {write}


def test_a_part_inherits_the_history_of_the_whole(
    root: Region, line: Timeline, other: Timeline
) -> None:
    write, read = submitted(line), submitted(other)
    root.record_write(write)
    root.record_read(read)
    assert set(before_write(root.carve(root, 0, 50))) == {write, read}


def test_parts_of_different_splits_that_share_bytes_are_ordered(
    root: Region, line: Timeline
) -> None:
    half = root.carve(root, 0, 50)
    third, last = root.carve(root, 33, 66), root.carve(root, 66, 100)
    write = submitted(line)
    half.record_write(write)
    assert write in before_read(third)
    assert write not in before_read(last)


def test_the_same_part_is_one_region(root: Region) -> None:
    assert root.carve(root, 0, 50) is root.carve(root, 0, 50)
    assert root.carve(root, 50, 50) is root.carve(root, 50, 50)


def test_parts_of_parts_are_ordered_within_their_part(root: Region, line: Timeline) -> None:
    left, right = root.carve(root, 0, 50), root.carve(root, 50, 100)
    inner = left.carve(root, 25, 50)
    write = submitted(line)
    inner.record_write(write)
    assert write in before_read(left)
    assert write in before_read(root)
    assert write not in before_read(right)


def test_readers_inherit_the_failure_of_a_part(root: Region) -> None:
    part = root.carve(root, 0, 50)
    write = failed()
    part.record_write(write)
    assert list(root.failed_writes()) == [write]
    assert list(part.failed_writes()) == [write]


def test_a_full_overwrite_clears_the_failure_of_its_parts(root: Region, line: Timeline) -> None:
    part = root.carve(root, 0, 50)
    part.record_write(failed())
    root.record_write(submitted(line))
    assert list(root.failed_writes()) == list(part.failed_writes()) == []


def test_overwriting_one_part_leaves_the_failure_of_another(root: Region, line: Timeline) -> None:
    one, two = root.carve(root, 0, 50), root.carve(root, 50, 100)
    write = failed()
    root.record_write(write)
    one.record_write(submitted(line))
    assert list(one.failed_writes()) == []
    assert list(two.failed_writes()) == [write]
    assert list(root.failed_writes()) == [write]


def test_thinning_keeps_the_newest_read_of_each_stream() -> None:
    """A write must come after the latest read of a stream; the older ones are implied."""
    lines = [Timeline(uid) for uid in (1, 2)]
    written = Ticket(1)
    lines[0].advance(written, 1, None)
    region = Region(written, 0, 64)
    reads = []
    for seq in range(2, 40):  # alternating, so no read replaces the one before it
        ticket = Ticket(seq)
        lines[seq % 2].advance(ticket, 1, None)
        region.record_read(ticket)
        reads.append(ticket)
    found: list[Ticket] = []
    region.before_write(found)
    assert {reads[-1], reads[-2]} <= set(found)
    assert len(region.reads) < len(reads)
