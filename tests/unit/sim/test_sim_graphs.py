"""Graphs on the simulator: what its clocks, faults, checker and controls make of nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from streamflow.backends.memory import Location
from streamflow.backends.sim import host_memory, open_device
from streamflow.backends.sim.report import RaceKind
from streamflow.config import Settings, SimOptions
from streamflow.errors import Closed, DeviceError, DeviceLost, LaunchFailed

N = 256
MS = 1e-3


def nothing(*_: Any) -> None:
    pass


class Graphs:
    """A graph of a lab's device, its executable, and shortcuts for nodes."""

    def __init__(self, lab: Any) -> None:
        self.lab = lab
        self.device = lab.device
        self.graph = self.device.create_graph()
        self.kernels: dict[tuple[str, str, float], Any] = {}

    def add(self, run: Callable[[Any], object], *deps: Any) -> Any:
        return self.device.add_graph_node(self.graph, run, deps)

    def launch(
        self, name: str, *deps: Any, access: str = "", args: Any = (), cost_s: float = MS
    ) -> Any:
        """A kernel that does nothing, as a node."""
        kernel = self.lab.kernel(nothing, access, name=name, cost_s=lambda *_: cost_s)
        return self.add(
            lambda stream: self.device.launch(stream, self.lab.config, kernel, *args), *deps
        )

    def mark(self, what: object, *deps: Any, cost_s: float = MS) -> Any:
        """A kernel that appends ``what`` to the lab's log, as a node."""
        kernel = self.lab.kernel(
            lambda: self.lab.log.append(what), name=str(what), cost_s=lambda: cost_s
        )
        return self.add(lambda stream: self.device.launch(stream, self.lab.config, kernel), *deps)

    def write(self, address: int, *deps: Any) -> Any:
        return self.launch("writer", *deps, access="w", args=(self.lab.view(address, N),))

    def read(self, address: int, *deps: Any) -> Any:
        return self.launch("reader", *deps, access="r", args=(self.lab.view(address, N),))

    def done(self) -> Any:
        return self.device.instantiate_graph_blocking(self.graph)


@pytest.fixture
def graphs(lab: Any) -> Graphs:
    return Graphs(lab)


@pytest.fixture
def sim(lab: Any) -> Any:
    return lab.device.controls()


@pytest.fixture
def checked(open_lab: Callable[..., Any]) -> Iterator[Any]:
    lab = open_lab(key=object(), check_races=True)
    yield lab
    lab.device.controls().take_races()


def ready(lab: Any, stream: Any) -> int:
    """Memory whose contents everything knows of."""
    address = lab.allocate(stream, 4 * N)
    lab.device.fill(address, b"\1", 4 * N, stream)
    lab.run()
    assert lab.record(stream).is_done  # the host has seen it
    return int(address)


# -- time ------------------------------------------------------------------------------


def test_sides_of_a_diamond_overlap(lab: Any, graphs: Graphs) -> None:
    top = graphs.launch("top")
    sides = [graphs.launch(f"side {i}", top, cost_s=5 * MS) for i in range(3)]
    graphs.launch("bottom", *sides)
    stream = lab.stream()
    start_s = lab.device.clock_s()
    lab.device.launch_graph(graphs.done(), stream)
    lab.run()
    assert lab.device.clock_s() - start_s == pytest.approx(7 * MS)


def test_a_chain_takes_the_sum_of_its_nodes(lab: Any, graphs: Graphs) -> None:
    node = graphs.launch("first")
    for _ in range(9):
        node = graphs.launch("next", node)
    stream = lab.stream()
    executable = graphs.done()
    start_s = lab.device.clock_s()
    for _ in range(3):
        lab.device.launch_graph(executable, stream)
    lab.run()
    assert lab.device.clock_s() - start_s == pytest.approx(30 * MS)


def test_launches_of_one_executable_do_not_overlap(lab: Any, graphs: Graphs) -> None:
    short, long = graphs.launch("short"), graphs.launch("long", cost_s=4 * MS)
    graphs.launch("last", short, long, cost_s=4 * MS)  # behind the short one: the other is idle
    executable = graphs.done()
    start_s = lab.device.clock_s()
    for _ in range(3):
        lab.device.launch_graph(executable, lab.stream())
    lab.run()
    assert lab.device.clock_s() - start_s == pytest.approx(24 * MS)


def test_two_executables_overlap(lab: Any, graphs: Graphs) -> None:
    graphs.launch("long", cost_s=4 * MS)
    executables = [graphs.done(), graphs.done()]
    start_s = lab.device.clock_s()
    for executable in executables:
        lab.device.launch_graph(executable, lab.stream())
    lab.run()
    assert lab.device.clock_s() - start_s == pytest.approx(4 * MS)


@pytest.mark.parametrize("num", [1, 7, 40])
def test_a_chain_runs_on_one_branch_and_a_fork_on_as_many(
    lab: Any, graphs: Graphs, num: int
) -> None:
    first = node = graphs.launch("first")
    for _ in range(num):
        node = graphs.launch("chain", node)
    for _ in range(num - 1):
        graphs.launch("fork", first)
    assert graphs.done().num_branches == num


def test_a_branch_is_used_again_where_its_tail_comes_before_anyway(graphs: Graphs) -> None:
    node = graphs.launch("first")
    for _ in range(20):
        left, right = graphs.launch("left", node), graphs.launch("right", node)
        node = graphs.launch("join", left, right)
    assert graphs.done().num_branches == 2


# -- order, and the checker ------------------------------------------------------------


def test_edges_are_order_to_the_race_checker(checked: Any) -> None:
    graphs, stream = Graphs(checked), checked.stream()
    address = ready(checked, stream)
    node = graphs.write(address)
    readers = [graphs.read(address, node) for _ in range(3)]
    graphs.write(address, *readers)
    executable = graphs.done()
    other = checked.stream()
    checked.device.fill(address, b"\2", 4 * N, stream)
    for _ in range(2):
        checked.device.launch_graph(executable, stream)
        other.wait(checked.record(stream))
        checked.device.launch_graph(executable, other)
        stream.wait(checked.record(other))
    checked.device.fill(address, b"\2", 4 * N, stream)
    checked.run()
    assert checked.device.controls().races == ()


def test_launches_of_one_executable_are_in_order_to_the_race_checker(checked: Any) -> None:
    graphs, stream = Graphs(checked), checked.stream()
    address = ready(checked, stream)
    other = graphs.launch("other root")
    graphs.write(address, other, graphs.read(address))  # behind the other one
    executable = graphs.done()
    for _ in range(3):
        checked.device.launch_graph(executable, checked.stream())
    checked.run()
    assert checked.device.controls().races == ()


@pytest.mark.parametrize("second", ["read", "write"])
def test_a_missing_edge_is_a_race(checked: Any, second: str) -> None:
    graphs, stream = Graphs(checked), checked.stream()
    address = ready(checked, stream)
    first = graphs.launch("first")
    graphs.write(address, first)
    getattr(graphs, second)(address, first)
    checked.device.launch_graph(graphs.done(), stream)
    checked.run()
    (race,) = checked.device.controls().races
    assert race.kind is (RaceKind.READ_WRITE if second == "read" else RaceKind.WRITE_WRITE)
    assert "branch" in race.first.stream
    assert "branch" in race.second.stream


def test_a_missing_edge_between_far_nodes_is_a_race(checked: Any) -> None:
    """Nodes that ended long before, on branches that are idle: nothing orders them either."""
    graphs, stream = Graphs(checked), checked.stream()
    address = ready(checked, stream)
    graphs.write(address)
    node = graphs.launch("chain")
    for _ in range(10):
        node = graphs.launch("chain", node)
    graphs.read(address, node)
    checked.device.launch_graph(graphs.done(), stream)
    checked.run()
    assert [race.kind for race in checked.device.controls().races] == [RaceKind.READ_WRITE]


def test_what_the_launching_stream_lacks_is_a_race(checked: Any) -> None:
    graphs, stream, other = Graphs(checked), checked.stream(), checked.stream()
    address = ready(checked, stream)
    graphs.read(address)
    executable = graphs.done()
    checked.device.fill(address, b"\2", 4 * N, other)
    checked.device.launch_graph(executable, stream)
    checked.run()
    assert [race.kind for race in checked.device.controls().races] == [RaceKind.READ_WRITE]


def test_work_beside_a_launch_races_with_its_nodes(checked: Any) -> None:
    graphs, stream, other = Graphs(checked), checked.stream(), checked.stream()
    address = ready(checked, stream)
    graphs.write(address)
    checked.device.launch_graph(graphs.done(), stream)
    checked.device.fill(address, b"\2", 4 * N, other)
    checked.run()
    assert [race.kind for race in checked.device.controls().races] == [RaceKind.WRITE_WRITE]


def test_reports_name_the_op_that_a_node_was_noted_for(checked: Any) -> None:
    graphs, stream = Graphs(checked), checked.stream()
    address = ready(checked, stream)
    code = test_reports_name_the_op_that_a_node_was_noted_for.__code__
    for name in ("one", "two"):
        checked.device.checker.attribute((name, code, 0))
        graphs.write(address)
        checked.device.checker.attribute(None)
    checked.device.launch_graph(graphs.done(), stream)
    (race,) = checked.device.controls().races
    assert (race.first.name, race.second.name) == ("one", "two")
    assert checked.device.checker.doing() is None


@pytest.mark.parametrize("is_changed", [True, False])
def test_the_source_of_a_copy_is_watched_from_the_launch_on(checked: Any, is_changed: bool) -> None:
    graphs, stream = Graphs(checked), checked.stream()
    address = ready(checked, stream)
    host, view = checked.host(4 * N)
    graphs.add(lambda noting: checked.device.copy_h2d(address, host, 4 * N, noting))
    executable = graphs.done()
    for value in (1, 2, 3):
        view[:] = value  # between launches it may change
        checked.device.launch_graph(executable, stream)
        if is_changed and value == 3:
            view[:] = 9
        checked.run()
        assert checked.record(stream).is_done
    kinds = [race.kind for race in checked.device.controls().races]
    assert kinds == ([RaceKind.HOST_CHANGE] if is_changed else [])


def test_pinned_memory_that_passes_between_nodes_is_no_change_of_the_hosts(checked: Any) -> None:
    graphs, stream = Graphs(checked), checked.stream()
    address = ready(checked, stream)
    host, _ = checked.host(4 * N)
    node = graphs.add(lambda noting: checked.device.copy_d2h(host, address, 4 * N, noting))
    graphs.add(lambda noting: checked.device.copy_h2d(address, host, 4 * N, noting), node)
    executable = graphs.done()
    for _ in range(2):
        checked.device.launch_graph(executable, stream)
    checked.run()
    assert checked.device.controls().races == ()


# -- faults ------------------------------------------------------------------------------


def test_a_sticky_fault_in_a_node_loses_the_device_when_it_runs(
    lab: Any, graphs: Graphs, sim: Any
) -> None:
    graphs.mark("b", graphs.mark("a"))
    executable, stream = graphs.done(), lab.stream()
    with sim.fail(kind="launch", name="b", sticky=True):
        lab.device.launch_graph(executable, stream)
    event = lab.record(stream)
    with pytest.raises(DeviceLost, match="'b'"):
        while not event.is_done:
            assert lab.device.advance(0)
    assert lab.log == ["a"]
    with pytest.raises(DeviceLost):
        lab.device.launch_graph(executable, stream)
    lab.device.close_graph(executable)


def test_a_fault_elsewhere_ends_a_graph_in_flight(lab: Any, graphs: Graphs, sim: Any) -> None:
    graphs.mark("b", graphs.mark("a"))
    lab.device.launch_graph(graphs.done(), lab.stream())
    with sim.fail(kind="launch"):
        lab.launch(lab.stream(), nothing, name="fault", cost_s=lambda: 1.5 * MS)
    lab.run()
    assert lab.log == ["a"]


def test_a_peer_that_was_closed_is_missed_at_the_launch(open_lab: Callable[..., Any]) -> None:
    lab, peer = (open_lab(index, key="pair", devices=2) for index in (0, 1))
    graphs, stream = Graphs(lab), lab.stream()
    ours, theirs = lab.allocate(stream, 64), peer.allocate(peer.stream(), 64)
    graphs.add(lambda noting: lab.device.copy_peer(theirs, 1, ours, 0, 64, noting))
    executable = graphs.done()
    lab.device.launch_graph(executable, stream)
    lab.run()
    peer.device.close()
    with pytest.raises(DeviceError, match="device 1 was closed"):
        lab.device.launch_graph(executable, stream)


def test_a_body_that_raises_in_a_node_loses_the_device(lab: Any, graphs: Graphs) -> None:
    def bad() -> None:
        raise ZeroDivisionError

    graphs.add(lambda noting: lab.launch(noting, bad))
    stream = lab.stream()
    lab.device.launch_graph(graphs.done(), stream)
    event = lab.record(stream)
    with pytest.raises(DeviceLost, match="ZeroDivisionError"):
        while not event.is_done:
            assert lab.device.advance(0)


def test_a_refused_node_refuses_the_launch_and_leaves_nothing_half_done(
    lab: Any, graphs: Graphs, sim: Any
) -> None:
    address = lab.allocate(lab.stream(), 64)
    host, _ = lab.host(64)
    node = graphs.add(lambda noting: lab.device.copy_h2d(address, host, 64, noting))
    graphs.mark("b", graphs.mark("a", node))
    executable, stream = graphs.done(), lab.stream()
    lab.run()
    with sim.fail(kind="launch", nth=2, sticky=False), pytest.raises(LaunchFailed):
        lab.device.launch_graph(executable, stream)
    assert stream.num_work == stream.num_submitted == 0
    block = host_memory.find(host)
    assert block is not None
    assert block.num_uses == 0
    lab.run()
    assert lab.log == []
    lab.device.launch_graph(executable, stream)
    lab.run()
    assert lab.log == ["a", "b"]


def test_faults_are_asked_for_at_launches_and_not_before(
    lab: Any, graphs: Graphs, sim: Any
) -> None:
    with sim.fail(kind="launch"):
        graphs.mark("a")
        executable = graphs.done()
    stream = lab.stream()
    with sim.fail(kind="launch", nth=2, sticky=False) as rule:
        lab.device.launch_graph(executable, stream)
        with pytest.raises(LaunchFailed):
            lab.device.launch_graph(executable, stream)
    assert rule.num_fired == 1


def test_pinned_memory_that_went_is_missed_at_the_launch(lab: Any, graphs: Graphs) -> None:
    address = lab.allocate(lab.stream(), 64)
    host = lab.device.allocate_pinned_blocking(64)
    graphs.mark("first")
    graphs.add(lambda noting: lab.device.copy_h2d(address, host, 64, noting))
    executable = graphs.done()
    lab.run()
    lab.device.free_pinned_blocking(host)  # a graph holds nothing
    with pytest.raises(DeviceError, match="pinned"):
        lab.device.launch_graph(executable, lab.stream())
    lab.run()
    assert lab.log == []


def test_memory_that_was_freed_faults_in_a_node(lab: Any, graphs: Graphs) -> None:
    stream = lab.stream()
    address = lab.allocate(stream, 4 * N)
    graphs.write(address)
    executable = graphs.done()
    lab.device.launch_graph(executable, stream)
    lab.device.deallocate(address, stream)
    lab.run()
    lab.device.launch_graph(executable, stream)
    event = lab.record(stream)
    with pytest.raises(DeviceLost):
        while not event.is_done:
            assert lab.device.advance(0)


# -- queues and handles --------------------------------------------------------------------


def test_r7_a_launch_is_refused_where_the_driver_would_block(
    lab: Any, graphs: Graphs, sim: Any
) -> None:
    graphs.mark("a", cost_s=0)
    executable, stream = graphs.done(), lab.stream()
    gate = sim.gate(stream)
    for _ in range(lab.device.num_queued_max):
        lab.device.launch_graph(executable, stream)
    with pytest.raises(DeviceError, match="would block"):
        lab.device.launch_graph(executable, stream)
    assert sim.counters["would_block"] == 1
    gate.release()
    lab.run()
    assert len(lab.log) == lab.device.num_queued_max
    assert stream.num_work == 0


def fills(graphs: Graphs, address: int, num: int) -> Any:
    """An executable of fills, each after the one before."""
    node: list[Any] = []
    for _ in range(num):
        node = [graphs.add(lambda noting: graphs.device.fill(address, b"\1", 8, noting), *node)]
    return graphs.done()


def test_r7_a_launch_is_refused_that_has_too_few_places_left(
    lab: Any, graphs: Graphs, sim: Any
) -> None:
    stream = lab.stream()
    executable = fills(graphs, lab.allocate(stream, 64), 50)
    lab.run()
    gate = sim.gate(stream)
    for _ in range(20):
        assert lab.device.launch_graph(executable, stream) == 50
    with pytest.raises(DeviceError, match=r"1000 launches and copies .* needs 50 places more"):
        lab.device.launch_graph(executable, stream)
    for _ in range(22):  # what is left
        lab.launch(stream, nothing)
    assert sim.counters["would_block"] == 1
    gate.release()
    lab.run()
    assert stream.num_work == 0
    lab.device.launch_graph(executable, stream)


@pytest.mark.parametrize("held_by", ["gate", "wait", "launch"])
def test_r7_more_places_than_a_queue_has_need_a_stream_that_nothing_holds(
    lab: Any, graphs: Graphs, sim: Any, held_by: str
) -> None:
    stream, other = lab.stream(), lab.stream()
    executable = fills(graphs, lab.allocate(stream, 64), lab.device.num_queued_max + 1)
    lab.run()
    if held_by == "gate":
        gate = sim.gate(stream)
    elif held_by == "wait":
        gate = sim.gate(other)
        lab.launch(other, nothing)
        stream.wait(lab.record(other))
    else:
        lab.device.launch_graph(executable, other)
    with pytest.raises(DeviceError, match="would block"):
        lab.device.launch_graph(executable, stream)
    if held_by != "launch":
        gate.release()
    lab.run()
    lab.device.launch_graph(executable, stream)
    lab.run()
    assert sim.counters["would_block"] == 1


@pytest.mark.parametrize("what", ["record", "wait", "sync", "prefetch"])
def test_events_and_waiting_are_no_part_of_a_graph(lab: Any, graphs: Graphs, what: str) -> None:
    event = lab.record(lab.stream())
    managed = lab.device.allocate_managed_blocking(64)

    def run(noting: Any) -> None:
        if what == "prefetch":
            lab.device.prefetch(managed, 64, Location("device", 0), noting)
        elif what == "sync":
            noting.sync()
        else:
            getattr(noting, what)(event)

    with pytest.raises(DeviceError, match=f"{what} can't be part of a graph"):
        graphs.add(run)
    lab.device.free_linear_blocking(managed)


def test_the_stream_of_a_node_is_good_for_its_run_alone(lab: Any, graphs: Graphs) -> None:
    kept: list[Any] = []
    graphs.add(kept.append)
    with pytest.raises(DeviceError, match="that node's run alone"):
        lab.mark(kept[0], "late")


def test_handles_of_another_device_are_refused(lab: Any, graphs: Graphs) -> None:
    other = open_device(0, Settings(sim=SimOptions(clock="virtual")), object())
    graphs.mark("a")
    executable = graphs.done()
    calls: list[Callable[[], object]] = [
        lambda: other.add_graph_node(graphs.graph, nothing, ()),
        lambda: other.instantiate_graph_blocking(graphs.graph),
        lambda: other.launch_graph(executable, other.create_stream()),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="another device"):
            call()
    other.close()


def test_a_device_closes_with_a_launch_in_flight(lab: Any, graphs: Graphs, sim: Any) -> None:
    graphs.mark("b", graphs.mark("a"))
    executable, stream = graphs.done(), lab.stream()
    sim.gate(stream)
    lab.device.launch_graph(executable, stream)
    lab.device.close()
    with pytest.raises(Closed):
        lab.device.launch_graph(executable, stream)
    lab.device.close_graph(executable)
    assert lab.log == []


def test_closing_an_executable_lets_its_launch_run(lab: Any, graphs: Graphs, sim: Any) -> None:
    graphs.mark("b", graphs.mark("a"))
    executable, stream = graphs.done(), lab.stream()
    with sim.gate(stream):
        lab.device.launch_graph(executable, stream)
        lab.device.close_graph(executable)
    lab.run()
    assert lab.log == ["a", "b"]


def test_synchronising_the_device_waits_for_graphs(lab: Any, graphs: Graphs) -> None:
    graphs.mark("b", graphs.mark("a"))
    lab.device.launch_graph(graphs.done(), lab.stream())
    lab.device.synchronize_blocking()
    assert lab.log == ["a", "b"]


def test_r15_a_seed_gives_one_schedule(open_lab: Callable[..., Any]) -> None:
    def order(seed: int) -> list[str]:
        lab = open_lab(key=object(), seed=seed)
        graphs = Graphs(lab)
        first = graphs.mark("first")
        forks = [graphs.mark(i, first) for i in range(12)]
        graphs.mark("last", *forks)
        executable, stream = graphs.done(), lab.stream()
        with lab.device.controls().log() as log:
            for _ in range(3):
                lab.device.launch_graph(executable, stream)
            lab.run()
        return str(log).splitlines()

    assert order(5) == order(5)
    assert order(5) != order(6)
    assert len(order(0)) == 42


def test_predicted_time_charges_the_host_for_one_call(open_lab: Callable[..., Any]) -> None:
    lab = open_lab(key=object(), predict=True)
    graphs = Graphs(lab)
    stream = lab.stream()
    args = (lab.view(lab.allocate(stream, 4 * N), N),)
    node = graphs.launch("k", access="w", args=args, cost_s=0)
    for _ in range(99):
        node = graphs.launch("k", node, access="w", args=args, cost_s=0)
    executable = graphs.done()
    start_s = lab.device.clock_s()
    lab.device.launch_graph(executable, stream)
    assert lab.device.clock_s() - start_s == pytest.approx(lab.device.gpu.model.host_launch_s)
    lab.run()
    assert stream.num_work == 0


def test_an_update_that_differs_says_where(lab: Any, graphs: Graphs) -> None:
    graphs.mark("b", graphs.mark("a"))
    executable = graphs.done()
    other = Graphs(lab)
    first = other.mark("a")
    other.add(lambda noting: lab.device.fill(0x100, b"\1", 1, noting), first)
    with pytest.raises(DeviceError, match=r"node 1 does \['launch'\], and \['fill'\]"):
        lab.device.update_graph_blocking(executable, other.graph)
    other = Graphs(lab)
    other.mark("a"), other.mark("b")
    with pytest.raises(DeviceError, match="node 1 has other dependencies"):
        lab.device.update_graph_blocking(executable, other.graph)
    other.mark("c")
    with pytest.raises(DeviceError, match="2 nodes can't be updated with one of 3"):
        lab.device.update_graph_blocking(executable, other.graph)
    assert np.array_equal(executable.leaves, [1])
