import math
import struct
from enum import IntEnum
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamflow.runtime.scalars import Converter, make_converter
from streamflow.runtime.signature import parse_parameters


def converter(ctype: str) -> Converter:
    (parameter,) = parse_parameters(f"{ctype} p", kernel="k")
    made = make_converter(parameter, "k")
    assert made is not None
    return made


class Colour(IntEnum):
    RED = 3


def test_a_pointer_has_no_converter() -> None:
    (parameter,) = parse_parameters("float* p", kernel="k")
    assert make_converter(parameter, "k") is None


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), Colour.RED, np.array(3)])
@pytest.mark.parametrize("ctype", ["char", "unsigned char", "int", "unsigned long long"])
def test_integers_become_python_ints(ctype: str, value: object) -> None:
    converted = converter(ctype)(value)
    assert isinstance(converted, int)
    assert converted == 3


@pytest.mark.parametrize(
    ("ctype", "low", "high"),
    [
        ("char", -128, 127),
        ("unsigned char", 0, 255),
        ("short", -(2**15), 2**15 - 1),
        ("int", -(2**31), 2**31 - 1),
        ("unsigned", 0, 2**32 - 1),
        ("long long", -(2**63), 2**63 - 1),
        ("unsigned long long", 0, 2**64 - 1),
    ],
)
def test_integers_are_checked_against_the_range(ctype: str, low: int, high: int) -> None:
    convert = converter(ctype)
    assert convert(low) == low
    assert convert(high) == high
    for value in (low - 1, high + 1, 10**50):
        with pytest.raises(OverflowError, match=f"{ctype}, which holds {low} to {high}; found int"):
            convert(value)


def test_integers_past_int64_become_numpy_scalars() -> None:
    convert = converter("unsigned long long")
    assert type(convert(2**63 - 1)) is int
    assert type(convert(2**63)) is np.uint64
    assert convert(np.uint64(2**64 - 1)) == 2**64 - 1


@pytest.mark.parametrize(
    "value", [2.5, 2.0, True, np.True_, "3", None, np.array([3]), np.float32(1), 1j, []]
)
def test_what_is_no_integer_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match=r"kernel 'k': parameter 'p' is int; found .*: pass an int"):
        converter("int")(value)


def test_the_message_says_what_was_found() -> None:
    with pytest.raises(
        TypeError, match=r"'p' is unsigned long long; found float 2\.5: pass an int"
    ):
        converter("unsigned long long")(2.5)
    with pytest.raises(TypeError, match=r"found ndarray of shape \(3, 2\)"):
        converter("int")(np.zeros((3, 2)))


def test_bool_takes_bools_only() -> None:
    convert = converter("bool")
    for value in (True, False, np.True_, np.False_):
        converted = convert(value)
        assert isinstance(converted, np.bool_)
        assert converted == value
    for other in (0, 1, 1.0, "", np.int8(1)):
        with pytest.raises(TypeError, match="pass a bool"):
            convert(other)


@pytest.mark.parametrize(
    "value",
    [2.5, np.float32(2.5), np.float64(2.5), np.float16(2.5), np.array(2.5), Fraction(5, 2)],
)
@pytest.mark.parametrize(
    ("ctype", "kind"), [("float", np.float32), ("double", float), ("half", np.float16)]
)
def test_floats(ctype: str, kind: type, value: object) -> None:
    converted = converter(ctype)(value)
    assert type(converted) is kind
    assert converted == 2.5


@pytest.mark.parametrize("ctype", ["float", "double", "half"])
@pytest.mark.parametrize("value", [3, -3, np.int32(3), np.array(3)])
def test_float_parameters_take_ints(ctype: str, value: int) -> None:
    assert converter(ctype)(value) == float(value)


@pytest.mark.parametrize("ctype", ["float", "double", "half"])
@pytest.mark.parametrize("value", [True, np.True_, "2", None, 1j, np.zeros(1), np.complex64(1)])
def test_what_is_no_float_is_refused(ctype: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"'p' is {ctype}; found .*: pass a float or an int"):
        converter(ctype)(value)


@pytest.mark.parametrize(
    ("ctype", "value"),
    [
        ("half", 65520.0),
        ("half", -(10**6)),
        ("float", 1e39),
        ("float", -1e39),
        ("float", np.float64(1e39)),
        ("float", 3.4028235677973366e38),
        ("float", 10**50),
        ("double", 10**400),
        ("cuComplex", 1e39j),
        ("cuComplex", 10**400),
        ("cuDoubleComplex", 10**400),
    ],
)
def test_a_finite_value_never_becomes_infinite(ctype: str, value: object) -> None:
    with pytest.raises(OverflowError, match=f"'p' is {ctype}, which holds"):
        converter(ctype)(value)


def test_a_value_that_rounds_to_the_largest_is_taken() -> None:
    assert converter("half")(65519.0) == np.finfo(np.float16).max
    assert converter("float")(3.40282351e38) == np.finfo(np.float32).max


@pytest.mark.parametrize("ctype", ["float", "double", "half", "cuComplex", "cuDoubleComplex"])
def test_infinities_and_nans_pass(ctype: str) -> None:
    convert = converter(ctype)
    assert convert(math.inf) == math.inf
    assert convert(-math.inf) == -math.inf
    assert np.isnan(convert(math.nan))  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("ctype", "kind"), [("cuComplex", np.complex64), ("cuDoubleComplex", np.complex128)]
)
def test_complex(ctype: str, kind: type) -> None:
    convert = converter(ctype)
    for value in (2, 2.0, 2 + 0j, np.float32(2), np.complex64(2), np.complex128(2), np.array(2j)):
        converted = convert(value)
        assert type(converted) is kind
        assert converted == value
    for other in (True, "2", None, np.zeros(2)):
        with pytest.raises(TypeError, match="pass a number"):
            convert(other)


@given(st.floats(-3.4e38, 3.4e38) | st.integers(-(2**100), 2**100))
def test_float_rounds_to_nearest(value: float) -> None:
    converted = converter("float")(value)
    assert type(converted) is np.float32
    assert converted.tobytes() == struct.pack("=f", value)


@given(st.floats())
def test_double_is_exact(value: float) -> None:
    converted = converter("double")(value)
    assert type(converted) is float
    assert struct.pack("d", converted) == struct.pack("d", value)
