"""A budget of bytes in flight, and who waits for a share of it (sans-IO)."""

from __future__ import annotations

from typing import Generic, TypeVar

from streamflow.scheduler.fair import FairQueue

__all__ = ["Budget", "parse_nbytes"]

T = TypeVar("T")

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}


class Budget(Generic[T]):
    """At most ``limit_nbytes`` admitted at a time.

    Whoever does not fit waits, and nobody who comes later overtakes within one key: a
    large request is not starved by small ones.
    """

    __slots__ = ("_sizes", "limit_nbytes", "queue", "used_nbytes")

    def __init__(self, limit_nbytes: int, what: str) -> None:
        self.limit_nbytes = limit_nbytes
        self.used_nbytes = 0
        self.queue: FairQueue[T] = FairQueue(what)
        self._sizes: dict[T, int] = {}

    def request(self, key: object, item: T, nbytes: int) -> bool:
        """Admit ``item`` now, or queue it. ``nbytes`` is at most the limit."""
        assert 0 <= nbytes <= self.limit_nbytes
        if not self.queue and self.used_nbytes + nbytes <= self.limit_nbytes:
            self.used_nbytes += nbytes
            return True
        self.queue.push(key, item)
        self._sizes[item] = nbytes
        return False

    def withdraw(self, key: object, item: T) -> list[T]:
        """Take a waiting item out; returns those behind it that fit now."""
        self.queue.remove(key, item)
        del self._sizes[item]
        return self._admitted()

    def release(self, nbytes: int) -> list[T]:
        """Give an admitted item's bytes back; returns the items admitted in their place."""
        self.used_nbytes -= nbytes
        return self._admitted()

    def _admitted(self) -> list[T]:
        admitted: list[T] = []
        while self.queue:
            nbytes = self._sizes[self.queue.peek()]
            if self.used_nbytes + nbytes > self.limit_nbytes:
                break
            item = self.queue.pop()
            del self._sizes[item]
            self.used_nbytes += nbytes
            admitted.append(item)
        return admitted


def parse_nbytes(text: int | str) -> int:
    """A number of bytes, as an int or with a unit: ``"2GiB"``, ``"1.5 GB"``, ``"512MiB"``.

    Raises
    ------
    TypeError
        Neither an int nor a string.
    ValueError
        Not a size, or not above zero.
    """
    if isinstance(text, str):
        compact = text.replace(" ", "").replace("_", "").lower()
        digits = compact.rstrip("abcdefghijklmnopqrstuvwxyz")
        unit = _UNITS.get(compact[len(digits) :])
        try:
            nbytes = int(float(digits) * unit) if unit is not None else 0
        except (ValueError, OverflowError):
            nbytes = 0
        if nbytes <= 0:
            raise ValueError(
                f"a limit is a number of bytes above 0, such as 4096, '512MiB' or '2GB'; "
                f"found {text!r}"
            )
        return nbytes
    if isinstance(text, bool) or not hasattr(text, "__index__"):
        raise TypeError(f"a limit is an int of bytes or a string like '2GiB', found {text!r}")
    nbytes = text.__index__()
    if nbytes <= 0:
        raise ValueError(f"a limit is above 0 bytes, found {text}")
    return nbytes
