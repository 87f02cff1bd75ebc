"""The strategies for users: what they draw, and our own runtime against their programs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

import streamflow as sf
from streamflow.config import Settings, SimOptions
from streamflow.testing import strategies
from streamflow.testing.programs import Kind, Program, Step

LOOPS: dict[str, dict[str, Any]] = {
    "asyncio": {"backend": "asyncio"},
    "trio": {"backend": "trio"},
}
VIRTUAL = Settings(sim=SimOptions(clock="virtual"))
SIM_OPTIONS = {item.name for item in fields(SimOptions)}

quick = settings(
    deadline=None,
    derandomize=True,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
search = settings(quick, max_examples=1000, phases=[Phase.generate, Phase.shrink])


def run(program: Program, seed: int = 0, loop: str = "asyncio", **options: Any) -> dict[str, Any]:
    sim = SimOptions(clock="virtual", seed=seed, **options)
    configuration = Settings(sim=sim, close_timeout_s=2.0)

    async def main() -> dict[str, Any]:
        with anyio.fail_after(10):
            async with sf.Device(0, backend="sim", settings=configuration) as dev:
                results = await program.run(dev)
                await dev.synchronize()
                assert dev.live() == {}
                return results

    return anyio.run(main, **LOOPS[loop])


# -- programs --------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", LOOPS)
@quick
@given(program=strategies.programs(), seed=st.integers(0, 3))
def test_programs_equal_numpy(loop: str, program: Program, seed: int) -> None:
    np.testing.assert_equal(run(program, seed, loop), program.expected())


@quick
@given(program=strategies.programs(), schedule=strategies.schedules())
def test_programs_equal_numpy_on_every_schedule(program: Program, schedule: str) -> None:
    np.testing.assert_equal(run(program, schedule=schedule), program.expected())


@pytest.mark.parametrize("kind", Kind)
def test_programs_have_steps_of_each_kind(kind: Kind) -> None:
    def has_it(program: Program) -> bool:
        return any(step.kind is kind for step in program.steps)

    program = find(strategies.programs(), has_it, settings=search)
    assert len(program.steps) <= 2 + (kind is Kind.COPY)  # it, and arrays for it
    np.testing.assert_equal(run(program), program.expected())


def test_programs_use_streams_and_lanes() -> None:
    for stream in ("", "s0", "s1"):
        find(
            strategies.programs(),
            lambda program, stream=stream: any(s.stream == stream for s in program.steps),
            settings=search,
        )


@sf.kernel("""extern "C" __global__ void blend(float w, const float* x, const short* m, float* y,
    unsigned long long count) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i < count) y[i] = w * x[i] + m[i];
}""")
def blend(w, x, m, y, count):
    y[:count] = w * x[:count] + m[:count]


@quick
@given(program=strategies.programs([blend], max_size=64))
def test_programs_take_kernels_of_the_user(program: Program) -> None:
    np.testing.assert_equal(run(program), program.expected())


def test_a_user_kernel_is_launched() -> None:
    def launches(program: Program) -> bool:
        return any(step.kind is Kind.LAUNCH for step in program.steps)

    program = find(strategies.programs([blend], max_size=8), launches, settings=search)
    text = repr(program)
    assert "dev.launch(blend, 0.0, a" in text
    assert len(program.steps) == 4


def test_a_program_reads_as_code() -> None:
    steps = (
        Step(Kind.PUT, ("a0",), size=3, value=2, dtype="uint32"),
        Step(Kind.SPLIT, ("a1", "a2", "a0")),
        Step(
            Kind.LAUNCH,
            ("a1",),
            kernel=strategies.advance,
            args=("a1", 1, 2),
            stream="s0",
        ),
        Step(Kind.GET, ("a0",), result="r0"),
        Step(Kind.FREE, ("a0", "a1", "a2"), stream="s1"),
    )
    assert repr(Program(steps)) == (
        "Program:\n"
        "    a0 = dev.put((np.arange(3) % 97 + 2).astype('uint32'))\n"
        "    a1, a2 = a0.split(2)\n"
        "    dev.launch(advance, a1, 1, 2, stream=s0)\n"
        "    r0 = dev.get(a0)\n"
        "    a0.free(stream=s1)\n"
    )
    expected = {"r0": np.array([11, 16, 4], np.uint32)}
    np.testing.assert_equal(Program(steps).expected(), expected)
    np.testing.assert_equal(run(Program(steps)), expected)


def test_kernels_that_programs_cannot_launch_are_refused() -> None:
    silent = sf.Kernel.from_source('extern "C" __global__ void silent(float* x) {}')
    untyped = sf.Kernel.from_source(
        'extern "C" __global__ void untyped(void* x) {}', body=lambda x: None
    )
    for kernel in (silent, untyped):
        with pytest.raises(ValueError, match="reference body and typed parameters"):
            strategies.programs([kernel])


def test_a_program_that_fails_holds_nothing() -> None:
    program = Program(
        (
            Step(Kind.PUT, ("a0",), size=3, value=2, dtype="uint32", stream="s0"),
            Step(Kind.FULL, ("a1",), size=3, value=1, dtype="uint32"),
            Step(Kind.FILL, ("a0",), value=1),
        )
    )

    async def main() -> None:
        async with sf.Device(0, backend="sim", settings=VIRTUAL) as dev:
            dev.sim.fail(kind="fill", nth=2, sticky=False)
            with pytest.raises(sf.UpstreamFailed) as caught:
                await program.run(dev)
            await dev.synchronize()
            assert dev.live() == {}
            assert caught.value.__traceback__ is not None

    anyio.run(main)


def test_frees_and_streams_are_those_of_the_steps() -> None:
    program = Program(
        (
            Step(Kind.FULL, ("a0",), size=3, value=1, dtype="uint32", stream="s0"),
            Step(Kind.FREE, ("a0",), stream="s1"),
        )
    )

    async def main() -> None:
        async with sf.Device(0, backend="sim", settings=VIRTUAL) as dev:
            with dev.trace() as trace:
                assert await program.run(dev) == {}
            traced = [(op.kind, op.stream) for op in trace.ops]
            assert traced == [("empty", "s0"), ("fill", "s0"), ("free", "s1")]

    anyio.run(main)


@quick
@given(program=strategies.programs())
def test_no_step_uses_memory_twice_or_after_its_free(program: Program) -> None:
    bases: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for step in program.steps:
        if step.kind in (Kind.PUT, Kind.FULL):
            bases[step.names[0]], sizes[step.names[0]] = step.names[0], step.size
        elif step.kind is Kind.SPLIT:
            *parts, whole = step.names
            bases.update(dict.fromkeys(parts, bases[whole]))
            for number, part in enumerate(parts):
                sizes[part] = len(np.array_split(np.empty(sizes[whole]), len(parts))[number])
        used = [bases[name] for name in step.names]
        if step.kind in (Kind.COPY, Kind.LAUNCH):
            assert len(set(used)) == len(used)
            assert len({sizes[name] for name in step.names}) == 1
        if step.kind is Kind.LAUNCH:
            assert step.args[-1] == sizes[step.names[0]]  # what both kernels call n
        if step.kind is Kind.FREE:
            bases = {name: base for name, base in bases.items() if base not in used}


SEEN: list[tuple[type, ...]] = []


@sf.kernel(
    """extern "C" __global__
    void look(float* x, float f, double d, int i, unsigned char u, bool b) {}"""
)
def look(x, f, d, i, u, b):
    SEEN.append(tuple(map(type, (f, d, i, u, b))))


def test_kernels_get_the_scalars_that_a_device_gives_them() -> None:
    program = Program(
        (
            Step(Kind.FULL, ("a0",), size=3, dtype="float32"),
            Step(Kind.LAUNCH, ("a0",), kernel=look, args=("a0", 0.5, 0.5, 7, 7, True)),
        )
    )
    SEEN.clear()
    run(program)
    program.expected()
    assert SEEN[0] == SEEN[1]


# -- arrays and schedules ----------------------------------------------------------------------


@quick
@given(values=strategies.arrays())
def test_arrays_go_to_a_device_and_back(values: np.ndarray) -> None:
    async def main() -> Any:
        async with sf.Device(0, backend="sim", settings=VIRTUAL) as dev:
            return (await dev.get(dev.put(values))).copy()

    result = anyio.run(main)
    assert result.dtype == values.dtype
    assert result.tobytes() == values.tobytes()


@pytest.mark.parametrize("size", strategies.EDGES)
def test_arrays_have_the_edge_sizes(size: int) -> None:
    find(strategies.arrays("float32"), lambda x: x.size == size, settings=search)


def test_arrays_have_what_is_hard_to_get_right() -> None:
    floats = strategies.arrays("float32", max_size=4)
    find(floats, lambda x: bool(np.isnan(x).any()), settings=search)
    find(floats, lambda x: bool(np.isinf(x).any()), settings=search)
    integers = strategies.arrays(np.int8, max_size=4)
    find(integers, lambda x: bool((x == -128).any()), settings=search)


@pytest.mark.parametrize("dtype", strategies.DTYPES)
def test_arrays_have_every_dtype(dtype: str) -> None:
    find(strategies.arrays(), lambda x: x.dtype == dtype and x.size > 0, settings=search)


@quick
@given(st.data())
def test_arrays_keep_to_the_sizes_asked_for(data: st.DataObject) -> None:
    values = data.draw(
        strategies.arrays(st.sampled_from(["int16", "bool"]), min_size=3, max_size=9)
    )
    assert 3 <= values.size <= 9
    assert values.dtype in (np.int16, np.bool_)


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="0 <= 5 <= 4"):
        strategies.arrays(min_size=5, max_size=4)


@given(text=strategies.schedules())
def test_schedules_are_texts_with_a_seed(text: str) -> None:
    name, _, seed = text.partition(":")
    assert name in strategies.SCHEDULES
    assert int(seed) >= 0


def test_without_hypothesis_the_extra_is_named() -> None:
    program = (
        "import sys; sys.modules['hypothesis'] = None\n"
        "try: import streamflow.testing.strategies\n"
        "except ImportError as error: print(error)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert "streamflow-cuda[testing]" in result.stdout


def test_neither_pytest_nor_hypothesis_come_with_the_testing_kit() -> None:
    program = (
        "import sys, streamflow.testing, streamflow.testing.fixtures\n"
        "print(sorted({'pytest', 'hypothesis'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout == "[]\n"
