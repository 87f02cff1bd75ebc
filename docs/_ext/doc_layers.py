"""The picture of the layers, drawn from the imports that the code really has.

Layers come from the import-linter contract in ``pyproject.toml``, rooms from the
folder tree, arrows from the ``import`` statements.
"""

from __future__ import annotations

import ast
import re
import textwrap
import tomllib
from dataclasses import dataclass
from html import escape
from pathlib import Path

__all__ = ["Room", "draw", "layers_of", "read_rooms"]

_WIDTH = 1080
_MARGIN = 24
_LABEL_WIDTH = 76
_GUTTER = 76  # right of the boxes, for arrows that pass by a layer
_GAP_X = 20
_GAP_Y = 52
_LINE = 15
_BOX_MAX = 300

_Box = tuple[float, float, float, float]  # x, y, width, height


@dataclass(frozen=True, slots=True)
class Room:
    """A module or package right under ``streamflow``."""

    name: str
    summary: str
    num_modules: int
    num_lines: int
    imports: frozenset[str]


def layers_of(pyproject: Path) -> list[list[str]]:
    """The layers of the contract, highest first; each a list of room names."""
    settings = tomllib.loads(pyproject.read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    rows = next(c["layers"] for c in contracts if c["type"] == "layers")
    return [re.findall(r"\w+", row) for row in rows]


def read_rooms(package: Path) -> dict[str, Room]:
    """Every room that exists, with what it imports from its siblings."""
    rooms = {}
    for entry in sorted(package.iterdir()):
        if entry.name.startswith("__"):
            continue
        if entry.is_dir() and any(entry.rglob("*.py")):
            rooms[entry.name] = _read_room(entry.name, package, sorted(entry.rglob("*.py")))
        elif entry.suffix == ".py":
            rooms[entry.stem] = _read_room(entry.stem, package, [entry])
    return rooms


def _read_room(name: str, package: Path, files: list[Path]) -> Room:
    summary = ""
    num_lines = 0
    imports: set[str] = set()
    for file in files:
        text = file.read_text(encoding="utf-8")
        tree = ast.parse(text)
        num_lines += len(text.splitlines())
        if file.stem in ("__init__", name) and not summary:
            summary = (ast.get_docstring(tree) or "").split("\n\n")[0].replace("\n", " ")
        for node in ast.walk(tree):
            imports.update(_imported_rooms(node, package.name))
    return Room(
        name=name,
        summary=re.split(r"(?<=[.:;]) ", summary)[0].rstrip(".:;").replace("``", ""),
        num_modules=len(files),
        num_lines=num_lines,
        imports=frozenset(imports - {name}),
    )


def _imported_rooms(node: ast.AST, package: str) -> set[str]:
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        names = [node.module]
        if node.module == package:
            names = [f"{package}.{alias.name}" for alias in node.names]
    parts = [name.split(".") for name in names]
    return {part[1] for part in parts if part[0] == package and len(part) > 1}


def _without_implied(edges: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Leave out each arrow that a longer way over other arrows says as well."""
    below: dict[str, set[str]] = {}
    for upper, lower in edges:
        below.setdefault(upper, set()).add(lower)

    def reaches(start: str, goal: str) -> bool:
        seen, todo = {start}, [low for low in below.get(start, ()) if low != goal]
        while todo:
            at = todo.pop()
            if at == goal:
                return True
            if at not in seen:
                seen.add(at)
                todo.extend(below.get(at, ()))
        return False

    return {(upper, lower) for upper, lower in edges if not reaches(upper, lower)}


def draw(rooms: dict[str, Room], layers: list[list[str]]) -> str:
    """The picture as SVG, one row for each layer that has a room."""
    rows = [row for row in ([n for n in layer if n in rooms] for layer in layers) if row]
    level = {name: index for index, row in enumerate(rows) for name in row}
    boxes: dict[str, _Box] = {}
    parts: list[str] = []
    y = float(_MARGIN)
    for row in rows:
        width = min(
            _BOX_MAX,
            (_WIDTH - 2 * _MARGIN - _LABEL_WIDTH - _GUTTER - _GAP_X * (len(row) - 1)) / len(row),
        )
        texts = {n: textwrap.wrap(rooms[n].summary, int(width / 6.4))[:6] for n in row}
        height = 48 + _LINE * max(len(lines) for lines in texts.values())
        total = width * len(row) + _GAP_X * (len(row) - 1)
        x = _LABEL_WIDTH + (_WIDTH - _LABEL_WIDTH - _GUTTER - total) / 2
        parts.append(
            f'<rect class="band" x="{_MARGIN / 2}" y="{y - 10}" '
            f'width="{_WIDTH - _MARGIN}" height="{height + 20}" rx="10"/>'
        )
        number = len(rows) - level[row[0]]
        parts.append(
            f'<text class="layer" x="{_MARGIN}" y="{y + height / 2 + 4}">layer {number}</text>'
        )
        for name in row:
            boxes[name] = (x, y, width, height)
            parts.append(_box(rooms[name], texts[name], x, y, width, height))
            x += width + _GAP_X
        y += height + _GAP_Y
    edges = {(n, low) for n in level for low in rooms[n].imports if low in level}
    arrows = []
    num_long = 0
    for upper, lower in sorted(_without_implied(edges), key=lambda edge: (level[edge[0]], edge)):
        steps = level[lower] - level[upper]
        if steps == 1:
            arrows.append(_short_arrow(boxes[upper], boxes[lower]))
        else:  # past a layer, or, if the contract is broken, sideways or up
            arrows.append(_long_arrow(boxes[upper], boxes[lower], num_long, is_wrong=steps < 1))
            num_long += 1
    return _document("\n".join(parts + arrows), y - _GAP_Y + _MARGIN)


def _box(room: Room, lines: list[str], x: float, y: float, width: float, height: float) -> str:
    middle = x + width / 2
    size = f"{room.num_modules} modules, " if room.num_modules > 1 else ""
    body = "".join(
        f'<text class="summary" x="{middle}" y="{y + 53 + i * _LINE}">{escape(line)}</text>'
        for i, line in enumerate(lines)
    )
    return (
        f'<rect class="room" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>'
        f'<text class="name" x="{middle}" y="{y + 20}">{escape(room.name)}</text>'
        f'<text class="size" x="{middle}" y="{y + 35}">{size}{room.num_lines} lines</text>{body}'
    )


def _short_arrow(upper: _Box, lower: _Box) -> str:
    # Spread the ends along the edges, towards each other, so that arrows don't share a point.
    upper_middle, lower_middle = upper[0] + upper[2] / 2, lower[0] + lower[2] / 2
    lean = max(-0.35, min(0.35, (lower_middle - upper_middle) / 900))
    x1, x2 = upper_middle + lean * upper[2], lower_middle - lean * lower[2]
    y1, y2 = upper[1] + upper[3], lower[1] - 2
    bend = (y2 - y1) / 2
    return (
        f'<path class="arrow" marker-end="url(#head)" d="M{x1:.1f},{y1:.1f} '
        f'C{x1:.1f},{y1 + bend:.1f} {x2:.1f},{y2 - bend:.1f} {x2:.1f},{y2:.1f}"/>'
    )


def _long_arrow(upper: _Box, lower: _Box, number: int, *, is_wrong: bool) -> str:
    # Out below the upper box, along the gap to the gutter, and into the lower box from above.
    track = _WIDTH - _MARGIN - 8 - 13 * (number % 5)
    x1 = upper[0] + upper[2] * (0.84 - 0.05 * (number % 3))
    x2 = lower[0] + lower[2] * (0.92 - 0.05 * (number % 5))
    y1, y2 = upper[1] + upper[3], lower[1] - 2
    out, back = y1 + 14 + 4 * (number % 5), y2 - 12 - 4 * (number % 5)
    turn = 6 if back > out else -6
    kind = "wrong" if is_wrong else "arrow"
    return (
        f'<path class="{kind}" marker-end="url(#head)" d="M{x1:.1f},{y1:.1f} V{out - 6:.1f} '
        f"q0,6 6,6 H{track - 6:.1f} q6,0 6,{turn} V{back - turn:.1f} "
        f'q0,{turn} -6,{turn} H{x2 + 6:.1f} q-6,0 -6,6 V{y2:.1f}"/>'
    )


def _document(body: str, height: float) -> str:
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}"
 width="{_WIDTH}" height="{height:.0f}" font-family="DejaVu Sans, Verdana, sans-serif">
<title>The layers of streamflow and the imports between them</title>
<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8"
 orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#3b6ea5"/></marker></defs>
<style>
.page {{ fill: #ffffff; }}
.band {{ fill: #f3f5f8; }}
.layer {{ font-size: 12px; fill: #7a8594; }}
.room {{ fill: #ffffff; stroke: #9aa7b8; stroke-width: 1.2; }}
.name {{ font-size: 14px; font-weight: bold; fill: #1d2733; text-anchor: middle; }}
.size {{ font-size: 10px; fill: #7a8594; text-anchor: middle; }}
.summary {{ font-size: 11px; fill: #47525f; text-anchor: middle; }}
.arrow {{ fill: none; stroke: #3b6ea5; stroke-width: 1.6; }}
.wrong {{ fill: none; stroke: #c0392b; stroke-width: 2.4; }}
</style>
<rect class="page" width="{_WIDTH}" height="{height:.0f}"/>
{body}
</svg>
"""
