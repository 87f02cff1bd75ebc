"""Copies from and to page-locked memory of the host, submitted as the runtime does it."""

from __future__ import annotations

from typing import Any

import numpy as np

import streamflow as sf
from streamflow.memory.page_locked import Staged, find
from streamflow.runtime.op import Op


def is_direct(array: np.ndarray[Any, Any]) -> bool:
    """Whether copies from and to ``array`` may use it as it is."""
    usable = find(array)
    return usable is not None and not isinstance(usable, Staged)


def copy_in(dev: sf.Device, source: np.ndarray[Any, Any], stream: Any = None) -> Any:
    """A device array with the contents of ``source``, read by the device itself; and the op."""
    usable, core, out = find(source), dev._core, dev.empty(source.shape, source.dtype)
    assert usable is not None
    assert usable.region is not None
    address, nbytes, to = source.ctypes.data, source.nbytes, out.address

    def run(target: Any) -> int:
        core.backend.copy_h2d(to, address, nbytes, target)
        return 1

    op: Op[None] = Op(core, "put", None)
    line = core.h2d if stream is None else stream._line
    core.parking.submit(op, run, line=line, reads=(usable.region,), writes=(out._region,))
    return out, op


def copy_out(dev: sf.Device, array: Any, out: np.ndarray[Any, Any], stream: Any = None) -> Op[None]:
    """Have the device itself write ``array`` to ``out``."""
    usable, core = find(out), dev._core
    assert usable is not None
    assert usable.region is not None
    address, nbytes, start = out.ctypes.data, out.nbytes, array.address

    def run(target: Any) -> int:
        core.backend.copy_d2h(address, start, nbytes, target)
        return 1

    op: Op[None] = Op(core, "get", None)
    op.rare().writes_host = True
    line = core.d2h if stream is None else stream._line
    core.parking.submit(op, run, line=line, reads=(array._region,), writes=(usable.region,))
    return op
