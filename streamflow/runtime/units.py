"""Seconds and bytes as people read them."""

from __future__ import annotations

__all__ = ["spell_bytes", "spell_seconds"]


def spell_seconds(seconds: float) -> str:
    """``"1.50 ms"``: three digits and the unit that fits."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        # As it will be printed: 0.9999 ms is a millisecond.
        if abs(seconds) >= factor * 0.9995:
            return f"{_three_digits(seconds / factor)} {unit}"
    return f"{_three_digits(seconds / 1e-9)} ns" if seconds else "0 s"


def spell_bytes(nbytes: int) -> str:
    """``"1.50 MiB"``: three digits and the unit that fits; exact below 1 KiB."""
    if abs(nbytes) < 1024:
        return f"{nbytes} B"
    units = ("KiB", "MiB", "GiB", "TiB")
    power = 1
    # As it will be printed: 1023.9 KiB is a MiB.
    while power < len(units) and abs(nbytes) >= 1023.5 * 1024**power:
        power += 1
    return f"{_three_digits(nbytes / 1024**power)} {units[power - 1]}"


def _three_digits(number: float) -> str:
    decimals = 2 if abs(number) < 9.995 else 1 if abs(number) < 99.95 else 0
    return f"{number:.{decimals}f}"
