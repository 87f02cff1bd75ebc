"""A world that predicts times: the host's calls cost, and engines slow each other down.

Without it the host's calls are free, so all that one turn of the loop submits is there at
the same moment. Here one cursor says how far the host has come. Each call moves it by its
cost; a command reaches its stream at the time at which its call has ended; a wait moves the
cursor to the completion that it was for. Commands that the host has submitted and the device
doesn't know of yet *arrive*, as time passes, and from then on the machine is the same.

Engines slow each other down. A copy that starts while the other direction is busy runs at the
rate for both. What moves bytes through the device's memory shares its rate equally: kernels
without a cost of their own, fills, and copies within the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heappush
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING

from streamflow.backends.sim.command import Command, CopyD2D, Fill, GateCommand, Launch
from streamflow.backends.sim.cost import CostModel
from streamflow.backends.sim.machine import Gpu, World

if TYPE_CHECKING:
    from streamflow.backends.sim.races import Place
    from streamflow.backends.sim.schedule import Schedule
    from streamflow.backends.sim.stream import SimStream
    from streamflow.config import Settings

__all__ = ["ContendedCost", "PredictingWorld", "Sharing"]


_LATE = 1 << 62
"""More than any stream counts."""


class ContendedCost:
    """A device's cost model while it runs: what copies take that start now.

    Asked once for each command, when it starts.
    """

    __slots__ = ("_gpu", "kernel_s", "model", "sharing")

    def __init__(self, gpu: Gpu) -> None:
        self.model = gpu.model
        self.kernel_s = gpu.model.kernel_s
        self.sharing = Sharing()
        self._gpu = gpu

    def h2d_s(self, nbytes: int) -> float:
        """Host to device."""
        model = self.model
        rate = model.h2d_duplex_rate if self._is_duplex() else model.h2d_rate
        return model.copy_latency_s + nbytes / rate

    def d2h_s(self, nbytes: int) -> float:
        """Device to host."""
        model = self.model
        rate = model.d2h_duplex_rate if self._is_duplex() else model.d2h_rate
        return model.copy_latency_s + nbytes / rate

    def peer_s(self, nbytes: int) -> float:
        """Between two devices."""
        return self.model.peer_s(nbytes)

    def d2d_s(self, nbytes: int) -> float:
        """Within one device, alone."""
        return self.model.d2d_s(nbytes)

    def fill_s(self, nbytes: int) -> float:
        """Write a pattern, alone."""
        return self.model.fill_s(nbytes)

    def launch_s(self, nbytes: int) -> float:
        """Run a kernel that touches each byte of its array arguments once, alone."""
        return self.model.launch_s(nbytes)

    def _is_duplex(self) -> bool:
        """Both directions are busy, or about to start."""
        h2d, d2h = self._gpu.h2d, self._gpu.d2h
        if h2d is d2h:
            return False
        return all(engine.num_free == 0 or engine.ready for engine in (h2d, d2h))


class Sharing:
    """The work that shares a device's memory: each running piece gets an equal part of its rate.

    Pieces are told by what they would still take alone. While ``n`` of them run, each
    gets on by a second in ``n``. So all ends are known as soon as the last piece has started.
    """

    __slots__ = ("_at_s", "_left_s")

    def __init__(self) -> None:
        self._at_s = 0.0
        self._left_s: dict[Command, float] = {}

    def __contains__(self, command: Command) -> bool:
        return command in self._left_s

    def reach(self, now_s: float) -> None:
        """Let the pieces get on up to ``now_s``; what has ended by then is forgotten."""
        ends_s = self.ends_s()
        passed_s, self._at_s = now_s - self._at_s, now_s
        # Each has got on by as much as one that still runs, or else it has ended.
        done_s = before_s = 0.0
        num = len(self._left_s)
        for command in sorted(self._left_s, key=self._left_s.__getitem__):
            left_s = self._left_s[command]
            step_s = min(left_s - before_s, passed_s / num)
            done_s += step_s
            passed_s -= step_s * num
            before_s, num = left_s, num - 1
        self._left_s = {
            command: left_s - done_s
            for command, left_s in self._left_s.items()
            if ends_s[command] > now_s
        }

    def add(self, command: Command, alone_s: float) -> None:
        """A piece has started, at the moment reached."""
        self._left_s[command] = alone_s

    def drop(self, streams: set[SimStream]) -> None:
        """Forget the pieces of these streams."""
        self._left_s = {c: left_s for c, left_s in self._left_s.items() if c.stream not in streams}

    def ends_s(self) -> dict[Command, float]:
        """When each piece ends if no other starts."""
        end_s, before_s, num = self._at_s, 0.0, len(self._left_s)
        found = {}
        for command in sorted(self._left_s, key=self._left_s.__getitem__):
            left_s = self._left_s[command]
            end_s += (left_s - before_s) * num
            before_s, num = left_s, num - 1
            found[command] = end_s
        return found


class _Charges(Counter[str]):
    """Counts the calls of each verb, and charges the host for them.

    A verb is counted once, before it does anything: what it submits arrives after its cost.
    Queries are free: how often a poller asks depends on real time (rule R15). A copy of this
    only counts.
    """

    _charge: Callable[[float], None]
    _costs_s: Mapping[str, float] = MappingProxyType({})

    def charge_by(self, model: CostModel, charge: Callable[[float], None]) -> None:
        """Charge for each call from now on."""
        self._charge = charge
        self._costs_s = {
            "launch": model.host_launch_s,
            "call": model.host_launch_s,
            "copy_h2d": model.host_copy_s,
            "copy_d2h": model.host_copy_s,
            "copy_d2d": model.host_copy_s,
            "copy_peer": model.host_copy_s,
            "fill": model.host_fill_s,
            "launch_graph": model.host_launch_s,
            "record": model.host_record_s,
            "wait": model.host_wait_s,
            "allocate": model.host_allocate_s,
            "deallocate": model.host_free_s,
        }

    def __setitem__(self, verb: str, num: int) -> None:
        super().__setitem__(verb, num)
        cost_s = self._costs_s.get(verb)
        if cost_s:
            self._charge(cost_s)


def _uses_memory(command: Command) -> bool:
    """Whether its time is that of the bytes it moves through the device's memory."""
    if isinstance(command, Launch):
        return command.kernel.cost_s is None
    return isinstance(command, Fill | CopyD2D)


def _sharing_of(command: Command) -> Sharing:
    cost = command.stream.gpu.cost
    assert isinstance(cost, ContendedCost)
    return cost.sharing


class Opening(Command):
    """A gate is opened: on its way to the device, and in no queue."""

    __slots__ = ("gate",)
    label = "opening"

    def __init__(self, gate: GateCommand) -> None:
        super().__init__(gate.stream)
        self.gate = gate


class PredictingWorld(World):
    """Virtual time with a host that takes some; see the top of this file.

    Only the thread that drives the clock is charged. What workers submit arrives when the
    host last saw a completion, or behind what is on its way to that stream: their calls run
    beside the loop's, and in which order threads call is not a function of the seed (rule R15).
    """

    def __init__(self, settings: Settings, schedule: Schedule | None = None) -> None:
        if schedule is not None:
            raise ValueError("predict=True tells the time of the plain run: it takes no schedule")
        super().__init__(settings)
        self._host_s = 0.0
        self._seen_s = 0.0  # the host's time when it last saw a completion
        self._arriving: list[tuple[float, int, int, Command]] = []
        self._last_s: dict[int, float] = {}  # by stream: when the newest on its way arrives

    def now_s(self) -> float:
        return max(self._now_s, self._host_s)

    def cost_of(self, gpu: Gpu) -> ContendedCost:
        return ContendedCost(gpu)

    def make_counter(self, gpu: Gpu) -> Counter[str]:
        charges = _Charges()
        charges.charge_by(gpu.model, self._charge)
        return charges

    def _charge(self, seconds: float) -> None:
        if self._is_driver():
            self._host_s += seconds

    # -- arriving --------------------------------------------------------------------

    def submit(self, command: Command) -> None:
        """Have the command reach its stream when the call that submits it has ended."""
        if isinstance(command, Launch):
            self._charge(len(command.args) * command.stream.gpu.model.host_argument_s)
        self.submit_node(command)

    def submit_node(self, command: Command) -> None:
        stream = command.stream
        stream.num_submitted += 1
        at_s = max(self._called_s(), self._last_s.get(stream.ordinal, 0.0))
        self._last_s[stream.ordinal] = at_s
        heappush(self._arriving, (at_s, stream.ordinal, stream.num_submitted, command))

    def _called_s(self) -> float:
        """When a call that is being made reaches the device."""
        return self._host_s if self._is_driver() else self._seen_s

    def open_gate(self, gate: GateCommand) -> None:
        """Have the opening reach the device as a call does."""
        stream = gate.stream
        number = _LATE + self.next_waiter()  # behind what reaches the stream at the same moment
        opening = Opening(gate)
        heappush(self._arriving, (self._called_s(), stream.ordinal, number, opening))

    def enqueue(self, command: Command) -> None:
        if isinstance(command, Opening):
            super().open_gate(command.gate)
        else:
            super().enqueue(command)

    def queued(self, gpu: Gpu) -> list[Command]:
        arriving = [command for *_, command in self._arriving if command.stream.gpu is gpu]
        return super().queued(gpu) + arriving

    def _admit(self) -> bool:
        """Queue what arrives no later than the next completion; whether there was any."""
        arriving = self._arriving
        num_before = len(arriving)
        while arriving:
            self._start_ready()
            at_s = arriving[0][0]
            if self._in_flight and self._in_flight[0][0] < at_s:
                break
            self._now_s = max(self._now_s, at_s)
            # All of one moment together, so that ties between streams are the seed's.
            while arriving and arriving[0][0] == at_s:
                _, ordinal, _, command = heappop(arriving)
                if self._last_s.get(ordinal) == at_s:
                    del self._last_s[ordinal]
                self.enqueue(command)
        return len(arriving) < num_before

    def next_s(self) -> float | None:
        self._admit()
        return super().next_s()

    def step(self) -> bool:
        # A step of its own: what was waited for may have been passed by arriving alone.
        return self._admit() or super().step()

    # -- sharing ---------------------------------------------------------------------

    def _start_ready(self) -> None:
        super()._start_ready()
        started = [
            (sharing, command, end_s)
            for end_s, _, _, command in self._in_flight
            if _uses_memory(command) and command not in (sharing := _sharing_of(command))
        ]
        for sharing, command, end_s in started:
            sharing.reach(self._now_s)
            sharing.add(command, end_s - self._now_s)
        if started:
            self._end_anew({sharing for sharing, _, _ in started})

    def _end_anew(self, sharings: set[Sharing]) -> None:
        """Have what these run end when it ends by now."""
        ends_s = {command: end_s for each in sharings for command, end_s in each.ends_s().items()}
        self._in_flight = [(ends_s.get(e[3], e[0]), *e[1:]) for e in self._in_flight]
        heapify(self._in_flight)

    def abandon(self, streams: list[SimStream]) -> None:
        dropped = set(streams)
        sharings = {_sharing_of(command) for *_, command in self._in_flight}
        for sharing in sharings:
            sharing.reach(self._now_s)
            sharing.drop(dropped)
        for entry in self._arriving:
            if entry[3].stream in dropped and entry[3].pinned is not None:
                entry[3].pinned.drop()
        self._arriving = [entry for entry in self._arriving if entry[3].stream not in dropped]
        heapify(self._arriving)
        self._end_anew(sharings)
        super().abandon(streams)

    # -- the host's time -------------------------------------------------------------

    def skip(self, seconds: float) -> float:
        passed_s = super().skip(seconds)
        self._host_s += passed_s
        return passed_s

    def advance(self, num_busy_workers: int, until_s: float = inf) -> bool:
        has_moved = super().advance(num_busy_workers, until_s)
        if has_moved:  # and the loop sees it in this turn
            self._host_s = self._seen_s = max(self._host_s, self._now_s)
        return has_moved

    def wait_blocking(self, place: Place) -> None:
        is_charged = self._is_driver()
        super().wait_blocking(place)
        if is_charged:
            model = place[0].gpu.model
            if self._now_s > self._host_s:  # it was not done yet
                self._host_s = self._now_s + model.host_sync_s
            else:
                self._host_s += model.host_query_s
            self._seen_s = self._host_s
