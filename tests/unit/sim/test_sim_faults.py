import pytest

from streamflow.backends.sim import open_device
from streamflow.backends.sim.event import EventState
from streamflow.errors import (
    Closed,
    CompileFailed,
    DeviceError,
    DeviceLost,
    LaunchFailed,
    OutOfDeviceMemory,
)


def break_device(lab):
    lab.launch(lab.stream(), lambda: 1 / 0, name="bad")
    lab.run()


def test_a_fault_drops_what_was_queued_on_every_stream(lab):
    bad, other = lab.stream(), lab.stream()
    lab.launch(bad, lambda: 1 / 0, name="bad")
    lab.mark(bad, "behind")
    lab.mark(other, "running", cost_s=lambda: 50.0)
    lab.mark(other, "queued")
    lab.run()
    assert lab.log == []


def test_after_a_fault_every_event_raises_also_one_that_was_done(lab):
    stream = lab.stream()
    done = lab.record(stream)
    assert done.is_done
    lab.launch(stream, lambda: 1 / 0, name="bad")
    pending = lab.record(stream)
    lab.run()
    assert done.state is pending.state is EventState.FAILED
    for event in (done, pending):
        with pytest.raises(DeviceLost, match="'bad'"):
            _ = event.is_done
        with pytest.raises(DeviceLost, match="'bad'"):
            event.sync()


def test_after_a_fault_every_submission_raises_at_once(lab):
    stream = lab.stream()
    address = lab.allocate(stream, 64)
    host, _ = lab.host(64)
    event = lab.device.create_event()
    break_device(lab)
    device = lab.device
    for submit in (
        lambda: lab.mark(stream, 0),
        lambda: device.copy_h2d(address, host, 64, stream),
        lambda: device.copy_d2h(host, address, 64, stream),
        lambda: device.copy_d2d(address, address, 8, stream),
        lambda: device.fill(address, b"x", 1, stream),
        lambda: lab.allocate(stream, 64),
        lambda: device.deallocate(address, stream),
        lambda: stream.record(event),
        lambda: stream.wait(event),
        lambda: stream.sync(),
        lambda: device.create_stream(),
        lambda: device.create_event(),
        lambda: device.synchronize_blocking(),
    ):
        with pytest.raises(DeviceLost, match="'bad'"):
            submit()


def test_another_device_is_untouched_and_its_waits_go_on(lab, open_lab):
    other = open_lab(1)
    bad, good = lab.stream(), other.stream()
    lab.launch(bad, lambda: 1 / 0, name="bad")
    good.wait(lab.record(bad))
    other.mark(good, "good")
    lab.run()
    assert other.log == ["good"]
    other.device.synchronize_blocking()


def test_a_lost_device_closes(lab):
    break_device(lab)
    lab.device.close()
    with pytest.raises(Closed):
        lab.device.create_stream()


def test_a_device_opened_again_after_a_fault_works(open_lab):
    lab = open_lab()
    break_device(lab)
    lab.device.close()
    again = open_lab()
    again.mark(again.stream(), "fine")
    again.run()
    assert again.log == ["fine"]


def test_a_second_opening_of_a_lost_device_is_lost_too(lab, settings):
    break_device(lab)
    again = open_device(0, settings, "loop")
    with pytest.raises(DeviceLost):
        again.create_stream()
    again.close()


def test_the_controls_name_the_fault(lab):
    stream = lab.stream()
    assert lab.device.controls().fault is None
    lab.launch(stream, lambda: 1 / 0, name="bad")
    lab.run()
    fault = lab.device.controls().fault
    assert (fault.label, fault.stream_id) == ("bad", lab.device.stream_id(stream))


def test_translate_keeps_the_kind_and_says_what_was_being_done(lab):
    translate = lab.device.translate
    for error in (
        DeviceError("x"),
        OutOfDeviceMemory("x"),
        LaunchFailed("x"),
        DeviceLost("x", suspects=("a", "b")),
        CompileFailed("x", log="line 1"),
    ):
        made = translate(error, "launching k")
        assert type(made) is type(error)
        assert str(made) == "launching k: x"
        assert made.__cause__ is error
    assert translate(DeviceLost("x", suspects=("a", "b")), "").suspects == ("a", "b")
    assert translate(CompileFailed("x", log="line 1"), "").log == "line 1"
    foreign = translate(OSError("no"), "polling")
    assert type(foreign) is DeviceError
    assert str(foreign) == "polling: OSError: no"


def test_ctrl_c_in_a_body_is_raised_and_leaves_no_half_done_work(lab):
    def interrupted():
        raise KeyboardInterrupt

    lab.launch(lab.stream(), interrupted)
    with pytest.raises(KeyboardInterrupt):
        lab.device.advance(0)
    with pytest.raises(DeviceLost, match="interrupted"):
        lab.device.synchronize_blocking()
