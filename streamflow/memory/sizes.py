"""Sizes as constructors take them."""

from __future__ import annotations

from operator import index

from streamflow.scheduler.budget import parse_nbytes

__all__ = ["checked_size"]


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
