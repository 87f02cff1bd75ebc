"""Pinning near a device: memory comes from the node of the host whose thread touches it first."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

__all__ = ["cpus_of", "near"]

_NODES = Path("/sys/devices/system/node")


@contextmanager
def near(node: int | None) -> Iterator[None]:
    """Keep the calling thread on the processors of ``node``, where the platform tells them.

    Does nothing for None, on machines with one node, and where the process may not run there.
    """
    cpus = frozenset() if node is None else cpus_of(node)
    if not cpus:
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cpus & before or before)
        yield
    finally:
        os.sched_setaffinity(0, before)


@cache
def cpus_of(node: int) -> frozenset[int]:
    """The processors of a node; none where there is one node only, or the platform tells none."""
    if not hasattr(os, "sched_setaffinity") or len(list(_NODES.glob("node[0-9]*"))) < 2:
        return frozenset()
    try:
        return _parsed((_NODES / f"node{node}" / "cpulist").read_text())
    except OSError:
        return frozenset()


def _parsed(text: str) -> frozenset[int]:
    """Processors of a list such as ``0-3,8``."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
