"""A trace as a picture: what ran when on which stream, what waited for what, and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from streamflow.runtime.units import spell_bytes, spell_seconds
from streamflow.trace.lanes import Bar, Lane, device_title, lanes_of
from streamflow.trace.looks import (
    COLOURS,
    FAILED_COLOUR,
    TOLD,
    EdgeLook,
    edge_look,
    edge_told,
    look_of,
    op_told,
    printable,
)
from streamflow.trace.model import Contents, TracedEdge, TracedMemory
from streamflow.trace.trace import Trace

__all__ = ["to_svg"]

_WIDTH = 1200.0
_LEFT, _RIGHT, _TOP = 120.0, 20.0, 58.0
_ROW, _GAP, _STRIP, _HEADER, _CURVE = 22.0, 8.0, 9.0, 20.0, 54.0
_RUN_MAX = 20.0  # so long are the bars that stand for several
_NUM_ARROWS_MAX = 1000  # where they are not drawn one by one
_GRID = 6.0  # then arrows from and to places so near are one
_NUM_ROWS_MAX = 12  # of full height; more share the height of so many
_CHAR = 5.6  # width of one at font size 10, about
_STEPS = (1, 2, 5, 10)
_LINES = {
    EdgeLook.WAIT: 'stroke="#000000"',
    EdgeLook.IMPLIED: 'stroke="#666666" stroke-dasharray="4 3"',
    EdgeLook.ORDER: 'stroke="#999999" stroke-dasharray="1 3"',
    EdgeLook.HOST: 'stroke="#0072b2" stroke-dasharray="7 2"',
    EdgeLook.CAPACITY: 'stroke="#cc79a7" stroke-dasharray="2 2"',
}


@dataclass(frozen=True, slots=True)
class _Spot:
    """Where the bar of an op is."""

    left: float
    right: float
    middle: float
    lane: int


def to_svg(trace: Trace, *, title: str | None = None, max_ops: int = 5000) -> str:
    """Draw the timeline: a lane for each stream, a bar for each op, an arrow for each edge.

    Arrows are drawn between streams only. Above ``max_ops`` ops, bars that are too small to see
    are drawn as one with their neighbours, and of the arrows, those that stand for the most edges
    from about one place to another.

    Parameters
    ----------
    trace : Trace
        Names in it may hold any text.
    title : str, optional
        Heads the picture; what is in it, if left out.
    max_ops : int
        Draw so many one by one.

    Returns
    -------
    str
        A whole SVG document, light in colour on any page, that refers to nothing outside.
    """
    return "".join(f"{line}\n" for line in _Picture(trace._read(), title, max_ops).lines())


class _Picture:
    def __init__(self, contents: Contents, title: str | None, max_ops: int) -> None:
        self._contents = contents
        self._is_binned = len(contents.ops) > max_ops
        self._lanes = lanes_of(contents)
        self._devices = [*dict.fromkeys((each.process, each.device) for each in self._lanes)]
        if title is None:
            on = device_title(contents, *self._devices[0]) if len(self._devices) == 1 else ""
            title = f"{len(contents.ops)} ops" + (f" on {on}" if on else "")
        self._title = printable(title)
        bars = [bar for lane in self._lanes for row in (*lane.rows, lane.marks) for bar in row]
        self._first_ns = min((bar.start_ns for bar in bars), default=0)
        self._span_ns = max((bar.end_ns for bar in bars), default=0) - self._first_ns or 1
        self._spots: dict[int, _Spot] = {}
        self._arrays = {each.id: each for each in contents.arrays}

    def _x(self, time_ns: float) -> float:
        part = min(1.0, max(0.0, (time_ns - self._first_ns) / self._span_ns))
        return _LEFT + part * (_WIDTH - _LEFT - _RIGHT)

    def lines(self) -> Iterator[str]:
        body, bottom = self._timeline()
        curves, height = self._curves(bottom + 26)
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {height:g}" '
            'font-family="sans-serif" font-size="11" role="img">'
        )
        yield f"<title>{escape(self._title)}</title>"
        yield (
            '<defs><marker id="tip" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="6" '
            'markerHeight="6" orient="auto"><path d="M0 0L6 3L0 6z" fill="context-stroke"/>'
            "</marker></defs>"
        )
        yield '<rect width="100%" height="100%" fill="#ffffff"/>'
        yield f'<text x="10" y="20" font-size="14" fill="#222222">{escape(self._title)}</text>'
        yield from self._legend()
        yield from self._axis(bottom, height)
        yield from body
        yield from self._arrows()
        yield from curves
        yield "</svg>"

    def _legend(self) -> Iterator[str]:
        x = _LEFT
        looks = {look_of(op) for op in self._contents.ops}
        for look in (each for each in COLOURS if each in looks):
            yield f'<rect x="{x:g}" y="32" width="12" height="12" fill="{COLOURS[look]}"/>'
            yield f'<text x="{x + 17:g}" y="42" fill="#444444">{TOLD[look]}</text>'
            x += 34 + 6 * len(TOLD[look])
        drawn = {edge_look(edge) for edge in self._edges()}
        for line in (each for each in _LINES if each in drawn):
            yield f'<path d="M{x:g} 38h26" fill="none" {_LINES[line]} marker-end="url(#tip)"/>'
            yield f'<text x="{x + 32:g}" y="42" fill="#444444">{line.value}</text>'
            x += 52 + 6 * len(line.value)

    def _axis(self, bottom: float, height: float) -> Iterator[str]:
        for time_ns in _ticks(self._first_ns, self._span_ns):
            x = self._x(time_ns)
            yield f'<path d="M{x:.1f} {_TOP - 6:g}V{height - 10:g}" stroke="#e4e4e4"/>'
            told = spell_seconds(time_ns * 1e-9)
            yield (
                f'<text x="{x:.1f}" y="{bottom + 16:g}" text-anchor="middle" fill="#555555">'
                f"{told}</text>"
            )

    # -- lanes -------------------------------------------------------------------------------

    def _timeline(self) -> tuple[list[str], float]:
        lines: list[str] = []
        y = _TOP
        device = None
        for number, lane in enumerate(self._lanes):
            if len(self._devices) > 1 and device != (lane.process, lane.device):
                device = lane.process, lane.device
                told = escape(printable(device_title(self._contents, *device)))
                lines.append(f'<text x="10" y="{y + 13:g}" font-weight="bold">{told}</text>')
                y += _HEADER
            y = self._lane(lane, number, y, lines)
        return lines, y

    def _lane(self, lane: Lane, number: int, y: float, lines: list[str]) -> float:
        height = _ROW * min(len(lane.rows), _NUM_ROWS_MAX)
        told = escape(_cut(printable(lane.title), _LEFT - 14))
        base = y + (height / 2 if lane.rows else _STRIP / 2) + 4
        lines.append(f'<text x="10" y="{base:g}" fill="#222222">{told}</text>')
        each = height / len(lane.rows) if lane.rows else 0.0
        for place, row in enumerate(lane.rows):
            top = y + place * each
            bar = each - min(3.0, each / 4)
            lines += [self._bar(run, lane, number, top, bar) for run in self._runs(row)]
        y += height
        if lane.marks:
            runs = self._runs(lane.marks)
            lines += [self._bar(run, lane, number, y + 1, _STRIP - 3) for run in runs]
            y += _STRIP
        y += _GAP / 2
        lines.append(f'<path d="M10 {y:g}H{_WIDTH - _RIGHT:g}" stroke="#eeeeee"/>')
        return y + _GAP / 2

    def _runs(self, row: Sequence[Bar]) -> Iterator[list[Bar]]:
        """The bars one by one; where there are too many, small neighbours together."""
        run: list[Bar] = []
        for bar in row:
            if run:
                is_small = self._x(bar.end_ns) - self._x(bar.start_ns) < 1
                is_near = self._x(bar.start_ns) - self._x(run[-1].end_ns) < 0.75
                is_alike = look_of(bar.op) == look_of(run[0].op)
                is_short = self._x(bar.end_ns) - self._x(run[0].start_ns) < _RUN_MAX
                if not (self._is_binned and is_small and is_near and is_alike and is_short):
                    yield run
                    run = []
            run.append(bar)
        if run:
            yield run

    def _bar(self, run: Sequence[Bar], lane: Lane, number: int, y: float, height: float) -> str:
        left = self._x(run[0].start_ns)
        width = max(self._x(run[-1].end_ns) - left, 1.5)
        op = run[0].op
        is_staging = lane.is_staging
        if not is_staging:
            for bar in run:
                self._spots[bar.op.id] = _Spot(
                    self._x(bar.start_ns), self._x(bar.end_ns), y + height / 2, number
                )
        if len(run) > 1:
            took_s = (run[-1].end_ns - run[0].start_ns) * 1e-9
            told = f"{len(run)} ops in {spell_seconds(took_s)}, from {printable(op.name)} on"
        else:
            told = "\n".join(map(printable, op_told(op, self._arrays)))
        fill = COLOURS["other" if is_staging else look_of(op)]
        if op.engine is None and height < 10:
            fill = "#777777"  # a mere tick
        edge = 'stroke="#555555" stroke-width="0.6"' if width > 3 else ""
        if any(bar.op.state == "failed" for bar in run):
            edge = f'stroke="{FAILED_COLOUR}" stroke-width="3"'
        label = ""
        name = _cut(printable(op.name), width - 4) if len(run) == 1 and height > 10 else ""
        if name and name != "\N{HORIZONTAL ELLIPSIS}":
            label = (
                f'<text x="{left + width / 2:.1f}" y="{y + height / 2 + 3.5:.1f}" '
                f'text-anchor="middle" font-size="10">{escape(name)}</text>'
            )
        kind = "staging" if is_staging else "op"
        ident = "" if is_staging or len(run) > 1 else f' id="op{op.id}"'
        return (
            f'<g class="{kind}"{ident}><title>{escape(told)}</title>'
            f'<rect x="{left:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}" '
            f'fill="{fill}" {edge}/>{label}</g>'
        )

    # -- arrows ------------------------------------------------------------------------------

    def _edges(self) -> list[TracedEdge]:
        """Those between lanes."""
        spots = self._spots
        return [
            edge for edge in self._contents.edges if spots[edge.src].lane != spots[edge.dst].lane
        ]

    def _arrows(self) -> Iterator[str]:
        edges = self._edges()
        if self._is_binned:
            alike = Counter[str]()
            first: dict[str, TracedEdge] = {}
            for edge in edges:
                key = self._path(edge) + _LINES[edge_look(edge)]
                first.setdefault(key, edge)
                alike[key] += 1
            edges = [first[key] for key, _ in alike.most_common(_NUM_ARROWS_MAX)]
        opacity = min(0.7, max(0.1, 60 / len(edges))) if edges else 0
        yield f'<g fill="none" stroke-opacity="{opacity:.2f}" stroke-width="0.8">'
        names = {op.id: printable(op.name) for op in self._contents.ops}
        tip = "" if self._is_binned else ' marker-end="url(#tip)"'
        for edge in edges:
            why = printable(edge_told(edge, self._arrays))
            told = f"{names[edge.src]} \N{RIGHTWARDS ARROW} {names[edge.dst]}: {why}"
            yield (
                f'<path class="edge" data-edge="{edge.src} {edge.dst} {edge.reason.value}" '
                f'd="{self._path(edge)}" {_LINES[edge_look(edge)]}{tip}>'
                f"<title>{escape(told)}</title></path>"
            )
        yield "</g>"

    def _path(self, edge: TracedEdge) -> str:
        src, dst = self._spots[edge.src], self._spots[edge.dst]
        x, to_x = src.right, dst.left
        if self._is_binned:
            x, to_x = round(x / _GRID) * _GRID, round(to_x / _GRID) * _GRID
        bend = min(24.0, 6 + abs(to_x - x) / 2)
        return (
            f"M{x:.1f} {src.middle:.1f}C{x + bend:.1f} {src.middle:.1f} "
            f"{to_x - bend:.1f} {dst.middle:.1f} {to_x:.1f} {dst.middle:.1f}"
        )

    # -- memory ------------------------------------------------------------------------------

    def _curves(self, y: float) -> tuple[list[str], float]:
        """One below the other, a device each."""
        lines: list[str] = []
        devices: dict[tuple[int, int], list[TracedMemory]] = {}
        for each in self._contents.memory:
            devices.setdefault((each.process, each.device), []).append(each)
        for key, points in devices.items():
            peak = max(max(each.nbytes, each.pinned_nbytes) for each in points) or 1
            told = ["memory", f"peak {spell_bytes(max(each.nbytes for each in points))}"]
            if len(devices) > 1:
                told[0] = f"memory {_short(self._contents, key)}"
            pinned = max(each.pinned_nbytes for each in points)
            if pinned:
                told.append(f"pinned {spell_bytes(pinned)} \N{EN DASH}\N{EN DASH}")
            for number, line in enumerate(told):
                place = y + 14 + 14 * number
                lines.append(f'<text x="10" y="{place:g}" fill="#222222">{escape(line)}</text>')
            base = y + _CURVE
            thin = 0.3 if len(points) > _WIDTH else 1
            in_use = self._steps(((p.time_s, p.nbytes / peak) for p in points), base)
            end = self._x(self._first_ns + self._span_ns)
            lines.append(
                f'<path class="memory" d="{in_use}V{base:g}H{_LEFT:g}z" fill="#56b4e9" '
                f'fill-opacity="0.35" stroke="#0072b2" stroke-width="{thin}"/>'
            )
            if pinned:
                line = self._steps(((p.time_s, p.pinned_nbytes / peak) for p in points), base)
                lines.append(
                    f'<path class="pinned" d="{line}" fill="none" stroke="#d55e00" '
                    f'stroke-width="{thin}" stroke-dasharray="5 3"/>'
                )
            lines.append(f'<path d="M{_LEFT:g} {base:g}H{end:g}" stroke="#999999"/>')
            y = base + 16
        return lines, y + 4

    def _steps(self, points: Iterable[tuple[float, float]], base: float) -> str:
        path = [f"M{_LEFT:g} {base:g}"]
        column, highest, last = -1.0, 0.0, 0.0
        for time_s, part in points:
            x = round(self._x(time_s * 1e9), 1)
            if x != column:
                path.append(_step(column, highest, last, base))
                column, highest = x, 0.0
            highest, last = max(highest, part), part
        path.append(_step(column, highest, last, base))
        path.append(f"H{self._x(self._first_ns + self._span_ns):g}")
        return "".join(path)


def _step(x: float, highest: float, last: float, base: float) -> str:
    """The moment ``x``: up to the highest value of it, and on from its last."""
    if x < 0:
        return ""
    up, on = base - highest * (_CURVE - 8), base - last * (_CURVE - 8)
    return f"H{x:g}V{up:.1f}" + (f"V{on:.1f}" if on != up else "")


def _short(contents: Contents, key: tuple[int, int]) -> str:
    return device_title(contents, *key).partition(":")[0]


def _cut(text: str, width: float) -> str:
    num = int(width / _CHAR)
    return text if len(text) <= num else text[: max(0, num - 1)] + "\N{HORIZONTAL ELLIPSIS}"


def _ticks(first_ns: int, span_ns: int) -> Iterator[float]:
    """Five to ten round times."""
    power = 1.0
    while power * 100 <= span_ns:
        power *= 10
    step = next(power * each for each in _STEPS if span_ns / (power * each) <= 10)
    for number in range(-int(-first_ns // step), int((first_ns + span_ns) // step) + 1):
        yield number * step
