"""The table of settings, read from ``streamflow.config.Settings`` itself."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields

from streamflow.config import Settings

__all__ = ["settings_rows"]

_GROUP = re.compile(r"^ {4}(\w[\w, ]*) : .+\n((?: {8}.+\n?)+)", re.MULTILINE)


def settings_rows() -> list[tuple[str, str, str, str]]:
    """For each setting: name, environment variable, default, meaning."""
    meanings: dict[str, str] = {}
    for names, text in _GROUP.findall(Settings.__doc__ or ""):
        for name in names.split(", "):
            meanings[name] = " ".join(text.split())
    rows = []
    for item in fields(Settings):
        if item.name not in meanings:
            raise ValueError(f"Settings.{item.name} is missing from the docstring of Settings")
        default = "depends on the machine" if item.default is MISSING else repr(item.default)
        rows.append((item.name, f"STREAMFLOW_{item.name.upper()}", default, meanings[item.name]))
    return rows
