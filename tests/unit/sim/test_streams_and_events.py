import pytest

from streamflow.backends.base import Backend
from streamflow.backends.sim.event import EventState
from streamflow.errors import Closed, DeviceError


def test_a_simulated_device_is_a_backend(lab):
    assert isinstance(lab.device, Backend)


def test_work_on_one_stream_runs_in_submission_order(lab):
    stream = lab.stream()
    for i in range(10):
        lab.mark(stream, i, cost_s=lambda: 1.0)
    assert lab.run() == 10
    assert lab.log == list(range(10))


def test_streams_without_waits_overlap(lab):
    for i in range(8):
        lab.mark(lab.stream(), i, cost_s=lambda: 1.0)
    lab.run()
    assert lab.device.clock_s() == 1.0


def test_compute_slots_are_limited(lab):
    for i in range(9):
        lab.mark(lab.stream(), i, cost_s=lambda: 1.0)
    lab.run()
    assert lab.device.clock_s() == 2.0


def test_a_wait_orders_two_streams(lab):
    slow, fast = lab.stream(), lab.stream()
    lab.mark(slow, "slow", cost_s=lambda: 5.0)
    fast.wait(lab.record(slow))
    lab.mark(fast, "fast", cost_s=lambda: 1.0)
    lab.run()
    assert lab.log == ["slow", "fast"]
    assert lab.device.clock_s() == 6.0


def test_a_wait_binds_to_the_record_at_the_call(lab):
    a, b = lab.stream(), lab.stream()
    lab.mark(a, "first", cost_s=lambda: 1.0)
    event = lab.record(a)
    b.wait(event)
    lab.mark(a, "second", cost_s=lambda: 10.0)
    a.record(event)
    lab.mark(b, "after first", cost_s=lambda: 1.0)
    lab.run()
    assert lab.log == ["first", "after first", "second"]


def test_recording_again_rebinds_a_pending_event(lab):
    stream = lab.stream()
    lab.mark(stream, "first")
    event = lab.record(stream)
    lab.mark(stream, "second")
    stream.record(event)
    lab.device.advance(0)
    assert not event.is_done
    lab.device.advance(0)
    assert event.is_done


def test_waiting_for_an_event_never_recorded_is_a_no_op(lab):
    stream = lab.stream()
    stream.wait(lab.device.create_event())
    lab.mark(stream, "ran")
    lab.run()
    assert lab.log == ["ran"]


def test_an_event_never_recorded_is_not_done(lab):
    event = lab.device.create_event()
    assert not event.is_done
    assert event.state is EventState.NEVER_RECORDED
    with pytest.raises(DeviceError, match="never recorded"):
        event.sync()


def test_an_event_goes_from_pending_to_done(lab):
    stream = lab.stream()
    lab.mark(stream, "work")
    event = lab.record(stream)
    assert event.state is EventState.PENDING
    lab.run()
    assert event.state is EventState.DONE


def test_asking_an_event_never_moves_the_clock(lab):
    stream = lab.stream()
    lab.mark(stream, "work")
    event = lab.record(stream)
    assert [event.is_done for _ in range(100)] == [False] * 100
    assert lab.device.clock_s() == 0.0


def test_an_event_on_an_idle_stream_is_done_at_once(lab):
    assert lab.record(lab.stream()).is_done


def test_an_event_is_exact(lab):
    stream = lab.stream()
    lab.mark(stream, "before")
    event = lab.record(stream)
    lab.mark(stream, "behind", cost_s=lambda: 100.0)
    lab.device.advance(0)
    assert event.is_done
    assert lab.log == ["before"]


def test_a_long_chain_of_waits_resolves_without_recursion(lab):
    first = lab.stream()
    lab.mark(first, "first")
    event = lab.record(first)
    streams = []
    for _ in range(3000):
        stream = lab.stream()
        stream.wait(event)
        event = lab.record(stream)
        streams.append(stream)
    assert not event.is_done
    lab.run()
    assert event.is_done


def test_closing_an_event_keeps_waits_on_it(lab):
    a, b = lab.stream(), lab.stream()
    lab.mark(a, "a", cost_s=lambda: 5.0)
    event = lab.record(a)
    b.wait(event)
    event.close()
    lab.mark(b, "b")
    lab.run()
    assert lab.log == ["a", "b"]


def test_a_closed_event_is_refused_everywhere(lab):
    stream = lab.stream()
    event = lab.record(stream)
    event.close()
    with pytest.raises(Closed):
        _ = event.is_done
    with pytest.raises(Closed):
        event.sync()
    with pytest.raises(Closed):
        stream.record(event)
    with pytest.raises(Closed):
        stream.wait(event)


def test_work_on_a_closed_stream_still_runs(lab):
    stream = lab.stream()
    lab.mark(stream, "work")
    event = lab.record(stream)
    stream.close()
    lab.run()
    assert lab.log == ["work"]
    assert event.is_done


def test_a_closed_stream_refuses_work(lab):
    stream = lab.stream()
    stream.close()
    with pytest.raises(Closed):
        lab.mark(stream, "work")
    with pytest.raises(Closed):
        lab.record(stream)
    with pytest.raises(Closed):
        stream.sync()


def test_a_dropped_stream_still_runs_its_work(lab):
    a = lab.stream()
    lab.mark(a, "a", cost_s=lambda: 3.0)
    b = lab.stream()
    b.wait(lab.record(a))
    lab.mark(b, "b")
    del a, b
    lab.run()
    assert lab.log == ["a", "b"]


def test_elapsed_time_is_the_modelled_time(lab):
    stream = lab.stream()
    start = lab.record(stream, timing=True)
    lab.mark(stream, "work", cost_s=lambda: 0.25)
    end = lab.record(stream, timing=True)
    with pytest.raises(DeviceError, match="done"):
        lab.device.elapsed_ms(start, end)
    lab.run()
    assert lab.device.elapsed_ms(start, end) == 250.0


def test_elapsed_time_needs_timing_events(lab):
    stream = lab.stream()
    plain, timed = lab.record(stream), lab.record(stream, timing=True)
    with pytest.raises(ValueError, match="timing=True"):
        lab.device.elapsed_ms(plain, timed)
    with pytest.raises(ValueError, match="recorded"):
        lab.device.elapsed_ms(timed, lab.device.create_event(timing=True))


def test_an_urgent_stream_is_served_first(lab):
    host, _ = lab.host(64)
    events = []
    for priority in (0, 0, -1):
        stream = lab.stream(priority=priority)
        lab.device.copy_h2d(lab.allocate(stream, 64), host, 64, stream)
        events.append(lab.record(stream))
        lab.device.world.next_s()  # the first has started and fills the engine
    order = []
    while lab.device.advance(0):
        order.append([event.is_done for event in events])
    assert order == [[True, False, False], [True, False, True], [True, True, True]]


def test_a_priority_outside_the_range_is_refused(lab):
    with pytest.raises(ValueError, match="priority"):
        lab.stream(priority=1)


def test_stream_ids_are_unique_and_never_handles_of_others(lab):
    ids = [lab.device.stream_id(lab.stream()) for _ in range(100)]
    assert len(set(ids)) == 100


def test_a_full_queue_says_that_the_driver_would_block(lab):
    stream = lab.stream()
    with lab.device.controls().gate(stream):
        for _ in range(1022):
            lab.mark(stream, 0)
        with pytest.raises(DeviceError, match="would block"):
            lab.mark(stream, 0)
        address = lab.allocate(stream, 512)  # allocations don't count
        lab.device.deallocate(address, stream)
    assert lab.device.counts["would_block"] == 1
    lab.device.advance(0)
    lab.mark(stream, 0)
    lab.run()
    assert len(lab.log) == 1023


def test_a_stream_of_another_device_is_refused(lab, open_lab):
    other = open_lab(1)
    with pytest.raises(ValueError, match="another device"):
        lab.mark(other.stream(), 0)
    with pytest.raises(ValueError, match="device that made it"):
        lab.stream().record(other.device.create_event())
