import threading

import pytest

from streamflow.errors import Closed, DeviceError, DeviceLost


class Worker(threading.Thread):
    """Runs ``job``; ``result`` is what it returned or raised."""

    def __init__(self, job):
        super().__init__(daemon=True)
        self._job = job
        self.result = None
        self.start()

    def run(self):
        try:
            self.result = self._job()
        except BaseException as error:
            self.result = error

    def wait(self):
        self.join(10)
        assert not self.is_alive()
        return self.result


def wait_until_blocked(lab, num):
    """Until ``num`` threads are inside a synchronisation; yields the lock, so it ends soon."""
    pause = threading.Event()
    while lab.device.world.num_blocked < num:
        pause.wait(0.001)


def test_advance_completes_one_piece_of_work_per_call(lab):
    stream = lab.stream()
    for i in range(3):
        lab.mark(stream, i)
    for expected in ([0], [0, 1], [0, 1, 2]):
        assert lab.device.advance(0)
        assert lab.log == expected
    assert not lab.device.advance(0)


def test_time_stands_still_while_a_worker_is_busy(lab):
    lab.mark(lab.stream(), "work")
    assert not lab.device.advance(1)
    assert lab.log == []
    assert lab.device.advance(0)


def test_a_blocked_worker_does_not_hold_time_and_is_busy_again_once_released(lab):
    stream = lab.stream()
    lab.mark(stream, "first", cost_s=lambda: 1.0)
    event = lab.record(stream)
    lab.mark(stream, "second", cost_s=lambda: 1.0)
    worker = Worker(event.sync)
    wait_until_blocked(lab, 1)
    assert not lab.device.advance(2)  # another one is still running
    assert lab.device.advance(1)
    assert not lab.device.advance(1)  # released: it counts as running, awake or not
    assert worker.wait() is None
    assert lab.device.advance(0)
    assert lab.log == ["first", "second"]


def test_the_driving_thread_steps_the_machine_instead_of_blocking(lab):
    stream = lab.stream()
    lab.mark(stream, "one")
    event = lab.record(stream)
    lab.mark(stream, "two")
    event.sync()
    assert lab.log == ["one"]
    stream.sync()
    assert lab.log == ["one", "two"]


def test_a_synchronisation_that_can_never_end_raises(lab):
    stream = lab.stream()
    with lab.device.controls().gate(stream):
        lab.mark(stream, "held")
        with pytest.raises(DeviceError, match=r"'gate'.*release its gates"):
            stream.sync()
        with pytest.raises(DeviceError, match="'gate'"):
            lab.device.synchronize_blocking()
    lab.device.synchronize_blocking()
    assert lab.log == ["held"]


def test_any_thread_may_synchronise_the_device(lab):
    lab.device.advance(0)  # this thread drives the clock
    lab.mark(lab.stream(), "work")
    assert Worker(lab.device.synchronize_blocking).wait() is None
    assert lab.log == ["work"]


@pytest.mark.parametrize("how", ["fault", "close"])
def test_a_blocked_thread_is_woken_with_the_reason(lab, how):
    stream = lab.stream()
    with lab.device.controls().gate(stream):
        event = lab.record(stream)
        worker = Worker(event.sync)
        wait_until_blocked(lab, 1)
        if how == "fault":
            lab.launch(lab.stream(), lambda: 1 / 0)
            lab.run()
        else:
            lab.device.close()
        assert isinstance(worker.wait(), DeviceLost if how == "fault" else Closed)
    assert lab.device.world.num_blocked == 0


def test_submissions_at_one_moment_start_in_stream_order_not_call_order(open_lab):
    def schedule(order):
        lab = open_lab(key=order)
        streams = [lab.stream() for _ in range(10)]
        for i in order:
            lab.mark(streams[i], i, cost_s=lambda: 1.0)
        lab.run()
        return lab.log

    assert schedule(tuple(range(10))) == schedule(tuple(reversed(range(10))))


def test_the_seed_decides_ties(open_lab):
    def schedule(seed, key):
        lab = open_lab(key=key, seed=seed)
        for i in range(12):
            lab.mark(lab.stream(), i, cost_s=lambda: 1.0)
        lab.run()
        return tuple(lab.log)

    assert schedule(0, "a") == tuple(range(12))
    assert schedule(1, "b") == schedule(1, "c")
    assert len({schedule(seed, ("d", seed)) for seed in range(5)}) > 1
