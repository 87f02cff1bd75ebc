"""The picture of a trace: its bars stand where and as long as the ops were."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamflow.trace import EdgeReason, Trace, TracedDevice, TracedEdge, TracedMemory, TracedOp
from streamflow.trace.svg import to_svg

SVG = "{http://www.w3.org/2000/svg}"
OP = TracedOp(0, "put", "a<b", "h2d", "h2d", 0, 64, 0.0, 0.0, 0.001, "done", None)
KERNEL = replace(OP, id=1, name="kernel", stream="c", engine="compute", start_s=0.001, end_s=0.003)
GET = replace(OP, id=2, name="get", stream="d2h", engine="d2h", start_s=0.003, end_s=0.004)
FREE = replace(OP, id=3, name="free", stream="d2h", engine=None, start_s=0.004, end_s=0.004)


def texts(svg: str) -> list[str]:
    return [each.text or "" for each in ET.fromstring(svg).iter(f"{SVG}text")]


def bars(svg: str, kind: str = "op") -> dict[str, tuple[float, float, float]]:
    """Left, top and width by the first line of the tooltip."""
    found = {}
    for group in ET.fromstring(svg).iter(f"{SVG}g"):
        if group.get("class") == kind:
            title, rect = group.find(f"{SVG}title"), group.find(f"{SVG}rect")
            assert title is not None
            assert rect is not None
            name = (title.text or "").split("\n")[0]
            found[name] = tuple(float(rect.attrib[each]) for each in ("x", "y", "width"))
    return found  # type: ignore[return-value]


def test_bars_stand_where_and_as_long_as_the_ops_were() -> None:
    found = bars(to_svg(Trace.of((OP, KERNEL, GET, FREE)), title="x & y"))
    put, kernel, get, free = found.values()
    assert [*found][:2] == ["a<b, 64 B, 1.00 ms", "kernel, 64 B, 2.00 ms"]
    assert put[1] < kernel[1] < get[1] < free[1]  # a row for each stream, ticks beneath
    assert kernel[2] == pytest.approx(2 * put[2], rel=0.01)
    assert kernel[0] == pytest.approx(put[0] + put[2], abs=0.1)
    assert get[0] == pytest.approx(kernel[0] + kernel[2], abs=0.1)


def test_ops_are_named_where_the_name_fits() -> None:
    found = texts(to_svg(Trace.of((KERNEL, replace(GET, name="x" * 300))), title="x & y"))
    assert {"x & y", "kernel", "c", "d2h"} <= {*found}
    assert any(each.startswith("xxxx") and each.endswith("…") for each in found)


def test_ops_of_one_stream_that_overlap_are_in_rows() -> None:
    other = replace(OP, id=5, name="other", start_s=0.0005, end_s=0.002)
    one, two = bars(to_svg(Trace.of((OP, other)))).values()
    assert one[1] != two[1]


def test_arrows_lead_between_streams_and_say_why() -> None:
    edges = [
        TracedEdge(0, 1, EdgeReason.READ_AFTER_WRITE, True),
        TracedEdge(1, 2, EdgeReason.CAPACITY, False),
        TracedEdge(2, 3, EdgeReason.STREAM_ORDER, False),
    ]
    svg = to_svg(Trace.of((OP, KERNEL, GET, FREE), edges))
    arrows = [path for path in ET.fromstring(svg).iter(f"{SVG}path") if path.get("data-edge")]
    assert [arrow.attrib["data-edge"] for arrow in arrows] == [
        "0 1 read-after-write", "1 2 capacity",
    ]  # fmt: skip
    titles = [arrow.findtext(f"{SVG}title") for arrow in arrows]
    assert titles == ["a<b → kernel: read-after-write", "kernel → get: capacity"]
    assert len({arrow.get("stroke-dasharray") for arrow in arrows}) == 2
    assert {"wait on the device", "made room"} <= {*texts(svg)}


def test_memory_is_drawn_below() -> None:
    memory = [TracedMemory(0.0, 2048, 0, 0), TracedMemory(0.002, 1024, 512, 0)]
    svg = to_svg(Trace.of((OP, KERNEL), memory=memory))
    assert 'class="memory"' in svg
    assert 'class="pinned"' in svg
    assert "peak 2.00 KiB" in texts(svg)


def test_devices_and_processes_are_told_apart() -> None:
    devices = [TracedDevice(0, "one <1>", "sim", True, 0, 0, process) for process in (0, 1)]
    ops = (OP, replace(OP, id=1, process=1), replace(OP, id=2, device=1, process=1))
    found = texts(to_svg(Trace.of(ops, devices=devices)))
    assert {"process 0, gpu0: one <1>", "process 1, gpu0: one <1>", "process 1, gpu1"} <= {*found}


def test_a_failed_op_is_framed_though_it_has_no_times() -> None:
    svg = to_svg(Trace.of((replace(OP, start_s=None, end_s=None, seen_s=0.5, state="failed"),)))
    assert 'stroke="#d55e00" stroke-width="3"' in svg
    assert "0, put, failed" not in svg


def test_c48_what_is_too_small_to_see_is_drawn_as_one() -> None:
    ops = [replace(OP, id=i, start_s=i * 1e-6, end_s=(i + 1) * 1e-6) for i in range(9000)]
    far = replace(KERNEL, id=9000, start_s=0.0, end_s=0.009)
    edges = [TracedEdge(i, 9000, EdgeReason.AFTER, False) for i in range(9000)]
    trace = Trace.of([*ops, far], edges)
    svg = to_svg(trace)
    assert svg.count('class="op"') < 200
    assert svg.count('class="edge"') <= 1000
    assert "ops in" in svg
    assert to_svg(trace, max_ops=9001).count('class="op"') == 9001


def test_a_trace_without_ops_is_a_picture_too() -> None:
    assert bars(to_svg(Trace.of(()))) == {}


def test_nothing_outside_is_referred_to() -> None:
    svg = to_svg(Trace.of((OP, KERNEL)))
    assert "href" not in svg
    assert svg.count("http") == 1  # the namespace


@settings(deadline=None)
@given(st.text(max_size=40))
def test_c48_any_name_is_valid_xml(name: str) -> None:
    op = replace(KERNEL, name=name, stream=name, scope=name, task=name, where=name, needs=(name,))
    edges = [TracedEdge(0, 1, EdgeReason.AFTER, True)]
    devices = [TracedDevice(0, name, name, True, 0, 0)]
    svg = to_svg(Trace.of((OP, op), edges, devices=devices), title=name)
    shown = "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in name)
    assert (ET.fromstring(svg).findtext(f"{SVG}title") or "") == shown
