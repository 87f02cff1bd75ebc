import threading
from types import SimpleNamespace

import numpy as np
import pytest

from streamflow.backends.base import Backend, KernelSpec
from streamflow.backends.memory import Location, MemoryAdvice, PoolAccess, PoolAttribute
from streamflow.backends.sim import host_memory
from streamflow.backends.sim.controls import FAIL_KINDS
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


@pytest.fixture
def submits(lab, open_lab):
    """For each kind that can be made to fail, a submission of that kind."""
    device, stream = lab.device, lab.stream()
    host, _ = lab.host(64)
    address = lab.allocate(stream, 64)
    peer = open_lab(1)
    there = peer.allocate(peer.stream(), 64)
    managed = device.allocate_managed_blocking(64)
    own = np.zeros((16, 64), np.uint8)
    rows = iter(own.ctypes.data + 64 * row for row in range(16))
    registered = []

    def register(verb):
        registered.append(next(rows))
        verb(registered[-1], 64, False)

    def unregister():
        register(host_memory.register)
        device.unregister_host_blocking(registered[-1])
        registered.pop()

    yield {
        "launch": lambda: lab.mark(stream, "launch"),
        "call": lambda: device.call(stream, "call", lambda: None, ()),
        "copy_h2d": lambda: device.copy_h2d(address, host, 64, stream),
        "copy_d2h": lambda: device.copy_d2h(host, address, 64, stream),
        "copy_d2d": lambda: device.copy_d2d(address, address + 32, 32, stream),
        "copy_peer": lambda: device.copy_peer(there, 1, address, 0, 64, stream),
        "fill": lambda: device.fill(address, b"x", 64, stream),
        "prefetch": lambda: device.prefetch(managed, 64, Location("host"), stream),
        "allocate": lambda: lab.allocate(stream, 64),
        "free": lambda: device.deallocate(address, stream),
        "register": lambda: register(device.register_host_blocking),
        "unregister": unregister,
    }
    for row in registered:
        if host_memory.find(row) is not None:
            host_memory.free(row, host_memory.HostKind.REGISTERED)
    host_memory.free(managed, host_memory.HostKind.MANAGED)


def test_the_submissions_here_are_of_every_kind(submits):
    assert tuple(submits) == FAIL_KINDS


@pytest.mark.parametrize("kind", FAIL_KINDS)
@pytest.mark.parametrize("sticky", [True, False])
def test_every_kind_can_fail(lab, sim, submits, kind, sticky):
    submit = submits[kind]
    rule = sim.fail(kind, nth=2, sticky=sticky)
    if kind != "free":  # which there is only one of
        submit()
    else:
        lab.device.deallocate(lab.allocate(lab.stream(), 64), lab.stream())
    for other in submits:
        if other not in (kind, "free"):
            submits[other]()
    assert rule.num_fired == 0
    if sticky and kind in ("register", "unregister"):  # no work of a stream, which could fault
        with pytest.raises(RuntimeError, match=kind):
            submit()
        lab.run()
        lab.device.synchronize_blocking()
    elif sticky:
        submit()
        lab.run()
        with pytest.raises(DeviceLost, match=kind.replace("_", " ")):
            lab.device.synchronize_blocking()
    else:
        expected = {"allocate": OutOfDeviceMemory, "launch": LaunchFailed, "call": LaunchFailed}
        with pytest.raises(expected.get(kind, DeviceError)):
            submit()
        submit()
        lab.run()
        lab.device.synchronize_blocking()
    assert rule.num_fired == 1


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


NOT_COUNTED = {
    "array_argument",  # a tuple of the arguments, made for every launch: nothing is asked of anyone
    "translate",
    "controls",
    "stream_id",
    "clock_s",
    "advance",  # time passing is no call of the program's
    "skip_to",
    "are_blocked",
}


def test_every_verb_of_the_protocol_counts_under_its_name(lab, sim, submits):
    device, stream = lab.device, lab.stream()
    sim.counters.clear()
    for kind, submit in submits.items():
        if kind != "free":
            submit()
    submits["free"]()
    start, end = device.create_event(timing=True), device.create_event(timing=True)
    stream.record(start)
    stream.record(end)
    lab.run()
    device.elapsed_ms(start, end)
    device.set_current()
    device.memory_info()
    device.synchronize_blocking()
    device.create_stream()
    pool = device.create_pool(release_threshold_nbytes=0)
    device.pool_info(pool)
    device.trim_pool(pool, 0)
    device.set_pool_attribute(pool, PoolAttribute.USED_HIGH, 0)
    device.pool_attribute(pool, PoolAttribute.USED_HIGH)
    device.can_access_peer(1)
    device.pool_access(pool, 1)
    device.set_pool_access_blocking(pool, 1, PoolAccess.READ_WRITE)
    device.set_current_pool(device.current_pool())
    device.default_pool()
    device.destroy_pool(pool)
    device.memory_support()
    device.free_linear_blocking(device.allocate_linear_blocking(64))
    device.free_system(device.allocate_system(64, 256))
    managed = device.allocate_managed_blocking(64)
    device.prefetch(managed, 64, Location("device", 0), device.create_stream())
    device.advise(managed, 64, MemoryAdvice.READ_MOSTLY, Location("device", 0))
    device.pointer_attributes(managed)
    lab.run()
    device.free_linear_blocking(managed)
    device.free_pinned_blocking(device.allocate_pinned_blocking(64))
    device.free_pinned_blocking(device.allocate_mapped_blocking(64))
    own = np.zeros(64, np.uint8)
    device.register_host_blocking(own.ctypes.data, 64, False)
    device.unmap_pinned(device.map_pinned(own.ctypes.data, 64))
    device.unregister_host_blocking(own.ctypes.data)
    spec = KernelSpec("k", (), body=lambda: None)
    device.load_kernel(spec)
    device.load_kernel_blocking(spec)
    device.launch_config((1, 1, 1), (1, 1, 1), 0)
    graph = device.create_graph()
    device.add_graph_node(graph, lambda noting: None, ())
    whole = device.create_graph()
    device.embed_graph(whole, graph, ())
    executable = device.instantiate_graph_blocking(graph)
    device.update_graph_blocking(executable, graph)
    device.launch_graph(executable, stream)
    device.close_graph(graph)
    stream.wait(start)
    stream.sync()
    end.sync()
    assert end.is_done
    end.close()
    stream.close()
    device.close()
    verbs = {
        name
        for name, value in vars(Backend).items()
        if callable(value) and not name.startswith("_")
    }
    of_handles = {"record", "wait", "stream_sync", "stream_close"} | {
        "is_done",
        "event_sync",
        "event_close",
    }
    assert verbs > NOT_COUNTED
    assert set(sim.counters) == verbs - NOT_COUNTED | of_handles
    assert [name for name, num in sim.counters.items() if num < 1] == []


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
