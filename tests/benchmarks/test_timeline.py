"""The picture of a trace: its bars stand where and as long as the ops were."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from streamflow.trace import Trace, TracedOp

SVG = "{http://www.w3.org/2000/svg}"
OP = TracedOp(0, "put", "a<b", "h2d", "h2d", 0, 64, 0.0, 0.0, 0.001, "done", None)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2]))


def bars(svg: str) -> list[tuple[str, float, float, float]]:
    found = ET.fromstring(svg).findall(f"{SVG}rect")
    return [
        (title.text or "", float(rect.attrib["x"]), float(rect.attrib["y"]),
         float(rect.attrib["width"]))
        for rect in found
        if (title := rect.find(f"{SVG}title")) is not None
    ]  # fmt: skip


def test_bars_stand_where_and_as_long_as_the_ops_were() -> None:
    from tests.benchmarks.timeline import to_svg

    trace = Trace.of(
        (
            OP,
            replace(OP, id=1, name="kernel", engine="compute", start_s=0.001, end_s=0.003),
            replace(OP, id=2, name="get", engine="d2h", start_s=0.003, end_s=0.004),
            replace(OP, id=3, name="free", engine=None),
            replace(OP, id=4, name="pending", start_s=None, end_s=None),
        )
    )
    put, kernel, get = bars(to_svg(trace, "x & y"))
    assert (put[0], kernel[0]) == ("a<b, 1.00 ms", "kernel, 2.00 ms")
    assert put[2] < kernel[2] < get[2]  # a row for each engine
    assert kernel[3] == pytest.approx(2 * put[3], rel=0.01)
    assert kernel[1] == pytest.approx(put[1] + put[3], abs=0.1)
    assert get[1] == pytest.approx(kernel[1] + kernel[3], abs=0.1)


def test_a_trace_without_timed_ops_is_a_picture_too() -> None:
    from tests.benchmarks.timeline import to_svg

    assert bars(to_svg(Trace.of(()), "nothing")) == []
