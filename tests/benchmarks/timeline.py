"""A trace as a picture: one row for each engine, one bar for each op on it."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from streamflow.runtime.units import spell_seconds
from streamflow.trace import Trace, TracedOp
from streamflow.trace.looks import COLOURS

__all__ = ["to_svg"]

_ROWS = {"h2d": "copies in", "compute": "kernels", "d2h": "copies out"}
_LEFT, _RIGHT, _TOP, _ROW, _BAR = 90, 20, 44, 44, 30
_WIDTH = 1000
_STEPS = (1, 2, 5, 10)


def to_svg(trace: Trace, title: str) -> str:
    """Draw the timed ops that occupy an engine.

    Parameters
    ----------
    trace : Trace
        Ops without times, and those on no engine, are left out.
    title : str

    Returns
    -------
    str
        A whole SVG document, light in colour on any page.
    """
    return "".join(f"{line}\n" for line in _lines(trace, title))


def _lines(trace: Trace, title: str) -> Iterator[str]:
    ops = [op for op in trace.ops if op.engine in _ROWS and op.duration_s is not None]
    start_s = min((op.start_s or 0.0 for op in ops), default=0.0)
    span_s = max((op.end_s or 0.0 for op in ops), default=0.0) - start_s or 1e-9
    scale = (_WIDTH - _LEFT - _RIGHT) / span_s
    bottom = _TOP + _ROW * len(_ROWS)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + 34}" '
        f'font-family="sans-serif" font-size="12" role="img">'
    )
    yield f"  <title>{escape(title)}</title>"
    yield '  <rect width="100%" height="100%" fill="#ffffff"/>'
    yield f'  <text x="{_LEFT}" y="24" font-size="14" fill="#222222">{escape(title)}</text>'
    for time_s in _ticks(span_s):
        x = _LEFT + time_s * scale
        yield f'  <path d="M{x:.1f} {_TOP}V{bottom}" stroke="#dddddd"/>'
        yield (
            f'  <text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle" fill="#555555">'
            f"{spell_seconds(time_s)}</text>"
        )
    for row, (engine, told) in enumerate(_ROWS.items()):
        y = _TOP + row * _ROW + (_ROW - _BAR) / 2
        yield f'  <text x="8" y="{y + _BAR / 2 + 4:.1f}" fill="#222222">{told}</text>'
        here = [op for op in ops if op.engine == engine]
        for number, op in enumerate(sorted(here, key=lambda op: op.start_s or 0.0)):
            yield from _bar(op, number, y, start_s, scale)
    yield "</svg>"


def _bar(op: TracedOp, number: int, y: float, start_s: float, scale: float) -> Iterator[str]:
    assert op.start_s is not None
    x = _LEFT + (op.start_s - start_s) * scale
    width = max((op.duration_s or 0.0) * scale, 0.5)
    told = f"{op.name}, {spell_seconds(op.duration_s or 0.0)}"
    yield (
        f'  <rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{_BAR}" '
        f'fill="{COLOURS[op.engine or "other"]}" fill-opacity="0.75" stroke="#444444" '
        f'stroke-width="0.5"><title>{escape(told)}</title></rect>'
    )
    if width >= 16:
        yield (
            f'  <text x="{x + width / 2:.2f}" y="{y + _BAR / 2 + 4:.1f}" text-anchor="middle" '
            f'font-size="10" fill="#222222">{number}</text>'
        )


def _ticks(span_s: float) -> Iterator[float]:
    """Five to ten round times from 0 on."""
    power = 10.0**-12
    while power * 100 <= span_s:
        power *= 10
    step = next(power * each for each in _STEPS if span_s / (power * each) <= 10)
    for number in range(int(span_s / step) + 1):
        yield number * step
