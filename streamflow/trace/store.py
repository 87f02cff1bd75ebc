"""A trace as JSON, and back: docs/reference/trace-format.md describes it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from streamflow.trace.model import (
    Contents,
    EdgeReason,
    TracedArray,
    TracedDevice,
    TracedEdge,
    TracedMemory,
    TracedOp,
)
from streamflow.trace.trace import Trace

__all__ = ["VERSION", "from_json", "to_json"]

VERSION = 1
"""Raised when a reader of the version before would go wrong; it ignores fields it doesn't know."""

_NAME = "streamflow-trace"

_TABLES: dict[str, type] = {
    "devices": TracedDevice,
    "ops": TracedOp,
    "edges": TracedEdge,
    "arrays": TracedArray,
    "memory": TracedMemory,
    "loose": TracedEdge,
}

_T = TypeVar("_T")


def to_json(trace: Trace) -> str:
    """All of ``trace``; the same trace gives the same text."""
    contents = trace._read()
    tables = {
        name: {
            "fields": [field.name for field in fields(kind)],
            "rows": [_row(each) for each in getattr(contents, name)],
        }
        for name, kind in _TABLES.items()
    }
    document = {
        "format": _NAME,
        "version": VERSION,
        "num_dropped": contents.num_dropped,
        **tables,
    }
    return json.dumps(document, ensure_ascii=True, allow_nan=False, separators=(",", ":")) + "\n"


def from_json(text: str | bytes, file_name: str) -> Contents:
    """What :func:`to_json` wrote. The name is for errors.

    Raises
    ------
    ValueError
        It is no trace, one of a newer version, or one with a part missing or of a wrong type.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file_name} is not a trace: it is no JSON ({error})") from None
    if not isinstance(document, dict) or document.get("format") != _NAME:
        raise ValueError(f'{file_name} is not a trace: it has no "format": "{_NAME}"')
    version = document.get("version")
    if not isinstance(version, int) or not 1 <= version <= VERSION:
        raise ValueError(
            f"{file_name} has version {version!r} of the format; this reads 1 to {VERSION}"
        )
    try:
        tables: dict[str, Any] = {
            table: _read(document[table], kind) for table, kind in _TABLES.items()
        }
        num_dropped = document["num_dropped"]
        if type(num_dropped) is not int or num_dropped < 0:
            raise ValueError(f"num_dropped is {num_dropped!r}")
    except (KeyError, TypeError, ValueError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{file_name} is a damaged trace: {what}") from None
    contents = Contents(**tables, num_dropped=num_dropped)
    known = {op.id for op in contents.ops}
    if len(known) < len(contents.ops):
        raise ValueError(f"{file_name} is a damaged trace: two ops have the same id")
    for edge in contents.edges:
        if edge.src not in known or edge.dst not in known:
            raise ValueError(f"{file_name} is a damaged trace: {edge} leads to no op")
    return contents


def _row(record: Any) -> list[Any]:
    return [_plain(getattr(record, field.name)) for field in fields(record)]


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, EdgeReason) else value


def _read(table: Any, kind: type[_T]) -> tuple[_T, ...]:
    names: Sequence[str] = table["fields"]
    hints = get_type_hints(kind)
    missing = [
        field.name
        for field in fields(kind)  # type: ignore[arg-type]
        if field.default is MISSING and field.name not in names
    ]
    if missing:
        raise ValueError(f"{kind.__name__} lacks {', '.join(missing)}")
    columns = [(place, name, hints[name]) for place, name in enumerate(names) if name in hints]
    rows: Iterable[Any] = table["rows"]
    made = []
    for row in rows:
        if not isinstance(row, list) or len(row) != len(names):
            raise ValueError(f"a row of {kind.__name__} is {row!r:.80}")
        made.append(kind(**{name: _value(row[place], hint) for place, name, hint in columns}))
    return tuple(made)


def _value(value: Any, hint: Any) -> Any:
    """``value`` as a field of type ``hint`` holds it."""
    if isinstance(hint, UnionType):
        if value is None and NoneType in get_args(hint):
            return None
        (hint,) = (each for each in get_args(hint) if each is not NoneType)
    if hint is EdgeReason:
        return EdgeReason(value)
    if get_origin(hint) is tuple:
        item = get_args(hint)[0]
        if not isinstance(value, list):
            raise TypeError(f"{value!r:.80} is no list")
        return tuple(_value(each, item) for each in value)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise TypeError(f"{value!r:.80} is no {hint.__name__}")
    return value
