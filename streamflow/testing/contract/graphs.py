"""Graphs: what is noted down once and done by every launch, in the order of the edges alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from streamflow.backends.base import Access
from streamflow.errors import Closed, DeviceError, LaunchFailed
from streamflow.testing.contract.harness import Harness, Rig, drain, fidelity, settle
from streamflow.testing.contract.kernels import AXPY
from streamflow.testing.contract.kinds import refused

__all__ = ["GraphContract"]

_F32 = np.dtype(np.float32)
_I32 = np.dtype(np.int32)
_N = 1000
_NBYTES = 4 * _N

Run = Callable[[Any], object]


class _Graph:
    """A graph under construction, and the executables made of it; all closed at the end."""

    def __init__(self, rig: Rig) -> None:
        self.backend = rig.backend
        self.handle = rig.backend.create_graph()
        self._open: list[Any] = [self.handle]
        self.kernel = rig.backend.load_kernel_blocking(AXPY)

    def add(self, run: Run, *deps: Any) -> Any:
        """A node that does what ``run`` submits."""
        return self.backend.add_graph_node(self.handle, run, deps)

    def axpy(self, y: int, a: float, x: int, *deps: Any) -> Any:
        """A node that adds ``a * x`` to ``y``."""
        backend = self.backend
        config = backend.launch_config((8, 1, 1), (128, 1, 1), 0)
        args = (
            backend.array_argument(y, (_N,), _F32),
            np.float32(a),
            backend.array_argument(x, (_N,), _F32),
            _N,
        )
        return self.add(lambda stream: backend.launch(stream, config, self.kernel, *args), *deps)

    def fill(self, address: int, value: float, *deps: Any) -> Any:
        """A node that makes all of ``address`` one value."""
        pattern = np.float32(value).tobytes()
        return self.add(lambda stream: self.backend.fill(address, pattern, _N, stream), *deps)

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


def _until(backend: Any, is_so: Callable[[], bool]) -> None:
    """Let time pass until ``is_so()``: by moving a virtual clock, or by looking again."""
    end_s = time.monotonic() + 10
    while not is_so():
        moved = backend.advance(0)
        assert moved or (not backend.is_virtual and time.monotonic() < end_s)


def _touch(rig: Rig, address: int, run: Callable[[Any], None], stream: Any) -> None:
    """Foreign code on ``stream``: where streams are CUDA's, ``run`` gets nothing."""
    backend = rig.backend
    argument = None if backend.is_cuda else backend.array_argument(address, (_N,), _F32)
    backend.call(stream, "foreign", run, (Access.READ_WRITE,), argument)


def _floats(rig: Rig, value: float) -> int:
    return rig.put(np.full(_N, value, np.float32).view(np.uint8))


def _values(rig: Rig, address: int) -> set[float]:
    """The values that are there once the rig's stream has come this far."""
    return {float(value) for value in rig.get(address, _NBYTES).view(np.float32)}


class GraphContract(Harness):
    """Graphs of one device."""

    @pytest.fixture
    def graph(self, rig: Rig) -> Iterator[_Graph]:
        graph = _Graph(rig)
        yield graph
        rig.finish()
        graph.close()

    # -- order inside ----------------------------------------------------------------------

    @fidelity
    def test_c40_a_chain_runs_in_order_at_every_launch(self, rig: Rig, graph: _Graph) -> None:
        """Every launch of a graph does what its nodes say, in the order of its edges."""
        y = _floats(rig, 1)
        node = graph.axpy(y, 1.0, y)
        for _ in range(9):
            node = graph.axpy(y, 1.0, y, node)  # doubles
        executable = graph.instantiate()
        rig.backend.launch_graph(executable, rig.stream)
        assert _values(rig, y) == {1024.0}
        rig.backend.launch_graph(executable, rig.stream)
        rig.backend.launch_graph(executable, rig.stream)
        assert _values(rig, y) == {float(2**30)}

    def test_a_chain_may_be_longer_than_a_streams_queue(self, rig: Rig, graph: _Graph) -> None:
        y, one = _floats(rig, 0), _floats(rig, 1)
        node = graph.axpy(y, 1.0, one)
        num = rig.backend.num_queued_max + 10
        for _ in range(num - 1):
            node = graph.axpy(y, 1.0, one, node)
        rig.backend.launch_graph(graph.instantiate(), rig.stream)
        assert _values(rig, y) == {float(num)}

    def test_a_diamond_joins_both_sides(self, rig: Rig, graph: _Graph) -> None:
        top, left, right, bottom = (_floats(rig, 0) for _ in range(4))
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
        assert _values(rig, bottom) == {39.0}

    def test_a_fork_of_many_joins_in_one_node(self, rig: Rig, graph: _Graph) -> None:
        total = _floats(rig, 0)
        parts = [_floats(rig, 0) for _ in range(12)]
        first = graph.fill(total, 0)
        forks = [graph.fill(part, at + 1, first) for at, part in enumerate(parts)]
        joined = graph.empty(*forks)
        for part in parts:
            joined = graph.axpy(total, 1.0, part, joined)
        executable = graph.instantiate()
        for _ in range(2):
            rig.backend.launch_graph(executable, rig.stream)
        assert _values(rig, total) == {float(sum(range(1, 13)))}

    @fidelity
    def test_nodes_that_no_edge_orders_run_independently(self, rig: Rig) -> None:
        """A node waits for nothing but what its edges name, whatever was added before it."""
        backend, graph = rig.backend, _Graph(rig)
        address = _floats(rig, 5)
        host, view = rig.pinned(_NBYTES)
        with self.running(rig, rig.stream):
            pass  # its kernel is loaded now: a capture is no place for that
        rig.finish()
        with ExitStack() as stack:
            graph.add(lambda stream: stack.enter_context(self.running(rig, stream)))
            graph.add(lambda stream: backend.copy_d2h(host, address, _NBYTES, stream))
            executable = graph.instantiate()
            backend.launch_graph(executable, rig.stream)
            done = rig.mark(rig.stream)
            _until(backend, lambda: bool((view.view(np.float32) == 5).all()))
            assert not done.is_done
        drain(backend, done)
        graph.close()

    def test_an_empty_node_keeps_the_order(self, rig: Rig, graph: _Graph) -> None:
        y, x = _floats(rig, 0), _floats(rig, 0)
        node = graph.fill(x, 4)
        for _ in range(3):
            node = graph.empty(node)
        graph.axpy(y, 1.0, x, node)
        rig.backend.launch_graph(graph.instantiate(), rig.stream)
        assert _values(rig, y) == {4.0}

    @pytest.mark.parametrize("num_empty", [0, 3])
    def test_a_graph_that_does_nothing_can_be_launched(
        self, rig: Rig, graph: _Graph, num_empty: int
    ) -> None:
        for _ in range(num_empty):
            graph.empty()
        executable = graph.instantiate()
        rig.backend.launch_graph(executable, rig.stream)
        rig.backend.launch_graph(executable, rig.stream)
        rig.finish()

    def test_a_node_may_stand_for_several_pieces_of_work(self, rig: Rig, graph: _Graph) -> None:
        backend = rig.backend
        x, y = _floats(rig, 0), _floats(rig, 0)

        def run(stream: Any) -> None:
            backend.fill(x, np.float32(6).tobytes(), _N, stream)
            backend.copy_d2d(y, x, _NBYTES, stream)
            backend.fill(x, np.float32(1).tobytes(), _N, stream)

        graph.axpy(y, 1.0, x, graph.add(run))
        executable = graph.instantiate()
        for _ in range(2):
            backend.launch_graph(executable, rig.stream)
        assert _values(rig, y) == {7.0}

    def test_naming_a_dependency_twice_is_naming_it_once(self, rig: Rig, graph: _Graph) -> None:
        x, y = _floats(rig, 0), _floats(rig, 0)
        node, other = graph.fill(x, 2), graph.fill(y, 1)
        graph.axpy(y, 1.0, x, node, other, node)
        rig.backend.launch_graph(graph.instantiate(), rig.stream)
        assert _values(rig, y) == {3.0}

    # -- order outside ---------------------------------------------------------------------

    @fidelity
    def test_a_launch_keeps_its_place_in_the_stream(self, rig: Rig, graph: _Graph) -> None:
        """A graph runs after what its stream held at the launch, and before what comes later."""
        backend = rig.backend
        x, *parts = (_floats(rig, 0) for _ in range(4))
        for part in parts:
            graph.axpy(part, 1.0, x)
        executable = graph.instantiate()
        with self.stall(rig, rig.stream):
            for address, value in ((x, 1), *((part, 50) for part in parts)):
                backend.fill(address, np.float32(value).tobytes(), _N, rig.stream)
            backend.launch_graph(executable, rig.stream)
            backend.fill(x, np.float32(100).tobytes(), _N, rig.stream)
            done = rig.mark(rig.stream)
            settle(backend)
            assert not done.is_done
        drain(backend, done)
        assert [_values(rig, part) for part in parts] == [{51.0}] * 3
        assert _values(rig, x) == {100.0}

    def test_streams_that_wait_for_a_launch_see_all_of_it(self, rig: Rig, graph: _Graph) -> None:
        backend, other = rig.backend, rig.backend.create_stream()
        parts = [_floats(rig, 0) for _ in range(4)]
        host, view = rig.pinned(4 * _NBYTES)
        rig.finish()
        for part in parts:
            graph.fill(part, 8)
        executable = graph.instantiate()
        with self.stall(rig, rig.stream):
            backend.launch_graph(executable, rig.stream)
            other.wait(rig.mark(rig.stream))
            for at, part in enumerate(parts):
                backend.copy_d2h(host + at * _NBYTES, part, _NBYTES, other)
        rig.finish(other)
        assert (view.view(np.float32) == 8).all()
        other.close()

    @fidelity
    def test_launches_of_one_executable_run_one_after_the_other(
        self, rig: Rig, graph: _Graph
    ) -> None:
        """A launch waits for the executable's launch before it, also on another stream."""
        backend, other = rig.backend, rig.backend.create_stream()
        x, y, total = _floats(rig, 0), _floats(rig, 0), _floats(rig, 0)
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
        assert _values(rig, y) == {1.0}
        assert _values(rig, total) == {3.0}
        other.close()

    @fidelity
    def test_two_executables_of_one_graph_run_independently(self, rig: Rig, graph: _Graph) -> None:
        """Each executable of a graph is launched without regard to the others."""
        backend, other = rig.backend, rig.backend.create_stream()
        graph.fill(_floats(rig, 0), 1)
        first, second = graph.instantiate(), graph.instantiate()
        with self.stall(rig, rig.stream):
            backend.launch_graph(first, rig.stream)
            backend.launch_graph(second, other)
            rig.finish(other)
        other.close()

    def test_two_graphs_at_once(self, rig: Rig, graph: _Graph) -> None:
        backend, other, second = rig.backend, rig.backend.create_stream(), _Graph(rig)
        x, y = _floats(rig, 1), _floats(rig, 1)
        ours, theirs = graph.axpy(x, 1.0, x), second.axpy(y, 2.0, y)
        for _ in range(5):  # built in turns, too
            ours, theirs = graph.axpy(x, 1.0, x, ours), second.axpy(y, 2.0, y, theirs)
        executables = graph.instantiate(), second.instantiate()
        rig.finish()
        for _ in range(2):
            backend.launch_graph(executables[0], rig.stream)
            backend.launch_graph(executables[1], other)
        rig.finish(other)
        assert _values(rig, x) == {float(2**12)}
        assert _values(rig, y) == {float(3**12)}
        second.close()
        other.close()

    def test_a_launch_takes_one_place_of_the_queue(self, rig: Rig, graph: _Graph) -> None:
        backend, y = rig.backend, _floats(rig, 0)
        node = graph.fill(y, 1)
        for _ in range(49):
            node = graph.fill(y, 1, node)
        executable = graph.instantiate()
        with self.stall(rig, rig.stream):
            held = rig.mark(rig.stream)
            for _ in range(100):  # 5000 nodes
                backend.launch_graph(executable, rig.stream)
            assert not held.is_done  # no launch has blocked until what holds the stream gave up
        assert _values(rig, y) == {1.0}

    # -- what nodes do ---------------------------------------------------------------------

    @fidelity
    @pytest.mark.parametrize("width", [1, 2, 4, 8, 16])
    def test_fills_of_every_width(self, rig: Rig, graph: _Graph, width: int) -> None:
        """A node fills with patterns of every width, and touches nothing around."""
        backend, count = rig.backend, 5000
        pattern = bytes(range(1, width + 1))
        address = rig.put(np.zeros(width * count + 32, np.uint8))
        first = graph.add(lambda stream: backend.fill(address + 16, pattern, count, stream))
        graph.add(lambda stream: backend.fill(address + 16, pattern, 3, stream), first)
        executable = graph.instantiate()
        backend.launch_graph(executable, rig.stream)
        expected = np.zeros(width * count + 32, np.uint8)
        expected[16:-16] = np.tile(np.frombuffer(pattern, np.uint8), count)
        np.testing.assert_array_equal(rig.get(address, expected.nbytes), expected)

    @fidelity
    def test_copies_read_and_write_pinned_memory_at_every_launch(
        self, rig: Rig, graph: _Graph
    ) -> None:
        """The copies of a graph move at each launch what is there at that time."""
        backend, x, y = rig.backend, _floats(rig, 0), _floats(rig, 0)
        source, put = rig.pinned(_NBYTES)
        target, got = rig.pinned(_NBYTES)
        rig.finish()
        node = graph.add(lambda stream: backend.copy_h2d(x, source, _NBYTES, stream))
        node = graph.add(lambda stream: backend.copy_d2d(y, x, _NBYTES, stream), node)
        node = graph.axpy(y, 1.0, x, node)
        graph.add(lambda stream: backend.copy_d2h(target, y, _NBYTES, stream), node)
        executable = graph.instantiate()
        for value in (1, 5, 9):
            put.view(np.float32)[:] = value
            backend.launch_graph(executable, rig.stream)
            rig.finish()
            assert (got.view(np.float32) == 2 * value).all()

    def test_foreign_code_is_part_of_a_graph(self, rig: Rig, graph: _Graph) -> None:
        backend, y = rig.backend, _floats(rig, 0)
        seen: list[int] = []

        def run(stream: Any) -> None:
            def body(array: Any) -> None:
                seen.append(threading.get_ident())
                if backend.is_cuda:
                    backend.fill(y, np.float32(3).tobytes(), _N, stream)
                else:
                    array[:] = 3

            _touch(rig, y, body, stream)

        graph.axpy(y, 1.0, y, graph.add(run))
        executable = graph.instantiate()
        for _ in range(3):
            backend.launch_graph(executable, rig.stream)
        assert _values(rig, y) == {6.0}
        assert len(seen) == (1 if backend.is_cuda else 3)

    def test_copies_from_host_to_host_are_part_of_a_graph(self, rig: Rig, graph: _Graph) -> None:
        backend = rig.backend
        mapped = backend.allocate_mapped_blocking(_NBYTES)
        source, put = rig.pinned(_NBYTES)
        target, got = rig.pinned(_NBYTES)
        node = graph.add(lambda stream: backend.copy_h2d(mapped, source, _NBYTES, stream))
        graph.add(lambda stream: backend.copy_d2h(target, mapped, _NBYTES, stream), node)
        executable = graph.instantiate()
        for value in (3, 4):
            put[:] = value
            backend.launch_graph(executable, rig.stream)
            rig.finish()
            assert (got == value).all()
        graph.close()
        backend.free_pinned_blocking(mapped)

    def test_a_graph_may_be_a_node_of_another(self, rig: Rig, graph: _Graph) -> None:
        backend = rig.backend
        x, y = _floats(rig, 0), _floats(rig, 0)
        child = _Graph(rig)
        child.axpy(y, 1.0, x, child.axpy(x, 1.0, x))
        first = graph.fill(x, 1)
        node = backend.embed_graph(graph.handle, child.handle, [first, graph.fill(y, 0)])
        node = backend.embed_graph(graph.handle, child.handle, [node])
        child.fill(x, 77)  # it is what it was
        child.close()
        graph.axpy(y, 10.0, x, node)
        executable = graph.instantiate()
        for _ in range(2):
            backend.launch_graph(executable, rig.stream)
        assert _values(rig, y) == {46.0}
        other = _Graph(rig)
        with pytest.raises(ValueError, match="own graph"):
            backend.embed_graph(other.handle, graph.handle, [node])
        other.close()

    # -- updating --------------------------------------------------------------------------

    def _chain(self, rig: Rig, y: int, a: float, x: int, value: float) -> _Graph:
        graph = _Graph(rig)
        graph.axpy(y, a, x, graph.fill(x, value), graph.fill(y, 0))
        return graph

    @fidelity
    def test_an_update_changes_what_later_launches_do(self, rig: Rig) -> None:
        """An executable updated with a graph of the same shape does what that says from then on."""
        backend = rig.backend
        x, y, z = (_floats(rig, 0) for _ in range(3))
        first = self._chain(rig, y, 2.0, x, 3)
        executable = first.instantiate()
        second = self._chain(rig, z, 10.0, x, 5)
        with self.stall(rig, rig.stream):
            backend.launch_graph(executable, rig.stream)  # is as it was, whenever it runs
            backend.update_graph_blocking(executable, second.handle)
            second.close()
            backend.launch_graph(executable, rig.stream)
        assert _values(rig, y) == {6.0}
        assert _values(rig, z) == {50.0}
        first.close()

    @pytest.mark.parametrize("how", ["a node more", "an edge more", "another kind"])
    def test_an_update_by_another_shape_is_refused(self, rig: Rig, graph: _Graph, how: str) -> None:
        backend = rig.backend
        x, y = _floats(rig, 0), _floats(rig, 0)
        graph.axpy(y, 1.0, x, graph.fill(x, 7), graph.fill(y, 1))
        executable = graph.instantiate()
        other = _Graph(rig)
        first = other.fill(x, 8)
        second = other.fill(y, 2, first) if how == "an edge more" else other.fill(y, 2)
        if how == "another kind":
            other.fill(y, 1, first, second)
        else:
            other.axpy(y, 1.0, x, first, second)
        if how == "a node more":
            other.fill(x, 0)
        message = refused(
            backend, lambda: backend.update_graph_blocking(executable, other.handle), DeviceError
        )
        assert message
        backend.launch_graph(executable, rig.stream)  # as it was
        assert _values(rig, y) == {8.0}
        other.close()

    # -- refusals and closing --------------------------------------------------------------

    @fidelity
    def test_a_run_that_raises_breaks_its_graph_and_nothing_else(self, rig: Rig) -> None:
        """What a node's run raises is raised; the graph can be closed, the device goes on."""
        backend, y = rig.backend, _floats(rig, 0)
        broken = _Graph(rig)

        def run(stream: Any) -> None:
            backend.fill(y, np.float32(9).tobytes(), _N, stream)
            raise ZeroDivisionError("in the middle")

        broken.fill(y, 1)
        with pytest.raises(ZeroDivisionError, match="in the middle"):
            broken.add(run)
        calls: list[Callable[[], object]] = [
            lambda: broken.fill(y, 1),
            lambda: backend.instantiate_graph_blocking(broken.handle),
        ]
        for call in calls:
            with pytest.raises(DeviceError, match="can only be closed"):
                call()
        broken.close()
        graph = _Graph(rig)
        graph.fill(y, 5)
        backend.launch_graph(graph.instantiate(), rig.stream)
        assert _values(rig, y) == {5.0}
        graph.close()

    def test_a_bad_launch_is_refused_when_it_is_noted(self, rig: Rig) -> None:
        backend, graph = rig.backend, _Graph(rig)
        limit = backend.properties.max_threads_per_block

        def run(stream: Any) -> None:
            y = backend.array_argument(address, (_N,), _F32)
            config = backend.launch_config((1, 1, 1), (2 * limit, 1, 1), 0)
            backend.launch(stream, config, graph.kernel, y, np.float32(1), y, _N)

        address = _floats(rig, 0)
        with pytest.raises(Exception) as caught:  # noqa: PT011 - each backend raises its own
            graph.add(run)
        assert isinstance(backend.translate(caught.value, "launching axpy"), LaunchFailed)
        graph.close()
        assert _values(rig, address) == {0.0}

    @pytest.mark.parametrize(
        "what", ["allocate", "deallocate", "launch_graph", "sync", "pageable copy"]
    )
    def test_what_no_graph_can_hold_is_refused(self, rig: Rig, what: str) -> None:
        backend, graph = rig.backend, _Graph(rig)
        address = _floats(rig, 2)
        if what == "pageable copy" and not backend.memory_support().has_pageable_access:
            pytest.skip("the device reads no pageable memory")
        system = 0
        if what == "pageable copy":
            system = backend.allocate_system(64, 64)
        executable = graph.instantiate()

        def run(stream: Any) -> None:
            if what == "allocate":
                backend.allocate(rig.pool, 64, stream)
            elif what == "deallocate":
                backend.deallocate(address, stream)
            elif what == "launch_graph":
                backend.launch_graph(executable, stream)
            elif what == "sync":
                stream.sync()
            else:
                backend.copy_h2d(address, system, 64, stream)

        assert refused(backend, lambda: graph.add(run), DeviceError)
        graph.close()
        if system:
            backend.free_system(system)
        assert _values(rig, address) == {2.0}
        again = _Graph(rig)
        again.fill(address, 1)
        backend.launch_graph(again.instantiate(), rig.stream)
        assert _values(rig, address) == {1.0}
        again.close()

    def test_nodes_of_another_graph_are_no_dependencies(self, rig: Rig, graph: _Graph) -> None:
        other = _Graph(rig)
        node = other.empty()
        with pytest.raises(ValueError, match="own graph"):
            graph.empty(node)
        graph.empty()  # and it goes on
        other.close()

    def test_an_executable_outlives_its_graph(self, rig: Rig) -> None:
        backend, y, graph = rig.backend, _floats(rig, 0), _Graph(rig)
        graph.fill(y, 3)
        executable = backend.instantiate_graph_blocking(graph.handle)
        graph.fill(y, 4)  # a graph may grow: that one stays as it is
        graph.close()
        backend.launch_graph(executable, rig.stream)
        assert _values(rig, y) == {3.0}
        backend.close_graph(executable)

    def test_closed_graphs_and_executables_are_refused(self, rig: Rig, graph: _Graph) -> None:
        backend = rig.backend
        graph.empty()
        executable = graph.instantiate()
        for _ in range(2):
            graph.close()
            backend.close_graph(executable)
            backend.close_graph(graph.handle)
        other = _Graph(rig)
        mistakes: list[Callable[[], object]] = [
            lambda: backend.launch_graph(executable, rig.stream),
            lambda: backend.instantiate_graph_blocking(graph.handle),
            lambda: backend.update_graph_blocking(executable, other.handle),
            lambda: graph.empty(),
        ]
        for mistake in mistakes:
            with pytest.raises(Closed):
                mistake()
        other.close()

    def test_graphs_are_closed_on_any_thread_and_after_the_device(self, rig: Rig) -> None:
        graphs = [_Graph(rig) for _ in range(3)]
        for graph in graphs:
            graph.empty()
            rig.backend.launch_graph(graph.instantiate(), rig.stream)
        rig.finish()
        thread = threading.Thread(target=graphs[0].close)
        thread.start()
        thread.join()
        graphs[1].close()
        late = Rig(self.open())
        graph = _Graph(late)
        graph.empty()
        graph.instantiate()
        late.close()
        graph.close()
        graphs[2].close()
