"""What a test in CI asks of a trace."""

from __future__ import annotations

from streamflow.runtime.units import spell_seconds
from streamflow.trace.answers import overlap
from streamflow.trace.gaps import Gap, gap_in_words, idle_gaps
from streamflow.trace.hints import hints
from streamflow.trace.index import Index
from streamflow.trace.sentences import name_on
from streamflow.trace.trace import Trace

__all__ = ["assert_overlap"]

_NUM_GAPS_TOLD = 5


def assert_overlap(trace: Trace, ratio: float) -> None:
    """See :meth:`Trace.assert_overlap <streamflow.trace.trace.Trace.assert_overlap>`."""
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
        raise ValueError(f"ratio must be a number from 0 to 1, not {ratio!r}")
    found = overlap(trace)
    if not found.busy_s:
        raise AssertionError(
            f"none of the {len(trace.ops)} ops of this trace has a time on an engine: nothing "
            "tells whether they overlapped. Await them inside dev.trace()"
        )
    if found.ratio >= ratio:
        return
    lines = [f"overlapped {found.ratio:.1%} of what could be, wanted {ratio:.1%}", str(found)]
    if sum(busy_s > 0 for busy_s in found.busy_s.values()) < 2:
        lines.append("one engine was used: there was nothing to overlap")
    index = Index(trace)
    gaps = idle_gaps(index)[:_NUM_GAPS_TOLD]
    if gaps:
        lines.append("longest gaps:")
        lines.extend(_gap_in_words(index, gap) for gap in gaps)
    told = hints(trace)
    if told:
        lines.append("hints:")
        lines.extend(f"  {hint}" for hint in told)
    raise AssertionError("\n".join(lines))


def _gap_in_words(index: Index, gap: Gap) -> str:
    _, device, engine = gap.place
    why = gap_in_words(index, gap.op, gap.before)
    where = f" of {gap.op.where}" if gap.op.where else ""
    return (
        f"  {spell_seconds(gap.length_s)} on {engine} of device {device} before "
        f"{name_on(gap.op)}{where}: {why or 'not known'}"
    )
