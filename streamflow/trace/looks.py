"""What the graph writers share: colours, grouping and labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import TypeVar

from streamflow.runtime.units import spell_bytes, spell_seconds
from streamflow.trace.groups import Group, GroupEdge
from streamflow.trace.model import EdgeReason, TracedArray, TracedEdge, TracedOp

__all__ = [
    "COLOURS",
    "FAILED_COLOUR",
    "TOLD",
    "EdgeLook",
    "colour_of",
    "edge_look",
    "edge_told",
    "group_by_stream",
    "group_lines",
    "label_lines",
    "look_of",
    "op_told",
    "printable",
]

# Okabe and Ito's palette, which people with any colour vision can tell apart.
COLOURS = {
    "h2d": "#56b4e9",
    "d2h": "#e69f00",
    "compute": "#009e73",
    "other": "#dddddd",
}
FAILED_COLOUR = "#d55e00"
TOLD = {"h2d": "copy in", "d2h": "copy out", "compute": "compute", "other": "other work"}
"""What the colours mean."""

_NUM_LABEL_CHARS_MAX = 80
_NUM_ARRAYS_TOLD_MAX = 4


class EdgeLook(Enum):
    """What a line of an edge says; as text, what a legend says of it."""

    WAIT = "wait on the device"
    IMPLIED = "implied"
    ORDER = "order of one stream"
    HOST = "host"
    CAPACITY = "made room"


def edge_look(edge: TracedEdge | GroupEdge) -> EdgeLook:
    """How an edge is drawn; many as one that waits if any of them does."""
    if edge.reason is EdgeReason.CAPACITY:
        return EdgeLook.CAPACITY
    if edge.reason is EdgeReason.HOST:
        return EdgeLook.HOST
    if edge.reason is EdgeReason.STREAM_ORDER:
        return EdgeLook.ORDER
    is_issued = edge.issued if isinstance(edge, TracedEdge) else edge.num_issued > 0
    return EdgeLook.WAIT if is_issued else EdgeLook.IMPLIED


def look_of(op: TracedOp | Group) -> str:
    """The key of ``op``'s colour in :data:`COLOURS`."""
    return op.engine if op.engine in COLOURS else "other"


def colour_of(op: TracedOp | Group) -> str:
    """The fill colour for ``op``."""
    return COLOURS[look_of(op)]


_Item = TypeVar("_Item", TracedOp, Group)


def group_by_stream(items: Iterable[_Item]) -> dict[str, list[_Item]]:
    """The ops, or groups of ops, of each stream, by a title.

    It names the device, and the process, if there are several.
    """
    lanes: dict[tuple[int | None, int | None, str | None], list[_Item]] = {}
    for item in items:
        lanes.setdefault((item.process, item.device, item.stream), []).append(item)
    is_single_device = len({device for _, device, _ in lanes}) <= 1
    is_single_process = len({process for process, _, _ in lanes}) <= 1
    titles: dict[str, list[_Item]] = {}
    for (process, device, stream), members in lanes.items():
        title = "several streams" if stream is None else stream
        if not is_single_device or not is_single_process:
            title = f"gpu{'s' if device is None else device}: {title}"
        if not is_single_process:
            title = f"process {process}, {title}" if process is not None else title
        titles.setdefault(title, []).extend(members)
    return titles


def label_lines(op: TracedOp) -> list[str]:
    """The name, shortened if it is long, then bytes and duration where they are known."""
    facts = []
    if op.nbytes:
        facts.append(spell_bytes(op.nbytes))
    if op.duration_s is not None:
        facts.append(spell_seconds(op.duration_s))
    return [_shortened(op.name), *([", ".join(facts)] if facts else [])]


def group_lines(group: Group) -> list[str]:
    """What is written on a group."""
    facts = []
    if group.nbytes:
        facts.append(spell_bytes(group.nbytes))
    if group.busy_s:
        facts.append(f"busy {spell_seconds(group.busy_s)}")
    if group.num_failed:
        facts.append(f"{group.num_failed} failed")
    scope = [] if group.scope is None else [f"in {_shortened(group.scope)}"]
    return [_shortened(group.label), *scope, *([", ".join(facts)] if facts else [])]


def op_told(op: TracedOp, arrays: Mapping[int, TracedArray]) -> list[str]:
    """Everything about ``op`` that a tooltip has room for, a line each."""
    told = [", ".join(label_lines(op)), f"{op.kind}, {op.state}, on {op.stream}"]
    if op.where is not None:
        told.append(op.where)
    for name, text in (("scope", op.scope), ("task", op.task)):
        if text is not None:
            told.append(f"{name} {text}")
    if op.needs:
        told.append(f"waited for {', '.join(op.needs)}")
    if op.issued_s is not None and op.start_s is not None and op.start_s > op.issued_s:
        told.append(f"queued {spell_seconds(op.start_s - op.issued_s)}")
    for verb, ids in (("reads", op.reads), ("writes", op.writes)):
        told.extend(f"{verb} {_array_told(each, arrays)}" for each in ids[:_NUM_ARRAYS_TOLD_MAX])
        if len(ids) > _NUM_ARRAYS_TOLD_MAX:
            told.append(f"{verb} {len(ids) - _NUM_ARRAYS_TOLD_MAX} more")
    return told


def edge_told(edge: TracedEdge, arrays: Mapping[int, TracedArray]) -> str:
    """The reason of ``edge``, and the array that gave it."""
    if edge.array is None:
        return edge.reason.value
    return f"{edge.reason.value} on {_array_told(edge.array, arrays)}"


def _array_told(array_id: int, arrays: Mapping[int, TracedArray]) -> str:
    array = arrays.get(array_id)
    if array is None:
        return f"array {array_id}"
    where = "" if array.where is None else f", made at {array.where}"
    return f"array {array_id} ({spell_bytes(array.nbytes)}{where})"


def _shortened(name: str) -> str:
    if len(name) <= _NUM_LABEL_CHARS_MAX:
        return name
    return name[: _NUM_LABEL_CHARS_MAX - 1] + "\N{HORIZONTAL ELLIPSIS}"


def printable(text: str) -> str:
    """``text`` on one line, without control characters and lone surrogates."""
    return "".join(char if char.isprintable() else _visible(char) for char in text)


def _visible(char: str) -> str:
    return " " if char.isspace() else "\N{REPLACEMENT CHARACTER}"
