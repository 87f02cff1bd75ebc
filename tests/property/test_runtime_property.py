"""Random programs on the simulator mean what NumPy says, one op after another (R2 to R7, R15)."""

from __future__ import annotations

import gc
from typing import Any

import anyio
import numpy as np
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import streamflow as sf
from streamflow.config import Settings, SimOptions

SMALL, BIG = 48, 20_000  # int32s: BIG is more than 64 KiB, so it is staged
NUM_ARRAYS_MAX = 6

LOOPS: dict[str, dict[str, Any]] = {
    "asyncio": {"backend": "asyncio"},
    "uvloop": {"backend": "asyncio", "backend_options": {"use_uvloop": True}},
    "trio": {"backend": "trio"},
}


def cost_s(*args: Any) -> float:
    return 1e-6 * (1 + int(args[-1]) % 7)


@sf.kernel(
    """extern "C" __global__ void mix(const int* x, int* y, int c) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i] = 3 * y[i] + x[i] + c;
}""",
    cost=cost_s,
)
def mix(x, y, c):
    y[:] = 3 * y + x + c


@sf.kernel(
    """extern "C" __global__ void step(int* x, int c) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    x[i] = 5 * x[i] + c;
}""",
    cost=cost_s,
)
def step(x, c):
    x[:] = 5 * x + c


class Program:
    """Runs one program on a device and on NumPy arrays, side by side."""

    def __init__(self, dev: sf.Device, num_streams: int) -> None:
        self.dev = dev
        self.streams = [dev.stream(f"s{i}") for i in range(num_streams)]
        self.arrays: list[tuple[sf.DeviceArray, np.ndarray]] = []
        self.results: list[tuple[Any, np.ndarray]] = []
        self.sources: list[tuple[np.ndarray, np.ndarray]] = []
        self.ops: list[Any] = []
        self.gates: list[Any] = []

    # -- picking -----------------------------------------------------------------------

    def pick(self, choice: int) -> tuple[sf.DeviceArray, np.ndarray]:
        """An array, or a part, a slice or a reshaped view of one, with its model."""
        array, model = self.arrays[choice % len(self.arrays)]
        how = choice // 7 % 8
        if how == 1:
            part = choice // 56 % 3
            array, model = array.split(3)[part], np.array_split(model, 3)[part]
        elif how == 2:
            part = choice // 56 % 4
            array, model = array.split(4)[part], np.array_split(model, 4)[part]
        elif how == 3:
            array, model = array[4 : len(model) // 2], model[4 : len(model) // 2]
        elif how == 4:
            array, model = array.reshape(-1, 4).reshape(-1), model
        return array, model

    def pair(self, a: int, b: int) -> tuple[Any, np.ndarray, Any, np.ndarray] | None:
        x, x_model = self.pick(a)
        for shift in range(len(self.arrays)):
            y, y_model = self.pick(b + 56 * 12 * shift + shift)
            if len(x_model) == len(y_model) and not np.shares_memory(x_model, y_model):
                return x, x_model, y, y_model
        return None

    def options(self, choice: int) -> dict[str, Any]:
        options: dict[str, Any] = {}
        where = choice % (2 * len(self.streams) + 1)
        if where < len(self.streams):
            options["stream"] = self.streams[where]
        if self.ops and choice // 11 % 4 == 0:
            options["after"] = (self.ops[-1 - choice // 44 % len(self.ops)],)
        return options

    def new(self, a: int) -> None:
        num = BIG if a % 3 == 0 else SMALL
        data = (np.arange(num, dtype=np.int32) * 7 + a) % 1000
        if a // 3 % 4 == 0:
            value = a % 1000
            array = self.dev.full(num, value, np.int32)
            data = np.full(num, value, np.int32)
        else:
            source = data.copy()
            self.sources.append((source, data))
            array = self.dev.put(source, **self.options(a // 12))
        self.arrays.append((array, data.copy()))

    # -- what a program may do -------------------------------------------------------------

    async def do(self, kind: str, a: int, b: int, c: int) -> None:
        if kind == "checkpoint":
            for _ in range(a % 8):
                await checkpoint()
            return
        if kind == "gate":
            self.gates.append(self.dev.sim.gate(self.where(a)))
            return
        if kind == "release":
            if self.gates:
                self.gates.pop(a % len(self.gates)).release()
            return
        if kind == "await":
            self.release()
            if self.ops:
                await self.ops[-1 - a % len(self.ops)]
            return
        if kind == "wait_for":
            if self.ops:
                self.streams[a % len(self.streams)].wait_for(self.ops[-1 - b % len(self.ops)])
            return
        if not self.arrays or (kind == "new" and len(self.arrays) < NUM_ARRAYS_MAX):
            self.new(a)
            return
        getattr(self, "do_" + kind, self.do_step)(a, b, c)

    def where(self, a: int) -> Any:
        lanes = ["h2d", "d2h", "compute0", "compute1", "free", *self.streams]
        return lanes[a % len(lanes)]

    def do_step(self, a: int, b: int, c: int) -> None:
        x, model = self.pick(a)
        self.ops.append(self.dev.launch(step, x, c % 100, **self.options(b)))
        model[...] = 5 * model + c % 100

    def do_mix(self, a: int, b: int, c: int) -> None:
        if (pair := self.pair(a, b)) is not None:
            x, x_model, y, y_model = pair
            self.ops.append(self.dev.launch(mix, x, y, c % 100, **self.options(c)))
            y_model[...] = 3 * y_model + x_model + c % 100

    def do_copy(self, a: int, b: int, c: int) -> None:
        if (pair := self.pair(a, b)) is not None:
            x, x_model, y, y_model = pair
            self.ops.append(self.dev.copy(y, x, **self.options(c)))
            y_model[...] = x_model

    def do_fill(self, a: int, b: int, c: int) -> None:
        x, model = self.pick(a)
        options = self.options(b)
        options.pop("after", None)
        self.ops.append(self.dev.fill(x, c % 1000, **options))
        model[...] = c % 1000

    def do_put(self, a: int, b: int, c: int) -> None:
        x, model = self.pick(a)
        model[...] = (np.arange(len(model)) * 3 + c) % 1000
        source = model.copy()
        self.sources.append((source, source.copy()))
        self.ops.append(self.dev.copy(x, source, **self.options(b)))

    def do_get(self, a: int, b: int, c: int) -> None:
        x, model = self.pick(a)
        out = np.empty(x.shape, np.int32) if c % 3 == 0 else None
        op = self.dev.get(x, out=out, **self.options(b))
        self.ops.append(op)
        self.results.append((op, model.copy()))

    def do_drop(self, a: int, b: int, c: int) -> None:
        del self.arrays[a % len(self.arrays)]

    def do_free(self, a: int, b: int, c: int) -> None:
        array, _ = self.arrays.pop(a % len(self.arrays))
        self.ops.append(array.free(stream=self.options(b).get("stream")))

    def do_with(self, a: int, b: int, c: int) -> None:
        with self.streams[c % len(self.streams)]:
            self.do_step(a, 2 * len(self.streams), c)
            self.do_mix(b, a, 2 * len(self.streams))

    # -- the end -------------------------------------------------------------------------

    def release(self) -> None:
        while self.gates:
            self.gates.pop().release()

    async def check(self) -> None:
        """Everything that was read, and all that is left, is as NumPy has it."""
        self.release()
        for op, expected in self.results:
            np.testing.assert_array_equal(await op, expected)
        for array, expected in self.arrays:
            np.testing.assert_array_equal(await self.dev.get(array), expected)
        for source, untouched in self.sources:
            np.testing.assert_array_equal(source, untouched)

    async def finish(self) -> None:
        self.arrays.clear()
        self.results.clear()
        self.ops.clear()
        for stream in self.streams:
            stream.close()
        gc.collect(0)
        await self.dev.synchronize()


def in_order(trace: Any) -> None:
    """No op began before one that it comes after had ended."""
    ops = {op.id: op for op in trace.ops}
    for edge in trace.edges:
        before, after = ops[edge.src], ops[edge.dst]
        if edge.reason.value == "capacity":  # what a staged copy lacked room for is its position
            assert after.issued_s is None or before.seen_s <= after.issued_s, edge
            continue
        if before.end_s is not None and after.start_s is not None:
            # On a lane a staged copy, which runs on streams of its own, keeps data order only.
            is_lane = not before.stream.startswith("s")
            if edge.reason.value == "stream-order" and is_lane:
                continue
            assert before.end_s <= after.start_s + 1e-12, (before, after, edge)


def in_program_order(trace: Any) -> None:
    """An explicit stream was given its ops in the order of the calls (R3, R7)."""
    for name in {op.stream for op in trace.ops if op.stream.startswith("s")}:
        # Allocations and frees never park: they may overtake what does.
        ops = [op for op in trace.ops if op.stream == name and op.kind not in ("empty", "free")]
        ids = [op.id for op in sorted(ops, key=lambda op: op.position)]
        assert ids == sorted(ids), name


def run_program(
    program: list[tuple[str, int, int, int]],
    *,
    loop: str = "asyncio",
    seed: int = 0,
    window: int = 8,
    is_traced: bool = False,
    schedule: str = "",
) -> list[tuple[Any, ...]]:
    """Run and check; returns the schedule: kind, stream, start and end of every traced op."""
    configuration = Settings(
        sim=SimOptions(clock="virtual", seed=seed, memory_nbytes=64 << 20, schedule=schedule),
        window=window,
        compute_lanes=2,
        staging_threads=2,
        staging_in_nbytes=65536,
        staging_out_nbytes=65536,
        close_timeout_s=2.0,
    )
    schedule: list[tuple[Any, ...]] = []

    async def main() -> None:
        with anyio.fail_after(4):
            async with sf.Device(0, backend="sim", settings=configuration) as dev:
                run = Program(dev, 3)

                async def body() -> None:
                    for action in program:
                        await run.do(*action)
                    await run.check()
                    await run.finish()

                if is_traced:
                    with dev.trace() as trace:
                        await body()
                    in_order(trace)
                    in_program_order(trace)
                    first = min((op.id for op in trace.ops), default=0)
                    schedule.extend(
                        (op.id - first, op.kind, op.stream, op.start_s, op.end_s)
                        for op in trace.ops
                    )
                else:
                    await body()
                assert dev.live() == {}
                assert dev.memory.used_nbytes == 0
                assert dev.sim.counters["would_block"] == 0
                stats = dev.stats()
                assert stats.num_submitted == stats.num_finished

    anyio.run(main, **LOOPS[loop])
    return schedule


KINDS = (
    *("new", "new", "step", "step", "mix", "mix", "mix", "copy", "fill", "put", "get", "get"),
    *("drop", "free", "with", "gate", "release", "await", "wait_for", "checkpoint"),
)
small = st.integers(0, 1 << 16)
actions = st.tuples(st.sampled_from(KINDS), small, small, small)
programs = st.integers(8, 45).flatmap(lambda n: st.lists(actions, min_size=n, max_size=n))
quick = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.parametrize("loop", LOOPS)
@settings(quick, max_examples=25)
@given(program=programs, seed=st.integers(0, 3), window=st.sampled_from([4, 8, 8, 512]))
def test_random_programs_equal_numpy(
    loop: str, program: list[tuple[str, int, int, int]], seed: int, window: int
) -> None:
    run_program(program, loop=loop, seed=seed, window=window)


@settings(quick, max_examples=25)
@given(program=programs, seed=st.integers(0, 3), window=st.sampled_from([8, 8, 512]))
def test_traced_programs_run_in_the_order_of_their_edges(
    program: list[tuple[str, int, int, int]], seed: int, window: int
) -> None:
    run_program(program, seed=seed, window=window, is_traced=True)


@pytest.mark.parametrize("strategy", ["random", "priority-inverting", "starved"])
@settings(quick, max_examples=60)
@given(program=programs, seed=st.integers(0, 1000))
def test_random_programs_under_other_legal_schedules(
    strategy: str, program: list[tuple[str, int, int, int]], seed: int
) -> None:
    run_program(program, schedule=f"{strategy}:{seed}")


@settings(quick, max_examples=12)
@given(program=programs, seed=st.integers(0, 3))
def test_the_same_seed_gives_the_same_schedule(
    program: list[tuple[str, int, int, int]], seed: int
) -> None:
    # How many turns pass while a worker is busy is up to the threads: don't count turns.
    program = [action for action in program if action[0] != "checkpoint"]
    first, second = (run_program(program, seed=seed, is_traced=True) for _ in range(2))
    assert first == second
    if any(kind == "put" for _, kind, *_ in first):
        event("with copies in")


@pytest.mark.parametrize("loop", LOOPS)
def test_every_loop_gives_the_same_schedule(loop: str) -> None:
    program = [("new", 3 * i + 1, 0, 0) for i in range(3)]
    program += [(kind, 5 * i, 3 * i, i) for i in range(9) for kind in ("mix", "step", "put", "get")]
    reference = run_program(program, seed=1, is_traced=True)
    assert run_program(program, loop=loop, seed=1, is_traced=True) == reference
    assert len(reference) > 30
