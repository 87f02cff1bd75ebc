"""Profiles: what one machine's calibration found, as a JSON file, and reading them back.

A figure is named as the cost model's field, but says its unit: ``h2d_rate`` is
``h2d_bytes_per_s`` there. Next to its value stands where that comes from: ``measured``,
``assumed`` or ``data sheet``. Everything else in the file (the machine, the single
measurements, what the runtime reached) is for people and for fitting again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any, TypeAlias

__all__ = ["FORMAT", "VERSION", "Figures", "figure_name", "read_figures", "shipped"]

FORMAT = "streamflow-profile"
VERSION = 1

Figures: TypeAlias = Mapping[str, tuple[float, str]]
"""By field of the cost model: its value, and where that comes from."""

_SHIPPED = Path(__file__).with_name("profiles")


def shipped() -> tuple[str, ...]:
    """The names of the profiles that come with streamflow."""
    return tuple(sorted(path.stem for path in _SHIPPED.glob("*.json")))


def figure_name(field: str) -> str:
    """How a profile calls a field of the cost model."""
    return f"{field.removesuffix('_rate')}_bytes_per_s" if field.endswith("_rate") else field


def read_figures(profile: str, fields: Iterable[str]) -> dict[str, float]:
    """The values of ``fields`` in a profile.

    Parameters
    ----------
    profile : str
        A shipped name, or the path of a file that ends in ``.json``.
    fields : iterable of str
        What the cost model wants: each of them, and nothing else, has to be there.

    Raises
    ------
    ValueError
        No such profile, another format or version, a figure that is missing, unknown, no
        number or not positive.
    """
    path = _find(profile)
    found = _parse(path)
    figures = found.get("figures")
    if not isinstance(figures, dict):
        raise ValueError(f"{path}: a profile has an object 'figures', found {figures!r}")
    wanted = {figure_name(field): field for field in fields}
    for what, names in (
        ("unknown", sorted(figures.keys() - wanted.keys())),
        ("missing", sorted(wanted.keys() - figures.keys())),
    ):
        if names:
            raise ValueError(f"{path}: {what} in its figures: {', '.join(names)}")
    return {field: _value(path, name, figures[name]) for name, field in wanted.items()}


def _find(profile: str) -> Path:
    if not profile.endswith(".json"):
        if profile in shipped():
            return _SHIPPED / f"{profile}.json"
        raise ValueError(
            f"no profile {profile!r}; shipped: {', '.join(shipped())}; a file's name ends in .json"
        )
    return Path(profile)


def _parse(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"no profile {str(path)!r}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"{path} is no profile: it does not say 'format': {FORMAT!r}")
    if found.get("version") != VERSION:
        raise ValueError(
            f"{path} has version {found.get('version')!r} of the format, wanted {VERSION}; "
            "write it again with: streamflow doctor --calibrate"
        )
    return found


def _value(path: Path, name: str, figure: object) -> float:
    value = figure.get("value") if isinstance(figure, dict) else figure
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise ValueError(f"{path}: {name} has no number as its value: {figure!r}")
    # A call may have taken less than can be measured; nothing moves bytes at rate zero.
    if value < 0 or (value == 0 and name.endswith("_bytes_per_s")):
        raise ValueError(f"{path}: {name} must be positive, found {value!r}")
    return float(value)
