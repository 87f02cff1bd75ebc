"""Streams and events: order, exactness, and nothing remembered from a past life."""

from __future__ import annotations

import threading
from math import isfinite

import numpy as np
import pytest

from streamflow.errors import StreamflowError
from streamflow.testing.contract.harness import Harness, Rig, drain, fidelity, settle

__all__ = ["StreamContract"]


class StreamContract(Harness):
    """Streams and events of one device."""

    def test_cr1_stream_ids_never_repeat(self, rig: Rig) -> None:
        ids = []
        for _ in range(32):
            stream = rig.backend.create_stream()
            ids.append(rig.backend.stream_id(stream))
            stream.close()
        assert len(set(ids)) == 32

    def test_cr1_a_stream_keeps_its_id(self, rig: Rig) -> None:
        other = rig.backend.create_stream()
        before = rig.backend.stream_id(rig.stream)
        other.close()
        assert rig.backend.stream_id(rig.stream) == before

    def test_cr1_a_new_stream_inherits_nothing(self, rig: Rig) -> None:
        backend = rig.backend
        blocked = backend.create_stream()
        with self.stall(rig, rig.stream):
            blocked.wait(rig.mark(rig.stream))
            blocked.close()
            fresh = backend.create_stream()
            rig.finish(fresh)  # would hang if the wait of the closed stream held it
        fresh.close()

    @fidelity
    def test_priorities_over_the_whole_range(self, rig: Rig) -> None:
        """Streams have priorities within the range that the device names."""
        least, greatest = rig.backend.properties.priority_range
        assert least >= greatest
        for priority in (least, greatest):
            stream = rig.backend.create_stream(priority=priority)
            rig.finish(stream)
            stream.close()

    @fidelity
    def test_a_stalled_stream_holds_up_no_other(self, rig: Rig) -> None:
        """Streams that nothing orders run independently of each other."""
        other = rig.backend.create_stream()
        with self.stall(rig, rig.stream):
            pending = rig.mark(rig.stream)
            rig.finish(other)
            assert not pending.is_done
        drain(rig.backend, pending)
        other.close()

    @fidelity
    def test_c18_an_event_is_pending_until_its_place_is_reached(self, rig: Rig) -> None:
        """An event is pending until the device has passed its place."""
        with self.stall(rig, rig.stream):
            event = rig.mark(rig.stream)
            settle(rig.backend)
            assert not event.is_done
        drain(rig.backend, event)
        assert event.is_done

    @fidelity
    def test_c18_an_event_recorded_again_is_pending_again(self, rig: Rig) -> None:
        """An event is bound to its latest record."""
        event = rig.mark(rig.stream)
        drain(rig.backend, event)
        with self.stall(rig, rig.stream):
            rig.stream.record(event)
            assert not event.is_done
        drain(rig.backend, event)

    @fidelity
    def test_c18_a_wait_binds_to_the_record_at_the_call(self, rig: Rig) -> None:
        """A wait binds to the record that the event has at the call."""
        other = rig.backend.create_stream()
        event = rig.mark(rig.stream)
        drain(rig.backend, event)
        other.wait(event)
        with self.stall(rig, rig.stream):
            rig.stream.record(event)  # later: the wait does not follow it
            rig.finish(other)
            assert not event.is_done
        drain(rig.backend, event)
        other.close()

    @fidelity
    def test_c18_a_wait_holds_what_comes_after_it(self, rig: Rig) -> None:
        """A wait holds what comes after it on its stream, and nothing before."""
        other = rig.backend.create_stream()
        with self.stall(rig, rig.stream):
            before = rig.mark(other)
            other.wait(rig.mark(rig.stream))
            after = rig.mark(other)
            drain(rig.backend, before)
            settle(rig.backend)
            assert not after.is_done
        drain(rig.backend, after)
        other.close()

    @fidelity
    def test_c18_a_wait_for_an_event_never_recorded_holds_nothing(self, rig: Rig) -> None:
        """A wait for an event that was never recorded holds nothing."""
        rig.stream.wait(rig.backend.create_event())
        rig.finish()

    @fidelity
    def test_an_event_waits_for_its_place_only(self, rig: Rig) -> None:
        """Waiting for an event waits for its place, not for what is behind it (R4)."""
        early = rig.mark(rig.stream)
        with self.stall(rig, rig.stream):
            late = rig.mark(rig.stream)
            drain(rig.backend, early)
            assert not late.is_done
        drain(rig.backend, late)

    @fidelity
    def test_closing_an_event_keeps_the_waits_made_on_it(self, rig: Rig) -> None:
        """Closing an event keeps the waits that were made on it."""
        other = rig.backend.create_stream()
        with self.stall(rig, rig.stream):
            event = rig.mark(rig.stream)
            other.wait(event)
            event.close()
            after = rig.mark(other)
            settle(rig.backend)
            assert not after.is_done
        drain(rig.backend, after)
        other.close()

    @fidelity
    def test_closing_a_stream_lets_its_work_run(self, rig: Rig) -> None:
        """Closing a stream lets its work run."""
        stream = rig.backend.create_stream()
        address = rig.put(np.zeros(4096, np.uint8))
        with self.stall(rig, stream):
            rig.backend.fill(address, b"\x07", 4096, stream)
            done = rig.mark(stream)
            stream.close()
        drain(rig.backend, done)
        assert (rig.get(address, 4096) == 7).all()

    def test_sync_waits_for_the_stream(self, rig: Rig) -> None:
        address = rig.empty(1 << 20)
        rig.backend.fill(address, b"\x01", 1 << 20, rig.stream)
        event = rig.mark(rig.stream)
        rig.stream.sync()
        assert event.is_done

    @fidelity
    def test_synchronize_waits_for_every_stream(self, rig: Rig) -> None:
        """Synchronising the device waits for every stream."""
        other = rig.backend.create_stream()
        address = rig.empty(1 << 20)
        other.wait(rig.mark(rig.stream))
        rig.backend.fill(address, b"\x01", 1 << 20, other)
        events = [rig.mark(other), rig.mark(rig.stream)]
        rig.backend.synchronize_blocking()
        assert all(event.is_done for event in events)
        other.close()

    @fidelity
    def test_elapsed_time_between_timing_events(self, rig: Rig) -> None:
        """Timing events give the time that passed on the device between them."""
        backend = rig.backend
        address = rig.empty(4 << 20)
        start, end = (backend.create_event(timing=True) for _ in range(2))
        rig.stream.record(start)
        backend.fill(address, b"\x01", 4 << 20, rig.stream)
        rig.stream.record(end)
        drain(backend, end)
        elapsed_ms = backend.elapsed_ms(start, end)
        assert isfinite(elapsed_ms)
        assert elapsed_ms > 0

    def test_elapsed_time_needs_timing_events(self, rig: Rig) -> None:
        start, end = rig.mark(rig.stream), rig.mark(rig.stream)
        drain(rig.backend, end)
        with pytest.raises(Exception) as caught:  # noqa: PT011 - each backend raises its own
            rig.backend.elapsed_ms(start, end)
        assert isinstance(rig.backend.translate(caught.value, "timing"), StreamflowError)

    def test_c3_waiting_for_an_event_lets_other_threads_run(self, rig: Rig) -> None:
        backend = rig.backend
        entered = threading.Event()

        def wait_blocking() -> None:
            backend.set_current()
            entered.set()
            event.sync()

        with self.stall(rig, rig.stream):
            event = rig.mark(rig.stream)
            waiter = threading.Thread(target=wait_blocking)
            waiter.start()
            # Were the interpreter's lock held by the wait, this thread could not go on
            # to end the stall.
            assert entered.wait(10)
            assert not event.is_done
        while waiter.is_alive() and backend.is_virtual:
            backend.advance(1)
        waiter.join(10)
        assert not waiter.is_alive()

    def test_two_threads_submit_at_once(self, rig: Rig) -> None:
        backend = rig.backend
        nbytes = 1 << 16
        streams = [backend.create_stream() for _ in range(2)]
        blocks = [rig.empty(nbytes) for _ in streams]
        rig.finish()
        failures: list[BaseException] = []

        def submit(number: int) -> None:
            try:
                backend.set_current()
                for step in range(100):
                    backend.fill(blocks[number], bytes([step + number]), nbytes, streams[number])
                    streams[number].record(events[number])
            except BaseException as error:
                failures.append(error)

        events = [backend.create_event() for _ in streams]
        threads = [threading.Thread(target=submit, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failures
        for number, event in enumerate(events):
            drain(backend, event)
            assert (rig.get(blocks[number], nbytes) == 99 + number).all()
        for stream in streams:
            stream.close()
