"""A world that predicts times: the host's calls cost, and engines slow each other down.

Without it the host's calls are free, so all that one turn of the loop submits is there at
the same moment. Here one cursor says how far the host has come. Each call moves it by its
cost; a command reaches its stream at the time at which its call has ended; a wait moves the
cursor to the completion that it was for. Commands that the host has submitted and the device
doesn't know of yet *arrive*, as time passes, and from then on the machine is the same.

Contention is decided as work starts. A copy runs at the rate for both directions if the
other one is busy then. What moves bytes through the device's memory is served one after the
other: big kernels of several streams share the memory's rate, and which of them is served
first makes no difference to when all are done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heappush
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING

from streamflow.backends.sim.command import Launch
from streamflow.backends.sim.cost import CostModel
from streamflow.backends.sim.machine import Gpu, World

if TYPE_CHECKING:
    from streamflow.backends.sim.command import Command
    from streamflow.backends.sim.races import Place
    from streamflow.backends.sim.schedule import Schedule
    from streamflow.backends.sim.stream import SimStream
    from streamflow.config import Settings

__all__ = ["ContendedCost", "PredictingWorld"]


class ContendedCost:
    """A device's cost model while it runs: what takes how long, started now.

    Every method is asked once for each command, when it starts.
    """

    __slots__ = ("_gpu", "_memory_free_s", "_world", "kernel_s", "model")

    def __init__(self, gpu: Gpu, world: PredictingWorld) -> None:
        self.model = gpu.model
        self.kernel_s = gpu.model.kernel_s
        self._gpu = gpu
        self._world = world
        self._memory_free_s = 0.0

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
        """Within one device."""
        return self._after_memory(self.model.copy_latency_s, nbytes / self.model.d2d_rate)

    def fill_s(self, nbytes: int) -> float:
        """Write a pattern."""
        return self._after_memory(self.model.copy_latency_s, nbytes / self.model.fill_rate)

    def launch_s(self, nbytes: int) -> float:
        """Run a kernel that touches each byte of its array arguments once."""
        return self._after_memory(self.kernel_s, nbytes / self.model.memory_rate)

    def _is_duplex(self) -> bool:
        """Both directions are busy, or about to start."""
        h2d, d2h = self._gpu.h2d, self._gpu.d2h
        if h2d is d2h:
            return False
        return all(engine.num_free == 0 or engine.ready for engine in (h2d, d2h))

    def _after_memory(self, fixed_s: float, memory_s: float) -> float:
        now_s = self._world.device_s
        end_s = max(now_s + fixed_s, self._memory_free_s) + memory_s
        self._memory_free_s = end_s
        return end_s - now_s


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

    @property
    def device_s(self) -> float:
        """How far the devices have come; the host is never behind."""
        return self._now_s

    def now_s(self) -> float:
        return max(self._now_s, self._host_s)

    def cost_of(self, gpu: Gpu) -> ContendedCost:
        return ContendedCost(gpu, self)

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
        stream = command.stream
        stream.num_submitted += 1
        if isinstance(command, Launch):
            self._charge(len(command.args) * stream.gpu.model.host_argument_s)
        at_s = self._host_s if self._is_driver() else self._seen_s
        at_s = max(at_s, self._last_s.get(stream.ordinal, 0.0))
        self._last_s[stream.ordinal] = at_s
        heappush(self._arriving, (at_s, stream.ordinal, stream.num_submitted, command))

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

    def abandon(self, streams: list[SimStream]) -> None:
        dropped = set(streams)
        for entry in self._arriving:
            if entry[3].stream in dropped and entry[3].pinned is not None:
                entry[3].pinned.drop()
        self._arriving = [entry for entry in self._arriving if entry[3].stream not in dropped]
        heapify(self._arriving)
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
