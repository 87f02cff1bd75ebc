"""Sizes and alignments, as calls and constructors take them."""

from __future__ import annotations

from operator import index

from streamflow.errors import OutOfDeviceMemory
from streamflow.scheduler.budget import parse_nbytes

__all__ = ["ALIGNMENT", "checked_alignment", "checked_nbytes", "checked_size", "quarter_class"]

ALIGNMENT = 256
_MAX_NBYTES = 2**63 - 1
_GRAIN_NBYTES = 512


def checked_size(value: int | str, name: str, *, largest: int = 2**63 - 1) -> int:
    """A number of bytes from 0 to ``largest``, as an int or as ``"1GiB"``.

    Raises
    ------
    TypeError
        Neither; ``bool`` is refused.
    ValueError
        Not a size, negative, or above ``largest``.
    """
    if isinstance(value, str):
        try:
            checked = parse_nbytes(value)
        except ValueError:
            raise ValueError(
                f"{name} is a number of bytes such as 4096 or '1GiB', found {value!r}"
            ) from None
    elif isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} is an int of bytes or a string like '1GiB', found {value!r}")
    else:
        checked = index(value)
    if not 0 <= checked <= largest:
        raise ValueError(f"{name} is from 0 to {largest} bytes, found {value!r}")
    return checked


def checked_nbytes(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """``nbytes`` as an int that a device may have.

    Raises
    ------
    TypeError
        Not an integer; ``bool`` is refused.
    ValueError
        Negative.
    OutOfDeviceMemory
        More than 2**63 - 1 - ``alignment``.
    """
    if type(nbytes) is int and 0 <= nbytes <= _MAX_NBYTES - alignment:
        return nbytes
    if isinstance(nbytes, bool) or not hasattr(nbytes, "__index__"):
        raise TypeError(f"a size is an int of bytes, found {nbytes!r}")
    checked = index(nbytes)
    if checked < 0:
        raise ValueError(f"a size is not negative, found {checked}")
    if checked > _MAX_NBYTES - alignment:
        raise OutOfDeviceMemory(
            f"{checked} bytes are more than any device has (at most 2**63 - 1 - {alignment})"
        )
    return checked


def checked_alignment(alignment: int) -> int:
    """``alignment`` as an int.

    Raises
    ------
    TypeError
        Not an integer.
    ValueError
        Not a power of two.
    """
    if isinstance(alignment, bool) or not hasattr(alignment, "__index__"):
        raise TypeError(f"an alignment is an int of bytes, found {alignment!r}")
    checked = index(alignment)
    if checked < 1 or checked & (checked - 1):
        raise ValueError(f"an alignment is a power of two, found {checked}")
    return checked


def quarter_class(nbytes: int) -> int:
    """``nbytes`` raised to the next of four steps per doubling, by a quarter or 511 at most."""
    step = max(_GRAIN_NBYTES, 1 << max(nbytes - 1, 1).bit_length() - 1 >> 2)
    return -(-nbytes // step) * step
