"""The simulator's graphs: work taken down once, and submitted anew by every launch.

A launch spreads the nodes over private streams, its *branches*, so that engines, times, faults
and the race checker deal with them as with any other work. A node goes on a branch only where
the last node there comes before it anyway: streams bring no order that the edges lack, and a
missing edge shows as a race.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from streamflow.backends.base import Doing
from streamflow.backends.graph_places import count_places
from streamflow.backends.sim import host_memory
from streamflow.backends.sim.checks import NUM_QUEUED_MAX, Checks
from streamflow.backends.sim.command import Command, CopyD2D, CopyD2H, CopyH2D, CopyPeer
from streamflow.backends.sim.stream import SimStream
from streamflow.errors import Closed, DeviceError

if TYPE_CHECKING:
    from streamflow.backends.sim.device import SimDevice
    from streamflow.backends.sim.event import SimEvent
    from streamflow.backends.sim.races import Place

__all__ = ["GraphVerbs", "NotingStream", "SimExecutable", "SimGraph", "SimNode"]

_Noted = tuple[str, Command, Doing | None]
"""A verb, what it would have submitted, and for which op, if that is known."""

_KERNELS = frozenset(("launch", "call"))
_KINDS = _KERNELS | {"copy_h2d", "copy_d2h", "copy_d2d", "copy_peer", "fill"}


class NotingStream(SimStream):
    """What a node's ``run`` submits to: nothing comes to its queue.

    It counts as full at all times, so that only what finds a stream full has to ask.

    Attributes
    ----------
    noted : list or None
        What ``run`` has submitted so far; None while none runs.
    """

    __slots__ = ("noted",)

    def __init__(self, device: SimDevice) -> None:
        # Not numbered as others are: graphs are built on worker threads, in no order (R15).
        super().__init__(device, -1, 0, 0)
        self.num_work = 1 << 62
        self.noted: list[_Noted] | None = None

    def note(self, kind: str, command: Command) -> None:
        """Take down what a verb would have submitted."""
        if self.noted is None:
            raise DeviceError("the stream of a graph's node is for that node's run alone")
        if kind not in _KINDS:
            raise self.refuse(kind)
        if isinstance(command, CopyD2D | CopyD2H | CopyH2D):
            for address in (command.dst, command.src):
                block = host_memory.find(address)
                if block is not None and block.kind is host_memory.HostKind.SYSTEM:
                    raise DeviceError("a copy from or to pageable memory can't be part of a graph")
        if command.pinned is not None:  # each launch looks for it anew
            command.pinned.drop()
            command.pinned = None
        self.noted.append((kind, command, self.world.watcher.doing()))

    def refuse(self, what: str) -> DeviceError:
        """The error of what no graph can hold."""
        return DeviceError(
            f"{what} can't be part of a graph: a node launches, copies, fills and calls"
        )

    def record(self, event: SimEvent, /) -> SimEvent:
        raise self.refuse("record")

    def wait(self, event: SimEvent, /) -> None:
        raise self.refuse("wait")

    def sync(self) -> None:
        raise self.refuse("sync")


@dataclass(frozen=True, slots=True, eq=False)
class SimNode:
    """One node; it comes after those of its graph that ``deps`` numbers.

    ``num_places`` is what a graph that was embedded takes of a queue; None for other nodes.
    """

    graph: SimGraph
    index: int
    deps: tuple[int, ...]
    work: tuple[_Noted, ...]
    num_places: int | None


class SimGraph:
    """Nodes, each after those that it depends on."""

    __slots__ = ("device", "is_broken", "is_closed", "nodes", "stream")

    def __init__(self, device: SimDevice) -> None:
        self.device = device
        self.stream = NotingStream(device)
        self.nodes: list[SimNode] = []
        self.is_broken = False
        self.is_closed = False

    def add(
        self, work: Iterable[_Noted], deps: Iterable[SimNode], num_places: int | None = None
    ) -> SimNode:
        """Append a node."""
        indices = tuple(sorted({dep.index for dep in deps}))
        node = SimNode(self, len(self.nodes), indices, tuple(work), num_places)
        self.nodes.append(node)
        return node

    def check(self, device: Checks) -> None:
        """Raise if nothing can be done with it on ``device`` any more."""
        _check_handle(self, device, "graph")
        if self.is_broken:
            raise DeviceError("the graph holds half a node: it can only be closed")


class _Step(NamedTuple):
    """Where a launch has a node run, and which nodes of other branches it has to wait for."""

    branch: int
    waits: tuple[int, ...]
    is_root: bool


class SimExecutable:
    """What a graph was when it was instantiated or updated, and the streams of its launches.

    Attributes
    ----------
    last : Place or None
        The end of the latest launch, on the stream that launched it.
    num_places : int
        What a launch takes of its stream's queue. No update changes it.
    """

    __slots__ = (
        "branches",
        "device",
        "is_closed",
        "last",
        "leaves",
        "nodes",
        "num_branches",
        "num_places",
        "steps",
    )

    def __init__(self, graph: SimGraph) -> None:
        self.device = graph.device
        self.is_closed = False
        self.nodes = tuple(graph.nodes)
        self.steps, num_branches = _spread(self.nodes)
        inner = {dep for node in self.nodes for dep in node.deps}
        self.leaves = [node.index for node in self.nodes if node.index not in inner]
        self.last: Place | None = None
        self.num_places = max(1, _places_of(self.nodes))
        self.num_branches = num_branches
        self.branches: list[SimStream] = []  # made by the first launch: launches have an order

    def fits(self, stream: SimStream) -> bool:
        """Whether a launch has room in the stream's queue, or can be worked off as it comes in."""
        if stream.num_work + self.num_places <= NUM_QUEUED_MAX:
            return True
        last = self.last
        return not stream.queue and (last is None or last[0].num_done >= last[1])

    def make_branches(self) -> None:
        """The streams of its launches, unless they are there."""
        device, world = self.device, self.device.world
        while len(self.branches) < self.num_branches:
            branch = SimStream(device, world.next_ordinal(), 0, world.seed)
            branch.name = f"branch {len(self.branches)} of a graph"
            device.gpu.streams.add(branch)
            self.branches.append(branch)


class _Ended(Command):
    """The end of a launch, on the stream that launched the graph: it has all its places."""

    __slots__ = ("num_places",)
    label = "graph"
    is_movable = False

    def __init__(self, stream: SimStream, num_places: int) -> None:
        super().__init__(stream)
        self.num_places = num_places

    def settle(self, now_s: float) -> bool:
        self.stream.num_work -= self.num_places
        return True


class GraphVerbs(Checks):
    """Verbs of :class:`streamflow.backends.base.Backend`."""

    def create_graph(self) -> SimGraph:
        self.counts["create_graph"] += 1
        self._check()
        with self.world.lock:
            return SimGraph(self._itself())

    def add_graph_node(
        self, graph: SimGraph, run: Callable[[Any], object], deps: Sequence[SimNode], /
    ) -> SimNode:
        self.counts["add_graph_node"] += 1
        self._check()
        graph.check(self)
        if any(dep.graph is not graph for dep in deps):
            raise ValueError("a node depends on nodes of its own graph only")
        stream = graph.stream
        noted: list[_Noted] = []
        stream.noted = noted
        try:
            run(stream)
        except BaseException:
            graph.is_broken = True
            raise
        finally:
            stream.noted = None
        return graph.add(noted, deps)

    def embed_graph(self, graph: SimGraph, child: SimGraph, deps: Sequence[SimNode], /) -> SimNode:
        self.counts["embed_graph"] += 1
        self._check()
        for each in (graph, child):
            each.check(self)
        if any(dep.graph is not graph for dep in deps):
            raise ValueError("a node depends on nodes of its own graph only")
        work = [each for node in child.nodes for each in node.work]
        return graph.add(work, deps, _places_of(child.nodes))

    def instantiate_graph_blocking(self, graph: SimGraph, /) -> SimExecutable:
        self.counts["instantiate_graph_blocking"] += 1
        self._check()
        with self.world.lock:
            graph.check(self)
            return SimExecutable(graph)

    def update_graph_blocking(self, executable: SimExecutable, graph: SimGraph, /) -> None:
        self.counts["update_graph_blocking"] += 1
        self._check()
        with self.world.lock:
            _check_handle(executable, self, "executable")
            graph.check(self)
            _check_alike(executable.nodes, graph.nodes)
            executable.nodes = tuple(graph.nodes)

    def launch_graph(self, executable: SimExecutable, stream: SimStream, /) -> int:
        self.counts["launch_graph"] += 1
        with self.world.lock:
            self._check_stream(stream)
            _check_handle(executable, self, "executable")
            if isinstance(stream, NotingStream):
                raise stream.refuse("a launch of another graph")
            if not executable.fits(stream):
                raise self._full(stream, executable.num_places)
            executable.make_branches()
            watcher = self.world.watcher
            before = watcher.doing()
            try:
                work = self._prepare(executable, before)
                self._submit_nodes(executable, stream, work)
            finally:
                watcher.attribute(before)
        return executable.num_places

    def close_graph(self, graph_or_executable: SimGraph | SimExecutable, /) -> None:
        self.counts["close_graph"] += 1
        with self.world.lock:
            graph_or_executable.is_closed = True
            if isinstance(graph_or_executable, SimGraph):
                graph_or_executable.nodes = []
            else:
                graph_or_executable.nodes = ()
                graph_or_executable.branches = []
                graph_or_executable.last = None

    def _itself(self) -> SimDevice:
        raise NotImplementedError

    def _watch(self, command: CopyH2D) -> None:
        raise NotImplementedError

    # -- launching -------------------------------------------------------------------------

    def _prepare(self, executable: SimExecutable, before: Doing | None) -> list[list[_Noted]]:
        """What a launch submits, by node. All that can be refused is refused here."""
        prepared: list[list[_Noted]] = []
        pinned: list[host_memory.HostBlock] = []
        try:
            for node, step in zip(executable.nodes, executable.steps, strict=True):
                made: list[_Noted] = []
                for kind, noted, doing in node.work:
                    self.world.watcher.attribute(doing or before)
                    command = copy(noted)
                    command.stream = executable.branches[step.branch]
                    if isinstance(command, CopyPeer):
                        self._check_open(command)
                    block = _hold(command)
                    if block is not None:
                        pinned.append(block)
                    command.injected = self._consult_rules(kind, command.label)
                    made.append((kind, command, doing or before))
                prepared.append(made)
        except BaseException:
            for block in pinned:
                block.drop()
            raise
        return prepared

    def _submit_nodes(
        self, executable: SimExecutable, stream: SimStream, work: Iterable[list[_Noted]]
    ) -> None:
        world, branches = self.world, executable.branches
        if world.races is not None:
            world.races.entered(stream)
        start = stream.place()
        ends: list[Place] = []
        for step, commands in zip(executable.steps, work, strict=True):
            branch = branches[step.branch]
            if step.is_root:
                branch.follow(start)
                if executable.last is not None:
                    branch.follow(executable.last)
            for dep in step.waits:
                branch.follow(ends[dep])
            for _, command, doing in commands:
                world.watcher.attribute(doing)
                if isinstance(command, CopyH2D):
                    self._watch(command)
                if world.races is not None:
                    world.races.used(command)
                branch.num_work += 1
                world.submit_node(command)
            ends.append(branch.place())
        for leaf in executable.leaves:
            stream.follow(ends[leaf])
        stream.num_work += executable.num_places
        world.submit(_Ended(stream, executable.num_places))
        executable.last = stream.place()

    def _check_open(self, command: CopyPeer) -> None:
        gpus = self.world.gpus
        for gpu in (command.dst_gpu, command.src_gpu):
            if gpus.get(gpu.index) is not gpu:
                raise DeviceError(f"simulated device {gpu.index} was closed after the capture")


def _hold(command: Command) -> host_memory.HostBlock | None:
    """Mark the host memory of a copy as in use until the copy has ended."""
    if isinstance(command, CopyH2D):
        command.pinned = host_memory.hold(command.src, command.nbytes)
    elif isinstance(command, CopyD2H):
        command.pinned = host_memory.hold(command.dst, command.nbytes)
    return command.pinned


def _check_handle(handle: SimGraph | SimExecutable, device: Checks, what: str) -> None:
    if handle.is_closed:
        raise Closed(f"the {what} is closed")
    if handle.device is not device:
        raise ValueError(f"the {what} belongs to another device than {device.index}")


def _places_of(nodes: Iterable[SimNode]) -> int:
    """What nodes take of a queue, each piece of their work being a node of a driver's."""
    own: list[int | None] = []
    edges: list[tuple[int, int]] = []
    ends: list[int] = []  # by node: its last piece
    for node in nodes:
        pieces: list[int | None] = [None if kind in _KERNELS else 1 for kind, *_ in node.work]
        if node.num_places is not None or not pieces:
            pieces = [node.num_places or 0]
        first = len(own)
        own += pieces
        ends.append(len(own) - 1)
        edges += [(ends[dep], first) for dep in node.deps]
        edges += [(piece, piece + 1) for piece in range(first, ends[-1])]
    return count_places(own, edges)


def _spread(nodes: Sequence[SimNode]) -> tuple[list[_Step], int]:
    """Where each node runs, and the number of branches."""
    steps: list[_Step] = []
    before: list[dict[int, int]] = []  # by node: the last of each branch that comes before it
    tails: list[int] = []
    for node in nodes:
        known: dict[int, int] = {}
        for dep in node.deps:
            for branch, last in (*before[dep].items(), (steps[dep].branch, dep)):
                known[branch] = max(last, known.get(branch, -1))
        own = next((branch for branch, last in known.items() if tails[branch] == last), len(tails))
        if own == len(tails):
            tails.append(-1)
        tails[own] = node.index
        waits = tuple(dep for dep in node.deps if steps[dep].branch != own)
        steps.append(_Step(own, waits, not node.deps))
        before.append(known)
    return steps, len(tails)


def _check_alike(ours: Sequence[SimNode], theirs: Sequence[SimNode]) -> None:
    """Raise unless the graphs differ in arguments only."""
    if len(ours) != len(theirs):
        raise DeviceError(
            f"a graph of {len(ours)} nodes can't be updated with one of {len(theirs)}: "
            "instantiate that one"
        )
    for our, their in zip(ours, theirs, strict=True):
        found = [[kind for kind, *_ in node.work] for node in (our, their)]
        if our.deps != their.deps:
            raise DeviceError(f"node {our.index} has other dependencies in the graph to update by")
        if found[0] != found[1]:
            raise DeviceError(
                f"node {our.index} does {found[0]}, and {found[1]} in the graph to update by"
            )
