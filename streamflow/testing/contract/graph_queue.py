"""What a launch of a graph takes of its stream's queue (rule R7)."""

from __future__ import annotations

import pytest

from streamflow.testing.contract.graphs import Graph, WithGraph, floats, values
from streamflow.testing.contract.harness import Rig, fidelity

__all__ = ["GraphQueueContract"]

_NUM_KEPT = 8
"""Of a queue's places: on hardware what holds the stream has some, too."""


class GraphQueueContract(WithGraph):
    """How many launches a stream takes that is held, and what a launch says of that."""

    def _hold_and_launch(self, rig: Rig, graph: Graph, num: int) -> set[int]:
        """Launch so often on a stream that is held; what the launches have returned."""
        executable = graph.instantiate()
        with self.stall(rig, rig.stream):
            held = rig.mark(rig.stream)
            told = {rig.backend.launch_graph(executable, rig.stream) for _ in range(num)}
            # Had a launch waited for room, what holds the stream would have ended meanwhile.
            assert not held.is_done
        assert told == {executable.num_places}
        return told

    @fidelity
    @pytest.mark.parametrize("num_nodes", [1, 50])
    def test_r7_a_run_of_kernels_takes_one_place(
        self, rig: Rig, graph: Graph, num_nodes: int
    ) -> None:
        """A graph of kernels in a row takes one place of its stream's queue, however many."""
        y, one = floats(rig, 0), floats(rig, 1)
        node = graph.axpy(y, 1.0, one)
        for _ in range(num_nodes - 1):
            node = graph.axpy(y, 1.0, one, node)
        num = rig.backend.num_queued_max - _NUM_KEPT
        assert self._hold_and_launch(rig, graph, num) == {1}
        assert values(rig, y) == {float(num * num_nodes)}

    @fidelity
    @pytest.mark.parametrize("is_chain", [True, False])
    def test_r7_fills_take_a_place_each(self, rig: Rig, graph: Graph, is_chain: bool) -> None:
        """A graph takes no more places of its stream's queue than it has fills and kernel runs."""
        y, one = floats(rig, 5), floats(rig, 1)
        node = graph.axpy(y, 1.0, one, graph.fill(y, 1))
        for _ in range(24):
            node = graph.fill(y, 1, node) if is_chain else graph.fill(floats(rig, 0), 1)
            node = graph.axpy(y, 1.0, one, node) if is_chain else node
        if not is_chain:
            for _ in range(24):
                graph.axpy(floats(rig, 0), 1.0, one)
        num = (rig.backend.num_queued_max - _NUM_KEPT) // 50
        assert self._hold_and_launch(rig, graph, num) == {50}
        assert values(rig, y) == {2.0}

    def test_r7_a_launch_says_how_many_places_it_takes_at_most(
        self, rig: Rig, graph: Graph
    ) -> None:
        """Counted are fills, copies and straight runs of kernels; never none."""
        y, one = floats(rig, 0), floats(rig, 1)
        backend = rig.backend

        def places() -> int:
            executable = graph.instantiate()
            num: int = backend.launch_graph(executable, rig.stream)
            assert num == executable.num_places
            rig.finish()
            return num

        assert places() == 1
        node = graph.empty()
        assert places() == 1
        node = graph.fill(y, 1, node)
        assert places() == 1
        node = graph.axpy(y, 1.0, one, node)
        assert places() == 2
        node = graph.axpy(y, 1.0, one, node)
        assert places() == 2
        sides = [graph.axpy(floats(rig, 0), 1.0, one, node) for _ in range(3)]
        assert places() == 5  # each is the head of a run: another comes after the same
        sides[0] = graph.axpy(y, 1.0, one, sides[0])
        assert places() == 5
        node = graph.axpy(y, 1.0, one, *sides)
        assert places() == 6
        node = graph.axpy(y, 1.0, one, graph.empty(node))
        assert places() == 7
        child = Graph(rig)
        below = child.axpy(y, 1.0, one, child.fill(y, 2))
        child.axpy(y, 1.0, one, below)
        node = backend.embed_graph(graph.handle, child.handle, [node])
        assert places() == 9
        graph.axpy(y, 1.0, one, node)
        assert places() == 10
        assert values(rig, y) == {5.0}
        child.close()

    def test_r7_kernels_of_one_node_are_in_a_row(self, rig: Rig, graph: Graph) -> None:
        y, one = floats(rig, 0), floats(rig, 1)
        graph.axpy(y, 1.0, one, graph.axpy(y, 1.0, one, num=3), num=3)
        assert self._hold_and_launch(rig, graph, 10) == {1}
        assert values(rig, y) == {60.0}

    def test_r7_a_graph_may_take_more_places_than_a_queue_has(self, rig: Rig, graph: Graph) -> None:
        """On a stream that nothing holds: the caller waits until the device has come far enough."""
        y, num = floats(rig, 0), rig.backend.num_queued_max + 10
        node = graph.fill(y, 1)
        for _ in range(num - 1):
            node = graph.fill(y, 1, node)
        executable = graph.instantiate()
        rig.finish()
        for _ in range(2):
            assert rig.backend.launch_graph(executable, rig.stream) == num
            rig.finish()
        assert values(rig, y) == {1.0}
