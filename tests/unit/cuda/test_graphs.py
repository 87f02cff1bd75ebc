"""Which driver calls the verbs of graphs make, with a driver that keeps the books of a capture."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from streamflow.backends.memory import MemoryKind
from streamflow.errors import Closed, DeviceError

pytest.importorskip("cuda.core", reason="no cuda.core on this platform")

from cuda.bindings import driver as real

from streamflow.backends.cuda import device as device_module
from streamflow.backends.cuda import graph_places, graphs, mapped
from streamflow.backends.cuda.device import CudaBackend
from streamflow.backends.cuda.errors import DriverCallError

OK = real.CUresult.CUDA_SUCCESS
INVALIDATED = real.CUresult.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
RELAXED = real.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


class FakeDriver:
    """Captures of one stream at a time; a node is the number it was made as."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.errors: dict[str, Any] = {}
        self.num_nodes = 0
        self.leaves: list[int] = []

    def disturb(self, num: int) -> Callable[[], object]:
        """The next ``num`` captures are ended from outside."""
        answers = iter([INVALIDATED] * num)
        real_call = self.__getattr__("cuStreamEndCapture")

        def end(*args: Any) -> tuple[Any, ...]:
            real_call(*args)
            return next(answers, OK), None

        self.__dict__["cuStreamEndCapture"] = end
        return lambda: self.__dict__.pop("cuStreamEndCapture")

    def work(self) -> None:
        """Something is submitted to the stream that captures."""
        self.num_nodes += 1
        self.leaves = [self.num_nodes]

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return getattr(real, name)

        def call(*args: Any) -> tuple[Any, ...]:
            self.calls.append((name, *args))
            error = self.errors.get(name, OK)
            if error:
                return error, None
            return (OK, *self.answer(name, args))

        return call

    def answer(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if name == "cuStreamBeginCaptureToGraph":
            self.leaves = list(args[2] or ())
        elif name == "cuStreamGetCaptureInfo":
            return 1, 99, "graph", list(self.leaves), [None], len(self.leaves)
        elif name == "cuStreamEndCapture":
            return ("graph",)
        elif name in ("cuGraphAddEmptyNode", "cuGraphAddChildGraphNode"):
            self.num_nodes += 1
            return (self.num_nodes,)
        elif name == "cuGraphGetNodes":
            return [], 0
        elif name in ("cuGraphCreate", "cuGraphInstantiate", "cuMemAlloc", "cuGraphExecUpdate"):
            return (f"{name} {len(self.made(name))}" if name != "cuMemAlloc" else 0x7000,)
        return ()

    def made(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]


class Streams(dict[Any, Any]):
    """As StreamTable."""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver()
    monkeypatch.setattr(graphs, "driver", driver)
    monkeypatch.setattr(graph_places, "driver", driver)
    return driver


@pytest.fixture
def backend(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = CudaBackend.__new__(CudaBackend)
    made.index, made._num_devices, made._is_lost = 0, 1, False
    made._noting, made._idle_streams, made._between = {}, [], "pool"
    made._streams = Streams(s="CUstream s")  # type: ignore[assignment]

    def create_stream() -> str:
        name = f"private {len(made._streams)}"
        made._streams[name] = f"CU{name}"  # type: ignore[index]
        return name

    monkeypatch.setattr(made, "set_current", lambda: None, raising=False)
    monkeypatch.setattr(made, "create_stream", create_stream, raising=False)
    for name in ("_copy_h2d", "_copy_d2h", "_copy_d2d"):
        monkeypatch.setattr(device_module, name, lambda *args: fake.work() or (OK,))
    return made


def add(backend: Any, fake: FakeDriver, graph: Any, *deps: Any) -> Any:
    return backend.add_graph_node(graph, lambda stream: fake.work(), deps)


def test_a_node_is_a_capture_behind_the_leaves_of_its_deps(backend: Any, fake: FakeDriver) -> None:
    graph = backend.create_graph()
    first = add(backend, fake, graph)
    second = add(backend, fake, graph, first)
    assert (first.leaves, second.leaves) == ([1], [2])
    assert fake.made("cuStreamBeginCaptureToGraph") == [
        ("CUprivate 1", "cuGraphCreate 1", None, None, 0, RELAXED),
        ("CUprivate 1", "cuGraphCreate 1", [1], None, 1, RELAXED),
    ]
    assert fake.names()[-3:] == [
        "cuStreamBeginCaptureToGraph",
        "cuStreamGetCaptureInfo",
        "cuStreamEndCapture",
    ]


def test_no_edge_is_given_twice(backend: Any, fake: FakeDriver) -> None:
    graph = backend.create_graph()
    first, second = add(backend, fake, graph), add(backend, fake, graph)
    add(backend, fake, graph, first, second, first)
    assert fake.made("cuStreamBeginCaptureToGraph")[-1][2:5] == ([1, 2], None, 2)


@pytest.mark.parametrize("num_deps", [0, 1, 2])
def test_a_run_that_submits_nothing_makes_an_empty_node(
    backend: Any, fake: FakeDriver, num_deps: int
) -> None:
    graph = backend.create_graph()
    deps = [add(backend, fake, graph) for _ in range(num_deps)]
    node = backend.add_graph_node(graph, lambda stream: None, deps)
    leaves = [dep.leaves[0] for dep in deps]
    assert fake.made("cuGraphAddEmptyNode") == [("cuGraphCreate 1", leaves, num_deps)]
    assert node.leaves == [num_deps + 1]


def test_the_private_stream_is_lent_again(backend: Any, fake: FakeDriver) -> None:
    streams: list[Any] = []
    for _ in range(2):
        graph = backend.create_graph()
        backend.add_graph_node(graph, streams.append, ())
    assert streams == ["private 1", "private 1"]

    def nested(stream: Any) -> None:
        streams.append(stream)
        backend.add_graph_node(backend.create_graph(), streams.append, ())

    backend.add_graph_node(graph, nested, ())
    assert streams[2:] == ["private 1", "private 2"]


def test_a_run_that_raises_ends_the_capture_and_breaks_the_graph(
    backend: Any, fake: FakeDriver
) -> None:
    graph = backend.create_graph()
    with pytest.raises(ZeroDivisionError):
        backend.add_graph_node(graph, lambda stream: 1 // 0, ())
    assert fake.names()[-1] == "cuStreamEndCapture"
    assert backend._noting == {}
    with pytest.raises(DeviceError, match="half a node"):
        add(backend, fake, graph)
    with pytest.raises(DeviceError, match="half a node"):
        backend.instantiate_graph_blocking(graph)
    backend.close_graph(graph)
    assert fake.made("cuGraphDestroy") == [("cuGraphCreate 1",)]
    add(backend, fake, backend.create_graph())
    assert fake.made("cuStreamBeginCaptureToGraph")[-1][0] == "CUprivate 1"


def test_a_capture_that_the_driver_calls_invalid_is_an_error(
    backend: Any, fake: FakeDriver
) -> None:
    graph = backend.create_graph()
    fake.errors["cuStreamEndCapture"] = INVALIDATED
    with pytest.raises(DeviceError, match="such as waiting"):
        add(backend, fake, graph)
    backend.close_graph(graph)
    assert fake.made("cuGraphDestroy") == []  # the driver may have done it


def test_a_run_that_raises_in_an_invalid_capture_raises_its_own(
    backend: Any, fake: FakeDriver
) -> None:
    graph = backend.create_graph()
    fake.errors["cuStreamEndCapture"] = INVALIDATED
    with pytest.raises(ZeroDivisionError):
        backend.add_graph_node(graph, lambda stream: 1 // 0, ())
    backend.close_graph(graph)
    assert fake.made("cuGraphDestroy") == []


def test_a_capture_that_does_not_begin_leaves_the_graph_whole(
    backend: Any, fake: FakeDriver
) -> None:
    graph = backend.create_graph()
    fake.errors["cuStreamBeginCaptureToGraph"] = INVALIDATED
    with pytest.raises(DriverCallError):
        add(backend, fake, graph)
    del fake.errors["cuStreamBeginCaptureToGraph"]
    assert add(backend, fake, graph).leaves == [1]
    assert backend._idle_streams == ["private 1"]


def test_a_node_of_another_graph_is_refused(backend: Any, fake: FakeDriver) -> None:
    stranger = add(backend, fake, backend.create_graph())
    with pytest.raises(ValueError, match="own graph"):
        add(backend, fake, backend.create_graph(), stranger)


def test_launching_updating_and_closing(backend: Any, fake: FakeDriver) -> None:
    graph, other = backend.create_graph(), backend.create_graph()
    add(backend, fake, graph)
    executable = backend.instantiate_graph_blocking(graph)
    assert fake.made("cuGraphInstantiate") == [("cuGraphCreate 1", 0)]
    backend.launch_graph(executable, "s")
    assert fake.made("cuGraphLaunch") == [("cuGraphInstantiate 1", "CUstream s")]
    backend.update_graph_blocking(executable, other)
    assert fake.made("cuGraphExecUpdate") == [("cuGraphInstantiate 1", "cuGraphCreate 2")]
    for handle in (graph, executable, other, executable):
        backend.close_graph(handle)
    assert graph.steps == []  # they hold what nodes work with
    assert len(fake.made("cuGraphDestroy")) == 2
    assert len(fake.made("cuGraphExecDestroy")) == 1
    calls: list[Callable[[], object]] = [
        lambda: backend.launch_graph(executable, "s"),
        lambda: backend.update_graph_blocking(executable, other),
        lambda: backend.instantiate_graph_blocking(graph),
        lambda: add(backend, fake, graph),
    ]
    for call in calls:
        with pytest.raises(Closed):
            call()


def test_r7_a_launch_says_how_many_places_it_takes(
    backend: Any, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter([7, 0])
    monkeypatch.setattr(graphs, "places_of", lambda handle: next(found))
    graph, other = backend.create_graph(), backend.create_graph()
    executable, empty = map(backend.instantiate_graph_blocking, (graph, other))
    backend.update_graph_blocking(executable, other)
    assert backend.launch_graph(executable, "s") == executable.num_places == 7
    assert backend.launch_graph(empty, "s") == empty.num_places == 1


def test_a_graph_that_cannot_be_counted_is_not_instantiated(backend: Any, fake: FakeDriver) -> None:
    fake.errors["cuGraphGetNodes"] = INVALIDATED
    with pytest.raises(DriverCallError):
        backend.instantiate_graph_blocking(backend.create_graph())
    assert fake.made("cuGraphInstantiate") == []  # nothing half made


@pytest.mark.parametrize("info", [None, SimpleNamespace(result=SimpleNamespace(name="X_CHANGED"))])
def test_an_update_that_the_driver_refuses_is_a_device_error(
    backend: Any, fake: FakeDriver, info: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = backend.create_graph()
    executable = backend.instantiate_graph_blocking(graph)
    failure = real.CUresult.CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE
    monkeypatch.setattr(fake, "cuGraphExecUpdate", lambda *args: (failure, info), raising=False)
    with pytest.raises(DeviceError, match="instantiate it"):
        backend.update_graph_blocking(executable, graph)


def test_nothing_is_destroyed_on_a_lost_device(backend: Any, fake: FakeDriver) -> None:
    graph = backend.create_graph()
    executable = backend.instantiate_graph_blocking(graph)
    backend._is_lost = True
    backend.close_graph(executable)
    backend.close_graph(graph)
    assert not {"cuGraphDestroy", "cuGraphExecDestroy"} & set(fake.names())


@pytest.mark.parametrize("verb", ["allocate", "deallocate", "launch_graph"])
def test_what_no_node_can_hold_is_refused_before_the_driver_is_asked(
    backend: Any, fake: FakeDriver, verb: str
) -> None:
    graph = backend.create_graph()
    executable = backend.instantiate_graph_blocking(backend.create_graph())

    def run(stream: Any) -> None:
        with pytest.raises(DeviceError, match="can't be part of a graph"):
            if verb == "allocate":
                backend.allocate("pool", 64, stream)
            elif verb == "deallocate":
                backend.deallocate(0x10, stream)
            else:
                backend.launch_graph(executable, stream)

    backend.add_graph_node(graph, run, ())
    assert fake.made("cuGraphLaunch") == []


def test_copies_from_and_to_pageable_memory_are_refused(
    backend: Any, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = {1: MemoryKind.UNREGISTERED, 2: MemoryKind.DEVICE, 3: MemoryKind.HOST}
    monkeypatch.setattr(
        backend,
        "pointer_attributes",
        lambda address: SimpleNamespace(kind=kinds[address]),
        raising=False,
    )

    def run(stream: Any) -> None:
        backend.copy_h2d(2, 3, 8, stream)
        backend.copy_d2h(3, 2, 8, stream)
        backend.copy_d2d(2, 2, 8, stream)
        for copy in (
            lambda: backend.copy_h2d(2, 1, 8, stream),
            lambda: backend.copy_d2h(1, 2, 8, stream),
            lambda: backend.copy_d2d(2, 1, 8, stream),
        ):
            with pytest.raises(DeviceError, match="pageable"):
                copy()

    backend.add_graph_node(backend.create_graph(), run, ())
    assert fake.num_nodes == 3
    kinds[9] = MemoryKind.UNREGISTERED
    backend.add_graph_node(
        backend.create_graph(), lambda stream: backend.copy_h2d(2, 9, 8, "s"), ()
    )  # another stream: eager, as ever
    assert fake.num_nodes > 3


def test_copies_by_the_device_go_through_memory_of_the_graph(
    backend: Any, fake: FakeDriver
) -> None:
    mapped.add(1 << 40, 256)
    try:
        graph = backend.create_graph()
        node = backend.add_graph_node(
            graph, lambda stream: backend.copy_h2d(1 << 40, 0x10, 200, stream), ()
        )
    finally:
        mapped.remove(1 << 40)
    assert node.leaves == [2]
    assert fake.made("cuMemAlloc") == [(200,)]
    executable = backend.instantiate_graph_blocking(graph)
    backend.close_graph(graph)
    assert fake.made("cuMemFree") == []  # launches still go through it
    other = backend.create_graph()
    backend.update_graph_blocking(executable, other)
    assert fake.names()[-2:] == ["cuCtxSynchronize", "cuMemFree"]
    backend.close_graph(executable)
    assert fake.made("cuMemFree") == [(0x7000,)]


def test_a_graph_becomes_a_node_of_another(backend: Any, fake: FakeDriver) -> None:
    graph, child = backend.create_graph(), backend.create_graph()
    deps = [add(backend, fake, graph), add(backend, fake, graph)]
    add(backend, fake, child)
    node = backend.embed_graph(graph, child, [*deps, deps[0]])
    assert fake.made("cuGraphAddChildGraphNode") == [
        ("cuGraphCreate 1", [1, 2], 2, "cuGraphCreate 2")
    ]
    assert add(backend, fake, graph, node).leaves == [5]
    assert fake.made("cuStreamBeginCaptureToGraph")[-1][2] == [4]
    with pytest.raises(ValueError, match="own graph"):
        backend.embed_graph(child, graph, [node])


def test_memory_of_a_child_lives_as_long_as_what_embeds_it(backend: Any, fake: FakeDriver) -> None:
    graph, child = backend.create_graph(), backend.create_graph()
    mapped.add(1 << 40, 256)
    try:
        backend.add_graph_node(
            child, lambda stream: backend.copy_h2d(1 << 40, 0x10, 200, stream), ()
        )
    finally:
        mapped.remove(1 << 40)
    backend.embed_graph(graph, child, ())
    backend.close_graph(child)
    executable = backend.instantiate_graph_blocking(graph)
    backend.close_graph(graph)
    assert fake.made("cuMemFree") == []
    backend.close_graph(executable)
    assert fake.made("cuMemFree") == [(0x7000,)]


def test_a_graph_is_made_again_after_somebody_ended_a_capture(
    backend: Any, fake: FakeDriver
) -> None:
    graph, child = backend.create_graph(), backend.create_graph()
    add(backend, fake, child)
    first = add(backend, fake, graph)
    second = backend.embed_graph(graph, child, [first])
    fake.disturb(2)
    fake.calls.clear()
    third = add(backend, fake, graph, second)
    graphs_made = [f"cuGraphCreate {num}" for num in (1, 2)]
    assert fake.made("cuGraphCreate") == [(0,), (0,)]
    begun = [(args[1], args[2]) for args in fake.made("cuStreamBeginCaptureToGraph")]
    assert [name for name, _ in begun] == ["cuGraphCreate 1", *graphs_made, graphs_made[1]]
    assert begun[0][1] == [3]  # the child, as it was then
    assert begun[-1][1] == second.leaves  # and as it is now
    assert graph.handle == graphs_made[1]
    assert not graph.is_broken
    assert fake.made("cuGraphAddChildGraphNode")[-1] == (
        graphs_made[1],
        first.leaves,
        1,
        child.handle,
    )
    assert third.leaves == [fake.num_nodes]


def test_a_launch_into_a_capture_that_was_ended_is_tried_again(
    backend: Any, fake: FakeDriver
) -> None:
    graph = backend.create_graph()
    fake.disturb(1)
    num_runs = 0

    def run(stream: Any) -> None:
        nonlocal num_runs
        num_runs += 1
        if num_runs == 1:
            raise DriverCallError(INVALIDATED, "cuMemsetD8Async")
        fake.work()

    assert backend.add_graph_node(graph, run, ()).leaves == [1]
    assert num_runs == 2


def test_no_other_thread_waits_for_the_whole_device_within_a_capture(
    backend: Any, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_free: list[bool] = []

    def look() -> None:
        lock: Any = graphs.capturing(0)
        is_free.append(lock.acquire(blocking=False))
        if is_free[-1]:
            lock.release()

    def look_elsewhere(*_: object) -> tuple[Any]:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return (OK,)

    monkeypatch.setattr(device_module, "driver", fake)
    fake.__dict__["cuCtxSynchronize"] = look_elsewhere
    backend.add_graph_node(backend.create_graph(), look_elsewhere, ())
    backend.synchronize_blocking()
    look_elsewhere()
    assert is_free == [False, False, True]
