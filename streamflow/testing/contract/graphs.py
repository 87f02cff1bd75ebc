"""Graphs: what is noted down once and done by every launch, in the order of the edges alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from streamflow.testing.contract.harness import Harness, Rig, fidelity
from streamflow.testing.contract.kernels import AXPY

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


def _floats(rig: Rig, value: float) -> int:
    return rig.put(np.full(_N, value, np.float32).view(np.uint8))


def _values(rig: Rig, address: int) -> set[float]:
    """The values that are there once the rig's stream has come this far."""
    return {float(value) for value in rig.get(address, _NBYTES).view(np.float32)}


class GraphContract(Harness):
    """Graphs of one device."""

    @pytest.fixture
    def graph(self, rig: Rig) -> Any:
        graph = _Graph(rig)
        yield graph
        rig.finish()
        graph.close()

    # -- shapes --------------------------------------------------------------------------

    @fidelity
    def test_c40_a_chain_runs_in_order_at_every_launch(self, rig: Rig, graph: _Graph) -> None:
        """A graph's launch does what its nodes say in the order of the edges, each time anew."""
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
