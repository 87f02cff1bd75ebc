"""Graphs: what their nodes do, how they are updated, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from streamflow.backends.base import Access
from streamflow.errors import Closed, DeviceError, LaunchFailed
from streamflow.testing.contract.graphs import F32, NBYTES, Graph, N, WithGraph, floats, values
from streamflow.testing.contract.harness import Rig, fidelity
from streamflow.testing.contract.kinds import refused

__all__ = ["GraphNodesContract"]


def _touch(rig: Rig, address: int, run: Callable[[Any], None], stream: Any) -> None:
    """Foreign code on ``stream``: where streams are CUDA's, ``run`` gets nothing."""
    backend = rig.backend
    argument = None if backend.is_cuda else backend.array_argument(address, (N,), F32)
    backend.call(stream, "foreign", run, (Access.READ_WRITE,), argument)


class GraphNodesContract(WithGraph):
    """Nodes, updates, refusals and closing, on one device."""

    # -- what nodes do ---------------------------------------------------------------------

    @fidelity
    @pytest.mark.parametrize("width", [1, 2, 4, 8, 16])
    def test_fills_of_every_width(self, rig: Rig, graph: Graph, width: int) -> None:
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
        self, rig: Rig, graph: Graph
    ) -> None:
        """The copies of a graph move at each launch what is there at that time."""
        backend, x, y = rig.backend, floats(rig, 0), floats(rig, 0)
        source, put = rig.pinned(NBYTES)
        target, got = rig.pinned(NBYTES)
        rig.finish()
        node = graph.add(lambda stream: backend.copy_h2d(x, source, NBYTES, stream))
        node = graph.add(lambda stream: backend.copy_d2d(y, x, NBYTES, stream), node)
        node = graph.axpy(y, 1.0, x, node)
        graph.add(lambda stream: backend.copy_d2h(target, y, NBYTES, stream), node)
        executable = graph.instantiate()
        for value in (1, 5, 9):
            put.view(np.float32)[:] = value
            backend.launch_graph(executable, rig.stream)
            rig.finish()
            assert (got.view(np.float32) == 2 * value).all()

    def test_foreign_code_is_part_of_a_graph(self, rig: Rig, graph: Graph) -> None:
        backend, y = rig.backend, floats(rig, 0)
        seen: list[int] = []

        def run(stream: Any) -> None:
            def body(array: Any) -> None:
                seen.append(threading.get_ident())
                if backend.is_cuda:
                    backend.fill(y, np.float32(3).tobytes(), N, stream)
                else:
                    array[:] = 3

            _touch(rig, y, body, stream)

        graph.axpy(y, 1.0, y, graph.add(run))
        executable = graph.instantiate()
        for _ in range(3):
            backend.launch_graph(executable, rig.stream)
        assert values(rig, y) == {6.0}
        assert len(seen) == (1 if backend.is_cuda else 3)

    def test_copies_from_host_to_host_are_part_of_a_graph(self, rig: Rig, graph: Graph) -> None:
        backend = rig.backend
        mapped = backend.allocate_mapped_blocking(NBYTES)
        source, put = rig.pinned(NBYTES)
        target, got = rig.pinned(NBYTES)
        node = graph.add(lambda stream: backend.copy_h2d(mapped, source, NBYTES, stream))
        graph.add(lambda stream: backend.copy_d2h(target, mapped, NBYTES, stream), node)
        executable = graph.instantiate()
        for value in (3, 4):
            put[:] = value
            backend.launch_graph(executable, rig.stream)
            rig.finish()
            assert (got == value).all()
        graph.close()
        backend.free_pinned_blocking(mapped)

    def test_a_graph_may_be_a_node_of_another(self, rig: Rig, graph: Graph) -> None:
        backend = rig.backend
        x, y = floats(rig, 0), floats(rig, 0)
        child = Graph(rig)
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
        assert values(rig, y) == {46.0}
        other = Graph(rig)
        with pytest.raises(ValueError, match="own graph"):
            backend.embed_graph(other.handle, graph.handle, [node])
        other.close()

    # -- updating --------------------------------------------------------------------------

    def _chain(self, rig: Rig, y: int, a: float, x: int, value: float) -> Graph:
        graph = Graph(rig)
        graph.axpy(y, a, x, graph.fill(x, value), graph.fill(y, 0))
        return graph

    @fidelity
    def test_an_update_changes_what_later_launches_do(self, rig: Rig) -> None:
        """An executable updated with a graph of the same shape does what that says from then on."""
        backend = rig.backend
        x, y, z = (floats(rig, 0) for _ in range(3))
        first = self._chain(rig, y, 2.0, x, 3)
        executable = first.instantiate()
        second = self._chain(rig, z, 10.0, x, 5)
        with self.stall(rig, rig.stream):
            backend.launch_graph(executable, rig.stream)  # is as it was, whenever it runs
            backend.update_graph_blocking(executable, second.handle)
            second.close()
            backend.launch_graph(executable, rig.stream)
        assert values(rig, y) == {6.0}
        assert values(rig, z) == {50.0}
        first.close()

    @pytest.mark.parametrize("how", ["a node more", "an edge more", "another kind"])
    def test_an_update_by_another_shape_is_refused(self, rig: Rig, graph: Graph, how: str) -> None:
        backend = rig.backend
        x, y = floats(rig, 0), floats(rig, 0)
        graph.axpy(y, 1.0, x, graph.fill(x, 7), graph.fill(y, 1))
        executable = graph.instantiate()
        other = Graph(rig)
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
        assert values(rig, y) == {8.0}
        other.close()

    # -- refusals and closing --------------------------------------------------------------

    @fidelity
    def test_a_run_that_raises_breaks_its_graph_and_nothing_else(self, rig: Rig) -> None:
        """What a node's run raises is raised; the graph can be closed, the device goes on."""
        backend, y = rig.backend, floats(rig, 0)
        broken = Graph(rig)

        def run(stream: Any) -> None:
            backend.fill(y, np.float32(9).tobytes(), N, stream)
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
        graph = Graph(rig)
        graph.fill(y, 5)
        backend.launch_graph(graph.instantiate(), rig.stream)
        assert values(rig, y) == {5.0}
        graph.close()

    def test_a_bad_launch_is_refused_when_it_is_noted(self, rig: Rig) -> None:
        backend, graph = rig.backend, Graph(rig)
        limit = backend.properties.max_threads_per_block

        def run(stream: Any) -> None:
            y = backend.array_argument(address, (N,), F32)
            config = backend.launch_config((1, 1, 1), (2 * limit, 1, 1), 0)
            backend.launch(stream, config, graph.kernel, y, np.float32(1), y, N)

        address = floats(rig, 0)
        with pytest.raises(Exception) as caught:  # noqa: PT011 - each backend raises its own
            graph.add(run)
        assert isinstance(backend.translate(caught.value, "launching axpy"), LaunchFailed)
        graph.close()
        assert values(rig, address) == {0.0}

    @pytest.mark.parametrize(
        "what", ["allocate", "deallocate", "launch_graph", "sync", "pageable copy"]
    )
    def test_what_no_graph_can_hold_is_refused(self, rig: Rig, what: str) -> None:
        backend, graph = rig.backend, Graph(rig)
        address = floats(rig, 2)
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
        assert values(rig, address) == {2.0}
        again = Graph(rig)
        again.fill(address, 1)
        backend.launch_graph(again.instantiate(), rig.stream)
        assert values(rig, address) == {1.0}
        again.close()

    def test_nodes_of_another_graph_are_no_dependencies(self, rig: Rig, graph: Graph) -> None:
        other = Graph(rig)
        node = other.empty()
        with pytest.raises(ValueError, match="own graph"):
            graph.empty(node)
        graph.empty()  # and it goes on
        other.close()

    def test_an_executable_outlives_its_graph(self, rig: Rig) -> None:
        backend, y, graph = rig.backend, floats(rig, 0), Graph(rig)
        graph.fill(y, 3)
        executable = backend.instantiate_graph_blocking(graph.handle)
        graph.fill(y, 4)  # a graph may grow: that one stays as it is
        graph.close()
        backend.launch_graph(executable, rig.stream)
        assert values(rig, y) == {3.0}
        backend.close_graph(executable)

    def test_closed_graphs_and_executables_are_refused(self, rig: Rig, graph: Graph) -> None:
        backend = rig.backend
        graph.empty()
        executable = graph.instantiate()
        for _ in range(2):
            graph.close()
            backend.close_graph(executable)
            backend.close_graph(graph.handle)
        other = Graph(rig)
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
        graphs = [Graph(rig) for _ in range(3)]
        for graph in graphs:
            graph.empty()
            rig.backend.launch_graph(graph.instantiate(), rig.stream)
        rig.finish()
        thread = threading.Thread(target=graphs[0].close)
        thread.start()
        thread.join()
        graphs[1].close()
        late = Rig(self.open())
        graph = Graph(late)
        graph.empty()
        graph.instantiate()
        late.close()
        graph.close()
        graphs[2].close()
