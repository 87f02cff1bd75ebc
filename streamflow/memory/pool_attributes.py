"""What a stream-ordered pool lets one read and set, under the driver's own names."""

from __future__ import annotations

from typing import Protocol

from streamflow.backends.memory import PoolAttribute
from streamflow.memory.sizes import checked_size

__all__ = ["PoolAttributes"]

_MAX_THRESHOLD = 2**64 - 1


class _Pool(Protocol):
    def _read(self, attribute: PoolAttribute) -> int: ...

    def _write(self, attribute: PoolAttribute, value: int) -> None: ...


class PoolAttributes:
    """The attributes of one pool, as they are at the moment of asking.

    Setting one takes effect from the next allocation or synchronisation on.
    """

    __slots__ = ("_pool",)

    def __init__(self, pool: _Pool) -> None:
        self._pool = pool

    # -- reuse ---------------------------------------------------------------------------------

    @property
    def reuse_follow_event_dependencies(self) -> bool:
        """Whether memory freed on one stream serves another that has waited for the free."""
        return bool(self._pool._read(PoolAttribute.REUSE_FOLLOW_EVENT_DEPENDENCIES))

    @reuse_follow_event_dependencies.setter
    def reuse_follow_event_dependencies(self, value: bool) -> None:
        self._switch(PoolAttribute.REUSE_FOLLOW_EVENT_DEPENDENCIES, value)

    @property
    def reuse_allow_opportunistic(self) -> bool:
        """Whether memory whose free happens to have run serves any stream."""
        return bool(self._pool._read(PoolAttribute.REUSE_ALLOW_OPPORTUNISTIC))

    @reuse_allow_opportunistic.setter
    def reuse_allow_opportunistic(self, value: bool) -> None:
        self._switch(PoolAttribute.REUSE_ALLOW_OPPORTUNISTIC, value)

    @property
    def reuse_allow_internal_dependencies(self) -> bool:
        """Whether an allocation may be made to wait for a free, rather than fail."""
        return bool(self._pool._read(PoolAttribute.REUSE_ALLOW_INTERNAL_DEPENDENCIES))

    @reuse_allow_internal_dependencies.setter
    def reuse_allow_internal_dependencies(self, value: bool) -> None:
        self._switch(PoolAttribute.REUSE_ALLOW_INTERNAL_DEPENDENCIES, value)

    # -- sizes -----------------------------------------------------------------------------

    @property
    def release_threshold(self) -> int:
        """Bytes to keep at a synchronisation of a stream, an event or the device.

        What is reserved above them and unused goes back then. May be set as ``"1GiB"``.
        """
        return self._pool._read(PoolAttribute.RELEASE_THRESHOLD)

    @release_threshold.setter
    def release_threshold(self, value: int | str) -> None:
        nbytes = checked_size(value, "release_threshold", largest=_MAX_THRESHOLD)
        self._pool._write(PoolAttribute.RELEASE_THRESHOLD, nbytes)

    @property
    def reserved_current(self) -> int:
        """Bytes that the pool has of the device now. Can only be read."""
        return self._pool._read(PoolAttribute.RESERVED_CURRENT)

    @reserved_current.setter
    def reserved_current(self, value: int) -> None:
        raise _read_only(PoolAttribute.RESERVED_CURRENT)

    @property
    def reserved_high(self) -> int:
        """The most it had of the device; set to 0, it starts again from now."""
        return self._pool._read(PoolAttribute.RESERVED_HIGH)

    @reserved_high.setter
    def reserved_high(self, value: int) -> None:
        self._start_again(PoolAttribute.RESERVED_HIGH, value)

    @property
    def used_current(self) -> int:
        """Bytes that are allocated now. Can only be read."""
        return self._pool._read(PoolAttribute.USED_CURRENT)

    @used_current.setter
    def used_current(self, value: int) -> None:
        raise _read_only(PoolAttribute.USED_CURRENT)

    @property
    def used_high(self) -> int:
        """The most that was allocated at a time; set to 0, it starts again from now."""
        return self._pool._read(PoolAttribute.USED_HIGH)

    @used_high.setter
    def used_high(self, value: int) -> None:
        self._start_again(PoolAttribute.USED_HIGH, value)

    # -- inside ------------------------------------------------------------------------------

    def _switch(self, attribute: PoolAttribute, value: bool) -> None:
        if value not in (False, True):
            raise TypeError(f"{attribute.value} is switched by a bool, found {value!r}")
        self._pool._write(attribute, int(value))

    def _start_again(self, attribute: PoolAttribute, value: int) -> None:
        if value != 0:
            raise ValueError(
                f"{attribute.value} can be set to 0 only, to start again from now; found {value!r}"
            )
        self._pool._write(attribute, 0)

    def __repr__(self) -> str:
        told = ", ".join(f"{name.value}={getattr(self, name.value)}" for name in PoolAttribute)
        return f"<PoolAttributes {told}>"


def _read_only(attribute: PoolAttribute) -> AttributeError:
    return AttributeError(f"{attribute.value} of a pool can only be read")
