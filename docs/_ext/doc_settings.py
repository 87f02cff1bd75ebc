"""The table of settings, read from ``streamflow.config.Settings`` itself."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields

from streamflow.config import Settings, SimOptions

__all__ = ["settings_rows"]

_GROUP = re.compile(r"^ {4}(\w[\w, ]*) : .+\n((?: {8}.+\n?)+)", re.MULTILINE)


def settings_rows() -> list[tuple[str, str, str, str]]:
    """For each setting: name, environment variable, default, meaning."""
    return [row for row in _rows(Settings, "STREAMFLOW_") if row[0] != "sim"] + [
        (f"sim.{name}", *rest) for name, *rest in _rows(SimOptions, "STREAMFLOW_SIM_")
    ]


def _rows(cls: type[Settings | SimOptions], prefix: str) -> list[tuple[str, str, str, str]]:
    meanings: dict[str, str] = {}
    for names, text in _GROUP.findall(cls.__doc__ or ""):
        for name in names.split(", "):
            meanings[name] = " ".join(text.split())
    rows = []
    for item in fields(cls):
        if item.name not in meanings:
            raise ValueError(f"{cls.__name__}.{item.name} is missing from its docstring")
        default = "depends on the machine" if item.default is MISSING else repr(item.default)
        if item.name == "rates":
            default = "none"
        rows.append((item.name, prefix + item.name.upper(), default, meanings[item.name]))
    return rows
