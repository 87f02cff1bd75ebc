"""Virtual time up to a moment: what a timer of ours needs."""

from __future__ import annotations


def test_work_that_ends_by_the_moment_completes(lab):
    lab.mark(lab.stream(), "work", cost_s=lambda: 2.0)
    assert not lab.device.advance(0, 1.5)
    assert lab.log == []
    assert lab.device.advance(0, 2.0)
    assert lab.log == ["work"]


def test_time_passes_to_a_moment_before_the_next_completion(lab):
    lab.mark(lab.stream(), "work", cost_s=lambda: 2.0)
    assert lab.device.skip_to(0, 1.5, False)
    assert (lab.log, lab.device.clock_s()) == ([], 1.5)
    assert not lab.device.skip_to(0, 2.0, True)  # a completion at that moment comes first
    assert lab.device.clock_s() == 1.5


def test_an_idle_clock_jumps_only_when_told_to(lab):
    assert not lab.device.skip_to(0, 1.0, False)
    assert lab.device.clock_s() == 0.0
    assert lab.device.skip_to(0, 1.0, True)
    assert lab.device.clock_s() == 1.0


def test_a_moment_that_has_come_needs_no_jump(lab):
    assert lab.device.skip_to(0, 0.0, False)
    assert lab.device.skip_to(0, 3.0, True)
    assert lab.device.skip_to(0, 2.0, False)
    assert lab.device.clock_s() == 3.0  # never back


def test_a_busy_worker_holds_time(lab):
    lab.mark(lab.stream(), "work", cost_s=lambda: 2.0)
    assert not lab.device.skip_to(1, 1.0, True)
    assert lab.device.clock_s() == 0.0
