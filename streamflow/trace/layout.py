"""Where the nodes of a graph stand: in layers, broken into bands as text is into lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType

__all__ = ["Placed", "place"]

# What the page draws: a column and a row in pixels, and the shape that a picture should have.
_COLUMN_PX = 190
_ROW_PX = 52
_ASPECT = 2.5

_NUM_SWEEPS = 8
_NUM_BENDS_MAX = 20_000  # a longer edge is drawn straight, before layout takes seconds

Edge = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Placed:
    """Places in columns and rows.

    Attributes
    ----------
    x, y : list of float
        Column and row of each node; two nodes are at least one column or one row apart.
    band : list of int
        Nodes of one band stand in one line of layers.
    bends : mapping of tuple of int to list of tuple of float
        Where an edge passes the layers between its ends, for edges within a band.
    """

    x: list[float]
    y: list[float]
    band: list[int]
    bends: dict[Edge, list[tuple[float, float]]]


def place(num_nodes: int, edges: Sequence[Edge]) -> Placed:
    """Lay out a graph by layers, left to right.

    Parameters
    ----------
    num_nodes : int
    edges : sequence of tuple of int
        ``(src, dst)``, each once. One with ``src >= dst`` orders nothing.

    Raises
    ------
    ModuleNotFoundError
        igraph is not installed.
    """
    igraph = _igraph()
    forward = [(src, dst) for src, dst in edges if src < dst]
    layers = _layers(num_nodes, forward)
    placed = Placed([0.0] * num_nodes, [0.0] * num_nodes, [0] * num_nodes, {})
    span_max = _span_max(forward, layers)
    members = _components(num_nodes, edges)
    edges_of: list[list[Edge]] = [[] for _ in members]
    component_of = [0] * num_nodes
    for index, nodes in enumerate(members):
        for node in nodes:
            component_of[node] = index
    for src, dst in forward:
        if layers[dst] - layers[src] <= span_max:
            edges_of[component_of[src]].append((src, dst))
    shelf = _Shelf()
    for nodes, own in zip(members, edges_of, strict=True):
        _place_component(igraph, nodes, own, layers, placed, shelf)
    shelf.settle(placed)
    return placed


class _Shelf:
    """Boxes beside each other, in lines whose length gives the whole a pleasant shape."""

    def __init__(self) -> None:
        self._boxes: list[tuple[list[int], list[Edge], float, float]] = []
        self.num_bands = 0

    def add(self, nodes: list[int], edges: list[Edge], width: float, height: float) -> None:
        self._boxes.append((nodes, edges, width, height))

    def settle(self, placed: Placed) -> None:
        area = sum((w * _COLUMN_PX) * ((h + 0.5) * _ROW_PX) for _, _, w, h in self._boxes)
        widest = max((w for _, _, w, _ in self._boxes), default=0.0)
        limit = max(widest, (area * _ASPECT) ** 0.5 / _COLUMN_PX)
        x = y = tallest = 0.0
        for nodes, edges, width, height in self._boxes:
            if x and x + width > limit:
                x, y, tallest = 0.0, y + tallest + 0.5, 0.0
            for node in nodes:
                placed.x[node] += x
                placed.y[node] += y
            for edge in edges:
                if edge in placed.bends:
                    placed.bends[edge] = [(bx + x, by + y) for bx, by in placed.bends[edge]]
            x += width
            tallest = max(tallest, height)


def _layers(num_nodes: int, forward: Sequence[Edge]) -> list[int]:
    """The longest path to each node; a node without any stands just before its first user."""
    followers: list[list[int]] = [[] for _ in range(num_nodes)]
    is_first = [True] * num_nodes
    for src, dst in forward:
        followers[src].append(dst)
        is_first[dst] = False
    layers = [0] * num_nodes
    for node in range(num_nodes):  # edges go upward, so this is a topological order
        for dst in followers[node]:
            layers[dst] = max(layers[dst], layers[node] + 1)
    for node in range(num_nodes):
        if is_first[node] and followers[node]:
            layers[node] = min(layers[dst] for dst in followers[node]) - 1
    return layers


def _span_max(forward: Sequence[Edge], layers: Sequence[int]) -> int:
    """How many layers an edge may span for layout to route it."""
    spans = [layers[dst] - layers[src] for src, dst in forward]
    limit = 64
    while limit > 1 and sum(span - 1 for span in spans if span <= limit) > _NUM_BENDS_MAX:
        limit //= 2
    return limit


def _components(num_nodes: int, edges: Sequence[Edge]) -> list[list[int]]:
    """Nodes that hang together, in order of each part's first one."""
    leader = list(range(num_nodes))

    def find(node: int) -> int:
        while leader[node] != node:
            leader[node] = leader[leader[node]]
            node = leader[node]
        return node

    for src, dst in edges:
        first, second = find(src), find(dst)
        leader[max(first, second)] = min(first, second)
    parts: dict[int, list[int]] = {}
    for node in range(num_nodes):
        parts.setdefault(find(node), []).append(node)
    return list(parts.values())


def _place_component(
    igraph: ModuleType,
    nodes: list[int],
    edges: list[Edge],
    layers: Sequence[int],
    placed: Placed,
    shelf: _Shelf,
) -> None:
    """Rows from igraph, one part at a time and every bend a node of ours.

    igraph 1.0 writes beyond its memory where it has parts to tell apart and bends to add.
    """
    number = {node: index for index, node in enumerate(nodes)}
    columns = [layers[node] for node in nodes]
    segments: list[Edge] = []
    bends_of: dict[Edge, range] = {}
    for src, dst in edges:
        begin = len(columns)
        columns.extend(range(layers[src] + 1, layers[dst]))
        chain = [number[src], *range(begin, len(columns)), number[dst]]
        segments.extend(pairwise(chain))
        if len(columns) > begin:
            bends_of[src, dst] = range(begin, len(columns))
    least = min(columns)
    columns = [column - least for column in columns]
    if len(columns) == 1:
        rows = [0.0]
    else:
        graph = igraph.Graph(len(columns), segments, directed=True)
        layout = graph.layout_sugiyama(layers=columns, hgap=1, vgap=1, maxiter=20)
        rows = _straighten(columns, [float(point[0]) for point in layout], segments)
    bands = _break_into_bands(columns, rows)
    for node, index in number.items():
        band = bands.band_of(columns[index])
        placed.x[node] = columns[index] % bands.num_columns
        placed.y[node] = rows[index] + bands.shifts[band]
        placed.band[node] = shelf.num_bands + band
    for edge, bends in bends_of.items():
        if placed.band[edge[0]] == placed.band[edge[1]]:
            shift = bands.shifts[placed.band[edge[0]] - shelf.num_bands]
            placed.bends[edge] = [
                (columns[index] % bands.num_columns, rows[index] + shift) for index in bends
            ]
    shelf.num_bands += len(bands.shifts)
    shelf.add(nodes, edges, min(bands.num_columns, max(columns) + 1), bands.height)


@dataclass(frozen=True, slots=True)
class _Bands:
    num_columns: int
    shifts: list[float]
    height: float

    def band_of(self, column: int) -> int:
        return column // self.num_columns


def _straighten(
    columns: Sequence[int], rows: Sequence[float], segments: Sequence[Edge]
) -> list[float]:
    """The order of each layer as in ``rows``, closer together: those drift over many layers."""
    in_layer: list[list[int]] = [[] for _ in range(max(columns) + 1)]
    for node in sorted(range(len(rows)), key=rows.__getitem__):
        in_layer[columns[node]].append(node)
    neighbours: list[list[int]] = [[] for _ in rows]
    for src, dst in segments:
        neighbours[src].append(dst)
        neighbours[dst].append(src)
    straight = [0.0] * len(rows)
    for nodes in in_layer:
        for place, node in enumerate(nodes):
            straight[node] = place - (len(nodes) - 1) / 2
    for sweep in range(_NUM_SWEEPS):
        for nodes in in_layer if sweep % 2 == 0 else reversed(in_layer):
            wanted = [
                sum(straight[other] for other in neighbours[node]) / len(neighbours[node])
                if neighbours[node]
                else straight[node]
                for node in nodes
            ]
            for node, row in zip(nodes, _spread(wanted), strict=True):
                straight[node] = row
    return straight


def _spread(wanted: Sequence[float]) -> list[float]:
    """The rows nearest to ``wanted`` that keep its order and are one apart (least squares)."""
    blocks: list[tuple[float, int]] = []  # mean offset, how many
    for place, row in enumerate(wanted):
        mean, num = row - place, 1
        while blocks and blocks[-1][0] > mean:
            before, num_before = blocks.pop()
            mean = (before * num_before + mean * num) / (num_before + num)
            num += num_before
        blocks.append((mean, num))
    offsets = [mean for mean, num in blocks for _ in range(num)]
    return [offset + place for place, offset in enumerate(offsets)]


def _break_into_bands(columns: Sequence[int], rows: Sequence[float]) -> _Bands:
    """As many bands as give a long strip a pleasant shape; each begins at its own first row."""
    width = max(columns) + 1
    height = _typical_height(columns, rows)
    num_bands = 1
    if width * _COLUMN_PX > 3 * _ASPECT * height * _ROW_PX:
        num_bands = round((width * _COLUMN_PX / (_ASPECT * height * _ROW_PX)) ** 0.5)
    num_columns = -(-width // num_bands)
    shifts, top = [], 0.0
    for low, high in _extents(columns, rows, num_columns):
        shifts.append(top - low)
        top += high - low + 2
    return _Bands(num_columns, shifts, top - 1)


def _extents(
    columns: Sequence[int], rows: Sequence[float], num_columns: int
) -> list[tuple[float, float]]:
    """The first and the last row of each band."""
    num_bands = -(-(max(columns) + 1) // num_columns)
    low, high = [float("inf")] * num_bands, [float("-inf")] * num_bands
    for column, row in zip(columns, rows, strict=True):
        band = column // num_columns
        low[band] = min(low[band], row)
        high[band] = max(high[band], row)
    return [(a, b) if a <= b else (0.0, 0.0) for a, b in zip(low, high, strict=True)]


def _typical_height(columns: Sequence[int], rows: Sequence[float]) -> float:
    """Rows of a band of ten layers, and the space below it."""
    extents = _extents(columns, rows, 10)
    return sum(high - low for low, high in extents) / len(extents) + 2


def _igraph() -> ModuleType:
    try:
        import igraph
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "the page's graph is laid out by igraph, which is not installed: "
            "pip install 'streamflow-cuda[viz]'",
            name="igraph",
        ) from None
    found: ModuleType = igraph
    return found
