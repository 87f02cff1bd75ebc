"""What happens to the ops of a trace, what each of it comes after, and how long after."""

from __future__ import annotations

import re
from collections.abc import Sequence

from streamflow.trace.host_order import Call, lag
from streamflow.trace.model import EdgeReason, TracedEdge, TracedOp

__all__ = [
    "CALLED",
    "COMPUTE",
    "DIGITS",
    "ENDED",
    "GONE",
    "ISSUED",
    "LANES",
    "Order",
    "workers_s",
]

COMPUTE = re.compile(r"compute\d+")
LANES = ("h2d", "d2h", "free")
DIGITS = 9
"""What differs by less than a nanosecond is at the same time: sums of floats are not exact."""

CALLED, GONE, ISSUED, ENDED = range(4)
"""What happens to an op, in this order. It has gone once its work on the host has begun, or it is
issued."""


class Order:
    """What comes before what. A happening is ``4 * place + what``.

    Attributes
    ----------
    followers : list
        Of each happening: those that come after it, and how long after.
    num_before : list of int
        How many happenings come before each.
    ready_s : list of float
        When each may be at the earliest.
    needs : list
        By place, what the op comes after on the device, in the order it looks at that.
    """

    def __init__(
        self,
        ops: Sequence[TracedOp],
        edges: Sequence[TracedEdge],
        calls: Sequence[Call],
        *,
        keeps_lanes: bool,
    ) -> None:
        self.followers: list[list[tuple[int, float]]] = [[] for _ in range(4 * len(ops))]
        self.num_before = [0] * (4 * len(ops))
        self.ready_s = [0.0] * (4 * len(ops))
        self.needs: list[list[int]] = [[] for _ in ops]
        self._ops = ops
        # When all was there that had to be, in the trace: what comes later is the op's own time.
        self._met_s = [op.submitted_s for op in ops]
        gone = self._add_edges(edges)
        self._add_streams(keeps_lanes)
        for place, op in enumerate(ops):
            self.num_before[4 * place + ISSUED] += 1  # itself, once it has gone
            traced_s = op.begun_s if op.begun_s is not None else op.issued_s
            own_s = 0.0 if traced_s is None else max(0.0, traced_s - self._met_s[place])
            self._before(4 * place + CALLED, 4 * place + GONE, own_s)
            for happening, seconds in gone[place]:
                self._before(happening, 4 * place + GONE, seconds + own_s)
        # After the above: an op goes within its call, before the next one is called for.
        self._add_calls(calls)

    def _before(self, first: int, then: int, seconds: float = 0.0) -> None:
        self.followers[first].append((then, seconds))
        self.num_before[then] += 1

    def _add_edges(self, edges: Sequence[TracedEdge]) -> list[list[tuple[int, float]]]:
        """What each op waits for before it goes: on the host for an end, or for what parks."""
        ops, met_s = self._ops, self._met_s
        places = {op.id: place for place, op in enumerate(ops)}
        gone: list[list[tuple[int, float]]] = [[] for _ in ops]
        for edge in edges:
            if edge.reason is EdgeReason.STREAM_ORDER:
                continue
            src, dst = places[edge.src], places[edge.dst]
            first, op = ops[src], ops[dst]
            if (
                first.stream == "host"
                or op.stream == "host"
                or op.is_staged
                or edge.reason is EdgeReason.CAPACITY
            ):
                late_s = lag(first, op.submitted_s)
                gone[dst].append((4 * src + ENDED, late_s))
                met_s[dst] = max(met_s[dst], (first.end_s or 0.0) + late_s)
            else:
                gone[dst].append((4 * src + ISSUED, 0.0))
                met_s[dst] = max(met_s[dst], first.issued_s or 0.0)
                self.needs[dst].append(src)
        return gone

    def _add_streams(self, keeps_lanes: bool) -> None:
        """Explicit streams keep program order, also of what parks (rules R3 and R7).

        So do lanes, where nothing is known to be different.
        """
        newest: dict[tuple[int, str], int] = {}
        for place, op in sorted(enumerate(self._ops), key=lambda each: each[1].position):
            if op.position and (keeps_lanes or not _is_lane(op.stream)):
                before = newest.get((op.device, op.stream))
                if before is not None:
                    self._before(4 * before + ISSUED, 4 * place + ISSUED)
                    issued_s = self._ops[before].issued_s or 0.0
                    self._met_s[place] = max(self._met_s[place], issued_s)
                newest[op.device, op.stream] = place

    def _add_calls(self, calls: Sequence[Call]) -> None:
        for place, call in enumerate(calls):
            called = 4 * place + CALLED
            if call.after_call is None:
                self.ready_s[called] = call.after_call_s
            else:
                self._before(4 * call.after_call + CALLED, called, call.after_call_s)
            for end, seconds in call.after_ends:
                self._before(4 * end + ENDED, called, seconds)


def workers_s(ops: Sequence[TracedOp]) -> dict[int, float]:
    """By the place of a staged copy: how long its worker took to begin, when it waited for none."""
    found: dict[int, float] = {}
    until_s: dict[tuple[int, str | None], float] = {}
    for place, op in sorted(enumerate(ops), key=lambda each: each[1].start_s or 0.0):
        if op.is_staged and op.begun_s is not None and op.start_s is not None:
            key = (op.device, op.engine)
            took_s = round(op.start_s - op.begun_s, DIGITS)
            if took_s > 0 and op.begun_s >= until_s.get(key, 0.0):
                found[place] = took_s
            until_s[key] = max(until_s.get(key, 0.0), op.end_s or 0.0)
    return found


def _is_lane(stream: str) -> bool:
    return stream in LANES or COMPUTE.fullmatch(stream) is not None
