"""Simulated devices without a runtime: a backend, its space, and streams of its own."""

from __future__ import annotations

import dataclasses
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from streamflow.backends.sim import open_device
from streamflow.backends.sim.device import SimDevice
from streamflow.config import Settings, SimOptions
from streamflow.memory import CachingHostAllocator
from streamflow.memory.space import Space, enter_space, leave_space
from streamflow.scheduler.reaper import run_orphans_blocking
from streamflow.scheduler.timeline import Timeline

_DRIVER = (
    "allocate",
    "allocate_linear_blocking",
    "allocate_managed_blocking",
    "allocate_mapped_blocking",
    "allocate_pinned_blocking",
    "allocate_system",
    "deallocate",
    "free_linear_blocking",
    "free_pinned_blocking",
    "free_system",
    "create_pool",
)


class Lab:
    """One open device. Closed by the test, or after it."""

    def __init__(self, index: int, settings: Settings, loop_key: object) -> None:
        self.device: SimDevice = open_device(index, settings, loop_key)
        self.space: Space = enter_space(self.device)
        self.is_open = True
        self._has_left = False
        self._streams: list[Any] = []

    def stream(self) -> Any:
        stream = self.device.create_stream()
        self._streams.append(stream)
        return stream

    def named_stream(self) -> Any:
        """A stream that says which device it is of, as a ``Stream`` of the runtime's does."""
        stream = self.stream()
        owner = SimpleNamespace(backend=self.device)
        return SimpleNamespace(_line=Timeline(stream.id, stream, "S", owner=owner))

    def hold(self, stream: Any) -> Any:
        """Work on ``stream`` that has not ended; ``run`` ends it."""
        return self.device.controls().gate(stream)

    def run(self) -> None:
        """Let virtual time run dry."""
        while self.device.advance(0):
            pass

    def without(self, **changes: Any) -> None:
        """Have the device say that it lacks something."""
        support = dataclasses.replace(self.device.memory_support(), **changes)
        self.device.memory_support = lambda: support  # type: ignore[method-assign]

    def calls(self) -> Counter[str]:
        """Calls of the driver that allocate or free."""
        return Counter({name: self.device.counts[name] for name in _DRIVER})

    def used(self) -> int:
        """Bytes of the device that something takes."""
        free, total = self.device.memory_info()
        return total - free

    def leave(self) -> None:
        """What closing does first: resources give back what they have."""
        if self.device.controls().fault is None:
            self.device.synchronize_blocking()
        leave_space(self.space, self.device)
        self._has_left = True

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            if not self._has_left:
                self.leave()
            self.device.close()


@pytest.fixture(autouse=True)
def young_heap() -> Iterator[None]:
    """Let ``gc.collect()`` in a test look at that test's objects, not at thousands of others'."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def open_lab() -> Iterator[Callable[..., Lab]]:
    """Open devices of one machine, on virtual time."""
    labs: list[Lab] = []
    machine = object()

    def opener(
        index: int = 0, *, clock: str = "virtual", key: object = machine, **options: Any
    ) -> Lab:
        options.setdefault("memory_nbytes", 16 << 30)
        settings = Settings(sim=SimOptions(clock=clock, devices=2, **options))
        lab = Lab(index, settings, key)
        labs.append(lab)
        return lab

    yield opener
    gc.collect()
    races = [race for lab in labs if lab.is_open for race in lab.device.controls().take_races()]
    errors: list[Exception] = []
    for lab in labs:
        try:
            lab.close()
        except Exception as error:  # what is left open would be found by every later test
            leave_space(lab.space, lab.device, keeps=True)
            lab.device.close()
            errors.append(error)
    assert errors == []
    assert races == []


@pytest.fixture
def lab(open_lab: Callable[..., Lab]) -> Lab:
    return open_lab()


@pytest.fixture
def made() -> Iterator[Callable[..., CachingHostAllocator]]:
    """Allocators that give all back at the end of the test."""
    allocators: list[CachingHostAllocator] = []

    def make(*args: Any, **options: Any) -> CachingHostAllocator:
        allocators.append(CachingHostAllocator(*args, **options))
        return allocators[-1]

    yield make
    for allocator in allocators:
        allocator.free_all_cached()
    allocators.clear()
    gc.collect()
    run_orphans_blocking()
