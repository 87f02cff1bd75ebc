"""Our own timeouts: real time on a GPU and the wall clock, virtual time on the virtual one."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from support import turns, until, virtual

import streamflow as sf
from streamflow.scheduler.loops import current_shell


class Log:
    """What happened, and at what virtual time."""

    def __init__(self, dev):
        self._clock = dev.sim.clock
        self.entries = []

    def __call__(self, name):
        return lambda *_: self.entries.append((name, round(self._clock.now_s, 9)))


def test_a_timer_calls_once_after_its_delay(run, open_device):
    async def main():
        async with open_device() as dev:
            clock, called = dev._core.backend.clock_s, []
            start = clock()
            dev._core.timers.call_later(0.02, lambda: called.append(clock() - start))
            assert called == []
            await until(lambda: called)
            await turns()
            return called

    (after,) = run(main)
    assert after > 0.015  # a loop may round to its clock's milliseconds


def test_a_cancelled_timer_never_calls(run, open_device):
    async def main():
        async with open_device() as dev:
            called = []
            timers = dev._core.timers
            cancel = timers.call_later(0.002, lambda: called.append("cancelled"))
            timers.call_later(0.01, lambda: called.append("other"))
            cancel()
            cancel()
            await until(lambda: called)
            return called

    assert run(main) == ["other"]


def test_a_timer_does_nothing_once_the_device_is_closed(run, open_device):
    async def main():
        called = []
        async with open_device() as dev:
            cancel = dev._core.timers.call_later(0.001, lambda: called.append(1))
            dev._core.timers.call_later(float("inf"), lambda: called.append(2))()
        cancel()
        dev._core.timers.call_later(0.0, lambda: called.append(3))
        wake, wait = current_shell().park()
        current_shell().call_later(0.01, wake)
        await wait(False)
        return called

    assert run(main) == []


def test_a_delay_that_is_no_number_is_refused(run, open_device):
    async def main():
        async with open_device() as dev:
            with pytest.raises(ValueError, match="nan"):
                dev._core.timers.call_later(float("nan"), lambda: None)

    run(main)


def test_a_timer_that_fails_loses_the_device(run, open_device):
    async def main():
        async with open_device() as dev:
            dev._core.timers.call_later(0.001, lambda: 1 / 0)
            await until(lambda: not dev.is_healthy)

    with pytest.raises(sf.errors.DeviceLost, match="ZeroDivisionError"):
        run(main)


def test_virtual_time_stops_at_a_timer_between_two_completions(run, spin):
    async def main():
        async with virtual() as dev:
            log = Log(dev)
            first, second = (dev.launch(spin, s, grid=1, block=1) for s in (1.0, 10.0))
            first.add_done_callback(log("first"))
            second.add_done_callback(log("second"))
            dev._core.timers.call_later(4.0, log("timer"))
            await sf.gather(first, second)
            await turns()
            return log.entries

    (first, one), (timer, four), (second, ten) = run(main)
    assert (first, timer, second) == ("first", "timer", "second")
    assert four == 4.0
    assert 1.0 <= one < 1.001
    assert 10.0 <= ten < 10.001


def test_completions_come_before_a_timer_of_the_same_moment(run, spin):
    async def main():
        async with virtual() as dev:
            done, seen = [], []
            ops = [dev.launch(spin, 1.0, grid=1, block=1) for _ in range(3)]
            for op in ops:
                op.add_done_callback(done.append)
            due_s = dev.sim.clock.next_s  # all three end then
            dev._core.timers.call_later(
                due_s - dev.sim.clock.now_s, lambda: seen.append([op.done() for op in ops])
            )
            await sf.gather(*ops)
            await until(lambda: seen)
            return seen

    assert run(main) == [[True] * 3]


def test_timers_fire_by_due_time_then_by_order_of_call_also_across_devices(run, spin):
    async def main():
        async with virtual(0) as one, virtual(1) as two:
            log = []
            for number, (dev, due_s) in enumerate(
                ((one, 2.0), (two, 1.0), (two, 2.0), (one, 1.0), (one, 2.0))
            ):
                dev._core.timers.call_later(due_s, lambda n=number: log.append(n))
            await one.launch(spin, 5.0, grid=1, block=1)
            return log

    assert run(main) == [1, 3, 0, 2, 4]


def test_a_timer_of_one_device_stops_the_clock_that_another_drives(run, spin):
    async def main():
        async with virtual(0) as one, virtual(1) as two:
            log = Log(one)
            two._core.timers.call_later(3.0, log("timer"))
            await one.launch(spin, 5.0, grid=1, block=1)
            log("op")()
            return log.entries

    (timer, three), (op, five) = run(main)
    assert (timer, three, op) == ("timer", 3.0, "op")
    assert five >= 5.0


def test_a_pending_timer_lets_work_pass_that_nobody_awaits(run, spin):
    async def main():
        async with virtual() as dev:
            log = Log(dev)
            dev.launch(spin, 5.0, grid=1, block=1)
            dev._core.timers.call_later(7.0, log("timer"))
            await until(lambda: log.entries)
            return log.entries

    assert run(main) == [("timer", 7.0)]


def test_behind_a_gate_time_jumps_to_the_timer(run, spin):
    async def main():
        async with virtual() as dev:
            log, stream = Log(dev), dev.stream()
            gate = dev.sim.gate(stream)
            op = dev.launch(spin, 1.0, grid=1, block=1, stream=stream)
            dev._core.timers.call_later(3600.0, log("timer"))
            op.add_done_callback(log("op"))
            await until(lambda: log.entries)
            gate.release()
            await op
            await turns()
            return log.entries

    (timer, hour), (op, later) = run(main)
    assert (timer, hour, op) == ("timer", 3600.0, "op")
    assert later >= 3601.0


def test_a_gate_that_opens_within_the_grace_comes_before_the_timer(run, spin):
    async def main():
        async with virtual() as dev:
            log, stream = Log(dev), dev.stream()
            gate = dev.sim.gate(stream)
            op = dev.launch(spin, 1.0, grid=1, block=1, stream=stream)
            op.add_done_callback(log("op"))
            cancel = dev._core.timers.call_later(3600.0, log("timer"))
            await turns()
            gate.release()
            await op
            await turns()
            cancel()
            return [name for name, _ in log.entries]

    assert run(main) == ["op"]


def test_a_change_starts_the_grace_anew(run, spin, monkeypatch):
    """Each submission does, so the clock stays where it is while the program is at work."""

    async def main():
        async with virtual() as dev:
            log, stream = Log(dev), dev.stream()
            gate = dev.sim.gate(stream)
            graces = []
            poller, shell = dev._core.poller, dev._core.shell
            monkeypatch.setattr(
                shell, "call_later", lambda s, end: graces.append(end) or (lambda: None)
            )
            dev._core.timers.call_later(3600.0, log("timer"))
            await turns()
            assert len(graces) == 1
            dev.launch(spin, 1.0, grid=1, block=1, stream=stream)
            graces[0]()  # it ends, but something was submitted meanwhile
            await turns()
            assert (len(graces), log.entries) == (2, [])
            graces[1]()
            await turns()
            assert [name for name, _ in log.entries] == ["timer"]
            assert poller.num_moves == 0
            monkeypatch.undo()
            gate.release()

    run(main)


def test_a_busy_worker_holds_the_clock_short_of_a_timer(run, monkeypatch):

    async def main():
        async with virtual() as dev:
            log, release, core, graces = Log(dev), threading.Event(), dev._core, []
            monkeypatch.setattr(
                core.shell, "call_later", lambda s, end: graces.append(end) or (lambda: None)
            )
            core.background.submit(1, lambda: release.wait(20), log("worker"))
            core.schedule_turn()
            core.timers.call_later(1.0, log("timer"))
            for _ in range(3):
                await until(lambda: graces)
                graces.pop()()
                await turns()
            assert log.entries == []
            monkeypatch.undo()
            release.set()
            await until(lambda: len(log.entries) == 2)
            return log.entries

    assert run(main) == [("worker", 0.0), ("timer", 1.0)]


def test_virtual_timers_are_the_same_in_every_run(run, spin):
    async def main():
        async with virtual(seed=7) as dev:
            log = Log(dev)
            rng = np.random.default_rng(1)
            ops = []
            for number in range(40):
                op = dev.launch(spin, float(rng.integers(1, 9)), grid=1, block=1)
                op.add_done_callback(log(f"op{number}"))
                ops.append(op)
                dev._core.timers.call_later(float(rng.integers(1, 60)), log(f"timer{number}"))
            await sf.gather(*ops)
            await until(lambda: len(log.entries) == 80)
            return log.entries

    assert run(main) == run(main)


def test_a_pending_timer_alone_makes_no_turns(run, open_device, monkeypatch):
    async def main():
        async with open_device() as dev:
            core, fired, turned = dev._core, [], []
            await dev.zeros(16, np.float32)
            look = type(core.poller)._look
            monkeypatch.setattr(
                type(core.poller), "_look", lambda self: turned.append(1) or look(self)
            )
            core.timers.call_later(0.05, lambda: fired.append(1))
            await until(lambda: fired)
            monkeypatch.undo()
            return len(turned)

    assert run(main) <= 4


def test_closing_behind_a_gate_counts_real_seconds_on_every_clock(run, spin):
    async def main():
        async with virtual(close_timeout_s=0.05) as dev:
            stream = dev.stream()
            dev.sim.gate(stream)
            dev.launch(spin, 1.0, grid=1, block=1, stream=stream)

    with pytest.raises(TimeoutError, match="close_timeout_s"):
        run(main)
