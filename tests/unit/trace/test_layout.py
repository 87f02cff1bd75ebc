"""Where the nodes of a graph stand."""

from __future__ import annotations

import builtins
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamflow.trace.layout import Placed, place

Edges = list[tuple[int, int]]


@st.composite
def graphs(draw: st.DrawFn) -> tuple[int, Edges]:
    num = draw(st.integers(1, 60))
    node = st.integers(0, num - 1)
    edges = draw(
        st.sets(st.tuples(node, node).filter(lambda edge: edge[0] != edge[1]), max_size=120)
    )
    return num, sorted(edges)


def is_clear(placed: Placed, first: int, second: int) -> bool:
    apart_x = abs(placed.x[first] - placed.x[second])
    return apart_x >= 1 - 1e-6 or abs(placed.y[first] - placed.y[second]) >= 1 - 1e-6


@settings(deadline=None)
@given(graphs())
def test_no_two_nodes_overlap(graph: tuple[int, Edges]) -> None:
    num, edges = graph
    placed = place(num, edges)
    for first in range(num):
        for second in range(first):
            assert is_clear(placed, first, second)


@settings(deadline=None)
@given(graphs())
def test_edges_lead_to_the_right_or_to_a_later_line(graph: tuple[int, Edges]) -> None:
    num, edges = graph
    placed = place(num, edges)
    for src, dst in edges:
        if src < dst:
            here = (placed.band[src], placed.x[src])
            assert here < (placed.band[dst], placed.x[dst])


@settings(deadline=None)
@given(graphs())
def test_bends_stand_between_the_ends_and_on_no_node(graph: tuple[int, Edges]) -> None:
    num, edges = graph
    placed = place(num, edges)
    nodes = [*zip(placed.x, placed.y, strict=True)]
    for (src, dst), bends in placed.bends.items():
        assert [x for x, _ in bends] == [placed.x[src] + 1 + step for step in range(len(bends))]
        assert placed.x[dst] == placed.x[src] + len(bends) + 1
        for x, y in bends:
            assert all(x != node_x or abs(y - node_y) > 0.5 for node_x, node_y in nodes)


def test_a_long_chain_is_broken_into_lines() -> None:
    num = 400
    placed = place(num, [(node, node + 1) for node in range(num - 1)])
    assert max(placed.band) > 3
    assert max(placed.x) < num / 4


def test_parts_that_do_not_hang_together_stand_beside_and_below_each_other() -> None:
    placed = place(300, [(node, node + 1) for node in range(0, 300, 3)])
    assert max(placed.x) > 4
    assert max(placed.y) > 4


@pytest.mark.parametrize("num", [200, 600])
def test_many_parts_with_bends(num: int) -> None:
    # igraph 1.0 alone writes beyond its memory here, and often ends the process.
    edges = [
        (5 * part + src, 5 * part + dst)
        for part in range(num)
        for src, dst in ((0, 1), (1, 2), (2, 3), (3, 4), (2, 4))
    ]
    assert len(place(5 * num, edges).bends) == num


def test_without_igraph_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "igraph":
            raise ModuleNotFoundError(name)
        return whole(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "igraph", raising=False)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'streamflow-cuda\[viz\]'"):
        place(1, [])
