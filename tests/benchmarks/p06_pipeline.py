"""P6: a pipeline against pinned memory on three streams, torch, and CuPy by hand.

32 batches of 64 MiB of float32 go in from pageable memory, through a kernel that takes about as
long as a copy, and come out as ndarrays, dropped each round. With --output a picture of one
run is written there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

import streamflow as sf
from streamflow.trace.svg import to_svg
from tests.benchmarks.pipeline_peers import Consume, Peers
from tests.benchmarks.report import Options, Report, Sample
from tests.benchmarks.rig import Bare, Case, device, interleaved, warm

_MIB = 1 << 20
_KERNEL_S = 1.2e-3  # for 64 MiB
_DEPTH = 3
_SIM_STEPS = 4

# Rounded in one way by any compiler: results are compared bit for bit.
_SOURCE = """extern "C" __global__ void blend(float* x, int steps, unsigned long long n) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i >= n) return;
    float value = x[i];
    for (int step = 0; step < steps; ++step) value = __fmaf_rn(value, 0.9999f, 0.5f);
    x[i] = value;
}"""


@sf.kernel(_SOURCE, cost=lambda x, steps, n: 1e-6 + n * 4 / 55e9)
def blend(x: Any, steps: int, n: int) -> None:
    for _ in range(steps):
        x[:n] *= np.float32(0.9999)
        x[:n] += np.float32(0.5)


def run(options: Options) -> Report:
    """Measure, print and compare."""
    report = Report("P6", "a pipeline of batches, from pageable memory to ndarrays")
    asyncio.run(_run(options, report))
    return report


async def _run(options: Options, report: Report) -> None:
    nbytes = options.sized(64 * _MIB if options.is_cuda else 4 * _MIB, 1 << 16)
    num = options.sized(32, 5)
    row = np.arange(nbytes // 4, dtype=np.float32) % 1000
    batches = [row + np.float32(number) for number in range(num)]
    print(f"  {num} batches of {nbytes / _MIB:g} MiB, depth {_DEPTH}")
    async with device(options) as dev:
        await warm(dev)
        with ExitStack() as stack:
            peers = _peers(dev, options, report, batches, stack)
            steps = peers.steps if peers is not None else _SIM_STEPS
            ours = _Ours(dev, batches, steps)
            expected = await _expected(dev, batches, steps)
            cases: dict[str, Case] = {
                "streamflow": lambda: ours.run(_drop),
                "streamflow, depth 4": lambda: ours.run(_drop, depth=4),
            }
            await ours.run(_checked(expected))
            await ours.run(_checked(expected), depth=4)
            for name, case in (peers.cases() if peers is not None else {}).items():
                case(_checked(expected))
                cases[name] = _as_case(case)
            del expected
            num_reps = options.sized(max(5, min(options.num_reps, 10)), 2)
            found = await interleaved(num_reps, cases)
            _compare(report, found, num)
            await _show(dev, options, report, ours, f"{num} batches of {nbytes / _MIB:g} MiB")


class _Ours:
    """The program under test."""

    def __init__(self, dev: sf.Device, batches: Sequence[np.ndarray[Any, Any]], steps: int) -> None:
        self._dev, self._batches, self._steps = dev, batches, steps

    def _step(self, dev: sf.Device, x: sf.DeviceArray) -> sf.DeviceArray:
        dev.launch(blend, x, self._steps, x.size)
        return x

    async def run(self, consume: Consume, *, depth: int = _DEPTH) -> str:
        """One round; returns where its time went."""
        pipeline = self._dev.pipeline(self._batches, depth=depth).map(self._step, name="kernel")
        number = 0
        async for result in pipeline:
            consume(number, result)
            number += 1
            del result
        return str(pipeline.stats())


def _drop(number: int, result: np.ndarray[Any, Any]) -> None:
    """What the measured rounds do with a result."""


def _checked(expected: Sequence[np.ndarray[Any, Any]]) -> Consume:
    def consume(number: int, result: np.ndarray[Any, Any]) -> None:
        if not np.array_equal(result, expected[number]):
            raise AssertionError(f"batch {number} is not what one put, launch and get give")

    return consume


def _as_case(run: Callable[[Consume], None]) -> Case:
    async def case() -> None:
        run(_drop)

    return case


async def _expected(
    dev: sf.Device, batches: Sequence[np.ndarray[Any, Any]], steps: int
) -> list[np.ndarray[Any, Any]]:
    """Each batch by itself, and the first against NumPy."""
    found = []
    for batch in batches:
        x = dev.put(batch)
        dev.launch(blend, x, steps, x.size)
        found.append((await dev.get(x)).copy())
    head = batches[0][:1000].copy()
    blend(head, steps, head.size)
    if not np.allclose(head, found[0][:1000], rtol=1e-3):
        raise AssertionError("the kernel does not compute what its body says")
    return found


def _peers(
    dev: sf.Device,
    options: Options,
    report: Report,
    batches: Sequence[np.ndarray[Any, Any]],
    stack: ExitStack,
) -> Peers | None:
    if not options.is_cuda:
        report.note("no GPU: the peers and the targets are left out")
        return None
    kernel = dev._core.backend.load_kernel_blocking(blend.spec)
    peers = Peers(Bare(dev), blend.spec, kernel, batches, _DEPTH, report)
    stack.callback(peers.close)
    taken_s = peers.calibrate(_KERNEL_S * batches[0].nbytes / (64 * _MIB))
    report.add("the kernel", Sample((taken_s * 1e3,), "ms"))
    return peers


def _compare(report: Report, found: dict[str, list[float]], num: int) -> None:
    medians = {
        name: report.add(name, Sample(tuple(each * 1e3 for each in taken), "ms"))
        for name, taken in found.items()
    }
    ours = medians["streamflow"]
    if (floor := medians.get("pinned on three streams")) is not None:
        report.target("P6: over pinned on three streams", ours / floor, "x", at_most=1.15)
    for name, wanted in (
        ("torch, pin_memory and side streams", 1.6),
        ("CuPy, double buffering by hand", 8),
    ):
        if name in medians:
            report.target(f"P6: {name} over streamflow", medians[name] / ours, "x", at_least=wanted)
    if (naive := medians.get("CuPy, one batch after the other")) is not None:
        report.add("naive CuPy over streamflow", Sample((naive / ours,), "x"))


async def _show(dev: sf.Device, options: Options, report: Report, ours: _Ours, told: str) -> None:
    """One more run: its stages, and with --output its picture."""
    with dev.trace() as trace:
        stats = await ours.run(_drop)
        await dev.synchronize()
    for line in (*stats.splitlines(), "", *str(trace.overlap()).splitlines()):
        print(f"    {line}")
    report.note(f"stages: {stats.splitlines()[-1]}")
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        path = options.output / "p06_pipeline.svg"
        title = f"{told} through {dev.properties.name}"
        path.write_text(to_svg(trace, title=title), encoding="utf-8", newline="\n")
        trace.save(path.with_suffix(".json"))
        report.note(f"the picture is in {path.name}, the trace beside it")
