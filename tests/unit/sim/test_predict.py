"""Predicted time: the host's calls cost, and engines slow each other down."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from streamflow.backends.sim import host_memory
from streamflow.config import Settings, SimOptions

LAUNCH, ARGUMENT, RECORD, WAIT, SYNC, QUERY = 3e-6, 1e-7, 5e-7, 4e-7, 6e-6, 2e-7
RATES = {
    "copy_latency_s": 0.0,
    "h2d_rate": 50e9,
    "d2h_rate": 50e9,
    "h2d_duplex_rate": 40e9,
    "d2h_duplex_rate": 25e9,
    "memory_rate": 1e12,
    "fill_rate": 1e12,
    "d2d_rate": 1e12,
    "kernel_s": 1e-6,
    "host_launch_s": LAUNCH,
    "host_argument_s": ARGUMENT,
    "host_copy_s": 0.0,
    "host_fill_s": 0.0,
    "host_record_s": RECORD,
    "host_wait_s": WAIT,
    "host_allocate_s": 0.0,
    "host_free_s": 0.0,
    "host_sync_s": SYNC,
    "host_query_s": QUERY,
}


@pytest.fixture
def predicting(open_lab):
    """Open labs that predict; ``predicting(**changes)`` changes single rates."""

    def open_one(key="loop", **changes):
        return open_lab(key=key, predict=True, rates=RATES | changes)

    return open_one


def spin(lab, stream, seconds):
    lab.launch(stream, lambda s: None, "s", seconds, cost_s=lambda s: s)


def finish(lab, *streams):
    """Wait for the streams as a program does, and say when it goes on."""
    for stream in streams:
        stream.sync()
    return lab.device.clock_s()


def test_without_it_the_hosts_calls_are_free(open_lab):
    lab = open_lab(rates=RATES)
    stream = lab.stream()
    for _ in range(5):
        spin(lab, stream, 0.0)
    assert lab.device.clock_s() == 0.0


def test_each_call_moves_the_hosts_clock_and_nothing_runs_meanwhile(predicting):
    lab = predicting()
    one, two = lab.stream(), lab.stream()
    lab.mark(one, "ran")
    assert lab.device.clock_s() == pytest.approx(LAUNCH)
    event = lab.record(one)
    assert lab.device.clock_s() == pytest.approx(LAUNCH + RECORD)
    two.wait(event)
    assert lab.device.clock_s() == pytest.approx(LAUNCH + RECORD + WAIT)
    spin(lab, two, 1.0)
    assert lab.device.clock_s() == pytest.approx(2 * LAUNCH + RECORD + WAIT + ARGUMENT)
    assert lab.log == []
    lab.run()
    assert lab.log == ["ran"]


def test_queries_are_free_since_pollers_make_them_as_real_time_has_it(predicting):
    lab = predicting()
    event = lab.record(lab.stream())
    before_s = lab.device.clock_s()
    for _ in range(100):
        assert event.is_done
    assert lab.device.clock_s() == before_s


def test_work_starts_no_earlier_than_its_call_has_ended(predicting):
    lab = predicting()
    streams = [lab.stream() for _ in range(4)]
    for stream in streams:
        spin(lab, stream, 1.0)
    calls_s = 4 * (LAUNCH + ARGUMENT)
    assert finish(lab, streams[-1]) == pytest.approx(calls_s + 1.0 + SYNC)


def test_a_chain_of_tiny_kernels_takes_the_hosts_time(predicting):
    lab = predicting()
    stream = lab.stream()
    num = 500
    for _ in range(num):
        lab.launch(stream, lambda: None)
    assert finish(lab, stream) == pytest.approx(num * LAUNCH + 1e-6 + SYNC)


def test_a_chain_of_long_kernels_takes_the_devices_time(predicting):
    lab = predicting()
    stream = lab.stream()
    for _ in range(500):
        spin(lab, stream, 1e-3)
    assert finish(lab, stream) == pytest.approx(LAUNCH + ARGUMENT + 0.5 + SYNC)


def test_waiting_moves_the_host_to_the_end_it_has_waited_for_and_no_further(predicting):
    lab = predicting(host_sync_s=0.0)
    short, long = lab.stream(), lab.stream()
    spin(lab, short, 1e-3)
    spin(lab, long, 1.0)
    short_s = finish(lab, short)
    assert short_s == pytest.approx(LAUNCH + ARGUMENT + 1e-3)
    assert finish(lab, short) == pytest.approx(short_s + QUERY)  # done already
    spin(lab, short, 1e-3)
    assert finish(lab, long) == pytest.approx(2 * (LAUNCH + ARGUMENT) + 1.0)


def test_a_record_that_nothing_runs_before_does_not_wait_for_other_work(predicting):
    lab = predicting(host_sync_s=0.0)
    idle, busy = lab.stream(), lab.stream()
    spin(lab, busy, 1.0)
    event = lab.device.create_event(timing=True)
    idle.record(event)
    event.sync()
    assert lab.device.clock_s() < 1e-3
    assert event.time_s() == pytest.approx(LAUNCH + ARGUMENT + RECORD)


def copy_both_ways(lab, nbytes, num):
    up, down = lab.stream(), lab.stream()
    source, _ = lab.host(nbytes)
    target, _ = lab.host(nbytes)
    a, b = lab.allocate(up, nbytes), lab.allocate(down, nbytes)
    for _ in range(num):
        lab.device.copy_h2d(a, source, nbytes, up)
        lab.device.copy_d2h(target, b, nbytes, down)
    return up, down


def test_copies_in_both_directions_run_at_the_rates_for_both(predicting):
    lab = predicting(host_sync_s=0.0, host_query_s=0.0)
    nbytes = 1 << 20
    up, down = copy_both_ways(lab, nbytes, 4)
    assert finish(lab, up) == pytest.approx(4 * nbytes / 40e9)
    # The last copies out start while copies in still run, or after them: at least one is alone.
    assert 6 * nbytes / 50e9 < finish(lab, down) < 4 * nbytes / 25e9


def test_one_copy_engine_for_both_directions_is_never_both(open_lab):
    lab = open_lab(predict=True, copy_engines=1, rates=RATES | {"host_sync_s": 0.0})
    nbytes = 1 << 20
    streams = copy_both_ways(lab, nbytes, 2)
    assert finish(lab, *streams) == pytest.approx(4 * nbytes / 50e9, rel=1e-2)


@pytest.mark.parametrize("work", ["launch", "fill", "copy"])
def test_streams_share_the_memorys_rate(predicting, work):
    lab = predicting(host_launch_s=0.0, host_argument_s=0.0, host_sync_s=0.0, host_query_s=0.0)
    nbytes = 1 << 20
    streams = [lab.stream() for _ in range(3)]
    for stream in streams:
        a = lab.allocate(stream, 2 * nbytes)
        if work == "launch":
            lab.launch(stream, lambda x: None, "x", lab.view(a, nbytes // 4))
        elif work == "fill":
            lab.device.fill(a, b"1234", nbytes // 4, stream)
        else:
            lab.device.copy_d2d(a + nbytes, a, nbytes, stream)
    assert finish(lab, *streams) == pytest.approx(3 * (1e-6 + nbytes / 1e12))


def fills_end_at(lab, *starts_and_alone_s):
    """When fills on streams of their own end: each begins at a time, and takes so long alone."""
    ends = []
    for start_s, alone_s in starts_and_alone_s:
        stream, count = lab.stream(), int(alone_s * 1e12) // 4
        address = lab.allocate(stream, 4 * count)
        if start_s:
            spin(lab, stream, start_s)
        lab.device.fill(address, b"1234", count, stream)
        ends.append(lab.record(stream, timing=True))
    lab.run()
    return [event.time_s() for event in ends]


FREE = dict.fromkeys((name for name in RATES if name.startswith("host_")), 0.0)


@pytest.mark.parametrize(
    ("pieces", "ends"),
    [
        ([(0, 10)], [10]),
        ([(0, 10), (0, 10)], [20, 20]),
        ([(0, 10), (0, 30)], [20, 40]),  # 10 of each by 20, then the longer one alone
        ([(0, 30), (0, 10), (0, 20)], [60, 30, 50]),
        ([(0, 20), (10, 20)], [30, 40]),  # 10 alone, 10 more of both by 30, then 10 alone
        ([(0, 10), (20, 10)], [10, 30]),  # they never meet
        ([(0, 30), (20, 10), (30, 10)], [45, 45, 50]),  # 5 of each of three from 30 to 45
    ],
)
def test_each_piece_gets_an_equal_part_of_the_memorys_rate(predicting, pieces, ends):
    lab = predicting(**FREE, kernel_s=0.0)
    found = fills_end_at(lab, *((start * 1e-6, alone * 1e-6) for start, alone in pieces))
    assert [each * 1e6 for each in found] == pytest.approx(ends, abs=1e-2)


def test_what_is_dropped_leaves_its_part_to_the_others(open_lab):
    one = open_lab(predict=True, rates=RATES | FREE | {"kernel_s": 0.0})
    other = open_lab(
        predict=True, rates=RATES | FREE | {"kernel_s": 0.0}
    )  # the same device, opened twice
    nbytes = 4 << 20
    for lab in (one, other):
        stream = lab.stream()
        lab.device.fill(lab.allocate(stream, nbytes), b"1234", nbytes // 4, stream)
    end = other.record(stream, timing=True)
    half = one.stream()
    spin(one, half, nbytes / 1e12)  # by then half of each is done
    half.sync()
    one.device.close()
    other.run()
    assert end.time_s() == pytest.approx(1.5 * nbytes / 1e12)


def test_kernels_with_a_cost_of_their_own_share_nothing(predicting):
    lab = predicting(host_launch_s=0.0, host_argument_s=0.0, host_sync_s=0.0, host_query_s=0.0)
    streams = [lab.stream() for _ in range(3)]
    for stream in streams:
        a = lab.allocate(stream, 1 << 20)
        lab.launch(stream, lambda x: None, "x", lab.view(a, 1 << 18), cost_s=lambda x: 1.0)
    assert finish(lab, *streams) == pytest.approx(1.0)


def test_workers_are_not_charged_and_keep_the_order_of_their_stream(predicting):
    lab = predicting()
    stream, other = lab.stream(), lab.stream()
    lab.mark(other, "first")
    stream.wait(lab.record(other))
    before_s = lab.device.clock_s()
    worker = threading.Thread(target=lab.mark, args=(stream, "second"))
    worker.start()
    worker.join()
    assert lab.device.clock_s() == before_s
    lab.run()
    assert lab.log == ["first", "second"]


def test_what_a_worker_submits_starts_when_the_host_last_saw_a_completion(predicting):
    lab = predicting()
    stream, other = lab.stream(), lab.stream()
    lab.launch(other, lambda: None)
    seen_s = finish(lab, other)
    end = lab.device.create_event(timing=True)

    def work():
        spin(lab, stream, 1.0)
        stream.record(end)

    for _ in range(20):  # the loop goes on beside it, however fast the worker is
        lab.launch(other, lambda: None)
    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    lab.run()
    assert end.time_s() == pytest.approx(seen_s + 1.0, abs=1e-9)


def test_closing_drops_what_is_on_its_way(predicting):
    lab = predicting()
    stream = lab.stream()
    host = host_memory.allocate(4096)
    lab.device.copy_h2d(lab.allocate(stream, 4096), host, 4096, stream)
    lab.device.close()
    host_memory.free(host)  # refused while a copy may still read it


def test_ties_of_one_moment_are_the_seeds(open_lab):
    def order(seed, **options):
        lab = open_lab(key=object(), seed=seed, compute_slots=1, **options)
        for number in range(8):
            lab.mark(lab.stream(), number)
        lab.run()
        return lab.log

    free = {"predict": True, "rates": dict.fromkeys((n for n in RATES if "host" in n), 0.0)}
    assert order(3, **free) == order(3)
    assert order(3, **free) != order(4, **free)


def test_the_clock_of_the_controls_moves_by_what_it_is_asked_for(predicting):
    lab = predicting()
    spin(lab, lab.stream(), 1.0)
    clock = lab.device.controls().clock
    before_s = clock.now_s
    clock.advance(0.25)
    assert clock.now_s == pytest.approx(before_s + 0.25)


def test_counters_still_count_and_their_copies_cost_nothing(predicting):
    lab = predicting()
    lab.record(lab.stream())
    counters = lab.device.controls().counters
    assert counters["record"] == 1
    before_s = lab.device.clock_s()
    kept = counters.copy()
    kept["record"] += 1
    assert kept["record"] == 2
    assert counters["record"] == 1
    assert lab.device.clock_s() == before_s


def test_real_time_is_not_predicted():
    with pytest.raises(ValueError, match="predict=True needs clock='virtual'"):
        SimOptions(predict=True)
    virtual = SimOptions(clock="virtual", predict=True)
    assert Settings(sim=virtual).sim.predict
    with pytest.raises(ValueError, match="predict"):
        replace(virtual, clock="wall")


# -- with the controls -------------------------------------------------------------------


def test_a_gate_opens_when_the_host_opens_it(predicting):
    lab = predicting()
    gated, other = lab.stream(), lab.stream()
    gate = lab.device.controls().gate(gated)
    first = lab.record(gated, timing=True)
    spin(lab, gated, 1e-3)
    second = lab.record(gated, timing=True)
    spin(lab, other, 1e-6)
    finish(lab, other)  # the device has come to the gate
    for _ in range(100):
        spin(lab, other, 0.0)  # the host goes ahead
    opened_s = lab.device.clock_s()
    gate.release()
    assert gate.is_open
    assert finish(lab, gated) == pytest.approx(opened_s + 1e-3 + SYNC)
    assert lab.device.elapsed_ms(first, second) == pytest.approx(1.0)


def test_a_gate_opened_before_the_device_knows_of_it_holds_nothing_up(predicting):
    lab = predicting()
    stream = lab.stream()
    gate = lab.device.controls().gate
    with gate(stream), gate(stream):
        spin(lab, stream, 1e-3)
    assert finish(lab, stream) == pytest.approx(LAUNCH + ARGUMENT + 1e-3 + SYNC)


def test_an_engine_is_stalled_however_far_the_host_goes_ahead(predicting):
    lab = predicting()
    stream = lab.stream()
    lab.device.controls().stall("compute", 1e-3)
    for _ in range(300):  # 0.93 ms of the host's time
        spin(lab, stream, 5e-6)
    assert finish(lab, stream) == pytest.approx(1e-3 + 300 * 5e-6 + SYNC)


def test_the_memory_map_knows_of_what_is_on_its_way(predicting):
    lab = predicting(host_allocate_s=1e-6, host_free_s=1e-6)
    stream, sim = lab.stream(), lab.device.controls()

    def state():
        (row,) = sim.memory_map()
        return row.state.name

    address = lab.allocate(stream, 512)
    assert state() == "ALLOCATING"
    stream.sync()
    assert state() == "LIVE"
    lab.device.deallocate(address, stream)
    assert state() == "FREEING"
    stream.sync()
    assert state() == "FREED"
