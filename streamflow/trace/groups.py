"""The synopsis of a large trace: groups of like ops, and how many edges lead between them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import TypeAlias, TypeVar

from streamflow.trace.lanes import lane_of
from streamflow.trace.model import EdgeReason, TracedOp
from streamflow.trace.trace import Trace

__all__ = ["Group", "GroupEdge", "Synopsis", "synopsis"]


@dataclass(frozen=True, slots=True)
class Group:
    """Ops of one trace that are alike. Times are in seconds since the trace began.

    A field that says what the ops are, from ``scope`` to ``engine``, is None where they differ
    in it, or have none.

    Attributes
    ----------
    id : int
        From 0, its place in :attr:`Synopsis.groups`.
    label : str
        What a picture writes on it; names in it may hold any text.
    scope, stream, name, engine : str or None
        As of their ops. Where names or scopes that differ only in numbers were put together,
        each number in it reads ``*``.
    device, process : int or None
    ops : tuple of int
        Ids, in order of begin. ``synopsis(trace, ops=group.ops)`` shows the group in detail.
    num_ops, num_failed : int
    nbytes : int
        Sum over the ops.
    busy_s : float
        How long at least one of them ran.
    start_s, end_s : float or None
        From the first start to the last end; None if no op is timed.
    """

    id: int
    label: str
    scope: str | None
    stream: str | None
    device: int | None
    name: str | None
    ops: tuple[int, ...]
    num_ops: int
    nbytes: int
    busy_s: float
    start_s: float | None
    end_s: float | None
    process: int | None = None
    engine: str | None = None
    num_failed: int = 0


@dataclass(frozen=True, slots=True)
class GroupEdge:
    """All edges of one reason from ops of one group to ops of another, or of the same.

    Attributes
    ----------
    src, dst : int
        Ids of groups; equal for the edges inside a group. Both directions may exist.
    reason : EdgeReason
    num : int
        How many edges of the trace it stands for.
    num_issued : int
        For how many of them a wait was made on the device.
    """

    src: int
    dst: int
    reason: EdgeReason
    num: int
    num_issued: int = 0


@dataclass(frozen=True, slots=True)
class Synopsis:
    """A trace in few groups. Each op is in exactly one, each edge is counted once.

    Attributes
    ----------
    groups : tuple of Group
        By lane, then by scope and name, then by time.
    edges : tuple of GroupEdge
        By ``src``, ``dst`` and reason.
    by : tuple of str
        What the ops of a group have in common, such as ``("scope", "stream", "name")``.
    num_slices : int
        Into how many slices of time, of equally many ops, the groups were cut.
    """

    groups: tuple[Group, ...]
    edges: tuple[GroupEdge, ...]
    by: tuple[str, ...]
    num_slices: int

    def arrows(self, max_arrows: int = 300) -> list[tuple[int, int, list[GroupEdge]]]:
        """What a picture draws: the two groups, and their edges, the most frequent reason first.

        Of more than ``max_arrows`` those that stand for the most edges.
        """
        between = [
            (src, dst, sorted(edges, key=lambda edge: -edge.num))
            for (src, dst), edges in groupby(self.edges, key=lambda edge: (edge.src, edge.dst))
            if src != dst
        ]
        between.sort(key=lambda each: -sum(edge.num for edge in each[2]))
        return sorted(between[:max_arrows], key=lambda each: each[:2])

    def told(self, max_ops: int) -> str:
        """For the reader of a file that shows this, since there are more ops than ``max_ops``."""
        return (
            f"{self}, since they are more than max_ops={max_ops}. Of the edges between groups, "
            f"{self._num_drawn()} are drawn. To see ops one by one, trace a shorter piece of the "
            "program or pass a larger max_ops."
        )

    def _num_drawn(self) -> str:
        num = sum(edge.num for edge in self.edges if edge.src != edge.dst)
        num_drawn = sum(edge.num for _, _, edges in self.arrows() for edge in edges)
        return f"{num_drawn} of {num}" if num_drawn < num else f"all {num}"

    def __str__(self) -> str:
        num_ops = sum(group.num_ops for group in self.groups)
        by = f" by {', '.join(self.by)}" if self.by else ""
        slices = f" in {self.num_slices} slices of time" if self.num_slices > 1 else ""
        return f"{num_ops} ops in {len(self.groups)} groups{by}{slices}"


_Facet: TypeAlias = Callable[[TracedOp], Hashable]
_T = TypeVar("_T")
_DIGITS = re.compile(r"\d+")


def _device(op: TracedOp) -> tuple[int, int]:
    return op.process, op.device


def _scope(op: TracedOp) -> str | None:
    return op.scope


def _like_scopes(op: TracedOp) -> str | None:
    return None if op.scope is None else _starred(op.scope)


def _name(op: TracedOp) -> str:
    # What the runtime named itself ends in the op's number, which nothing else has.
    return op.kind if op.name.rpartition("#")[0] == op.kind else op.name


def _like_names(op: TracedOp) -> str:
    return _starred(_name(op))


def _kind(op: TracedOp) -> str:
    return op.kind


@lru_cache(maxsize=4096)
def _starred(text: str) -> str:
    return _DIGITS.sub("*", text)


# From fine to coarse; the first that makes few enough groups is taken.
_WAYS: tuple[dict[str, _Facet], ...] = (
    {"stream": lane_of, "scope": _scope, "name": _name},
    {"stream": lane_of, "like scopes": _like_scopes, "like names": _like_names},
    {"stream": lane_of, "like scopes": _like_scopes, "kind": _kind},
    {"stream": lane_of, "kind": _kind},
    {"stream": lane_of},
    {"device": _device},
    {},
)


def synopsis(trace: Trace, *, max_groups: int = 100, ops: Iterable[int] | None = None) -> Synopsis:
    """Put the ops of a trace into few groups, and count the edges between them.

    Ops are put together by stream, scope and name as far as ``max_groups`` allows, else more
    coarsely; what is left of it is used to cut all groups at the same moments of time.
    The same trace gives the same groups.

    Parameters
    ----------
    trace : Trace
    max_groups : int
        At least 1.
    ops : iterable of int, optional
        Ids of those to look at, such as a group's; all of the trace's if left out. Edges from
        and to others are left out.

    Returns
    -------
    Synopsis

    Raises
    ------
    ValueError
        ``max_groups`` is below 1.
    """
    if max_groups < 1:
        raise ValueError(f"max_groups must be at least 1, not {max_groups}")
    contents = trace._read()
    chosen: Sequence[TracedOp] = contents.ops
    if ops is not None:
        wanted = frozenset(ops)
        chosen = [op for op in chosen if op.id in wanted]
    chosen = sorted(chosen, key=_begin_s)  # stable: program order among equals
    for way in _WAYS:
        facets = tuple(way.values())
        keys = [tuple(facet(op) for facet in facets) for op in chosen]
        places = {key: place for place, key in enumerate(dict.fromkeys(keys))}
        if len(places) <= max_groups:
            break
    num_slices = _num_slices(keys, max_groups)
    members: dict[tuple[tuple[Hashable, ...], int], list[TracedOp]] = {}
    for rank, (op, key) in enumerate(zip(chosen, keys, strict=True)):
        members.setdefault((key, rank * num_slices // len(chosen)), []).append(op)
    order = sorted(members, key=lambda each: (places[each[0]], each[1]))
    groups = tuple(_group(number, members[each]) for number, each in enumerate(order))
    home = {op_id: group.id for group in groups for op_id in group.ops}
    counts: Counter[tuple[int, int, EdgeReason]] = Counter()
    issued: Counter[tuple[int, int, EdgeReason]] = Counter()
    for edge in contents.edges:
        src, dst = home.get(edge.src), home.get(edge.dst)
        if src is not None and dst is not None:
            counts[src, dst, edge.reason] += 1
            issued[src, dst, edge.reason] += edge.issued
    edges = tuple(
        GroupEdge(*key, counts[key], issued[key])
        for key in sorted(counts, key=lambda key: (key[0], key[1], key[2].value))
    )
    return Synopsis(groups, edges, tuple(way), num_slices)


def _begin_s(op: TracedOp) -> float:
    if op.start_s is not None:
        return op.start_s
    return op.submitted_s if op.issued_s is None else op.issued_s


def _common(values: Iterable[_T]) -> _T | None:
    """The one value of all; None if there are several."""
    found = set(values)
    return found.pop() if len(found) == 1 else None


def _num_slices(keys: Sequence[Hashable], max_groups: int) -> int:
    """The largest power of two that makes few enough groups."""
    num = 1
    while num < len(keys):
        cut = {(key, rank * 2 * num // len(keys)) for rank, key in enumerate(keys)}
        if len(cut) > max_groups:
            break
        num *= 2
    return num


def _group(number: int, members: Sequence[TracedOp]) -> Group:
    """``members`` are in order of begin."""
    busy_s, until_s = 0.0, float("-inf")
    start_s: float | None = None
    for op in members:
        if op.start_s is not None and op.end_s is not None:
            busy_s += max(0.0, op.end_s - max(op.start_s, until_s))
            until_s = max(until_s, op.end_s)
            start_s = op.start_s if start_s is None else start_s
    name = _common(map(_name, members))
    if name is None:
        name = _common(map(_like_names, members))
    scope = _common(map(_scope, members))
    if scope is None:
        scope = _common(map(_like_scopes, members))
    label = name
    if label is None:
        kinds = [*dict.fromkeys(op.kind for op in members)]
        label = ", ".join(kinds[:3]) + (", .." if len(kinds) > 3 else "")
    return Group(
        id=number,
        label=members[0].name if len(members) == 1 else f"{len(members)} x {label}",
        scope=scope,
        stream=_common(op.stream for op in members),
        device=_common(op.device for op in members),
        name=name,
        ops=tuple(op.id for op in members),
        num_ops=len(members),
        nbytes=sum(op.nbytes for op in members),
        busy_s=busy_s,
        start_s=start_s,
        end_s=None if start_s is None else until_s,
        process=_common(op.process for op in members),
        engine=_common(op.engine for op in members),
        num_failed=sum(op.state == "failed" for op in members),
    )
