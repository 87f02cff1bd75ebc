"""The pools that a device has of itself, and which one other libraries take from."""

from __future__ import annotations

from typing import Any

from streamflow.backends.memory import MemorySupport
from streamflow.memory.current import find_space
from streamflow.memory.mempool import MemoryPool, named
from streamflow.memory.pool_handle import keep_current

__all__ = ["current_pool", "default_pool", "memory_support", "set_current_pool"]


def default_pool(device: Any) -> MemoryPool:
    """The device's own pool, which every library of the process shares.

    It stays as it is: nothing here changes its threshold or its policies, unless a program
    sets its attributes. It is never destroyed.

    Parameters
    ----------
    device : Device or int
        An open one.

    Raises
    ------
    Closed
        The device is not open.
    """
    space = find_space(named(device))
    return MemoryPool._view(space, space.backend.default_pool())


def current_pool(device: Any) -> MemoryPool:
    """The pool that ``cudaMallocAsync`` takes from on ``device``: the default one at first.

    Parameters
    ----------
    device : Device or int
        An open one.

    Raises
    ------
    Closed
        The device is not open.
    """
    space = find_space(named(device))
    return MemoryPool._view(space, space.backend.current_pool())


def set_current_pool(device: Any, pool: MemoryPool) -> MemoryPool:
    """Have ``cudaMallocAsync`` take from ``pool`` on ``device`` from now on.

    That is for the code of other libraries: streamflow's own arrays come from resources.

    Parameters
    ----------
    device : Device or int
        An open one.
    pool : MemoryPool
        On that device; kept until another takes its place or the device is closed.

    Returns
    -------
    MemoryPool
        The previous one.

    Raises
    ------
    TypeError
        Not a pool; None is none.
    ValueError
        A pool of another device, or on the host.
    Closed
        The device is not open, or the pool was closed.
    """
    space = find_space(named(device))
    if not isinstance(pool, MemoryPool):
        raise TypeError(f"takes a MemoryPool, found {pool!r}")
    if pool.location.kind != "device" or pool._known.space is not space:
        raise ValueError(
            f"the current pool of device {space.index} is one that lies there, found {pool!r} "
            f"of device {pool.device}"
        )
    previous = current_pool(device)
    space.backend.set_current_pool(pool.handle)
    keep_current(pool._known)
    return previous


def memory_support(device: Any = None) -> MemorySupport:
    """Which kinds of memory a device and its driver offer.

    Parameters
    ----------
    device : Device or int, optional
        An open one; default: the task's current one.

    Raises
    ------
    Closed
        The device is not open.
    """
    return find_space(device).backend.memory_support()
