import numpy as np
import pytest

from streamflow.testing.compare import Difference, Tolerance, first_difference

EXACT = Tolerance(0.0, 0.0)


def test_equal_arrays_agree():
    for dtype in (np.float32, np.int16, np.bool_, np.complex64, [("a", "f4"), ("b", "i2")]):
        array = np.ones((3, 4), dtype)
        assert first_difference(array, array.copy(), Tolerance()) is None


def test_the_first_in_c_order_is_told_and_all_are_counted():
    expected = np.arange(12).reshape(3, 4)
    found = expected.copy()
    found[2, 0] = found[1, 3] = found[2, 2] = -1
    assert first_difference(expected, found, Tolerance()) == Difference((1, 3), 7, -1, 3)


def test_a_structure_differs_if_a_field_does():
    expected = np.zeros(3, [("a", "f4"), ("b", "i2")])
    found = expected.copy()
    found["b"][1] = 1
    difference = first_difference(expected, found, Tolerance())
    assert difference is not None
    assert difference.index == (1,)


def test_the_floats_of_a_structure_have_a_tolerance_too():
    particle = [("at", "f4", (3,)), ("inner", [("mass", "f8"), ("kind", "i2")])]
    expected = np.ones((2, 2), particle)
    expected["at"][0, 0] = np.nan
    found = expected.copy()
    found["at"][1, 1, 2] += 1e-7
    assert first_difference(expected, found, Tolerance()) is None
    assert first_difference(expected, found, EXACT).index == (1, 1)
    found["at"][1, 0, 1] += 1e-3
    found["inner"]["kind"][1, 1] = 2
    difference = first_difference(expected, found, Tolerance())
    assert (difference.index, difference.num_different) == ((1, 0), 2)
    assert Tolerance().says(expected.dtype) == "field by field"
    assert first_difference(expected[:0], found[:0], Tolerance()) is None


@pytest.mark.parametrize(
    ("dtype", "within", "beyond"),
    [
        (np.float16, 1e-3, 1e-2),
        (np.float32, 1e-6, 1e-4),
        (np.float64, 1e-13, 1e-11),
        (np.complex64, 1e-6, 1e-4),
        (np.complex128, 1e-13, 1e-11),
    ],
)
def test_the_default_suits_the_precision(dtype, within, beyond):
    one = np.ones(1, dtype)
    assert first_difference(one, (one * (1 + within)).astype(dtype), Tolerance()) is None
    assert first_difference(one, (one * (1 + beyond)).astype(dtype), Tolerance()) is not None


def test_no_tolerance_means_equal():
    one = np.ones(1, np.float32)
    assert first_difference(one, np.nextafter(one, np.float32(2)), EXACT) is not None
    assert first_difference(one, one.copy(), EXACT) is None


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_nan_and_infinity_equal_themselves_only(dtype):
    odd = np.array([np.nan, np.inf, -np.inf], dtype)
    assert first_difference(odd, odd.copy(), Tolerance()) is None
    for at, other in ((0, 1.0), (1, np.finfo(dtype).max), (2, np.inf)):
        found = odd.copy()
        found[at] = other
        difference = first_difference(odd, found, Tolerance())
        assert difference is not None
        assert difference.index == (at,)


def test_halves_are_compared_without_overflow():
    most = np.finfo(np.float16).max
    difference = first_difference(np.array([most]), np.array([-most]), Tolerance())
    assert difference is not None


def test_a_tolerance_is_said_in_words():
    assert Tolerance().says(np.dtype(np.int32)) == "exactly"
    assert Tolerance(rtol=0.5).says(np.dtype(np.float32)) == "within rtol=0.5, atol=1e-06"
