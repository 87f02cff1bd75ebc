"""Items of pipelines in a trace, and when each is called for."""

from __future__ import annotations

import pytest

from streamflow.trace import TracedOp
from streamflow.trace.items import item_calls

MS = 1e-3


def item(number: int, called_ms: float, seen_ms: float, scope: str = "pipeline") -> list[TracedOp]:
    """A put and a get."""
    return [
        TracedOp(
            2 * number + place, kind, kind, stream, stream, 0, 4, called_ms * MS, 0.0,
            seen_ms * MS, "done", "a.py:1", seen_s=seen_ms * MS, scope=scope, is_awaited=True,
        )
        for place, (kind, stream) in enumerate([("put", "h2d"), ("get", "d2h")])
    ]  # fmt: skip


def test_an_item_comes_after_the_one_as_many_places_before_it_as_the_pipeline_is_deep() -> None:
    ops = [*item(0, 0, 5), *item(1, 0, 6), *item(2, 5, 9), *item(3, 6, 10)]
    ops.sort(key=lambda op: op.id)
    found = item_calls(ops, None)
    assert (found[4].after_call, found[4].after_call_s, found[4].after_ends) == (2, 0.0, [(1, 0.0)])
    deeper = item_calls(ops, 3)
    assert deeper[4].after_ends == []
    assert deeper[6].after_ends == [(1, 0.0)]
    assert item_calls(ops, 1)[2].after_ends == [(1, 0.0)]


def test_where_the_consumer_was_late_its_pace_stays() -> None:
    ops = [op for n in range(4) for op in item(n, 10 * n, 10 * n + 12)]
    call = item_calls(ops, None)[6]
    assert call.after_call == 4
    assert call.after_call_s == pytest.approx(10 * MS)
    assert call.after_ends == [(3, 0.0)]


def test_a_scope_of_another_name_is_no_pipeline() -> None:
    with pytest.raises(ValueError, match="depth=2: the trace shows no pipeline"):
        item_calls(item(0, 0, 1, "mine"), 2)


def test_items_that_stay_on_the_device_have_no_end_here() -> None:
    puts = [op for n in range(4) for op in item(n, n, n + 1) if op.kind == "put"]
    assert item_calls(puts, None) == {}
