"""Python values to the scalars a backend's launch takes, one converter per parameter.

What a backend expects is said at :meth:`streamflow.backends.base.Backend.launch`:
ints for integer types, ``numpy.float32`` for float, Python floats for double, and
NumPy scalars for the rest. Converters run on every launch, so each decides the
common case (an exact ``int`` or ``float`` in range) in one test and leaves the rest
to a slower function.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from numbers import Complex, Real
from typing import Any, NoReturn, TypeAlias

import numpy as np

from streamflow.backends.base import Parameter

__all__ = ["Converter", "make_converter"]

Converter: TypeAlias = Callable[[object], object]

_INT64_MAX = 2**63 - 1


def make_converter(parameter: Parameter, kernel: str) -> Converter | None:
    """The function that checks and converts an argument for ``parameter``.

    Parameters
    ----------
    parameter : Parameter
        What the CUDA signature declares.
    kernel : str
        The kernel's name, for messages.

    Returns
    -------
    callable or None
        None for a pointer: its argument is an array, not a scalar. The function raises
        ``TypeError`` for a value of another kind and ``OverflowError`` for one that the
        type cannot hold, naming kernel, parameter, what was wanted and what was found.
    """
    if parameter.is_pointer:
        return None
    dtype = parameter.dtype
    assert dtype is not None, "a scalar parameter always has a dtype"
    complaint = _Complaint(parameter, kernel)
    if dtype.kind == "b":
        return _make_bool(complaint)
    if dtype.kind in "iu":
        return _make_integer(np.iinfo(dtype), complaint)
    if dtype.kind == "c":
        return _make_complex(dtype.type, complaint)
    if dtype == np.float64:
        return _make_double(complaint)
    return _make_float(dtype, complaint)


class _Complaint:
    """Raises the errors of one parameter."""

    __slots__ = ("_what",)

    def __init__(self, parameter: Parameter, kernel: str) -> None:
        self._what = f"kernel {kernel!r}: parameter {parameter.name!r} is {parameter.ctype}"

    def wrong_type(self, value: object, wanted: str) -> NoReturn:
        raise TypeError(f"{self._what}; found {_describe(value)}: pass {wanted}") from None

    def out_of_range(self, value: object, low: object, high: object) -> NoReturn:
        raise OverflowError(
            f"{self._what}, which holds {low} to {high}; found {_describe(value)}"
        ) from None


def _make_bool(complaint: _Complaint) -> Converter:
    def convert(value: object) -> object:
        if value is True:
            return np.True_
        if value is False:
            return np.False_
        if not isinstance(value, np.bool_):
            complaint.wrong_type(value, "a bool")
        return value

    return convert


def _make_integer(info: np.iinfo[Any], complaint: _Complaint) -> Converter:
    low, high = int(info.min), int(info.max)
    fast_high = min(high, _INT64_MAX)

    def convert_slowly(value: object) -> object:
        if isinstance(value, bool | np.bool_):
            complaint.wrong_type(value, "an int")
        try:
            number = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            complaint.wrong_type(value, "an int")
        if not low <= number <= high:
            complaint.out_of_range(value, low, high)
        # Drivers' bindings take Python ints as signed 64-bit values.
        return number if number <= _INT64_MAX else np.uint64(number)

    def convert(value: object) -> object:
        if type(value) is int and low <= value <= fast_high:
            return value
        return convert_slowly(value)

    return convert


def _make_double(complaint: _Complaint) -> Converter:
    def convert(value: object) -> object:
        if type(value) is float:
            return value
        if type(value) is int and -_INT64_MAX <= value <= _INT64_MAX:
            return float(value)
        return _to_float(value, complaint)

    return convert


def _make_float(dtype: np.dtype[Any], complaint: _Complaint) -> Converter:
    scalar = dtype.type
    high = float(np.finfo(dtype).max)
    low = -high
    one = scalar(1)

    def convert_slowly(value: object) -> object:
        if type(value) is scalar:
            return value
        number = _to_float(value, complaint)
        with np.errstate(over="ignore"):
            rounded = scalar(number)
        # Tested after rounding: a double just above the largest value still rounds to it.
        if math.isinf(rounded) and not math.isinf(number):
            complaint.out_of_range(value, low, high)
        return rounded

    def convert(value: object) -> object:
        if (type(value) is float or type(value) is int) and low <= value <= high:
            # Rounds as scalar(value) does, in a third of its time: Python numbers take
            # the NumPy operand's type.
            return one * value
        return convert_slowly(value)

    return convert


def _make_complex(scalar: Callable[[complex], Any], complaint: _Complaint) -> Converter:
    safe = 1e38  # within the parts of both complex types

    def convert(value: object) -> object:
        if type(value) is complex and -safe < value.real < safe and -safe < value.imag < safe:
            return scalar(value)
        number = _unwrap(value)
        if isinstance(number, bool | np.bool_) or not isinstance(number, Complex):
            complaint.wrong_type(value, "a number")
        try:
            exact = complex(number)
        except OverflowError:
            exact = complex(math.inf)
        with np.errstate(over="ignore"):
            rounded = scalar(exact)
        if not np.isfinite(rounded) and _is_finite(number):
            high = float(np.finfo(rounded.dtype).max)
            complaint.out_of_range(value, f"parts from {-high}", high)
        return rounded

    return convert


def _to_float(value: object, complaint: _Complaint) -> float:
    number = _unwrap(value)
    if isinstance(number, bool | np.bool_) or not isinstance(number, Real):
        complaint.wrong_type(value, "a float or an int")
    try:
        exact = float(number)
    except OverflowError:
        exact = math.inf
    if math.isinf(exact) and _is_finite(number):
        high = float(np.finfo(np.float64).max)
        complaint.out_of_range(value, -high, high)
    return exact


def _is_finite(number: Complex) -> bool:
    # Not math.isfinite: it goes through float, which big ints and long doubles overflow.
    return bool(number - number == 0)


def _unwrap(value: object) -> object:
    """The scalar in a zero-dimensional ndarray; any other value as it is."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        return value[()]
    return value


def _describe(value: object) -> str:
    """Type and, where it is short to say, the value."""
    kind = type(value).__name__
    if isinstance(value, np.ndarray):
        return f"{kind} of shape {value.shape}"
    if isinstance(value, int) and abs(value) >= 10**40:
        return f"{kind} of {value.bit_length()} bits"
    if isinstance(value, str | bytes):
        return f"{kind} {value[:20]!r}"
    if isinstance(value, np.generic):
        return f"{kind} {value!s}"
    if isinstance(value, Complex):
        return f"{kind} {value!r}"
    return kind
