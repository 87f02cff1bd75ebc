"""How long the device was busy with each op of a trace, and how long it would be otherwise.

The span of a copy is not its work: a staged one begins with the first look at the engine, and
several that were begun at once share it. What the engine did is known all the same, as no
engine runs two copies at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streamflow.backends.sim.cost import CostModel
from streamflow.trace.model import TracedOp

__all__ = ["Rates", "durations"]

_KERNELS = ("launch", "call", "graph")


@dataclass(frozen=True, slots=True)
class Rates:
    """What is to be different; None: nothing. ``kernel_speed`` is a factor."""

    h2d_rate: float | None = None
    d2h_rate: float | None = None
    kernel_speed: float = 1.0


def durations(ops: Sequence[TracedOp], rates: Rates) -> dict[int, float]:
    """By id, how long each op keeps its engine busy; each has its times."""
    found = {op.id: (op.duration_s or 0.0) for op in ops}
    for op in ops:
        if op.kind in _KERNELS:
            found[op.id] /= rates.kernel_speed
    engines: dict[tuple[int, str], list[TracedOp]] = {}
    for op in ops:
        if op.engine in ("h2d", "d2h"):
            engines.setdefault((op.device, op.engine), []).append(op)
    for (_, engine), copies in engines.items():
        rate = rates.h2d_rate if engine == "h2d" else rates.d2h_rate
        found.update(_copies(copies, rate))
    return found


@dataclass(slots=True)
class _Busy:
    """Copies whose spans overlap, and how long the engine was busy with them."""

    ops: list[TracedOp]
    seconds: float
    nbytes: int


def _copies(ops: list[TracedOp], rate: float | None) -> dict[int, float]:
    busy = _busy(ops)
    fixed_s, byte_s = _fit(busy)
    changed_s = byte_s if rate is None else 1.0 / rate
    found: dict[int, float] = {}
    for each in busy:
        for op, was_s in zip(each.ops, _shares(each, fixed_s, byte_s), strict=True):
            # What the model doesn't explain stays as it was.
            seconds = was_s + op.nbytes * (changed_s - byte_s)
            found[op.id] = max(seconds, op.nbytes * changed_s if rate is not None else 0.0)
    return found


def _shares(busy: _Busy, fixed_s: float, byte_s: float) -> list[float]:
    """How long the engine was busy with each of the ops."""
    busy.ops.sort(key=lambda op: (op.end_s or 0.0, op.id))
    shares: list[float] = []
    until_s = float("-inf")
    for op in busy.ops:  # one after the other
        assert op.start_s is not None
        assert op.end_s is not None
        shares.append(op.end_s - max(op.start_s, until_s))
        until_s = op.end_s
    bare_s = [op.nbytes * byte_s for op in busy.ops]
    if all(share > 0.9 * bare for share, bare in zip(shares, bare_s, strict=True)):
        return shares
    # Piece by piece in turns.
    modelled_s = len(busy.ops) * fixed_s + busy.nbytes * byte_s
    return [busy.seconds * (fixed_s + bare) / modelled_s for bare in bare_s]


def _busy(ops: list[TracedOp]) -> list[_Busy]:
    found: list[_Busy] = []
    until_s = float("-inf")
    for op in sorted(ops, key=lambda op: (op.start_s or 0.0, op.id)):
        assert op.start_s is not None
        assert op.end_s is not None
        if op.start_s >= until_s:
            found.append(_Busy([], 0.0, 0))
            until_s = op.start_s
        last = found[-1]
        last.ops.append(op)
        last.nbytes += op.nbytes
        last.seconds += max(0.0, op.end_s - until_s)
        until_s = max(until_s, op.end_s)
    return found


def _fit(busy: Sequence[_Busy]) -> tuple[float, float]:
    """Seconds of each copy and of each byte, by least squares of the share that is unexplained.

    Where sizes don't tell the two apart, a copy takes what the simulator's model says.
    """
    nn = nb = bb = ns = bs = 0.0
    for each in busy:
        if each.seconds > 0 and each.nbytes:
            num, nbytes, weight = len(each.ops), each.nbytes, each.seconds**-2
            nn += num * num * weight
            nb += num * nbytes * weight
            bb += nbytes * nbytes * weight
            ns += num * each.seconds * weight
            bs += nbytes * each.seconds * weight
    if not bb:
        return 0.0, 0.0
    determinant = nn * bb - nb * nb
    if determinant > 1e-3 * nn * bb:
        fixed_s = (ns * bb - bs * nb) / determinant
        byte_s = (nn * bs - nb * ns) / determinant
        if fixed_s >= 0 and byte_s > 0:
            return fixed_s, byte_s
    shortest_s = min(each.seconds / len(each.ops) for each in busy if each.seconds > 0)
    fixed_s = min(CostModel.load("h200", {}).copy_latency_s, shortest_s / 2)
    return fixed_s, (bs - fixed_s * nb) / bb
