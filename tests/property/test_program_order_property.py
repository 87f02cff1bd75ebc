"""Random programs with futures, host tasks, scopes and cancellations keep every order (R3, R4, R7).

What must come before what is read off the program itself, by brute force: the bytes that
ops touch, the edges they name, and the streams they are given.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import anyio
import numpy as np
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import streamflow as sf
from streamflow.runtime import allocate, launch, parking
from streamflow.scheduler.timeline import Ticket, Timeline

NUM, NUM_PARTS, NUM_ARRAYS = 48, 3, 4
Bytes = frozenset[tuple[int, int]]  # (array, part)


@sf.kernel(
    'extern "C" __global__ void mix(const int* x, int* y, int c) { y[0] = x[0] + c; }',
    cost=lambda x, y, c: 1e-6 * (1 + c % 7),
)
def mix(x, y, c):
    y[:] = 3 * y + x + c


class Ran:
    """One op of the program: what it touches and names, and when it ran."""

    def __init__(self, op: sf.Op[Any], reads: Bytes, writes: Bytes, after: list[Ran]) -> None:
        self.op = op
        self.number = op.ticket.seq
        self.stream = op.stream if op.stream and op.stream.startswith("s") else None
        self.reads, self.writes, self.after = reads, writes, after
        self.times: list[float] | None = None  # of a host task, whose device time is none

    def must_follow(self, other: Ran) -> bool:
        return (
            other in self.after
            or (self.stream is not None and self.stream == other.stream)
            or bool(self.writes & (other.reads | other.writes) or self.reads & other.writes)
        )


class Order:
    """Runs a program and remembers it."""

    def __init__(self, dev: sf.Device) -> None:
        self.dev = dev
        self.streams = [dev.stream(f"s{i}") for i in range(3)]
        self.arrays: dict[int, sf.DeviceArray] = {}
        self.num_arrays = 0
        self.ran: list[Ran] = []
        self.pending: list[Callable[[], object]] = []
        self.began_s = dev.sim.clock.now_s  # the trace's clock counts from here

    def array(self, choice: int) -> tuple[sf.DeviceArray, Bytes]:
        number = sorted(self.arrays)[choice % len(self.arrays)]
        part = choice // 8 % (NUM_PARTS + 1)
        if part == NUM_PARTS:
            return self.arrays[number], frozenset((number, p) for p in range(NUM_PARTS))
        return self.arrays[number].split(NUM_PARTS)[part], frozenset({(number, part)})

    def options(self, choice: int) -> tuple[dict[str, Any], list[Ran]]:
        options: dict[str, Any] = {}
        if choice % 5 < 3:
            options["stream"] = self.streams[choice % 5]
        named = []
        if self.ran and choice // 5 % 3 == 0:
            named = [self.ran[-1 - choice // 15 % len(self.ran)]]
        after: list[Any] = [ran.op for ran in named]
        how = choice // 7 % 6
        if how == 0:
            waits = anyio.Event()
            self.pending.append(waits.set)
            after.append(waits)
        elif how == 1 and self.ran:
            future: anyio.Future[Any] = anyio.Future()
            later = self.ran[-1 - choice // 45 % len(self.ran)]
            named = [*named, later]
            self.pending.append(lambda: setattr(future, "return_value", later.op))
            after.append(future)
        return {**options, "after": after}, named

    async def do(self, kind: str, a: int, b: int, c: int) -> None:
        if (kind == "new" and len(self.arrays) < NUM_ARRAYS) or not self.arrays:
            array = self.dev.full(NUM, a % 100, np.int32)
            self.arrays[self.num_arrays] = array
            touched = frozenset((self.num_arrays, p) for p in range(NUM_PARTS))
            self.ran.append(Ran(array.ready, frozenset(), touched, []))
            self.num_arrays += 1
        elif kind == "resolve":
            if self.pending:
                self.pending.pop(a % len(self.pending))()
        elif kind == "cancel":
            if self.ran:
                self.ran[-1 - a % len(self.ran)].op.cancel()
        elif kind == "gate":
            lanes = ["compute0", "compute1", "h2d", "d2h", *self.streams]
            self.pending.append(self.dev.sim.gate(lanes[a % len(lanes)]).release)
        elif kind == "turns":
            for _ in range(a % 6):
                await checkpoint()
        elif kind == "drop":
            del self.arrays[sorted(self.arrays)[a % len(self.arrays)]]
        elif kind == "scope":
            async with self.dev.scope(limit="1KiB"):
                for shift in range(1 + a % 3):
                    self.submit(("mix", "put")[shift % 2], a + shift, b, c + 9 * shift)
                self.release()
        else:
            self.submit(kind, a, b, c)

    def submit(self, kind: str, a: int, b: int, c: int) -> None:
        options, named = self.options(c)
        x, reads = self.array(a)
        none: Bytes = frozenset()
        if kind == "mix":
            y, writes = self.array(b)
            if x.size != y.size or reads & writes:
                y, writes = x, reads
            op: sf.Op[Any] = self.dev.launch(mix, x, y, c % 100, **options)
            self.ran.append(Ran(op, reads, writes, named))
        elif kind == "put":
            op = self.dev.copy(x, np.full(x.size, c % 100, np.int32), **options)
            self.ran.append(Ran(op, none, reads, named))
        elif kind == "get":
            self.ran.append(Ran(self.dev.get(x, **options), reads, none, named))
        else:
            self.host(kind, x, reads, options["after"], named)

    def host(self, kind: str, x: Any, reads: Bytes, after: list[Any], named: list[Ran]) -> None:
        clock, times = self.dev.sim.clock, []

        def task(values: np.ndarray) -> int:
            times.extend((clock.now_s, clock.now_s))
            return int(values.sum())

        async def task_async(values: np.ndarray) -> int:
            times.append(clock.now_s)
            await checkpoint()
            times.append(clock.now_s)
            return int(values.sum())

        op = self.dev.host(task if kind == "host" else task_async, x, after=after)
        ran = Ran(op, reads, frozenset(), named)
        ran.times = times
        self.ran.append(ran)

    def release(self) -> None:
        while self.pending:
            self.pending.pop(0)()

    async def finish(self) -> None:
        self.release()
        for ran in self.ran:
            try:
                await ran.op
            except sf.StreamflowError:
                event("an op did not run")
        await self.dev.synchronize()

    def check(self, trace: Any) -> list[tuple[Any, ...]]:
        """Whatever must come first has ended first; returns the schedule."""
        traced = {op.id: op for op in trace.ops}
        times: dict[Ran, tuple[float, float]] = {}
        for ran in self.ran:
            if ran.op.state is not sf.OpState.DONE:
                continue
            if ran.times is not None:
                times[ran] = ran.times[0], ran.times[1]
            elif (op := traced.get(ran.number)) is not None and op.end_s is not None:
                times[ran] = op.start_s, op.end_s
        for place, ran in enumerate(self.ran):
            for earlier in self.ran[:place]:
                if ran in times and earlier in times and ran.must_follow(earlier):
                    if earlier.times is not None and earlier not in ran.after:
                        continue  # a host task reads a copy of its own
                    end_s = times[earlier][1] - self.began_s * (earlier.times is not None)
                    start_s = times[ran][0] - self.began_s * (ran.times is not None)
                    assert end_s <= start_s + 1e-12, (earlier.op.story(), ran.op.story())
        return [
            (ran.number - self.ran[0].number, ran.op.kind, ran.op.state, times.get(ran))
            for ran in self.ran
        ]


class Waits:
    """Every wait the runtime issues, against the transitive reduction by brute force (R4)."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.before: dict[Ticket, set[Ticket]] = {}
        self.last: dict[Timeline, set[Ticket]] = defaultdict(set)
        self.num = 0
        needed, join, advance = parking.needed_waits, Timeline.join, Timeline.advance

        def checked(line: Timeline, tickets: Iterable[Ticket]) -> list[Ticket]:
            tickets = list(tickets)
            waits = needed(line, tickets)
            assert set(waits) == self.reduction(line, set(tickets))
            assert len(set(waits)) == len(waits)
            self.num += len(waits)
            return waits

        def joined(line: Timeline, tickets: Iterable[Ticket]) -> None:
            tickets = list(tickets)
            self.last[line] |= set(tickets)
            join(line, tickets)

        def advanced(line: Timeline, ticket: Ticket, num_calls: int, recorded: Any) -> None:
            self.before[ticket] = set(self.last[line])
            self.last[line] = {ticket}
            advance(line, ticket, num_calls, recorded)

        for module in (parking, launch, allocate):
            patch.setattr(module, "needed_waits", checked)
        patch.setattr(Timeline, "join", joined)
        patch.setattr(Timeline, "advance", advanced)

    def closure(self, roots: Iterable[Ticket]) -> set[Ticket]:
        found: set[Ticket] = set()
        stack = list(roots)
        while stack:
            ticket = stack.pop()
            if ticket not in found:
                found.add(ticket)
                stack.extend(self.before.get(ticket, ()))
        return found

    def reduction(self, line: Timeline, deps: set[Ticket]) -> set[Ticket]:
        known = self.closure(self.last[line])
        left = {dep for dep in deps if not dep.is_passed and dep not in known}
        return {dep for dep in left if not any(dep in self.closure({o}) for o in left - {dep})}


def run_program(program: list[tuple[str, int, int, int]], seed: int) -> list[tuple[Any, ...]]:
    configuration = sf.Settings(
        sim=sf.SimOptions(clock="virtual", seed=seed), window=8, compute_lanes=2, host_workers=2
    )
    schedule: list[tuple[Any, ...]] = []

    async def main() -> None:
        with anyio.fail_after(5):
            async with sf.Device(0, backend="sim", settings=configuration) as dev:
                order = Order(dev)
                with dev.trace() as trace:
                    for action in program:
                        await order.do(*action)
                    await order.finish()
                    schedule.extend(order.check(trace))
                order.arrays.clear()

    anyio.run(main)
    return schedule


KINDS = ("new", "mix", "mix", "mix", "put", "get", "host", "host_async", "resolve", "cancel")
KINDS += ("gate", "turns", "drop", "scope")
small = st.integers(0, 1 << 16)
actions = st.tuples(st.sampled_from(KINDS), small, small, small)
programs = st.integers(6, 40).flatmap(lambda n: st.lists(actions, min_size=n, max_size=n))
quick = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@settings(quick, max_examples=80)
@given(program=programs, seed=st.integers(0, 3))
def test_what_must_come_first_has_ended_and_no_wait_is_issued_twice(
    program: list[tuple[str, int, int, int]], seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        waits = Waits(patch)
        run_program(program, seed)
        if waits.num:
            event("waits were issued")


@settings(quick, max_examples=20)
@given(program=programs, seed=st.integers(0, 3))
def test_the_same_seed_gives_the_same_schedule_with_host_tasks(
    program: list[tuple[str, int, int, int]], seed: int
) -> None:
    # How many turns pass while a worker is busy is up to the threads: don't count turns.
    program = [action for action in program if action[0] not in ("turns", "resolve", "cancel")]
    assert run_program(program, seed) == run_program(program, seed)
