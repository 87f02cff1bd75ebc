"""SyncedArray against a model of its table, with copies in flight, cancelled and failed."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any

import anyio
import numpy as np
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

import streamflow as sf
from streamflow.config import Settings, SimOptions
from streamflow.scheduler.synced_table import TABLE, Asked, Step

State = sf.SyncedState
UNINIT, CPU, GPU, SYNCED, POISONED = State
NUM_TURNS = 60

LOOPS: dict[str, dict[str, Any]] = {
    "asyncio": {"backend": "asyncio"},
    "uvloop": {"backend": "asyncio", "backend_options": {"use_uvloop": True}},
    "trio": {"backend": "trio"},
}


class Broken(Exception):
    """What bodies, kernels and copies fail with here."""


def bump(stream: Any, y: Any) -> None:
    y += 1


def broken(stream: Any, y: Any) -> None:
    raise Broken("kernel")


@dataclass
class Flight:
    """A copy that was begun."""

    to: State  # the head of the side it goes to
    version: int
    host: int  # which host memory it uses
    device: int


@dataclass
class Model:
    """What the table and the sentences under it say, one step after another."""

    state: State = UNINIT
    value: float = 0
    version: int = 0
    host: int = 0  # which memory: a new number with each adoption
    device: int = 0
    owns_host: bool = True
    owns_device: bool = True
    is_large: bool = False  # more than is read before a copy is submitted
    closed: set[State] = field(default_factory=set)  # directions whose lane has a gate
    failing: set[State] = field(default_factory=set)  # directions whose next copy fails
    flights: list[Flight] = field(default_factory=list)

    def settle(self, state: State, value: float | None = None) -> None:
        self.state = state
        self.version += 1
        if value is not None:
            self.value = value

    def advance(self) -> None:
        """Let every copy end that nothing holds."""
        for flight in list(self.flights):
            ahead = self.flights[: self.flights.index(flight)]
            is_held = flight.to in self.closed
            # A copy out comes after the copy in of the same memory, on either side.
            is_held |= any(
                o.device == flight.device or self.uses_host(o, flight.host) for o in ahead
            )
            if not is_held:
                self.flights.remove(flight)
                if flight.version == self.version:
                    self.state = SYNCED

    def copy(self, to: State) -> bool:
        """Begin, or share, a copy; False if it fails."""
        if any(o.to is to and o.version == self.version for o in self.flights):
            return True
        if to in self.failing:
            self.failing.remove(to)
            # Nobody shares it, but its stream has to pass it before the memory is written.
            self.flights.append(Flight(to, -1, self.host, self.device))
            return False
        self.flights.append(Flight(to, self.version, self.host, self.device))
        return True

    def uses_host(self, flight: Flight, host: int) -> bool:
        """Whether it still needs that memory: a copy in only where the device itself reads it."""
        is_pinned = self.is_large and host == 0
        return flight.host == host and (flight.to is CPU or is_pinned)

    def holds_up_host(self, is_write: bool) -> bool:
        return any(self.uses_host(o, self.host) and (is_write or o.to is CPU) for o in self.flights)


class Driver:
    """Does each step on the array and on the model, and compares."""

    def __init__(self, dev: sf.Device, shape: Any) -> None:
        self.dev = dev
        self.m = sf.SyncedArray(dev, shape, np.float32)
        self.model = Model(is_large=self.m.nbytes > 64 << 10)
        self.gates: dict[State, Any] = {}
        self.ops: list[tuple[Any, bool]] = []  # pushes and pulls, and whether they end well
        self.adopted: list[Any] = []
        self.rules: list[Any] = []

    # -- waiting -----------------------------------------------------------------------

    async def settled(self) -> None:
        self.model.advance()
        for _ in range(NUM_TURNS):
            await checkpoint()
        await self.until(lambda: self.m.state is self.model.state)
        for _ in range(NUM_TURNS // 4):
            await checkpoint()
        assert self.m.state is self.model.state
        assert self.m.owns_host == self.model.owns_host
        assert self.m.owns_device == self.model.owns_device

    async def until(self, is_so: Any) -> None:
        """Worker threads take their time."""
        with anyio.move_on_after(5):
            while not is_so():
                await checkpoint()

    def release(self) -> None:
        for gate in self.gates.values():
            gate.release()
        self.gates.clear()
        self.model.closed.clear()
        self.model.advance()

    async def attempt(self, block: Any, body: Any, *, is_held: bool, gives_up: bool) -> Any:
        """Run a block; where the model says that it has to wait, cancel it or open the gates."""
        outcome: list[Any] = []

        async def use() -> None:
            try:
                async with block as array:
                    outcome.append(await body(array))
            except Exception as error:
                outcome.append(error)

        async with anyio.create_task_group() as group:
            group.start_soon(use)
            for _ in range(NUM_TURNS):
                await checkpoint()
            if is_held:
                assert not outcome
                if gives_up and self.m.owns_host:  # else it is the caller's memory: it holds out
                    group.cancel_scope.cancel()
                    return None
                self.release()
            await self.until(lambda: outcome)
            assert outcome  # here: else the group would wait for it without end
        return outcome[0]

    # -- steps -------------------------------------------------------------------------

    async def host(self, write: Any, value: int, fails: bool, gives_up: bool) -> None:
        model = self.model
        asked = {False: Asked.READ_HOST, True: Asked.WRITE_HOST, "all": Asked.WRITE_ALL_HOST}
        cell = TABLE[asked[write]][model.state]
        before = model.state
        copies_well = True
        if cell.step is Step.COPY:
            is_held_before = model.holds_up_host(True)
            copies_well = model.copy(CPU)
            is_held = is_held_before and not copies_well
            if is_held:  # it is not even submitted yet, and will fail then
                model.failing.add(CPU)
                copies_well = False
        else:
            is_held = False
        model.advance()
        if copies_well:
            is_held |= model.holds_up_host(bool(write) or cell.step is Step.ZEROS)
        if cell.step is Step.RAISE:
            is_held = False

        async def body(array: Any) -> Any:
            seen = array.copy()
            if write:
                array[...] = value
            if fails:
                raise Broken("body")
            return seen

        found = await self.attempt(
            self.m.host(write=write), body, is_held=is_held, gives_up=gives_up
        )
        if found is None:
            return
        if cell.step is Step.RAISE:
            assert isinstance(found, sf.UpstreamFailed)
            return
        if not copies_well:
            model.failing.discard(CPU)
            assert isinstance(found, sf.DeviceError)
            return
        if cell.step is Step.ZEROS:
            model.settle(CPU, 0)
        if not fails and write != "all":
            assert (found == model.value).all()
        if fails:
            assert isinstance(found, Broken)
        if not write:
            return
        keeps_device = model.state in (GPU, SYNCED)
        if not fails:
            model.settle(CPU, value)
        elif keeps_device:
            model.settle(GPU)
        elif before is UNINIT and write == "all":
            model.settle(UNINIT)
        else:
            model.settle(POISONED if before is not POISONED else before)

    async def device(self, write: Any, value: int, how: str, gives_up: bool) -> None:
        model, dev = self.model, self.dev
        asked = {False: Asked.READ_DEVICE, True: Asked.WRITE_DEVICE, "all": Asked.WRITE_ALL_DEVICE}
        cell = TABLE[asked[write]][model.state]
        copies_well = model.copy(GPU) if cell.step is Step.COPY else True
        is_quiet = not model.closed and CPU not in model.failing
        if not write or write == "all":
            how = "fill" if how == "bump" else how
        if how == "broken" and not (is_quiet and copies_well):
            how = "fill"

        async def body(array: Any) -> Any:
            seen = None
            if not write:
                if is_quiet and copies_well:
                    seen = await dev.get(array)
            elif how == "bump":
                dev.call(bump, array).add_done_callback(observe)
            elif how == "broken":
                op = dev.call(broken, array)
                with pytest.raises(Broken):
                    await op
            elif how != "untouched":
                dev.fill(array, value)
            if how in ("fails", "untouched"):
                raise Broken("body")
            return seen

        found = await self.attempt(
            self.m.device(write=write), body, is_held=False, gives_up=gives_up
        )
        if cell.step is Step.RAISE:
            assert isinstance(found, sf.UpstreamFailed)
            return
        if cell.step is Step.ZEROS:
            model.settle(GPU, 0)
        if how in ("fails", "untouched"):
            assert isinstance(found, Broken)
        elif found is not None:
            assert (found == model.value).all()
        if not write:
            return
        model.advance()
        keeps_host = model.state in (CPU, SYNCED)
        if how in ("fails", "untouched"):
            if keeps_host:
                model.settle(CPU)
            elif how == "fails" and model.state is GPU:
                model.settle(POISONED)
            else:
                model.settle(model.state)
        elif how == "broken" or (how == "bump" and not copies_well):
            model.settle(POISONED)
        else:
            model.settle(GPU, model.value + 1 if how == "bump" else value)

    async def transfer(self, asked: Asked, gives_up: bool) -> None:
        model = self.model
        cell = TABLE[asked][model.state]
        submit = self.m.push if asked is Asked.PUSH else self.m.pull
        if cell.step in (Step.REFUSE, Step.RAISE):
            with pytest.raises(sf.UpstreamFailed if cell.step is Step.RAISE else ValueError):
                submit()
            return
        to = GPU if asked is Asked.PUSH else CPU
        is_waiting = cell.step is Step.COPY and to is CPU and model.holds_up_host(True)
        ends_well = model.copy(to) if cell.step is Step.COPY else True
        op = submit()
        if is_waiting and not gives_up:  # it keeps its turn until the copy is submitted
            self.release()
        elif gives_up:
            was_dropped = op.cancel()
            assert was_dropped == (op.state is sf.OpState.CANCELLED)
            if was_dropped:
                with pytest.raises(sf.OpCancelled):
                    await op
                return
        self.ops.append((op, ends_well))

    def adopt(self, to_host: bool, value: int, discard: bool) -> None:
        model, m = self.model, self.m
        data: Any
        if to_host:
            data = np.full(m.shape, value, np.float32)
        else:
            data = self.dev.full(m.shape, value, np.float32)
        cell = TABLE[Asked.ADOPT_HOST if to_host else Asked.ADOPT_DEVICE][model.state]
        if cell.step is Step.REFUSE and not discard:
            with pytest.raises(ValueError, match="newest data"):
                m.adopt(data)
            return
        m.adopt(data, discard=discard)
        self.adopted.append(data)
        model.settle(CPU if to_host else GPU, value)
        if to_host:
            model.host, model.owns_host = model.version, False
        else:
            model.device, model.owns_device = model.version, False

    async def step(self, kind: str, number: int) -> None:
        value, flag, gives_up = number % 7 + 1, bool(number & 8), bool(number & 16)
        write = (False, True, "all")[number % 3]
        event(kind)
        if kind == "host":
            await self.host(write, value, flag and bool(write), gives_up)
        elif kind == "device":
            how = ("fill", "bump", "fails", "untouched", "broken")[number // 3 % 5]
            await self.device(write, value, how if write else "fill", gives_up)
        elif kind in ("push", "pull"):
            await self.transfer(Asked.PUSH if kind == "push" else Asked.PULL, gives_up)
        elif kind == "adopt":
            self.adopt(flag, value, gives_up)
        elif kind == "discard":
            self.m.discard()
            self.model.settle(UNINIT, 0)
        elif kind == "gate":
            to = GPU if flag else CPU
            if to not in self.gates:
                self.gates[to] = self.dev.sim.gate("h2d" if flag else "d2h")
                self.model.closed.add(to)
        elif kind == "release":
            self.release()
        elif kind == "break" and self.m.size:
            to = GPU if flag else CPU
            if to not in self.model.failing and not self.gates:
                kind = "copy_h2d" if flag else "copy_d2h"
                self.rules.append(self.dev.sim.fail(kind, error=Broken("copy"), sticky=False))
                self.model.failing.add(to)
        await self.settled()


def observe(op: Any) -> None:
    op.exception()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ("host", "device", "push", "pull", "adopt", "discard", "gate", "release", "break")
        ),
        st.integers(0, 127),
    ),
    max_size=14,
)


@pytest.mark.parametrize("loop", LOOPS)
@settings(
    max_examples=40,
    deadline=None,
    # A run that waits in vain takes seconds: shrinking it would take too long.
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(steps=STEPS, shape=st.sampled_from([(5,), (), (0,), (2, 3), (20_000,)]))
def test_every_run_is_as_the_table_says(
    loop: str, steps: list[tuple[str, int]], shape: tuple[int, ...]
) -> None:
    async def main() -> None:
        options = Settings(sim=SimOptions(clock="virtual"), close_timeout_s=5.0)
        async with sf.Device(0, backend="sim", settings=options) as dev:
            driver = Driver(dev, shape)
            try:
                for kind, number in steps:
                    await driver.step(kind, number)
            finally:
                driver.release()  # closing the device would wait for them
            await driver.settled()
            for op, ends_well in driver.ops:
                assert (op.exception() is None) == ends_well
            driver.m.close()
            assert not any(getattr(data, "is_freed", False) for data in driver.adopted)
            driver.adopted.clear()
            for rule in driver.rules:
                rule.clear()
            del driver
            gc.collect()
            try:
                await dev.synchronize()
            except* (Broken, sf.DeviceError):
                pass  # of copies that nobody asked about
            gc.collect()
            assert not dev.live().get("array")
            assert not [line for line in dev.live().get("pinned block", ()) if line != "streamflow"]

    anyio.run(main, **LOOPS[loop])
