"""Engine threads: the machine in real time, with real overlap.

Each slot of an engine is one daemon thread, started when work first needs it. It runs a
command's effect without the machine's lock, then sleeps until the modelled end. Modelled
times chain (the next start is the last modelled end), so sleeping too long by the
system's timer does not add up.
"""

from __future__ import annotations

import threading
import time
from heapq import heappop
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamflow.backends.sim.command import Command
    from streamflow.backends.sim.machine import Engine, World

__all__ = ["EngineThreads"]


class _Crew:
    """The threads of one engine."""

    __slots__ = ("bell", "num_idle", "num_threads")

    def __init__(self, lock: threading.RLock) -> None:
        self.bell = threading.Condition(lock)
        self.num_idle = 0
        self.num_threads = 0


class EngineThreads:
    """Runs a world's work on threads; every method but the threads' own holds its lock.

    Attributes
    ----------
    running : set of Command
        What threads are busy with.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._crews: dict[Engine, _Crew] = {}
        self._closing = threading.Event()
        self.running: set[Command] = set()

    def wake(self, engine: Engine) -> None:
        """A command has become ready."""
        crew = self._crews.get(engine)
        if crew is None:
            crew = self._crews[engine] = _Crew(self._world.lock)
        if len(engine.ready) > crew.num_idle and engine.num_free > crew.num_idle:
            crew.num_threads += 1
            crew.num_idle += 1
            threading.Thread(
                target=self._serve,
                args=(engine, crew),
                name=f"streamflow-sim-{engine.gpu.index}-{engine.name}-{crew.num_threads}",
                daemon=True,
            ).start()
        crew.bell.notify()

    def close(self) -> None:
        """End all threads; those asleep wake up."""
        self._closing.set()
        for crew in self._crews.values():
            crew.bell.notify_all()

    def _serve(self, engine: Engine, crew: _Crew) -> None:
        world = self._world
        free_at_s = 0.0
        with world.lock:
            while True:
                while not engine.ready:
                    if self._closing.is_set():
                        return
                    crew.bell.wait()
                _, ready_s, _, _, command = heappop(engine.ready)
                crew.num_idle -= 1
                engine.num_free -= 1
                error, free_at_s = self._run(command, max(ready_s, free_at_s))
                crew.num_idle += 1
                world.finish(command, free_at_s, error)

    def _run(self, command: Command, start_s: float) -> tuple[BaseException | None, float]:
        """Run one command; enters and leaves holding the lock. Returns its error and end."""
        world = self._world
        self.running.add(command)
        end_s = start_s
        error = command.injected
        try:
            end_s += command.duration_s()
            bound = command.bind() if error is None else ()
        except Exception as fault:
            error = fault
        world.lock.release()
        try:
            if error is None:
                try:
                    command.run(bound)
                except BaseException as fault:
                    error = fault
            end_s = self._sleep_until(end_s)
        finally:
            world.lock.acquire()
        self.running.discard(command)
        return error, end_s

    def _sleep_until(self, end_s: float) -> float:
        """Sleep to the modelled end; where the effect itself took longer, that is the end."""
        now_s = time.monotonic()
        if now_s >= end_s:
            return now_s
        self._closing.wait(end_s - now_s)
        return end_s
