"""``dev.capture()``: the same submissions, recorded once and launched as one op."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from streamflow.capture.alone import GoesAlone, num_places_free
from streamflow.capture.executables import Executables
from streamflow.capture.recorder import Handle, HostStep, Node, Recorded, TaskRecorder, told
from streamflow.errors import Closed, DeviceError
from streamflow.runtime.array import DeviceArray
from streamflow.runtime.core import Core
from streamflow.runtime.foreign import RepeatedCall, lent
from streamflow.runtime.futures import is_future
from streamflow.runtime.launch import KernelRun
from streamflow.runtime.op import SCOPE, Op
from streamflow.runtime.parked import After, Parked, no_calls
from streamflow.runtime.recording import Recording, refuse
from streamflow.runtime.stream import Stream, explicit_line
from streamflow.scheduler.timeline import Ticket

if TYPE_CHECKING:
    from streamflow.runtime.submit import Submit

__all__ = ["Capture", "CapturedGraph"]


class CapturedGraph:
    """Ops that were recorded by :meth:`Device.capture`, to be launched as often as you like.

    It owns the memory that was allocated within its block, and keeps the arrays it uses.
    """

    def __init__(self, dev: Submit, name: str | None) -> None:
        self._dev = dev
        self._core = dev._core
        self._name = name
        self._recorded: Recorded | None = None
        self._executables = Executables()
        self._built: Op[None] | None = None
        # Tickets, since ops hold their results.
        self._parked: list[Ticket] = []  # of launches, what may not have been submitted
        self._last: list[Ticket] = []  # all of the latest launch, where the host has a part in it
        self._is_closed = False

    # -- looking -----------------------------------------------------------------------------

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The ops on the device, in the order of their calls."""
        return tuple(self._whole.nodes)

    @property
    def edges(self) -> tuple[tuple[Node, Node], ...]:
        """``(earlier, later)``: what each op comes after, by data, ``after=`` or its stream."""
        return tuple((dep, node) for node in self._whole.nodes for dep in node.deps)

    @property
    def num_parts(self) -> int:
        """Graphs of the driver's: one more than there are host steps between ops."""
        return sum(isinstance(part, list) for part in self._whole.parts)

    @property
    def ready(self) -> Op[None]:
        """Ends when the graph has been built; launches wait for it by themselves."""
        self._whole  # noqa: B018  (raises before the block is left)
        assert self._built is not None
        return self._built

    @property
    def _whole(self) -> Recorded:
        if self._is_closed:
            raise Closed(f"{self!r} is closed")
        if self._recorded is None:
            raise RuntimeError("the graph is still being captured: leave the block first")
        return self._recorded

    # -- running -------------------------------------------------------------------------------

    def launch(
        self, *, after: Any = (), stream: Stream | None = None, name: str | None = None
    ) -> Op[Any]:
        """Run everything in it, once.

        Parameters
        ----------
        after : Op, DeviceArray, future or a sequence of these
            What else this comes after, as for :meth:`Device.launch`.
        stream : Stream, optional
            Default: the current stream, else a compute lane. Within the graph only its own
            edges count, so branches of it overlap all the same.
        name : str, optional
            For errors and traces; default: the graph's.

        Returns
        -------
        Op
            Ends when all of it has. Parked until the graph is built, which a worker thread does.
            Where the graph writes pinned memory, cancelling an await of it is delivered once that
            write has ended (rule R8).

        Ordering
        --------
        After the last write of every array it reads, and every use of those it writes; later
        uses come after it. Launches of one graph run one after another.

        A launch takes a place of its stream's queue for each fill, each copy and each straight run
        of kernels (rule R7). One that takes more than are free above the window (511 unless set
        otherwise) waits on the host until all it comes after, and all on its stream, has ended; the
        lane ``graphs`` is its stream where none is named. So nothing holds it when it goes. With
        more places than the queue has (1022 on an H200), the call that submits it still takes as
        long as the device needs for those that don't fit.

        Raises
        ------
        Closed
            The graph or the device is closed, or an array that it uses was freed.
        OutOfDeviceMemory
            The arrays it uses are more than a scope's limit; less than that waits for its share.
        CaptureRefused
            Called in a task that captures.
        """
        core = self._core
        core.check_open()
        refuse(core, "a graph in another one has no use: call what was captured again")
        recorded = self._whole
        recorded.check_usable()
        line = explicit_line(core, stream)
        items = _as_list(after)
        first = core.after(items)
        assert self._built is not None
        executables = self._executables
        is_built = self._built.done() and self._built._error is None
        if not is_built:
            first = After([*first.tickets, self._built.ticket], first.futures)
        label = self._name if name is None else name
        nbytes = recorded.nbytes if core.has_budgets() else 0
        core.check_budgets(nbytes, "launch of a graph")
        if self._last:  # the driver orders launches of graphs alone
            turn = self._end_of(self._last)
            items.append(turn)
            first = After([*first.tickets, turn.ticket], first.futures)
        reads, writes, is_overwrite = recorded.used
        results: dict[Op[Any], Op[Any]] = {}
        tickets: list[Ticket] = []
        op: Op[Any] | None = None
        place = 0
        for part in recorded.parts or [[]]:
            if op is not None:
                first = After([*first.tickets, op.ticket], first.futures)
            if isinstance(part, HostStep):
                # An array that is freed further on in the graph is there all the same.
                args = [
                    results.get(arg, arg) if isinstance(arg, Op) else lent(arg) for arg in part.args
                ]
                op = self._dev.host(part.function, *args, after=op or items, name=part.op.label)
                results[part.op] = op
                tickets.append(op.ticket)
                if recorded.writes_host:
                    op.rare().writes_host = True
                continue
            op = Op(core, "graph", label)
            tickets.append(op.ticket)
            if recorded.writes_host:
                op.rare().writes_host = True
            run = _PartRun(op, executables, recorded, place, part)
            op.rare().on_retired = run.let_go
            if not core.backend.is_cuda:
                op.rare().on_device_done = run.finish
            start = None
            if not is_built or executables.places_of(place) > num_places_free(core):
                start = GoesAlone(executables, place)
            core.parking.submit(
                op,
                run,
                line=line or core.picker(op),
                reads=reads,
                writes=writes,
                after=first,
                is_overwrite=is_overwrite,
                nbytes=nbytes,
                start=start,
            )
            place += 1
        assert op is not None
        self._last = tickets if recorded.has_host_steps else []
        self._parked = [ticket for ticket in self._parked if ticket.is_parked]
        self._parked += [ticket for ticket in tickets if ticket.is_parked]
        return op

    def update(self) -> AbstractContextManager[None]:
        """``with graph.update():`` record the same ops again, over other arguments.

        What the block submits takes the place of what was captured: other arrays to read and
        write, other scalars, other geometry. Launches from then on run that; earlier ones don't.

        Raises
        ------
        CaptureRefused
            On leaving: the block's ops or their edges are others than the graph's, which then
            stays as it was. Also what :meth:`Device.capture` refuses.
        """
        return _Update(self)

    def close(self) -> None:
        """Let go of its memory and arrays, once the launches so far have ended.

        Raises
        ------
        WrongThread
            Called on another thread or loop.
        """
        self._core.check_here()
        self._is_closed = True
        self._recorded = None
        self._built, self._last = None, []
        self._executables = Executables()

    def __enter__(self) -> CapturedGraph:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end_of(self, tickets: list[Ticket]) -> Op[None]:
        """An op that ends after ``tickets`` have, in whatever way: no failure is inherited."""
        core = self._core
        op: Op[None] = Op(core, "turn", self._name)

        def start(parked: Parked) -> None:
            core.when_all_ended(tickets, partial(ended, parked))

        def ended(parked: Parked) -> None:
            if not parked.has_left:
                core.start(op)
                core.parking.host_done(parked)

        core.parking.submit(op, no_calls, line=None, start=start)
        return op

    # -- building ------------------------------------------------------------------------------

    def _build(self, recorded: Recorded) -> None:
        """Have a worker thread make the backend's graphs, once all kernels are compiled."""
        core = self._core
        executables = self._executables
        outer = SCOPE.set(None)  # the graph outlives a scope that drops its work
        op: Op[None] = Op(core, "capture", self._name)
        SCOPE.reset(outer)
        runs = {
            node.run.plan: node.run
            for node in recorded.nodes
            if isinstance(node.run, KernelRun) and not node.run.is_loaded
        }

        # What was launched before runs what was captured before; it may fail, and this goes on.
        earlier = [ticket for ticket in self._parked if ticket.is_parked]
        if self._built is not None:
            earlier.append(self._built.ticket)

        def start(parked: Parked) -> None:
            core.when_all_ended(earlier, partial(build, parked))

        def build(parked: Parked) -> None:
            if parked.has_left:
                return

            def done(_: None, error: BaseException | None) -> None:
                if parked.has_left:
                    return
                if error is None:
                    core.parking.host_done(parked)
                else:
                    core.parking.drop(parked, core.lose(error, "building a captured graph"))

            core.start(op)
            make = partial(_build_blocking, core, recorded, executables)
            core.background.submit(op.ticket.seq, make, done)
            core.schedule_turn()

        parked = core.parking.submit(op, no_calls, line=None, num_needs=len(runs), start=start)
        self._recorded, self._built = recorded, op
        if parked is not None:
            for run in runs.values():
                run.await_kernel(parked)

    def __repr__(self) -> str:
        if self._is_closed:
            return f"<CapturedGraph {self._name or ''} closed>"
        if self._recorded is None:
            return "<CapturedGraph, being captured>"
        return f"<CapturedGraph {self._name or ''} of {len(self.nodes)} ops>"


_in_flight: dict[int, _PartRun] = {}
"""By number of the op: launches that the device runs. One whose end nobody will see stays (R6)."""


class _PartRun:
    """The driver call of one launch of one part, and what that holds."""

    __slots__ = ("_calls", "_executables", "_launched", "_number", "_op", "_place", "_recorded")

    def __init__(
        self,
        op: Op[Any],
        executables: Executables,
        recorded: Recorded,
        place: int,
        part: list[Node],
    ) -> None:
        self._op = op
        self._executables: Executables | None = executables
        self._recorded: Recorded | None = recorded  # its arrays, and the program's pinned memory
        self._place = place
        self._calls = [node.run for node in part if isinstance(node.run, RepeatedCall)]
        self._launched: Handle | None = None
        self._number = 0

    def __call__(self, target: Any) -> int:
        executables = self._executables
        assert executables is not None
        if not executables.parts:
            return 0  # nothing was captured: order still holds
        _in_flight[self._op.ticket.seq] = self
        self._launched = executables.parts[self._place]
        num_places = self._op._core.backend.launch_graph(self._launched.handle, target)
        executables.num_launches[self._place] += 1
        self._number = executables.num_launches[self._place]
        return num_places

    def finish(self) -> None:
        """Raise what a foreign function raised on the simulated device."""
        errors = [call.errors.pop(self._number, None) for call in self._calls]
        for error in errors:
            if error is not None:
                raise error

    def let_go(self) -> None:
        """The launch has retired."""
        op = self._op
        if op.ticket.failure is None or op._core.lost is not None:
            self._ended()
        else:  # it may be running still
            op._core.when_ended(op.ticket, self._ended)

    def _ended(self) -> None:
        self._executables = self._recorded = self._launched = None
        _in_flight.pop(self._op.ticket.seq, None)


def _as_list(after: Any) -> list[Any]:
    is_one = isinstance(after, (Op, DeviceArray)) or is_future(after)
    return [after] if is_one or not isinstance(after, Iterable) else list(after)


def _build_blocking(core: Core, recorded: Recorded, executables: Executables) -> None:
    """Make a graph of the backend's for each part, or bring those that are there up to date."""
    backend = core.backend
    parts = [part for part in recorded.parts if isinstance(part, list)]
    executables.num_launches = [0] * len(parts)
    for place, part in enumerate(parts):
        graph = backend.create_graph()
        try:
            made: dict[Node, Any] = {}
            for node in part:
                deps = [made[dep] for dep in node.deps]
                if node.child is None:
                    made[node] = backend.add_graph_node(graph, told(node.op, node.run), deps)
                else:
                    made[node] = backend.embed_graph(graph, node.child.handle, deps)
            if place < len(executables.parts):
                try:
                    backend.update_graph_blocking(executables.parts[place].handle, graph)
                    continue
                except DeviceError:  # as where a value takes another number of memsets
                    pass
            anew = Handle(core, backend.instantiate_graph_blocking(graph))
            executables.parts[place : place + 1] = [anew]  # launches may be running the old one
        finally:
            backend.close_graph(graph)
            for node in part:
                node.child = None


class _Session:
    """Has the calls of a task recorded from ``with`` on to its end."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._recorder: TaskRecorder | None = None
        self._task: object = None

    def _begin(self) -> None:
        core = self._core
        core.check_open()
        if self._recorder is not None:
            raise RuntimeError("a capture is entered once: make another one")
        recorder = TaskRecorder(core)
        recording = core.recording or Recording(core)
        self._task = recording.begin(recorder)
        self._recorder = recorder

    def _end(self) -> Recorded:
        assert self._core.recording is not None
        assert self._recorder is not None
        self._core.recording.end(self._task)
        return self._recorder.recorded


class Capture(_Session):
    """What ``dev.capture()`` returns: entered, it gives the graph."""

    def __init__(self, dev: Submit, name: str | None) -> None:
        super().__init__(dev._core)
        self._graph = CapturedGraph(dev, name)

    def __enter__(self) -> CapturedGraph:
        self._begin()
        return self._graph

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        recorded, core = self._end(), self._core
        if error is None and not core.is_closing and core.lost is None:
            self._graph._build(recorded)
        else:
            self._graph._is_closed = True


class _Update(_Session):
    """What ``graph.update()`` returns."""

    def __init__(self, graph: CapturedGraph) -> None:
        super().__init__(graph._core)
        self._graph = graph

    def __enter__(self) -> None:
        self._graph._whole  # noqa: B018  (raises where there is nothing to update)
        self._begin()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        recorded = self._end()
        if error is None:
            self._core.check_open()
            self._graph._whole.check_same_shape(recorded)
            self._graph._build(recorded)
