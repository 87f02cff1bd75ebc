"""What a test of the caching host allocator counts."""

from __future__ import annotations

from typing import Any

from streamflow.memory import CachingHostAllocator


def pins(*labs: Any) -> int:
    return sum(lab.device.counts["allocate_pinned_blocking"] for lab in labs)


def unpins(*labs: Any) -> int:
    return sum(lab.device.counts["free_pinned_blocking"] for lab in labs)


def figures(allocator: CachingHostAllocator) -> tuple[int, int, int, int]:
    held = allocator.cached_bytes
    return held.free, held.live, len(allocator.cached_blocks), len(allocator.live_blocks)
