import threading
from types import SimpleNamespace

import pytest

from streamflow.errors import DeviceError, DeviceLost, LaunchFailed, OutOfDeviceMemory


@pytest.fixture
def sim(lab):
    return lab.device.controls()


def test_a_gate_holds_later_work_only(lab, sim):
    stream, other = lab.stream(), lab.stream()
    lab.mark(stream, "before")
    before = lab.record(stream)
    gate = sim.gate(stream)
    lab.mark(stream, "after")
    lab.mark(other, "other")
    lab.run()
    assert lab.log == ["before", "other"]
    assert before.is_done
    gate.release()
    lab.run()
    assert lab.log == ["before", "other", "after"]


def test_an_event_recorded_behind_a_gate_is_pending(lab, sim):
    stream = lab.stream()
    with sim.gate(stream):
        event = lab.record(stream)
        assert not event.is_done
    assert event.is_done


def test_releasing_a_gate_wakes_whoever_asked(lab, sim):
    calls = []
    sim.on_change = lambda: calls.append(threading.current_thread().name)
    gate = sim.gate(lab.stream())
    thread = threading.Thread(target=gate.release, name="releaser")
    thread.start()
    thread.join()
    gate.release()
    assert calls == ["releaser"]
    assert gate.is_open


def test_a_gate_takes_a_name_or_a_runtime_stream(lab, sim):
    stream = lab.stream()
    sim.resolve = lambda target: (
        SimpleNamespace(backend_stream=stream) if target == "h2d" else target
    )
    with sim.gate("h2d"), sim.gate(stream), sim.gate(SimpleNamespace(backend_stream=stream)):
        assert len(stream.queue) == 3
    with pytest.raises(TypeError, match="simulated stream"):
        sim.gate("nonsense")


def test_a_gate_released_before_its_turn_holds_nothing(lab, sim):
    stream = lab.stream()
    lab.mark(stream, 1)
    sim.gate(stream).release()
    lab.mark(stream, 2)
    lab.run()
    assert lab.log == [1, 2]


def test_a_gate_of_a_lost_device_can_be_released(lab, sim):
    with sim.gate(lab.stream()):
        lab.launch(lab.stream(), lambda: 1 / 0)
        lab.run()


def test_a_sticky_failure_strikes_when_the_op_runs(lab, sim):
    stream = lab.stream()
    rule = sim.fail("launch", name="victim")
    lab.mark(stream, "bystander")
    lab.mark(stream, "victim")
    assert rule.num_fired == 1
    assert lab.device.advance(0)
    lab.run()
    assert lab.log == ["bystander"]
    with pytest.raises(DeviceLost, match="'victim'"):
        stream.sync()


def test_the_nth_submission_fails(lab, sim):
    stream = lab.stream()
    sim.fail("launch", nth=3, sticky=False)
    lab.mark(stream, 1)
    lab.mark(stream, 2)
    with pytest.raises(LaunchFailed, match="injected"):
        lab.mark(stream, 3)
    lab.mark(stream, 4)
    lab.run()
    assert lab.log == [1, 2, 4]


def test_the_error_can_be_chosen(lab, sim):
    class Odd(Exception):
        pass

    stream = lab.stream()
    sim.fail(error=Odd("mine"), sticky=False)
    with pytest.raises(Odd, match="mine"):
        lab.mark(stream, 0)
    sim.fail(error=Odd)
    lab.mark(stream, 0)
    lab.run()
    with pytest.raises(DeviceLost) as caught:
        stream.sync()
    assert isinstance(caught.value.__cause__, Odd)


@pytest.mark.parametrize("kind", ["copy_h2d", "copy_d2h", "copy_d2d", "fill", "allocate", "free"])
@pytest.mark.parametrize("sticky", [True, False])
def test_every_kind_can_fail(lab, sim, kind, sticky):
    stream = lab.stream()
    host, _ = lab.host(64)
    address = lab.allocate(stream, 64)
    submit = {
        "copy_h2d": lambda: lab.device.copy_h2d(address, host, 64, stream),
        "copy_d2h": lambda: lab.device.copy_d2h(host, address, 64, stream),
        "copy_d2d": lambda: lab.device.copy_d2d(address, address + 32, 32, stream),
        "fill": lambda: lab.device.fill(address, b"x", 64, stream),
        "allocate": lambda: lab.allocate(stream, 64),
        "free": lambda: lab.device.deallocate(address, stream),
    }[kind]
    sim.fail(kind, sticky=sticky)
    if sticky:
        submit()
        lab.run()
        with pytest.raises(DeviceLost, match=kind.replace("_", " ")):
            lab.device.synchronize_blocking()
    else:
        with pytest.raises(OutOfDeviceMemory if kind == "allocate" else DeviceError):
            submit()
        submit()
        lab.run()
        lab.device.synchronize_blocking()


def test_bad_rules_are_refused(sim):
    with pytest.raises(ValueError, match="copy_h2d"):
        sim.fail("teleport")
    with pytest.raises(ValueError, match="nth"):
        sim.fail(nth=0)
    with pytest.raises(ValueError, match="after"):
        sim.out_of_memory(after=-1)


def test_a_rule_can_be_taken_back(lab, sim):
    with sim.fail("launch", sticky=False):
        pass
    lab.mark(lab.stream(), "fine")
    lab.run()
    assert lab.log == ["fine"]


def test_out_of_memory_lasts_until_cleared(lab, sim):
    stream = lab.stream()
    shortage = sim.out_of_memory(after=1)
    address = lab.allocate(stream, 64)
    for _ in range(3):
        with pytest.raises(OutOfDeviceMemory):
            lab.allocate(stream, 64)
    lab.device.deallocate(address, stream)
    shortage.clear()
    lab.allocate(stream, 64)
    assert shortage.num_fired == 3


def test_counters_count_verbs_and_queries(lab, sim):
    a, b = lab.stream(), lab.stream()
    sim.counters.clear()
    for _ in range(3):
        lab.mark(a, 0)
    event = lab.record(a)
    b.wait(event)
    lab.run()
    assert event.is_done
    event.sync()
    lab.device.deallocate(lab.allocate(a, 64), a)
    counted = {
        k: sim.counters[k]
        for k in ("launch", "record", "wait", "is_done", "event_sync", "allocate", "deallocate")
    }
    assert counted == {
        "launch": 3,
        "record": 1,
        "wait": 1,
        "is_done": 1,
        "event_sync": 1,
        "allocate": 1,
        "deallocate": 1,
    }
    assert sim.counters["never called"] == 0


def test_the_clock_moves_up_to_the_next_completion(lab, sim):
    assert sim.clock.is_virtual
    assert sim.clock.next_s is None
    assert sim.clock.advance(2.0) == 2.0
    lab.mark(lab.stream(), "work", cost_s=lambda: 3.0)
    assert sim.clock.next_s == 5.0
    assert sim.clock.advance(1.0) == 1.0
    assert sim.clock.advance(10.0) == 2.0
    assert lab.log == []
    assert sim.clock.now_s == 5.0
    lab.run()
    assert lab.log == ["work"]
    assert sim.clock.now_s == 5.0
    with pytest.raises(ValueError, match="forward"):
        sim.clock.advance(-1)
