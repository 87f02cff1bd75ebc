"""The simulator's core: a discrete-event machine of devices, engines and queues.

A command starts when it is at the head of its stream's queue and a slot of its engine is
free. Engines serve by (stream priority, time it became ready, tie-break, stream made
first), never by which thread came first: on the virtual clock, work is only started
inside a step, after everything submitted before it has been seen (rule R15). Nothing
here knows about threads except that callers hold ``World.lock``; time passes through
:meth:`World.step` (virtual) or the engine threads of :mod:`.wall`.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import TYPE_CHECKING
from weakref import WeakSet

from streamflow.backends.sim.cost import CostModel
from streamflow.backends.sim.memory import AddressSpace
from streamflow.backends.sim.pool import SimPool
from streamflow.backends.sim.races import RaceChecker, Watcher
from streamflow.backends.sim.wall import EngineThreads
from streamflow.errors import DeviceError, DeviceLost

if TYPE_CHECKING:
    from streamflow.backends.sim.command import Command, GateCommand
    from streamflow.backends.sim.device import SimDevice
    from streamflow.backends.sim.predict import ContendedCost
    from streamflow.backends.sim.races import Place
    from streamflow.backends.sim.schedule import Schedule
    from streamflow.backends.sim.stream import SimStream
    from streamflow.config import Settings, SimOptions

__all__ = ["Blocker", "Engine", "Fault", "Gpu", "World"]

_POISON_VIRTUAL_NBYTES = 16 << 20
_POISON_WALL_NBYTES = 64 << 10
"""On the wall clock poison is written by the submitting thread, which must not block (R1)."""

_Ready = tuple[int, float, float, int, "Command"]


class Blocker:
    """A thread blocked until a stream has passed a position."""

    __slots__ = ("_world", "is_released", "latch")

    def __init__(self, world: World) -> None:
        self._world = world
        self.latch = threading.Lock()
        self.latch.acquire()
        self.is_released = False
        world.num_blocked += 1

    def resume(self) -> None:
        # Counted as running from here on, not from when the thread wakes: until it blocks
        # again or its job ends, virtual time stands still.
        if not self.is_released:
            self.is_released = True
            self._world.num_blocked -= 1
            self.latch.release()


class Engine:
    """A part of a device that runs work: ``num_free`` slots and a heap of ready commands."""

    __slots__ = ("gpu", "is_dirty", "name", "num_free", "num_slots", "ready")

    def __init__(self, gpu: Gpu, name: str, num_slots: int) -> None:
        self.gpu = gpu
        self.name = name
        self.num_slots = self.num_free = num_slots
        self.ready: list[_Ready] = []
        self.is_dirty = False


class Fault:
    """The sticky fault of a lost device: which command, on which stream, and why."""

    __slots__ = ("cause", "device_index", "label", "stream_id")

    def __init__(self, device_index: int, label: str, stream_id: int, cause: BaseException) -> None:
        self.device_index = device_index
        self.label = label
        self.stream_id = stream_id
        self.cause = cause

    def error(self) -> DeviceLost:
        """A new error each time, so that no traceback grows over many queries."""
        error = DeviceLost(
            f"simulated device {self.device_index} is lost: {self.label!r} on stream "
            f"{self.stream_id} failed: {type(self.cause).__name__}: {self.cause}",
            suspects=(self.label,),
        )
        error.__cause__ = self.cause
        return error


class Gpu:
    """One simulated device: its memory, engines and streams, whoever opened it."""

    def __init__(self, world: World, index: int, options: SimOptions) -> None:
        self.world = world
        self.index = index
        self.options = options
        self.model = CostModel.load(options.profile, options.rates)
        self.cost = world.cost_of(self)
        self.memory = AddressSpace(
            index,
            options.memory_nbytes,
            _POISON_VIRTUAL_NBYTES if world.is_virtual else _POISON_WALL_NBYTES,
            world.gpus,
        )
        self.h2d = Engine(self, "h2d", 1)
        self.d2h = self.h2d if options.copy_engines == 1 else Engine(self, "d2h", 1)
        self.compute = Engine(self, "compute", options.compute_slots)
        self.aside = Engine(self, "aside", 1 << 30)  # for stalls: room for any number
        self.fault: Fault | None = None
        self.devices: list[SimDevice] = []
        self.pools: list[SimPool] = []
        self.next_pool = count().__next__
        self._default_pool: SimPool | None = None
        self.current_pool: SimPool | None = None  # None: the default one
        # Weak: a stream with work left is held by what will make it go on.
        self.streams: WeakSet[SimStream] = WeakSet()

    @property
    def default_pool(self) -> SimPool:
        """The one that is always there, and that nothing of ours changes."""
        pool = self._default_pool
        if pool is None:
            pool = self._default_pool = SimPool(self, 0, 0, number=-1)
            self.pools.append(pool)
        return pool

    def engines(self) -> tuple[Engine, ...]:
        """Whatever runs work."""
        return self.h2d, self.d2h, self.compute, self.aside

    def sorted_streams(self) -> list[SimStream]:
        """Streams in the order they were made: a weak set's own order differs between runs."""
        return sorted(self.streams, key=lambda stream: stream.ordinal)

    def reclaim(self, nbytes: int) -> None:
        """Have pools give back what they keep, until ``nbytes`` are free, as a driver does."""
        for pool in self.pools:
            if self.memory.free_nbytes >= nbytes:
                return
            if pool.kind is None:
                pool.release_to(0)

    def on_synchronised(self) -> None:
        """A thread has waited for the device: pools give back what exceeds their threshold."""
        for pool in self.pools:
            pool.release_to(pool.release_threshold_nbytes)


class World:
    """Devices that share a clock, opened on one event loop.

    Attributes
    ----------
    lock : RLock
        Held around every call of the machine's methods. Kernel bodies run under it on
        the virtual clock only.
    num_blocked : int
        Threads blocked in a synchronisation, on the virtual clock.
    races : RaceChecker or None
    runnable : deque of SimStream
        Streams whose head can go on; drained before any call returns.
    schedule : Schedule or None
        Another order than the plain one; on the virtual clock only.
    listeners : list of callable
        Each called with every command that has ended and is movable, and the time.
    """

    def __init__(self, settings: Settings, schedule: Schedule | None = None) -> None:
        self.is_virtual = settings.sim.clock == "virtual"
        self.seed = settings.sim.seed
        self.lock = threading.RLock()
        self.num_blocked = 0
        self.num_opened = 0
        self.gpus: dict[int, Gpu] = {}
        self.runnable: deque[SimStream] = deque()
        self.next_ordinal = count().__next__
        self.next_waiter = count().__next__
        self._now_s = 0.0
        self._driver: int | None = None
        self._dirty: list[Engine] = []
        self._in_flight: list[tuple[float, float, int, Command]] = []
        self.threads = None if self.is_virtual else EngineThreads(self)
        self.schedule = schedule
        self.listeners: list[Callable[[Command, float], None]] = []
        if schedule is not None:
            self.listeners.append(schedule.ended)
        self.races = RaceChecker(self) if settings.sim.check_races else None
        self.watcher = self.races or Watcher()

    def cost_of(self, gpu: Gpu) -> CostModel | ContendedCost:
        """What tells the commands of a device how long they take."""
        return gpu.model

    def make_counter(self, gpu: Gpu) -> Counter[str]:
        """What counts the calls of a device's verbs."""
        return Counter()

    # -- time ----------------------------------------------------------------------

    def now_s(self) -> float:
        return self._now_s if self.is_virtual else time.monotonic()

    def reached_s(self) -> float:
        """How far the devices have come; where times are predicted the host may be ahead."""
        return self._now_s if self.is_virtual else time.monotonic()

    def next_s(self) -> float | None:
        """When the next running work ends in virtual time; None if none runs."""
        self._start_ready()
        if self.schedule is not None:
            self._let_go(self.schedule)
        return self._in_flight[0][0] if self._in_flight else None

    def skip(self, seconds: float) -> float:
        """Let up to ``seconds`` of virtual time pass, short of the next completion."""
        if seconds < 0:
            raise ValueError(f"time only passes forward, found {seconds} s")
        start = self._now_s
        next_s = self.next_s()
        self._now_s = start + seconds if next_s is None else min(start + seconds, next_s)
        return self._now_s - start

    def advance(self, num_busy_workers: int, until_s: float = inf) -> bool:
        """:meth:`Backend.advance`: one step, unless a worker is running."""
        with self.lock:
            self._driver = threading.get_ident()
            if num_busy_workers > self.num_blocked:
                return False
            if self.schedule is not None:
                return self._take_turn(self.schedule, num_busy_workers, until_s)
            if until_s < inf:
                next_s = self.next_s()
                if next_s is None or next_s > until_s:
                    return False
            return self.step()

    def _take_turn(self, schedule: Schedule, num_busy_workers: int, until_s: float) -> bool:
        """One turn of the host, in which as much ends as the schedule says; maybe nothing."""

        def can_step() -> bool:
            next_s = self.next_s()
            is_blocked = num_busy_workers <= self.num_blocked  # else a worker was just resumed
            return is_blocked and next_s is not None and next_s <= until_s

        if not can_step():
            return False
        num_ended, num_wanted = 0, schedule.next_turn()
        while num_ended < num_wanted and can_step():
            self.step()
            num_ended += 1
        schedule.turn_saw(num_ended)
        return True

    def skip_to(self, num_busy_workers: int, time_s: float, may_jump: bool) -> bool:
        """:meth:`Backend.skip_to`."""
        with self.lock:
            if num_busy_workers > self.num_blocked:
                return False
            next_s = self.next_s()
            can_skip = may_jump or time_s <= self._now_s if next_s is None else next_s > time_s
            if can_skip:
                self._now_s = max(self._now_s, time_s)
            return can_skip

    def step(self) -> bool:
        """Complete one piece of work in virtual time; False when none runs."""
        if self._dirty:
            self._start_ready()
        if self.schedule is not None:
            self._let_go(self.schedule)
        if not self._in_flight:
            return False
        self._now_s, _, _, command = heappop(self._in_flight)
        if command.engine is None:  # instant, but was held back
            self.runnable.append(command.stream)
            self.settle(self._now_s)
            return True
        error: BaseException | None = command.injected
        if error is None:
            try:
                command.run(command.bind())
            except Exception as fault:
                error = fault
            except BaseException as stop:  # Ctrl-C in a body: leave no half-done command
                self.finish(command, self._now_s, stop)
                raise
        self.finish(command, self._now_s, error)
        return True

    def _start_ready(self) -> None:
        for engine in self._dirty:
            engine.is_dirty = False
            ready = engine.ready
            while ready and engine.num_free:
                _, _, tie, ordinal, command = heappop(ready)
                engine.num_free -= 1
                end_s = self._now_s + command.duration_s()
                heappush(self._in_flight, (end_s, tie, ordinal, command))
        self._dirty.clear()

    def _let_go(self, schedule: Schedule) -> None:
        """Start what was held back, if it is time."""
        while (command := schedule.release(self._is_idle())) is not None:
            stream = command.stream
            if command.engine is None:  # a step of its own, so that the host sees a move
                heappush(self._in_flight, (self._now_s, 0.0, stream.ordinal, command))
            else:
                self.runnable.append(stream)
                self.settle(self._now_s)
                self._start_ready()

    def _is_idle(self) -> bool:
        """Whether nothing runs; a stall does nothing."""
        return not any(entry[3].is_movable for entry in self._in_flight)

    # -- queues ----------------------------------------------------------------------

    def submit(self, command: Command) -> None:
        """Queue a command on its stream."""
        command.stream.num_submitted += 1
        self.enqueue(command)

    def submit_node(self, command: Command) -> None:
        """Queue a command of a graph's launch, one call for all of them."""
        self.submit(command)

    def enqueue(self, command: Command) -> None:
        """The command reaches the device."""
        stream = command.stream
        queue = stream.queue
        queue.append(command)
        if len(queue) == 1:
            now_s = self._now_s if self.is_virtual else time.monotonic()
            self._pump(stream, now_s)
            if self.runnable:
                self.settle(now_s)

    def finish(self, command: Command, now_s: float, error: BaseException | None) -> None:
        """Work has ended: free its slot and let its stream and its waiters go on."""
        if command.pinned is not None:
            command.pinned.drop()
            command.pinned = None
        engine = command.engine
        assert engine is not None
        engine.num_free += 1
        if engine.ready:
            self._mark_dirty(engine)
        stream = command.stream
        queue = stream.queue
        if not queue or queue[0] is not command:
            return  # its device was lost or closed while it ran
        if error is not None:
            self._lose(command, error)
            return
        queue.popleft()
        stream.num_done += 1
        stream.num_work -= 1
        if self.listeners and command.is_movable:
            self._tell(command, now_s)
        if stream.waiters:
            self._release(stream)
        if queue:
            self._pump(stream, now_s)
        if self.runnable:
            self.settle(now_s)

    def open_gate(self, gate: GateCommand) -> None:
        """Let the stream go on that ``gate`` holds."""
        gate.is_open = True
        stream = gate.stream
        if stream.queue and stream.queue[0] is gate:
            stream.resume()
            self.settle(self.reached_s())

    def queued(self, gpu: Gpu) -> list[Command]:
        """What was submitted to a device and has not ended."""
        return [command for stream in gpu.sorted_streams() for command in stream.queue]

    def settle(self, now_s: float) -> None:
        """Let every runnable stream go on. A loop, so long chains of waits need no stack."""
        while self.runnable:
            self._pump(self.runnable.popleft(), now_s)

    def _pump(self, stream: SimStream, now_s: float) -> None:
        queue = stream.queue
        schedule = self.schedule
        while queue:
            command = queue[0]
            engine = command.engine
            if schedule is not None and command.is_movable and schedule.holds(command):
                return
            if engine is not None:
                draw = stream.draw
                tie = 0.0 if draw is None else draw()
                heappush(engine.ready, (stream.priority, now_s, tie, stream.ordinal, command))
                if not engine.is_dirty:
                    self._mark_dirty(engine)
                return
            if command.injected is not None:
                self._lose(command, command.injected)
                return
            if not command.settle(now_s):
                return
            queue.popleft()
            stream.num_done += 1
            if self.listeners and command.is_movable:
                self._tell(command, now_s)
            if stream.waiters:
                self._release(stream)

    def _tell(self, command: Command, now_s: float) -> None:
        for listener in self.listeners:
            listener(command, now_s)

    def _mark_dirty(self, engine: Engine) -> None:
        if self.threads is not None:
            self.threads.wake(engine)
        elif not engine.is_dirty:
            engine.is_dirty = True
            self._dirty.append(engine)

    def _release(self, stream: SimStream) -> None:
        waiters = stream.waiters
        done = stream.num_done
        while waiters and waiters[0][0] <= done:
            heappop(waiters)[2].resume()

    def end_now(self, command: Command) -> None:
        """Have work that runs in virtual time end at this moment; nothing if it doesn't run."""
        for at, (_, tie, ordinal, running) in enumerate(self._in_flight):
            if running is command:
                self._in_flight[at] = (self._now_s, tie, ordinal, running)
                heapify(self._in_flight)
                return

    # -- faults and closing ------------------------------------------------------------

    def _lose(self, command: Command, cause: BaseException) -> None:
        gpu = command.stream.gpu
        gpu.fault = Fault(gpu.index, command.label, command.stream.id, cause)
        for device in gpu.devices:
            device.stop = gpu.fault.error
        self.abandon(gpu.sorted_streams())

    def abandon(self, streams: list[SimStream]) -> None:
        """Drop what these streams still hold; who waits for them goes on.

        Work that an engine thread is running right now ends without a trace.
        """
        dropped = set(streams)
        if self.schedule is not None:
            self.schedule.forget(dropped)
        running = [e for e in self._in_flight if e[3].stream in dropped]
        if running:
            self._in_flight = [e for e in self._in_flight if e[3].stream not in dropped]
            heapify(self._in_flight)
            for *_, command in running:
                if command.engine is not None:
                    command.engine.num_free += 1
        for engine in {e for s in streams for e in s.gpu.engines()}:
            engine.ready = [e for e in engine.ready if e[4].stream not in dropped]
            heapify(engine.ready)
            if engine.ready:
                self._mark_dirty(engine)
        for stream in streams:
            for command in stream.queue:
                is_running = self.threads is not None and command in self.threads.running
                if command.pinned is not None and not is_running:
                    command.pinned.drop()
            stream.queue.clear()
            stream.num_done = stream.num_submitted
            stream.num_work = 0
            self._release(stream)
        if self.races is not None:
            self.races.ended(streams)
        self.settle(self.reached_s())

    # -- blocking ----------------------------------------------------------------------

    def wait_blocking(self, place: Place) -> None:
        """Block this thread until ``place`` was passed.

        On the virtual clock the thread that drives it (the one that called ``advance``
        last; the main thread before any did) steps the machine itself: nobody else would.
        """
        stream, position, *_ = place
        blocker: Blocker | None = None
        with self.lock:
            if stream.num_done < position:
                if self.is_virtual and self._is_driver():
                    self._drive(stream, position)
                else:
                    blocker = Blocker(self)
                    heappush(stream.waiters, (position, self.next_waiter(), blocker))
        if blocker is not None:
            try:
                blocker.latch.acquire()
            finally:  # also after a KeyboardInterrupt, so that the count stays true
                with self.lock:
                    blocker.resume()
        if stream.device.stop is not None:
            raise stream.device.stop()
        with self.lock:
            stream.num_proven = max(stream.num_proven, position)
            stream.gpu.on_synchronised()
        if self.races is not None:
            self.races.observe(place)

    def synchronize_blocking(self, gpu: Gpu) -> None:
        """Block until everything submitted to the device is done.

        On the virtual clock any thread steps the machine here, busy workers or not: this
        is for leaving a device, when its poller is gone.
        """
        with self.lock:
            places = [stream.place() for stream in gpu.sorted_streams()]
            if self.is_virtual:
                for stream, position, *_ in places:
                    self._drive(stream, position)
        for place in places:
            self.wait_blocking(place)

    def _is_driver(self) -> bool:
        if self._driver is None:
            return threading.current_thread() is threading.main_thread()
        return threading.get_ident() == self._driver

    def _drive(self, stream: SimStream, position: int) -> None:
        while stream.num_done < position:
            if not self.step():
                raise DeviceError(
                    f"stream {stream.id} would never get past {stream.queue[0].label!r}: nothing "
                    "runs on the simulator any more; release its gates first"
                )

    def close(self) -> None:
        """End the engine threads."""
        if self.threads is not None:
            self.threads.close()
