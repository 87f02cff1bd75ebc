"""Where two arrays first differ, by the measure that their type calls for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Difference", "Tolerance", "first_difference"]

Array = npt.NDArray[Any]

_BY_NBYTES = {2: (1e-3, 1e-3), 4: (1e-5, 1e-6), 8: (1e-12, 1e-14)}
"""Half, single, double: what a compiler's fused multiply-adds and its own functions may make."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far apart floats may lie; None for what suits their precision."""

    rtol: float | None = None
    atol: float | None = None

    def of(self, dtype: np.dtype[Any]) -> tuple[float, float] | None:
        """``(rtol, atol)`` for elements of ``dtype``; None where they have to be equal."""
        if dtype.kind not in "fc":
            return None
        nbytes = dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize
        rtol, atol = _BY_NBYTES.get(nbytes, _BY_NBYTES[8])
        return (
            rtol if self.rtol is None else self.rtol,
            atol if self.atol is None else self.atol,
        )

    def says(self, dtype: np.dtype[Any]) -> str:
        """In words, for a message."""
        if dtype.names is not None:
            return "field by field"
        used = self.of(dtype)
        return "exactly" if used is None else f"within rtol={used[0]:g}, atol={used[1]:g}"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first element, in C order, that is not as it should be.

    Attributes
    ----------
    index : tuple of int
    expected, found : object
    num_different : int
        How many elements differ.
    """

    index: tuple[int, ...]
    expected: object
    found: object
    num_different: int


def first_difference(expected: Array, found: Array, tolerance: Tolerance) -> Difference | None:
    """Compare two arrays of one shape and dtype; None where they agree.

    Floats agree within the tolerance, and NaN with NaN; structures if all of their fields do, and
    everything else if it is equal.
    """
    wrong = np.flatnonzero(_differs(expected, found, tolerance))
    if not wrong.size:
        return None
    index = tuple(int(at) for at in np.unravel_index(wrong[0], expected.shape))
    return Difference(index, expected[index], found[index], int(wrong.size))


def _differs(expected: Array, found: Array, tolerance: Tolerance) -> Array:
    """Which elements do not agree."""
    names = expected.dtype.names
    if names is not None:
        differs = np.zeros(expected.shape, np.bool_)
        for name in names:
            in_field = _differs(expected[name], found[name], tolerance)
            # A field that is an array itself has more axes.
            differs |= in_field.any(axis=tuple(range(expected.ndim, in_field.ndim)))
        return differs
    used = tolerance.of(expected.dtype)
    if used is None:
        return np.asarray(expected != found)
    return ~_are_close(expected, found, *used)


def _are_close(expected: Array, found: Array, rtol: float, atol: float) -> Array:
    if expected.dtype == np.float16:  # differences of halves would overflow
        expected, found = expected.astype(np.float32), found.astype(np.float32)
    with np.errstate(all="ignore"):
        return np.asarray(np.isclose(found, expected, rtol=rtol, atol=atol, equal_nan=True))
