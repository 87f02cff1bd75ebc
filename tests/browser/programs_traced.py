"""Traces to look at."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from support import virtual

import streamflow as sf
from streamflow.trace import EdgeReason, TracedEdge, TracedOp


@sf.kernel(
    'extern "C" __global__ void work(float* x, unsigned long long n) {}',
    cost=lambda x, n: 1e-3,
)
def work(x: Any, n: Any) -> None:
    x[:n] += np.float32(1)


def pipeline(num_items: int = 8) -> sf.Trace:
    """Items through three stages, three at a time."""

    def model(dev: sf.Device, x: Any) -> Any:
        dev.launch(work, x, x.size)
        return x

    async def main() -> sf.Trace:
        async with virtual() as dev:
            with dev.trace() as trace:
                items = [np.ones(1 << 16, np.float32)] * num_items
                async for _ in dev.pipeline(items).map(model):
                    pass
                await dev.synchronize()
        return trace

    with ThreadPoolExecutor(1) as executor:  # Playwright keeps a loop of its own in this thread
        return executor.submit(asyncio.run, main()).result()


def long(num_ops: int) -> sf.Trace:
    """Copies in, kernels and copies out, as many as one likes."""
    kinds = (("put", "h2d", "h2d"), ("launch", "compute0", "compute"), ("get", "d2h", "d2h"))
    ops = []
    for number in range(num_ops):
        kind, stream, engine = kinds[number % 3]
        start_s = number * 1e-5
        ops.append(
            TracedOp(
                id=number + 1,
                kind=kind,
                name=f"{kind}#{number + 1}",
                stream=stream,
                engine=engine,
                device=0,
                nbytes=4096,
                submitted_s=start_s,
                start_s=start_s,
                end_s=start_s + 9e-6,
                state="done",
                where="long.py:3",
                scope=f"part {number * 4 // num_ops}",
            )
        )
    edges = [
        TracedEdge(number, number + 1, EdgeReason.READ_AFTER_WRITE, issued=True)
        for number in range(1, num_ops)
        if number % 3
    ]
    edges += [
        TracedEdge(number, number + 3, EdgeReason.STREAM_ORDER, issued=False)
        for number in range(1, num_ops - 2)
    ]
    return sf.Trace.of(ops, sorted(edges, key=lambda edge: edge.dst))


def ancestors(trace: sf.Trace, op_id: int, without: EdgeReason | None = None) -> set[int]:
    """All that comes before an op, by the edges of the trace."""
    before: dict[int, list[int]] = {}
    for edge in trace.edges:
        if edge.reason is not without:
            before.setdefault(edge.dst, []).append(edge.src)
    found: set[int] = set()
    open_ids = [op_id]
    while open_ids:
        for src in before.get(open_ids.pop(), ()):
            if src not in found:
                found.add(src)
                open_ids.append(src)
    return found
