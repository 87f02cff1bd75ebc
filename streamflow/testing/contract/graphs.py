"""Graphs: what is noted down once and done by every launch, in the order of the edges alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from streamflow.testing.contract.harness import Harness, Rig, drain, fidelity, settle
from streamflow.testing.contract.kernels import AXPY

__all__ = ["F32", "NBYTES", "Graph", "GraphContract", "N", "WithGraph", "floats", "values"]

F32 = np.dtype(np.float32)
N = 1000
NBYTES = 4 * N

Run = Callable[[Any], object]


class Graph:
    """A graph under construction, and the executables made of it; all closed at the end."""

    def __init__(self, rig: Rig) -> None:
        self.backend = rig.backend
        self.handle = rig.backend.create_graph()
        self._open: list[Any] = [self.handle]
        self.kernel = rig.backend.load_kernel_blocking(AXPY)

    def add(self, run: Run, *deps: Any) -> Any:
        """A node that does what ``run`` submits."""
        return self.backend.add_graph_node(self.handle, run, deps)

    def axpy(self, y: int, a: float, x: int, *deps: Any, num: int = 1) -> Any:
        """A node that adds ``a * x`` to ``y``, so often, by a kernel each time."""
        backend = self.backend
        config = backend.launch_config((8, 1, 1), (128, 1, 1), 0)
        args = (
            backend.array_argument(y, (N,), F32),
            np.float32(a),
            backend.array_argument(x, (N,), F32),
            N,
        )

        def run(stream: Any) -> None:
            for _ in range(num):
                backend.launch(stream, config, self.kernel, *args)

        return self.add(run, *deps)

    def fill(self, address: int, value: float, *deps: Any) -> Any:
        """A node that makes all of ``address`` one value."""
        pattern = np.float32(value).tobytes()
        return self.add(lambda stream: self.backend.fill(address, pattern, N, stream), *deps)

    def empty(self, *deps: Any) -> Any:
        """A node that does nothing."""
        return self.add(lambda stream: None, *deps)

    def instantiate(self) -> Any:
        executable = self.backend.instantiate_graph_blocking(self.handle)
        self._open.append(executable)
        return executable

    def close(self) -> None:
        while self._open:
            self.backend.close_graph(self._open.pop())


def floats(rig: Rig, value: float) -> int:
    """Device memory of ``N`` floats, all of them ``value``."""
    return rig.put(np.full(N, value, np.float32).view(np.uint8))


def values(rig: Rig, address: int) -> set[float]:
    """The values that are there once the rig's stream has come this far."""
    return {float(value) for value in rig.get(address, NBYTES).view(np.float32)}


def _until(backend: Any, is_so: Callable[[], bool]) -> None:
    """Let time pass until ``is_so()``: by moving a virtual clock, or by looking again."""
    end_s = time.monotonic() + 10
    while not is_so():
        moved = backend.advance(0)
        assert moved or (not backend.is_virtual and time.monotonic() < end_s)


class WithGraph(Harness):
    """What tests of graphs stand on."""

    @pytest.fixture
    def graph(self, rig: Rig) -> Iterator[Graph]:
        graph = Graph(rig)
        yield graph
        rig.finish()
        graph.close()


class GraphContract(WithGraph):
    """In which order a graph of one device runs, inside and outside."""

    # -- order inside ----------------------------------------------------------------------

    @fidelity
    def test_c40_a_chain_runs_in_order_at_every_launch(self, rig: Rig, graph: Graph) -> None:
        """Every launch of a graph does what its nodes say, in the order of its edges."""
        y = floats(rig, 1)
        node = graph.axpy(y, 1.0, y)
        for _ in range(9):
            node = graph.axpy(y, 1.0, y, node)  # doubles
        executable = graph.instantiate()
        rig.backend.launch_graph(executable, rig.stream)
        assert values(rig, y) == {1024.0}
        rig.backend.launch_graph(executable, rig.stream)
        rig.backend.launch_graph(executable, rig.stream)
        assert values(rig, y) == {float(2**30)}

    def test_a_chain_may_be_longer_than_a_streams_queue(self, rig: Rig, graph: Graph) -> None:
        y, one = floats(rig, 0), floats(rig, 1)
        node = graph.axpy(y, 1.0, one)
        num = rig.backend.num_queued_max + 10
        for _ in range(num - 1):
            node = graph.axpy(y, 1.0, one, node)
        rig.backend.launch_graph(graph.instantiate(), rig.stream)
        assert values(rig, y) == {float(num)}

    def test_a_diamond_joins_both_sides(self, rig: Rig, graph: Graph) -> None:
        top, left, right, bottom = (floats(rig, 0) for _ in range(4))
        first = graph.fill(top, 3)
        sides = [graph.fill(left, 10, first), graph.fill(right, 20, first)]
        sides = [
            graph.axpy(left, 1.0, top, sides[0]),
            graph.axpy(right, 2.0, top, sides[1]),
        ]
        last = graph.fill(bottom, 0)
        last = graph.axpy(bottom, 1.0, left, *sides, last)
        graph.axpy(bottom, 1.0, right, last)
        executable = graph.instantiate()
        for _ in range(3):
            rig.backend.launch_graph(executable, rig.stream)
        assert values(rig, bottom) == {39.0}

    def test_a_fork_of_many_joins_in_one_node(self, rig: Rig, graph: Graph) -> None:
        total = floats(rig, 0)
        parts = [floats(rig, 0) for _ in range(12)]
        first = graph.fill(total, 0)
        forks = [graph.fill(part, at + 1, first) for at, part in enumerate(parts)]
        joined = graph.empty(*forks)
        for part in parts:
            joined = graph.axpy(total, 1.0, part, joined)
        executable = graph.instantiate()
        for _ in range(2):
            rig.backend.launch_graph(executable, rig.stream)
        assert values(rig, total) == {float(sum(range(1, 13)))}

    @fidelity
    def test_nodes_that_no_edge_orders_run_independently(self, rig: Rig) -> None:
        """A node waits for nothing but what its edges name, whatever was added before it."""
        backend, graph = rig.backend, Graph(rig)
        address = floats(rig, 5)
        host, view = rig.pinned(NBYTES)
        with self.running(rig, rig.stream):
            pass  # its kernel is loaded now: a capture is no place for that
        rig.finish()
        with ExitStack() as stack:
            graph.add(lambda stream: stack.enter_context(self.running(rig, stream)))
            graph.add(lambda stream: backend.copy_d2h(host, address, NBYTES, stream))
            executable = graph.instantiate()
            backend.launch_graph(executable, rig.stream)
            done = rig.mark(rig.stream)
            _until(backend, lambda: bool((view.view(np.float32) == 5).all()))
            assert not done.is_done
        drain(backend, done)
        graph.close()

    def test_an_empty_node_keeps_the_order(self, rig: Rig, graph: Graph) -> None:
        y, x = floats(rig, 0), floats(rig, 0)
        node = graph.fill(x, 4)
        for _ in range(3):
            node = graph.empty(node)
        graph.axpy(y, 1.0, x, node)
        rig.backend.launch_graph(graph.instantiate(), rig.stream)
        assert values(rig, y) == {4.0}

    @pytest.mark.parametrize("num_empty", [0, 3])
    def test_a_graph_that_does_nothing_can_be_launched(
        self, rig: Rig, graph: Graph, num_empty: int
    ) -> None:
        for _ in range(num_empty):
            graph.empty()
        executable = graph.instantiate()
        rig.backend.launch_graph(executable, rig.stream)
        rig.backend.launch_graph(executable, rig.stream)
        rig.finish()

    def test_a_node_may_stand_for_several_pieces_of_work(self, rig: Rig, graph: Graph) -> None:
        backend = rig.backend
        x, y = floats(rig, 0), floats(rig, 0)

        def run(stream: Any) -> None:
            backend.fill(x, np.float32(6).tobytes(), N, stream)
            backend.copy_d2d(y, x, NBYTES, stream)
            backend.fill(x, np.float32(1).tobytes(), N, stream)

        graph.axpy(y, 1.0, x, graph.add(run))
        executable = graph.instantiate()
        for _ in range(2):
            backend.launch_graph(executable, rig.stream)
        assert values(rig, y) == {7.0}

    def test_naming_a_dependency_twice_is_naming_it_once(self, rig: Rig, graph: Graph) -> None:
        x, y = floats(rig, 0), floats(rig, 0)
        node, other = graph.fill(x, 2), graph.fill(y, 1)
        graph.axpy(y, 1.0, x, node, other, node)
        rig.backend.launch_graph(graph.instantiate(), rig.stream)
        assert values(rig, y) == {3.0}

    # -- order outside ---------------------------------------------------------------------

    @fidelity
    def test_a_launch_keeps_its_place_in_the_stream(self, rig: Rig, graph: Graph) -> None:
        """A graph runs after what its stream held at the launch, and before what comes later."""
        backend = rig.backend
        x, *parts = (floats(rig, 0) for _ in range(4))
        for part in parts:
            graph.axpy(part, 1.0, x)
        executable = graph.instantiate()
        with self.stall(rig, rig.stream):
            for address, value in ((x, 1), *((part, 50) for part in parts)):
                backend.fill(address, np.float32(value).tobytes(), N, rig.stream)
            backend.launch_graph(executable, rig.stream)
            backend.fill(x, np.float32(100).tobytes(), N, rig.stream)
            done = rig.mark(rig.stream)
            settle(backend)
            assert not done.is_done
        drain(backend, done)
        assert [values(rig, part) for part in parts] == [{51.0}] * 3
        assert values(rig, x) == {100.0}

    def test_streams_that_wait_for_a_launch_see_all_of_it(self, rig: Rig, graph: Graph) -> None:
        backend, other = rig.backend, rig.backend.create_stream()
        parts = [floats(rig, 0) for _ in range(4)]
        host, view = rig.pinned(4 * NBYTES)
        rig.finish()
        for part in parts:
            graph.fill(part, 8)
        executable = graph.instantiate()
        with self.stall(rig, rig.stream):
            backend.launch_graph(executable, rig.stream)
            other.wait(rig.mark(rig.stream))
            for at, part in enumerate(parts):
                backend.copy_d2h(host + at * NBYTES, part, NBYTES, other)
        rig.finish(other)
        assert (view.view(np.float32) == 8).all()
        other.close()

    @fidelity
    def test_launches_of_one_executable_run_one_after_the_other(
        self, rig: Rig, graph: Graph
    ) -> None:
        """A launch waits for the executable's launch before it, also on another stream."""
        backend, other = rig.backend, rig.backend.create_stream()
        x, y, total = floats(rig, 0), floats(rig, 0), floats(rig, 0)
        # The other root of the next launch has nothing before it but the launch before.
        node = graph.axpy(y, 1.0, x, graph.fill(x, 1), graph.fill(y, 0))
        graph.axpy(total, 1.0, y, node)
        executable = graph.instantiate()
        with self.stall(rig, rig.stream):
            backend.launch_graph(executable, rig.stream)
            backend.launch_graph(executable, other)
            done = rig.mark(other)
            settle(backend)
            assert not done.is_done
        drain(backend, done)
        backend.launch_graph(executable, rig.stream)
        assert values(rig, y) == {1.0}
        assert values(rig, total) == {3.0}
        other.close()

    @fidelity
    def test_two_executables_of_one_graph_run_independently(self, rig: Rig, graph: Graph) -> None:
        """Each executable of a graph is launched without regard to the others."""
        backend, other = rig.backend, rig.backend.create_stream()
        graph.fill(floats(rig, 0), 1)
        first, second = graph.instantiate(), graph.instantiate()
        with self.stall(rig, rig.stream):
            backend.launch_graph(first, rig.stream)
            backend.launch_graph(second, other)
            rig.finish(other)
        other.close()

    def test_two_graphs_at_once(self, rig: Rig, graph: Graph) -> None:
        backend, other, second = rig.backend, rig.backend.create_stream(), Graph(rig)
        x, y = floats(rig, 1), floats(rig, 1)
        ours, theirs = graph.axpy(x, 1.0, x), second.axpy(y, 2.0, y)
        for _ in range(5):  # built in turns, too
            ours, theirs = graph.axpy(x, 1.0, x, ours), second.axpy(y, 2.0, y, theirs)
        executables = graph.instantiate(), second.instantiate()
        rig.finish()
        for _ in range(2):
            backend.launch_graph(executables[0], rig.stream)
            backend.launch_graph(executables[1], other)
        rig.finish(other)
        assert values(rig, x) == {float(2**12)}
        assert values(rig, y) == {float(3**12)}
        second.close()
        other.close()
