"""The race checker over raw verbs: each kind, what it says, and what is no race."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from streamflow.backends.base import Access
from streamflow.backends.checksum import checksum, sampled_checksum
from streamflow.backends.sim import host_memory
from streamflow.backends.sim.report import RaceKind

NBYTES = 64


@pytest.fixture
def two(lab):
    return lab.stream(), lab.stream()


def races(lab) -> list[RaceKind]:
    return [race.kind for race in lab.device.controls().take_races()]


def written(lab, stream, nbytes: int = NBYTES) -> int:
    address = lab.allocate(stream, nbytes)
    lab.device.fill(address, b"\0", nbytes, stream)
    return address


def wait(lab, waiting, waited) -> None:
    waiting.wait(lab.record(waited))


def test_a_stream_is_ordered_in_itself(lab, two):
    stream, _ = two
    address = written(lab, stream)
    lab.device.fill(address, b"\1", NBYTES, stream)
    lab.device.deallocate(address, stream)
    assert races(lab) == []


def test_use_before_allocation(lab, two):
    one, other = two
    address = lab.allocate(one, NBYTES)
    lab.device.fill(address, b"\0", NBYTES, other)
    assert races(lab) == [RaceKind.USE_BEFORE_ALLOCATION]


def test_a_wait_orders_a_use_after_the_allocation(lab, two):
    one, other = two
    address = lab.allocate(one, NBYTES)
    wait(lab, other, one)
    lab.device.fill(address, b"\0", NBYTES, other)
    assert races(lab) == []


def test_a_use_after_the_free_of_its_stream(lab, two):
    stream, _ = two
    address = written(lab, stream)
    lab.device.deallocate(address, stream)
    lab.device.fill(address, b"\1", NBYTES, stream)
    [race] = lab.device.controls().take_races()
    assert race.kind is RaceKind.USE_AFTER_FREE
    assert "fill was called for after free had given the memory back" in str(race)


def test_a_free_that_is_not_after_the_last_use(lab, two):
    one, other = two
    address = written(lab, one)
    wait(lab, other, one)
    lab.launch(other, lambda a: None, "r", lab.view(address, 4))
    lab.device.deallocate(address, one)
    [race] = lab.device.controls().take_races()
    assert race.kind is RaceKind.USE_AFTER_FREE
    assert (race.first.verb, race.second.verb) == ("reads", "frees")
    assert f"nothing orders free after <lambda>: {one.name} has not waited" in str(race)


def test_a_free_after_the_last_use_is_none(lab, two):
    one, other = two
    address = written(lab, one)
    wait(lab, other, one)
    lab.launch(other, lambda a: None, "r", lab.view(address, 4))
    wait(lab, one, other)
    lab.device.deallocate(address, one)
    assert races(lab) == []


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        ("r", "x", RaceKind.READ_WRITE),
        ("x", "r", RaceKind.READ_WRITE),
        ("w", "x", RaceKind.WRITE_WRITE),
        ("r", "r", None),
    ],
)
@pytest.mark.parametrize("is_ordered", [False, True])
def test_two_uses_on_two_streams(lab, two, first, second, kind, is_ordered):
    one, other = two
    address = written(lab, one)
    wait(lab, other, one)
    lab.launch(one, lambda a: None, first, lab.view(address, 4), name="first")
    if is_ordered:
        wait(lab, other, one)
    lab.launch(other, lambda a: None, second, lab.view(address, 4), name="second")
    assert races(lab) == ([] if is_ordered or kind is None else [kind])


def test_a_report_names_both_ops_both_lines_the_edge_and_the_remedy(lab, two):
    one, other = two
    one.name, other.name = "left", "right"
    address = written(lab, one)
    wait(lab, other, one)
    lab.launch(one, lambda a: None, "x", lab.view(address, 4), name="writer")
    lab.launch(other, lambda a: None, "r", lab.view(address, 4), name="reader")
    [race] = lab.device.controls().races
    text = str(race)
    assert text.startswith("unordered read and write, bytes 0 to 16, device 0:\n")
    assert "  writer (conftest.py:" in text
    assert "on left writes them" in text
    assert "on right reads them" in text
    assert "missing: nothing orders reader after writer: right has not waited for left" in text
    assert "remedy: pass after=" in text


def test_parts_of_an_allocation_are_told_apart(lab, two):
    one, other = two
    address = written(lab, one)
    wait(lab, other, one)
    lab.device.fill(address, b"\1", 32, one)
    lab.device.fill(address + 32, b"\2", 32, other)
    assert races(lab) == []
    lab.device.fill(address + 24, b"\3", 16, other)
    [race] = lab.device.controls().take_races()
    assert (race.start, race.stop) == (24, 32)


def test_reads_of_memory_that_was_never_written(lab, two):
    stream, _ = two
    address = lab.allocate(stream, NBYTES)
    lab.device.fill(address, b"\1", 32, stream)
    lab.launch(stream, lambda a: None, "r", lab.view(address, 8))
    assert races(lab) == []
    lab.launch(stream, lambda a: None, "r", lab.view(address, 9))
    [race] = lab.device.controls().take_races()
    assert (race.kind, race.start, race.stop) == (RaceKind.NEVER_WRITTEN, 32, 36)


def test_memory_that_is_handed_out_again_was_never_written(lab, two):
    stream, _ = two
    lab.device.deallocate(written(lab, stream), stream)
    address = lab.allocate(stream, NBYTES)
    host, _ = lab.host(NBYTES)
    lab.device.copy_d2h(host, address, NBYTES, stream)
    assert races(lab) == [RaceKind.NEVER_WRITTEN]


@pytest.mark.parametrize("reuse", ["same stream", "event", "opportunistic", "internal"])
def test_the_pool_orders_what_it_hands_out_again(open_lab, reuse):
    lab = open_lab(memory_nbytes=512)
    one, other = lab.stream(), lab.stream()
    address = written(lab, one)
    lab.device.deallocate(address, one)
    if reuse == "event":
        wait(lab, other, one)
    elif reuse == "opportunistic":
        lab.run()
    again = written(lab, one if reuse == "same stream" else other)
    assert again == address
    assert races(lab) == []


@pytest.mark.parametrize("reuse", ["opportunistic", "internal"])
def test_what_the_pool_happens_to_hand_out_orders_nothing_else(open_lab, reuse):
    lab = open_lab(memory_nbytes=1024)
    one, other = lab.stream(), lab.stream()
    address, freed = written(lab, one), written(lab, one)
    lab.device.deallocate(freed, one)
    if reuse == "opportunistic":
        lab.run()
    assert lab.allocate(other, NBYTES) == freed
    lab.device.fill(address, b"\1", NBYTES, other)
    assert races(lab) == [RaceKind.USE_BEFORE_ALLOCATION, RaceKind.WRITE_WRITE]


def test_a_host_that_changes_a_source_in_flight(lab, two):
    stream, _ = two
    address = lab.allocate(stream, NBYTES)
    host, array = lab.host(NBYTES)
    array[:] = 1
    lab.device.copy_h2d(address, host, NBYTES, stream)
    array[3] = 2
    lab.run()
    [race] = lab.device.controls().take_races()
    assert (race.kind, race.first, race.second.name) == (RaceKind.HOST_CHANGE, None, "copy h2d")
    lab.device.copy_h2d(address, host, NBYTES, stream)
    lab.run()
    array[3] = 3  # over by now
    assert races(lab) == []


def test_a_bounce_through_pinned_memory_is_no_change_by_the_host(lab, two):
    one, other = two
    source, target = written(lab, one), written(lab, other)
    host, array = lab.host(NBYTES)
    array[:] = 1
    lab.device.copy_d2h(host, source, NBYTES, one)
    wait(lab, other, one)
    lab.device.copy_h2d(target, host, NBYTES, other)
    assert lab.read(target, NBYTES, other) == bytes(NBYTES)
    assert races(lab) == []
    other.sync()
    lab.device.copy_h2d(target, host, NBYTES, one)  # watched again, as the first has ended
    array[:] = 2
    lab.run()
    assert races(lab) == [RaceKind.HOST_CHANGE]


def test_pinned_memory_used_again_too_early(lab, two):
    one, other = two
    source, target = written(lab, one), written(lab, other)
    host, _ = lab.host(NBYTES)
    lab.device.copy_d2h(host, source, NBYTES, one)
    lab.device.copy_h2d(target, host, NBYTES, other)
    assert races(lab) == [RaceKind.READ_WRITE]


def test_what_another_loop_does_to_pinned_memory_hides_no_race(open_lab):
    lab, foreign = open_lab(), open_lab(key="another loop")
    one, other, theirs = lab.stream(), lab.stream(), foreign.stream()
    source, target = written(lab, one), written(lab, other)
    host, _ = lab.host(NBYTES)
    lab.device.copy_d2h(host, source, NBYTES, one)
    foreign.device.copy_d2h(host, written(foreign, theirs), NBYTES, theirs)
    foreign.run()
    lab.device.copy_h2d(target, host, NBYTES, other)
    assert races(lab) == [RaceKind.READ_WRITE]
    lab.run()


def test_pinned_memory_of_many_loops_keeps_few_of_their_uses(open_lab):
    lab = open_lab()
    host, _ = lab.host(NBYTES)
    block = host_memory.find(host)
    for key in range(40):
        device = open_lab(key=key)
        stream = device.stream()
        device.device.fill(host, b"x", NBYTES, stream)
        device.run()
    assert len(block.shadow.by_world) < 20


@pytest.mark.parametrize("way", ["is_done", "event.sync", "stream.sync", "synchronize"])
def test_what_the_host_has_seen_end_comes_before(lab, two, way):
    one, other = two
    address = written(lab, one)
    event = lab.record(one)
    if way == "is_done":
        lab.run()
        assert event.is_done
    elif way == "event.sync":
        event.sync()
    elif way == "stream.sync":
        one.sync()
    else:
        lab.device.synchronize_blocking()
    lab.device.fill(address, b"\1", NBYTES, other)
    assert races(lab) == []


def test_what_has_ended_unseen_does_not(lab, two):
    """Whether a race shows does not depend on how fast the machine was."""
    one, other = two
    address = written(lab, one)
    event = lab.record(one)
    lab.run()
    lab.device.fill(address, b"\1", NBYTES, other)
    assert races(lab) == [RaceKind.USE_BEFORE_ALLOCATION, RaceKind.WRITE_WRITE]
    assert event.is_done


def test_orders_pass_on_through_streams_and_the_host(lab):
    one, two, three, four = (lab.stream() for _ in range(4))
    address = written(lab, one)
    wait(lab, two, one)
    wait(lab, three, two)  # which has no work of its own
    lab.run()
    assert lab.record(three).is_done
    lab.device.fill(address, b"\1", NBYTES, four)
    assert races(lab) == []


def test_a_record_that_took_no_position_of_its_own_is_seen_anew(lab, two):
    """Waits that are over at once take no position, and still order what follows."""
    one, other = two
    lab.mark(other, "first")
    early = lab.record(other)
    lab.run()
    assert early.is_done
    address = written(lab, one)
    done = lab.record(one)
    lab.run()
    other.wait(done)
    assert lab.record(other).is_done  # the same position as before
    lab.device.fill(address, b"\1", NBYTES, lab.stream())
    assert races(lab) == []


def in_worker(task: Any) -> None:
    thread = threading.Thread(target=task)
    thread.start()
    thread.join()


@pytest.mark.parametrize("is_handed", [False, True])
def test_a_worker_knows_what_came_with_its_task(lab, two, is_handed):
    one, other = two
    checker = lab.device.checker
    address = written(lab, one)
    event = lab.record(one)
    lab.run()
    early = checker.hand_off()
    assert event.is_done

    def task() -> None:
        checker.take_up(known)
        lab.device.fill(address, b"\1", NBYTES, other)
        checker.take_up(None)

    known = checker.hand_off() if is_handed else early
    in_worker(task)
    assert bool(races(lab)) is not is_handed


@pytest.mark.parametrize("is_delivered", [False, True])
def test_the_loop_knows_what_came_with_a_result(lab, two, is_delivered):
    one, other = two
    checker = lab.device.checker
    address = written(lab, one)
    event = lab.record(one)
    lab.run()
    known: list[Any] = []

    def task() -> None:
        checker.take_up(checker.hand_off())
        assert event.is_done
        known.append(checker.hand_off())
        checker.take_up(None)

    in_worker(task)
    if is_delivered:
        checker.deliver(known[0])
    lab.device.fill(address, b"\1", NBYTES, other)
    assert bool(races(lab)) is not is_delivered


def test_a_worker_knows_what_the_loop_knew_when_it_submitted_what_the_worker_waited_for(lab):
    one, two, three = (lab.stream() for _ in range(3))
    checker = lab.device.checker
    known = checker.hand_off()
    address = written(lab, one)
    event = lab.record(one)
    lab.run()
    assert event.is_done
    lab.mark(two, "after that")
    marked = lab.record(two)

    def task() -> None:
        checker.take_up(known)
        three.wait(marked)
        lab.device.fill(address, b"\1", NBYTES, three)
        checker.take_up(None)

    in_worker(task)
    assert races(lab) == []


def test_what_comes_after_a_call_for_a_stream_is_after_what_its_caller_knew(lab, two):
    """Also where the call is a wait for the stream's own past, which does nothing else."""
    one, other = two
    checker = lab.device.checker
    known = checker.hand_off()
    early = lab.record(other)
    address = written(lab, one)
    one.sync()
    other.wait(early)

    def task() -> None:
        checker.take_up(known)
        lab.device.fill(address, b"\1", NBYTES, other)
        checker.take_up(None)

    in_worker(task)
    assert races(lab) == []


def test_a_race_is_told_once(lab, two):
    one, other = two
    address = written(lab, one)
    wait(lab, other, one)
    for _ in range(5):
        lab.device.fill(address, b"\1", NBYTES, one)
        lab.device.fill(address, b"\1", NBYTES, other)
    assert len(races(lab)) == 2  # once for each of the two lines that come second
    assert races(lab) == []


def read_unwritten(lab) -> None:
    stream = lab.stream()
    lab.read(lab.allocate(stream, NBYTES), NBYTES, stream)


def test_a_race_that_comes_again_after_it_was_taken_is_told_again(lab):
    for _ in range(2):
        read_unwritten(lab)
        assert races(lab) == [RaceKind.NEVER_WRITTEN]


def test_the_same_lines_race_on_each_of_two_devices(open_lab):
    labs = [open_lab(0, devices=2), open_lab(1, devices=2)]
    for lab in labs:
        read_unwritten(lab)
    assert [races(lab) for lab in labs] == [[RaceKind.NEVER_WRITTEN]] * 2


def test_a_race_belongs_to_the_device_whose_memory_it_is(open_lab):
    here, there = open_lab(0, devices=2), open_lab(1, devices=2)
    one, other = here.stream(), there.stream()
    source, target = written(here, one), written(there, other)
    here.device.copy_peer(target, 1, source, 0, NBYTES, one)
    assert races(here) == []
    [race, _] = there.device.controls().take_races()
    assert (race.kind, race.device) == (RaceKind.USE_BEFORE_ALLOCATION, 1)


def test_the_checker_can_be_switched_off(open_lab):
    lab = open_lab(check_races=False)
    one, other = lab.stream(), lab.stream()
    lab.device.fill(lab.allocate(one, NBYTES), b"\0", NBYTES, other)
    assert lab.device.world.races is None
    assert races(lab) == []


def test_streams_that_are_gone_are_forgotten(lab):
    stream = lab.stream()
    address = written(lab, stream)
    for _ in range(1000):
        short = lab.stream()
        wait(lab, short, stream)
        lab.launch(short, lambda a: None, "r", lab.view(address, 4))
        wait(lab, stream, short)
        lab.run()
    checker = lab.device.checker
    [shadow] = {id(b.shadow): b.shadow for b in lab.device.gpu.memory.blocks()}.values()
    assert races(lab) == []
    assert len(checker._known) < 300
    assert len(checker._loop.seen) < 300
    assert len(stream.clock) < 300
    assert all(len(segment.reads) < 300 for segment in shadow.segments)


def test_the_newest_of_many_streams_is_looked_at(lab):
    streams = [lab.stream() for _ in range(300)]
    address = written(lab, streams[0])
    for stream in streams[250:]:
        wait(lab, stream, streams[0])
    for number, stream in enumerate(streams[250:]):
        lab.launch(stream, lambda a: None, "r", lab.view(address, 4), name=f"reader {number}")
    lab.device.fill(address, b"\1", NBYTES, streams[0])
    assert len(races(lab)) == 50


def shadow_of(lab, address):
    return lab.device.gpu.memory.block_at(address).shadow


def test_ever_new_slices_of_one_allocation_are_merged_once_they_are_over(lab, two):
    one, other = two
    address = written(lab, one, 1 << 16)
    wait(lab, other, one)
    for start in range(0, 1 << 16, 8):
        lab.launch(other, lambda a: None, "r", lab.view(address + start, 1))
        if start % 1024 == 0:
            lab.run()
            assert lab.record(other).is_done
    assert races(lab) == []
    assert len(shadow_of(lab, address).segments) < 1100


def test_a_merge_forgets_no_use_that_may_still_race_and_nothing_unwritten(lab, two):
    one, other = two
    address = lab.allocate(one, 1 << 16)
    lab.device.fill(address, b"\1", 1 << 15, one)
    one.sync()
    wait(lab, other, one)
    for start in range(0, 1 << 15, 16):
        lab.launch(other, lambda a: None, "r", lab.view(address + start, 1))
        lab.run()  # and nobody looks
    for start in (0, 1 << 14, (1 << 15) - 16):
        lab.launch(one, lambda a: None, "x", lab.view(address + start, 1), name=f"write {start}")
    assert races(lab) == [RaceKind.READ_WRITE] * 3
    other.sync()
    shadow_of(lab, address).merge(lambda use: use.stream_id == other.id)
    assert len(shadow_of(lab, address).segments) <= 7
    lab.launch(one, lambda a: None, "r", lab.view(address + (1 << 15) - 4, 2))
    assert races(lab) == [RaceKind.NEVER_WRITTEN]


def test_a_write_through_the_body_of_a_call_is_a_use(lab, two):
    one, other = two
    address = written(lab, one)
    wait(lab, other, one)
    view = lab.view(address, 4)
    lab.device.fill(address, b"\1", NBYTES, one)
    lab.device.call(other, "foreign", lambda a: None, [Access.WRITE], view)
    assert races(lab) == [RaceKind.WRITE_WRITE]


@pytest.mark.parametrize("nbytes", [1, 7, 4096, 65536, 65537, 1 << 20])
def test_a_checksum_sees_each_byte(nbytes):
    memory = np.arange(nbytes, dtype=np.uint32).astype(np.uint8)
    before = checksum(memory)
    assert checksum(memory.copy()) == before
    for place in {0, nbytes // 2, nbytes - 1}:
        memory[place] ^= 1
        assert checksum(memory) != before
        memory[place] ^= 1


@pytest.mark.parametrize("nbytes", [4096, 1 << 20])
def test_a_checksum_sees_one_constant_become_another(nbytes):
    values = [0, 1, 0x80, 255]
    sums = {checksum(np.full(nbytes, value, np.uint8)) for value in values}
    assert len(sums) == len(values)


def test_a_checksum_sees_signs_flip_and_parts_change_places():
    numbers = np.arange(1, 1 + (1 << 17), dtype=np.float64)
    sums = {checksum(each.view(np.uint8)) for each in (numbers, -numbers, np.roll(numbers, 1024))}
    assert len(sums) == 3


@pytest.mark.parametrize("shape", [(), (3,), (100_000,), (400, 500), (2, 100_000)])
def test_a_sampled_checksum_sees_a_change_of_everything_in_any_layout(shape):
    array = np.zeros(shape, np.float32)
    for each in (array, array.T, array[..., ::-1] if shape else array):
        before = sampled_checksum(each)
        array += 1
        assert sampled_checksum(each) != before
