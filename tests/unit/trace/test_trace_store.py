"""Traces as files: they come back as they were, and what is none says so."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamflow.trace import (
    EdgeReason,
    Trace,
    TracedArray,
    TracedDevice,
    TracedEdge,
    TracedMemory,
    TracedOp,
)
from streamflow.trace.model import Contents
from streamflow.trace.store import from_json, to_json

text = st.text(max_size=8)
times = st.floats(-1e6, 1e6) | st.none()
ids = st.integers(0, 2**40)


def op(op_id: int, **more: Any) -> TracedOp:
    facts: dict[str, Any] = {
        "kind": "launch",
        "name": "k",
        "stream": "compute0",
        "engine": "compute",
        "device": 0,
        "nbytes": 4,
        "submitted_s": 0.0,
        "start_s": 1.0,
        "end_s": 2.0,
        "state": "done",
        "where": "a.py:1",
    }
    return TracedOp(id=op_id, **{**facts, **more})


def device(**more: Any) -> TracedDevice:
    facts: dict[str, Any] = {
        "index": 0,
        "name": "a card",
        "backend": "sim",
        "is_virtual": False,
        "began_s": 100.0,
        "began_unix_s": 1e9,
        "process_key": "1-a",
    }
    return TracedDevice(**{**facts, **more})


def trace(contents: Contents) -> Trace:
    return Trace(lambda: contents)


def small(**more: Any) -> Contents:
    facts: dict[str, Any] = {
        "ops": (op(1), op(2, reads=(1,), writes=(1, 3), needs=("room",), scope="s")),
        "edges": (TracedEdge(1, 2, EdgeReason.READ_AFTER_WRITE, True, 1),),
        "arrays": (TracedArray(1, 4, 0, None), TracedArray(3, 4, 0, "a.py:2")),
        "memory": (TracedMemory(0.0, 4, 8, 0),),
        "devices": (device(),),
        "loose": (TracedEdge(0, 1, EdgeReason.AFTER, False),),
        "num_dropped": 3,
    }
    return Contents(**{**facts, **more})


@settings(deadline=None)
@given(
    op_id=ids, kind=text, name=text, stream=text, engine=text | st.none(), nbytes=ids,
    submitted_s=st.floats(-1e6, 1e6), start_s=times, end_s=times, state=text,
    where=text | st.none(), begun_s=times, issued_s=times, seen_s=times, position=ids,
    scope=text | st.none(), task=text | st.none(), needs=st.lists(text).map(tuple),
    is_staged=st.booleans(), reads=st.lists(ids).map(tuple), writes=st.lists(ids).map(tuple),
    error=text | st.none(), is_awaited=st.booleans(),
)  # fmt: skip
def test_c48_any_op_comes_back_as_it_was(op_id: int, **more: Any) -> None:
    contents = Contents(ops=(op(op_id, **more),), edges=())
    assert from_json(to_json(trace(contents)), "x") == contents


def test_all_parts_come_back_as_they_were(tmp_path: Path) -> None:
    trace(small()).save(tmp_path / "a.json")
    loaded = Trace.load(tmp_path / "a.json")
    assert loaded._read() == small()
    loaded.save(tmp_path / "b.json")
    assert (tmp_path / "b.json").read_bytes() == (tmp_path / "a.json").read_bytes()


def test_every_field_is_in_the_file() -> None:
    document = json.loads(to_json(trace(small())))
    for name, kind in (("ops", TracedOp), ("edges", TracedEdge), ("devices", TracedDevice)):
        assert document[name]["fields"] == [each.name for each in fields(kind)]


def test_fields_of_a_later_minor_writer_are_passed_over() -> None:
    document = json.loads(to_json(trace(small())))
    document["ops"]["fields"].append("mood")
    for row in document["ops"]["rows"]:
        row.append("good")
    document["weather"] = "fine"
    assert from_json(json.dumps(document), "x") == small()


def test_fields_that_an_older_writer_lacked_have_their_defaults() -> None:
    document = json.loads(to_json(trace(small())))
    place = document["ops"]["fields"].index("task")
    for row in (document["ops"]["fields"], *document["ops"]["rows"]):
        del row[place]
    assert from_json(json.dumps(document), "x") == small()


def _damaged(change: str) -> str:
    document = json.loads(to_json(trace(small())))
    ops, edges = document["ops"], document["edges"]
    if change == "no ops":
        del document["ops"]
    elif change == "no id":
        ops["fields"][0] = "number"
    elif change == "short row":
        ops["rows"][0].pop()
    elif change == "a word for a number":
        ops["rows"][0][ops["fields"].index("nbytes")] = "many"
    elif change == "a number for words":
        ops["rows"][0][ops["fields"].index("needs")] = 5
    elif change == "another reason":
        edges["rows"][0][2] = "because"
    elif change == "an edge to nowhere":
        edges["rows"][0][0] = 77
    elif change == "the same op twice":
        ops["rows"].append(ops["rows"][0])
    elif change == "fewer than none":
        document["num_dropped"] = -1
    elif change == "rows of none":
        ops["rows"] = None
    return json.dumps(document)


@pytest.mark.parametrize(
    "change",
    [
        "no ops", "no id", "short row", "a word for a number", "a number for words",
        "another reason", "an edge to nowhere", "the same op twice", "fewer than none",
        "rows of none",
    ],
)  # fmt: skip
def test_a_damaged_trace_says_so(change: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(_damaged(change))
    with pytest.raises(ValueError, match=r"bad\.json is a damaged trace"):
        Trace.load(path)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "no JSON"),
        ("[1, 2", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[1]", "has no"),
        ('{"traceEvents": []}', "has no"),
        ('{"format": "streamflow-trace", "version": 2}', "version 2"),
        ('{"format": "streamflow-trace", "version": "1"}', "version '1'"),
        ('{"format": "streamflow-trace"}', "version None"),
    ],
)
def test_what_is_no_trace_says_so(content: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=told) as caught:
        Trace.load(path)
    assert "bad.json" in str(caught.value)


def test_bytes_that_are_no_text_say_so(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"bad\.json"):
        Trace.load(path)


# -- merging ---------------------------------------------------------------------------------


def test_devices_of_one_process_share_its_clock_and_its_ids() -> None:
    first = small(loose=(), num_dropped=0)
    later = Contents(
        ops=(op(5, device=1, submitted_s=0.0),),
        edges=(),
        devices=(device(index=1, began_s=102.5, began_unix_s=2e9),),  # the time of day was set
        loose=(TracedEdge(2, 5, EdgeReason.AFTER, True),),
    )
    merged = Trace.merged([trace(later), trace(first)])
    assert [(each.id, each.submitted_s) for each in merged.ops] == [(1, 0.0), (2, 0.0), (5, 2.5)]
    assert TracedEdge(2, 5, EdgeReason.AFTER, True) in merged.edges
    assert {each.process for each in merged.ops} == {0}


def test_what_was_merged_can_be_merged_again_in_any_order() -> None:
    first = trace(small(loose=(), num_dropped=0))
    parts = [
        trace(
            Contents(
                ops=(op(5 + number, device=number),),
                edges=(),
                devices=(device(index=number, began_s=100.0 + number, began_unix_s=1e9 + number),),
            )
        )
        for number in (1, 2)
    ]
    at_once = Trace.merged([first, *parts])
    in_steps = Trace.merged([Trace.merged([parts[0], first]), parts[1]])
    assert in_steps.ops == at_once.ops


def test_virtual_time_is_no_time_of_the_host() -> None:
    real = device(is_virtual=False, began_s=50_000.0, began_unix_s=1e9)
    virtual = device(is_virtual=True, began_s=0.5, began_unix_s=1e9 + 2)
    merged = Trace.merged(
        [
            trace(Contents(ops=(op(1),), edges=(), devices=(real,))),
            trace(Contents(ops=(op(2),), edges=(), devices=(virtual,))),
        ]
    )
    assert [each.submitted_s for each in merged.ops] == [0.0, 2.0]


@pytest.mark.parametrize("turn", [1, -1])
def test_an_array_is_on_the_device_that_made_it(turn: int) -> None:
    made = Contents(
        ops=(op(1),), edges=(), arrays=(TracedArray(1, 8, 0, "a.py:1"),), devices=(device(),)
    )
    used = Contents(
        ops=(op(2, device=1),),
        edges=(),
        arrays=(TracedArray(1, 4, 1, None),),
        devices=(device(index=1),),
    )
    merged = Trace.merged([trace(made), trace(used)][::turn])
    assert merged.arrays == (TracedArray(1, 8, 0, "a.py:1"),)


def test_processes_are_told_apart_and_put_on_one_axis() -> None:
    first = trace(small())
    second = trace(small(devices=(device(process_key="2-b", began_unix_s=1e9 + 4, began_s=7.0),)))
    merged = Trace.merged([first, second])
    assert len({each.id for each in merged.ops}) == 4
    assert sorted({each.process for each in merged.ops}) == [0, 1]
    other = [each for each in merged.ops if each.process == 1]
    assert [each.submitted_s for each in other] == [4.0, 4.0]
    assert [each.start_s for each in other] == [5.0, 5.0]
    arrays = {each.id for each in merged.arrays if each.process == 1}
    assert set(other[1].writes) == arrays
    assert len(merged.edges) == 2
    assert merged.num_dropped == 6
    assert [each.time_s for each in merged.memory] == [0.0, 4.0]


def test_a_merged_trace_comes_back_from_its_file(tmp_path: Path) -> None:
    merged = Trace.merged([trace(small()), trace(small(devices=(device(process_key="2-b"),)))])
    merged.save(tmp_path / "m.json")
    assert Trace.load(tmp_path / "m.json")._read() == merged._read()


def test_what_cant_be_merged_says_why() -> None:
    with pytest.raises(ValueError, match="no traces"):
        Trace.merged([])
    with pytest.raises(ValueError, match="without devices"):
        Trace.merged([trace(small(devices=()))])
    with pytest.raises(ValueError, match="same op"):
        Trace.merged([trace(small()), trace(small())])
    two = Trace.merged([trace(small()), trace(small(devices=(device(process_key="2-b"),)))])
    with pytest.raises(ValueError, match="several processes"):
        Trace.merged([two])


# -- asking for an op ------------------------------------------------------------------------


def test_an_op_is_found_by_id_name_or_itself() -> None:
    it = trace(small(ops=(op(1, name="a"), op(2, name="b"), op(3, name="b"))))
    assert it.op(2) is it.op(it.ops[1])
    assert it.op("a") is it.ops[0]
    with pytest.raises(LookupError, match=r"2 ops are named 'b'.*2, 3"):
        it.op("b")
    with pytest.raises(LookupError, match="no op 9 among the 3"):
        it.op(9)
    with pytest.raises(LookupError, match="no op"):
        it.op(replace(it.ops[0], id=77))
