"""Page-locked memory of our own: its pages are made first, and only then is the driver asked.

``cuMemHostAlloc`` holds a lock that launches and copies of all threads need, also while the
system makes and clears the pages: 430 ms for 1 GiB on an H200's host. Registering pages that are
there took 20 to 50 ms, and unregistering them 20 instead of 100 to 150 (decision 0043).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading

import numpy as np
from cuda.bindings import driver

from streamflow.backends.cuda.errors import DriverCallError, check

__all__ = ["OWN_NBYTES", "allocate", "free"]

OWN_NBYTES = 2 << 20
"""Below, the driver's own: it cuts small blocks from larger ones."""
_FLAGS = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP

_lock = threading.Lock()
_own: dict[int, mmap.mmap] = {}
# Not even the interpreter's end unmaps what a device may be copying to (rule R12).
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_own))


def allocate(nbytes: int) -> int:
    """The address of ``nbytes`` that every context may copy from and to."""
    if nbytes >= OWN_NBYTES:
        address = _allocate_own(nbytes)
        if address is not None:
            return address
    return int(
        check(driver.cuMemHostAlloc(nbytes, driver.CU_MEMHOSTALLOC_PORTABLE), "cuMemHostAlloc")
    )


def _allocate_own(nbytes: int) -> int | None:
    """None where it can't be: the driver's call says why, or does it."""
    if nbytes > _free_nbytes() // 2:  # else the system would end some process to find the pages
        return None
    try:
        # Shared with children of a fork, who read what is there: they can't have copies of pages
        # that a device writes to.
        memory = mmap.mmap(-1, nbytes)
    except (OSError, OverflowError):
        return None
    pages = np.frombuffer(memory, np.uint8)
    address = int(pages.ctypes.data)
    pages[:: mmap.PAGESIZE] = 0  # without the GIL
    (error,) = driver.cuMemHostRegister(address, nbytes, _FLAGS)
    del pages
    if error:
        memory.close()
        return None
    with _lock:
        _own[address] = memory
    return address


def _free_nbytes() -> int:
    """Of the host's memory; 0 where the system doesn't tell."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE
    except (AttributeError, ValueError, OSError):
        return 0


def free(address: int) -> None:
    """Give back what :func:`allocate` gave.

    Raises
    ------
    DriverCallError
        It was not allocated, or the device has failed.
    """
    with _lock:
        memory = _own.pop(address, None)
    if memory is None:
        check(driver.cuMemFreeHost(address), "cuMemFreeHost")
        return
    (error,) = driver.cuMemHostUnregister(address)
    if error:
        with _lock:
            _own[address] = memory
        raise DriverCallError(error, "cuMemHostUnregister")
    memory.close()
