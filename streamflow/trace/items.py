"""The items of the pipelines in a trace, and what each one's way onto the device waited for.

A pipeline asks for as many items at a time as it is deep. So an item is called for once the
one that many places before it was handed over, and its copy to the host has ended by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from streamflow.trace.host_order import Call, is_soon, lag
from streamflow.trace.model import TracedOp

__all__ = ["item_calls"]


@dataclass(slots=True)
class _Item:
    """Places of the ops of one item.

    ``before`` are those of stages on the host before the device, and ``ends`` those that end
    last: the copies out, or of stages after them.
    """

    device: list[int] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    @property
    def first(self) -> int:
        return self.before[0] if self.before else self.device[0]


def item_calls(ops: Sequence[TracedOp], depth: int | None) -> dict[int, Call]:
    """How the ops of pipelines come to be called for, by their places.

    Parameters
    ----------
    ops : sequence of TracedOp
        In the order of their calls.
    depth : int or None
        Items at a time; None: as many as there were.

    Raises
    ------
    ValueError
        ``depth`` is given, and there are no items that come back to the host.
    """
    found: dict[int, Call] = {}
    num_items = 0
    for items in _pipelines(ops):
        traced_depth = _depth(ops, items)
        for run in _runs(ops, items, traced_depth):
            num_items += len(run)
            _add_calls(ops, run, traced_depth, depth or traced_depth, found)
    if depth is not None and not num_items:
        raise ValueError(
            f"depth={depth}: the trace shows no pipeline whose items come back to the host, as "
            "dev.pipeline(..).map(..) makes them"
        )
    return found


def _pipelines(ops: Sequence[TracedOp]) -> list[list[_Item]]:
    """The items of each pipeline, told apart by the line that made it."""
    pipelines: dict[str | None, list[_Item]] = {}
    stages: dict[str | None, dict[str, list[int]]] = {}
    item: _Item | None = None
    is_putting = False
    where: str | None = None
    for place, op in enumerate(ops):
        if op.kind == "free":
            if item is not None:
                item.device.append(place)
            continue
        if op.scope != "pipeline":
            item = None
            continue
        if op.kind == "host":
            stages.setdefault(op.where, {}).setdefault(op.name, []).append(place)
            item = None
            continue
        if op.kind == "put" or (op.kind == "empty" and op.stream == "h2d"):
            if item is None or not (is_putting or op.where != where):
                item, where = _Item(), op.where
                pipelines.setdefault(where, []).append(item)
            is_putting = True
        else:
            is_putting = False
        if item is not None:
            item.device.append(place)
            if op.kind == "get":
                item.ends.append(place)
    for line, items in pipelines.items():
        _add_stages(ops, items, stages.get(line, {}))
    return [items for items in pipelines.values() if all(item.ends for item in items)]


def _add_stages(ops: Sequence[TracedOp], items: list[_Item], stages: dict[str, list[int]]) -> None:
    """Give each item its ops of the stages on the host that have one for each."""
    for places in stages.values():
        if len(places) < len(items):
            continue  # makes items of several, or isn't called for each
        pairs = list(zip(items, places, strict=False))
        if all(place < item.device[0] for item, place in pairs):
            for item, place in pairs:
                item.before.append(place)
        elif all(place > item.device[-1] for item, place in pairs):
            for item, place in pairs:
                item.ends.append(place)


def _seen(ops: Sequence[TracedOp], item: _Item) -> float:
    return max(ops[place].seen_s or 0.0 for place in item.ends)


def _depth(ops: Sequence[TracedOp], items: list[_Item]) -> int:
    """The most items that were under way at the same time."""
    most, under_way = 1, list[float]()
    for item in items:
        now_s = ops[item.first].submitted_s
        under_way = [seen_s for seen_s in under_way if seen_s > now_s]
        under_way.append(_seen(ops, item))
        most = max(most, len(under_way))
    return most


def _runs(ops: Sequence[TracedOp], items: list[_Item], depth: int) -> list[list[_Item]]:
    """The items of each run: it begins while none is under way, as those before have ended."""
    runs: list[list[_Item]] = []
    until_s = float("-inf")
    for item in items:
        if not runs or (depth > 1 and until_s <= ops[item.first].submitted_s):
            runs.append([])
        runs[-1].append(item)
        until_s = max(until_s, _seen(ops, item))
    return runs


def _add_calls(
    ops: Sequence[TracedOp], run: list[_Item], traced: int, depth: int, found: dict[int, Call]
) -> None:
    for number, item in enumerate(run):
        if number:
            found[item.first] = _first_call(ops, run, number, traced, depth)
        before = item.first
        for place in item.before[1:] + item.device[:1]:
            if place != before:
                found[place] = _after(ops, before, place)
                before = place
        out = [end for end in item.ends if ops[end].kind == "get"]
        for place in item.ends:
            if ops[place].kind != "get":  # a stage after the device
                late_s = ops[place].submitted_s - max(ops[end].seen_s or 0.0 for end in out)
                ends = [(end, lag(ops[end]) + max(0.0, late_s)) for end in out]
                found[place] = Call(item.device[-1], 0.0, ends)
                out = [place]
        for place in item.device[1:]:
            gap_s = ops[place].submitted_s - ops[before].submitted_s
            found[place] = Call(before, max(0.0, gap_s), [])
            before = place


def _first_call(
    ops: Sequence[TracedOp], run: list[_Item], number: int, traced: int, depth: int
) -> Call:
    """That of an item which is not the first one of its run."""
    op, before = ops[run[number].first], run[number - 1].first
    gap_s = op.submitted_s - ops[before].submitted_s
    late_s = 0.0
    if number >= traced:
        late_s = op.submitted_s - _seen(ops, run[number - traced])
        if is_soon(late_s, gap_s):
            gap_s = 0.0
        else:  # its consumer was busy, or its source
            late_s = 0.0
    ends = run[number - depth].ends if number >= depth else []
    return Call(before, gap_s, [(end, lag(ops[end]) + late_s) for end in ends])


def _after(ops: Sequence[TracedOp], before: int, place: int) -> Call:
    """The next stage's call, where the stage before was on the host."""
    end = ops[before]
    late_s = max(0.0, ops[place].submitted_s - (end.seen_s or 0.0))
    return Call(before, 0.0, [(before, lag(end) + late_s)])
