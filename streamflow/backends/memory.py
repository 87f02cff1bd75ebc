"""The kinds of memory a device has, as a backend tells of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

__all__ = [
    "Location",
    "MemoryAdvice",
    "MemoryKind",
    "MemorySupport",
    "PointerAttributes",
    "PoolAccess",
    "PoolAttribute",
    "PoolInfo",
]


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """A stream-ordered pool's counters, in bytes."""

    reserved_nbytes: int
    reserved_high_nbytes: int
    used_nbytes: int
    used_high_nbytes: int
    release_threshold_nbytes: int


@dataclass(frozen=True, slots=True)
class Location:
    """Where memory lies, or is to lie.

    ``kind`` is ``"device"`` (``index``: its ordinal), ``"host"`` or ``"numa"`` (``index``: the
    host's node).
    """

    kind: str
    index: int = 0


class PoolAttribute(Enum):
    """What a pool lets one read or set; sizes in bytes, switches 0 or 1."""

    REUSE_FOLLOW_EVENT_DEPENDENCIES = "reuse_follow_event_dependencies"
    REUSE_ALLOW_OPPORTUNISTIC = "reuse_allow_opportunistic"
    REUSE_ALLOW_INTERNAL_DEPENDENCIES = "reuse_allow_internal_dependencies"
    RELEASE_THRESHOLD = "release_threshold"
    RESERVED_CURRENT = "reserved_current"
    """Can only be read."""
    RESERVED_HIGH = "reserved_high"
    """Can be set to 0 only: then it starts again from the current value."""
    USED_CURRENT = "used_current"
    """Can only be read."""
    USED_HIGH = "used_high"
    """As ``RESERVED_HIGH``."""


class PoolAccess(Enum):
    """What a device may do with a pool's memory."""

    NONE = "none"
    READ = "read"
    READ_WRITE = "read-write"


class MemoryAdvice(Enum):
    """A hint for managed and system memory."""

    READ_MOSTLY = "read-mostly"
    NOT_READ_MOSTLY = "not read-mostly"
    PREFERRED_LOCATION = "preferred location"
    NO_PREFERRED_LOCATION = "no preferred location"
    ACCESSED_BY = "accessed by"
    NOT_ACCESSED_BY = "not accessed by"


class MemoryKind(Enum):
    """What a pointer leads to."""

    DEVICE = "device"
    HOST = "host"
    """Page-locked."""
    MANAGED = "managed"
    UNREGISTERED = "unregistered"
    """Nothing the driver knows: plain host memory."""


@dataclass(frozen=True, slots=True)
class MemorySupport:
    """Which kinds of memory a device and its driver offer."""

    has_pools: bool
    """Stream-ordered pools."""
    has_managed_pools: bool
    has_host_pools: bool
    """Pools located on the host, or on one of its NUMA nodes."""
    has_managed_memory: bool
    has_concurrent_managed_access: bool
    """Host and device may touch managed memory at the same time; prefetch and advice work."""
    has_pageable_access: bool
    """The device reads the host's plain memory."""
    has_host_register: bool
    """Memory of the program's own can be page-locked."""
    has_read_only_host_register: bool
    """That too which the host has mapped for reading only, a file's say."""
    pool_handle_types: frozenset[str]
    """How a pool's memory can be shared with other processes: ``"posix_fd"``, ``"win32"``,
    ``"fabric"``."""


@dataclass(frozen=True, slots=True)
class PointerAttributes:
    """What the driver knows of an address."""

    kind: MemoryKind
    device_index: int | None
    """The device it belongs to; None for host memory."""
    has_context: bool
    """False for memory of a pool, which belongs to no context."""
    pool: Any
    """The pool's handle; None for memory that came from none."""
    is_device_accessible: bool
    is_host_accessible: bool
