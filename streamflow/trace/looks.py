"""What the graph writers share: colours, grouping and labels."""

from __future__ import annotations

from collections.abc import Iterable

from streamflow.runtime.units import spell_bytes, spell_seconds
from streamflow.trace.model import TracedOp

__all__ = [
    "COLOURS",
    "FAILED_COLOUR",
    "colour_of",
    "group_by_stream",
    "label_lines",
    "look_of",
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

_NUM_LABEL_CHARS_MAX = 80


def look_of(op: TracedOp) -> str:
    """The key of ``op``'s colour in :data:`COLOURS`."""
    return op.engine if op.engine in COLOURS else "other"


def colour_of(op: TracedOp) -> str:
    """The fill colour for ``op``."""
    return COLOURS[look_of(op)]


def group_by_stream(ops: Iterable[TracedOp]) -> dict[str, list[TracedOp]]:
    """The ops of each stream, by a title that names the device if there are several."""
    groups: dict[tuple[int, str], list[TracedOp]] = {}
    for op in ops:
        groups.setdefault((op.device, op.stream), []).append(op)
    is_single_device = len({device for device, _ in groups}) <= 1
    return {
        stream if is_single_device else f"gpu{device}: {stream}": members
        for (device, stream), members in groups.items()
    }


def label_lines(op: TracedOp) -> list[str]:
    """The name, shortened if it is long, then bytes and duration where they are known."""
    facts = []
    if op.nbytes:
        facts.append(spell_bytes(op.nbytes))
    if op.duration_s is not None:
        facts.append(spell_seconds(op.duration_s))
    name = op.name
    if len(name) > _NUM_LABEL_CHARS_MAX:
        name = name[: _NUM_LABEL_CHARS_MAX - 1] + "\N{HORIZONTAL ELLIPSIS}"
    return [name, *([", ".join(facts)] if facts else [])]


def printable(text: str) -> str:
    """``text`` on one line, without control characters and lone surrogates."""
    return "".join(char if char.isprintable() else _visible(char) for char in text)


def _visible(char: str) -> str:
    return " " if char.isspace() else "\N{REPLACEMENT CHARACTER}"
