import threading

import pytest

from streamflow.errors import Closed, DeviceLost


@pytest.fixture
def wall(open_lab):
    return open_lab(clock="wall")


def test_work_runs_by_itself_in_order(wall):
    stream = wall.stream()
    for i in range(20):
        wall.mark(stream, i)
    wall.record(stream).sync()
    assert wall.log == list(range(20))
    assert not wall.device.is_virtual
    assert not wall.device.advance(0)


def test_kernels_of_two_streams_really_overlap(wall):
    meeting = threading.Barrier(2, timeout=10)
    a, b = wall.stream(), wall.stream()
    wall.launch(a, meeting.wait)
    wall.launch(b, meeting.wait)
    wall.device.synchronize_blocking()


def test_every_compute_slot_can_be_in_use_at_once(wall):
    meeting = threading.Barrier(8, timeout=10)
    for _ in range(8):
        wall.launch(wall.stream(), meeting.wait)
    wall.device.synchronize_blocking()


def test_copies_overlap_a_kernel(wall):
    started, copied = threading.Event(), threading.Event()

    def body():
        started.set()
        assert copied.wait(10)

    compute, copy = wall.stream(), wall.stream()
    host, array = wall.host(64)
    array[:] = 4
    address = wall.allocate(copy, 64)
    wall.launch(compute, body)
    assert started.wait(10)
    wall.device.copy_h2d(address, host, 64, copy)
    array_out, out = wall.host(64)
    wall.device.copy_d2h(array_out, address, 64, copy)
    wall.record(copy).sync()
    copied.set()
    wall.device.synchronize_blocking()
    assert out.tobytes() == b"\x04" * 64


def test_a_stream_waits_for_another(wall):
    go = threading.Event()
    a, b = wall.stream(), wall.stream()
    wall.launch(a, lambda: (go.wait(10), wall.log.append("a")))
    b.wait(wall.record(a))
    wall.mark(b, "b")
    event = wall.record(b)
    assert not event.is_done
    go.set()
    event.sync()
    assert wall.log == ["a", "b"]


def test_elapsed_time_covers_the_modelled_time(wall):
    stream = wall.stream()
    start = wall.record(stream, timing=True)
    for i in range(5):
        wall.mark(stream, i, cost_s=lambda: 2e-3)
    end = wall.record(stream, timing=True)
    end.sync()
    assert wall.device.elapsed_ms(start, end) >= 10.0


def test_work_takes_its_modelled_time_in_real_time(wall):
    stream = wall.stream()
    start_s = wall.device.clock_s()
    wall.mark(stream, 0, cost_s=lambda: 0.02)
    stream.sync()
    assert wall.device.clock_s() - start_s >= 0.02


def test_a_body_can_submit_because_the_machine_is_not_locked(wall):
    first, second = wall.stream(), wall.stream()
    done = threading.Event()

    def body():
        thread = threading.Thread(target=lambda: (wall.mark(second, "inner"), done.set()))
        thread.start()
        assert done.wait(10)

    wall.launch(first, body)
    first.sync()
    second.sync()
    assert wall.log == ["inner"]


def test_a_fault_wakes_threads_that_wait(wall):
    go = threading.Event()
    stream = wall.stream()

    def broken():
        go.wait(10)
        raise ZeroDivisionError

    wall.launch(stream, broken)
    event = wall.record(stream)
    results = []

    def wait():
        try:
            event.sync()
        except DeviceLost as error:
            results.append(error)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    go.set()
    for thread in threads:
        thread.join(10)
    assert [error.suspects for error in results] == [("broken",)] * 3


def test_a_gate_holds_and_releases_real_work(wall):
    stream = wall.stream()
    gate = wall.device.controls().gate(stream)
    wall.mark(stream, "held")
    event = wall.record(stream)
    other = wall.stream()
    wall.mark(other, "other")
    other.sync()
    assert wall.log == ["other"]
    gate.release()
    event.sync()
    assert wall.log == ["other", "held"]


def test_closing_does_not_wait_for_running_work_and_ends_the_threads(wall):
    started, go = threading.Event(), threading.Event()

    def body():
        started.set()
        go.wait(10)

    stream = wall.stream()
    wall.launch(stream, body)
    wall.mark(stream, "never", cost_s=lambda: 100.0)
    assert started.wait(10)
    engines = [t for t in threading.enumerate() if t.name.startswith("streamflow-sim-")]
    assert engines
    assert all(thread.daemon for thread in engines)
    wall.device.close()
    with pytest.raises(Closed):
        stream.sync()
    go.set()
    for thread in engines:
        thread.join(10)
        assert not thread.is_alive()
    assert wall.log == []


def test_a_long_modelled_sleep_ends_with_the_world(wall):
    ran = threading.Event()
    wall.launch(wall.stream(), ran.set, cost_s=lambda: 1000.0)
    assert ran.wait(10)
    engines = [t for t in threading.enumerate() if t.name.startswith("streamflow-sim-")]
    wall.device.close()
    for thread in engines:
        thread.join(10)
        assert not thread.is_alive()


def test_a_pinned_block_of_a_copy_that_runs_while_the_device_closes_is_let_go(open_lab):
    for _ in range(20):
        lab = open_lab(clock="wall", key=object())
        stream = lab.stream()
        host, _ = lab.host(1 << 16)
        address = lab.allocate(stream, 1 << 16)
        for _ in range(4):
            lab.device.copy_h2d(address, host, 1 << 16, stream)
        engines = [t for t in threading.enumerate() if t.name.startswith("streamflow-sim-")]
        lab.device.close()
        for thread in engines:
            thread.join(10)


def test_no_thread_starts_before_there_is_work(wall):
    num_before = threading.active_count()
    wall.allocate(wall.stream(), 64)
    assert threading.active_count() == num_before
    wall.mark(wall.stream(), 1)
    assert threading.active_count() == num_before + 1
    wall.device.synchronize_blocking()
