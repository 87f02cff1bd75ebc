"""What is copied from and to on the host: any memory that NumPy can see, in any layout."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from streamflow.backends.memory import MemoryKind
from streamflow.memory.layout import overlaps_itself
from streamflow.memory.page_locked import Staged, find
from streamflow.runtime.array import DeviceArray, checked_dtype
from streamflow.runtime.op import Op
from streamflow.runtime.recording import recorder_of

if TYPE_CHECKING:
    from streamflow.runtime.core import Core
    from streamflow.scheduler.hazards import Region
    from streamflow.scheduler.timeline import Ticket

__all__ = ["HostEnd", "check_same", "host_source", "host_target", "keep_alive", "shared_memory"]

Array = np.ndarray[Any, Any]

_ASK_ABOVE_NBYTES = 1 << 20
"""Asking the driver about an address takes microseconds: much for a small copy."""

_ARRAY_INTERFACES = ("__array_interface__", "__array_struct__")
_DLPACK_ON_HOST = (1, 3)  # kDLCPU and kDLCUDAHost, of dlpack.h

_in_flight: dict[int, Array] = {}
"""By number of the op: host memory that the device reads or writes (rule R6). Of an op whose end
nobody will see, an entry stays."""


class HostEnd:
    """The end of a copy that lies on the host.

    Attributes
    ----------
    array : ndarray
    regions : tuple of Region
        The hazards of the pinned memory it lies in, where somebody keeps them: at most one.
    is_pinned : bool
        Pinned memory of ours, or that the program pinned with ours.
    is_direct : bool
        The device can copy from or to it as it is: page-locked, and in C order.
    """

    __slots__ = ("array", "is_direct", "is_pinned", "regions")

    def __init__(self, core: Core, array: Array) -> None:
        self.array = array
        self.regions: tuple[Region, ...] = ()
        self.is_pinned = self.is_direct = False
        if not array.nbytes:
            return
        usable = find(array)
        if usable is not None:
            self.is_pinned = True
            self.is_direct = array.flags.c_contiguous and not isinstance(usable, Staged)
            region = usable.region
            if region is not None:
                self.regions = (region,)
        elif array.nbytes > _ASK_ABOVE_NBYTES and array.flags.c_contiguous:
            self.is_direct = _is_page_locked(core, array)

    @property
    def address(self) -> int:
        """Of its first byte; in C order the others follow."""
        return address_of(self.array)

    @property
    def will_change(self) -> bool:
        """Whether an earlier op is still to write to it."""
        writes: list[Ticket] = []
        for region in self.regions:
            region.before_read(writes)
        return bool(writes)


def address_of(array: Array) -> int:
    """The address of the first element."""
    address: int = array.__array_interface__["data"][0]
    return address


def keep_alive(op: Op[Any], array: Array) -> None:
    """Keep the memory of ``array`` until ``op``, a copy by the device, has retired (rule R6)."""
    recorder = recorder_of(op._core)
    if recorder is not None:
        recorder.hold_host(array)
        return
    number = op.ticket.seq

    def ended() -> None:
        _in_flight.pop(number, None)

    def retired() -> None:
        if op.ticket.failure is None or op._core.lost is not None:
            ended()
        else:  # it may be running still
            op._core.when_ended(op.ticket, ended)

    _in_flight[number] = array
    op.rare().on_retired = retired


def _is_page_locked(core: Core, array: Array) -> bool:
    """Whether another library, or the program by other means, has page-locked ``array``.

    Managed memory isn't: its pages move, and a copy of them may wait for that.
    """
    first = address_of(array)
    try:
        # An array is one allocation: if both ends are page-locked, all of it is.
        return all(
            core.backend.pointer_attributes(address).kind is MemoryKind.HOST
            for address in (first, first + array.nbytes - 1)
        )
    except Exception as error:
        raise core.lose(error, f"asking about {array.nbytes} bytes of host memory") from error


def host_source(source: Any) -> Array:
    """``source`` as an ndarray whose items are plain bytes; memory it has is not copied.

    Raises
    ------
    TypeError
        It has a mask, lies on a device, or its items are not plain bytes.
    """
    if type(source) is np.ndarray:
        array: Array = source
    elif isinstance(source, np.ndarray):
        array = _plain(source, "the source")
    else:
        _refuse_device(source, "the source")
        shared = None if hasattr(source, "__array__") else shared_memory(source)
        array = np.asarray(source) if shared is None else shared
    checked_dtype(array.dtype)
    return array


def host_target(out: Any, what: str) -> Array:
    """``out`` as an ndarray over the same memory, to be written.

    Raises
    ------
    TypeError
        Not memory that NumPy can write to, or it has a mask.
    ValueError
        Read-only, or some of its elements share bytes.
    """
    if type(out) is np.ndarray:
        array: Array = out
    elif isinstance(out, np.ndarray):
        array = _plain(out, what)
    else:
        _refuse_device(out, what)
        shared = shared_memory(out)
        if shared is None:
            raise TypeError(
                f"{what} takes an ndarray or another writable buffer, found {type(out).__name__}"
            )
        array = shared
    if not array.flags.writeable:
        raise ValueError(f"{what} is read-only")
    if overlaps_itself(array):
        raise ValueError(
            f"{what} of shape {array.shape} and strides {array.strides} has elements that share "
            "bytes: what would be left in them is not defined"
        )
    return array


def check_same(
    shape: tuple[int, ...], dtype: Any, from_shape: tuple[int, ...], from_dtype: Any
) -> None:
    """Raise unless source and destination have one shape and dtype."""
    if shape != from_shape:
        raise ValueError(f"the destination has shape {shape}, the source {from_shape}")
    if dtype != from_dtype:
        raise TypeError(f"the destination has dtype {dtype}, the source {from_dtype}")


def _plain(array: Array, what: str) -> Array:
    """``array`` without what its class adds, where that is no part of its values."""
    masked = sys.modules.get("numpy.ma")
    if masked is not None and isinstance(array, masked.MaskedArray):
        raise TypeError(
            f"{what} is a masked array, whose mask would be lost: copy its .data and "
            "np.ma.getmaskarray() of it, or .filled()"
        )
    return array.view(np.ndarray)


def _refuse_device(memory: Any, what: str) -> None:
    if isinstance(memory, DeviceArray):
        raise TypeError(f"{what} is on a device already: use dev.copy")
    if hasattr(memory, "__cuda_array_interface__"):
        raise TypeError(
            f"{what} is on a GPU already, as a {type(memory).__name__}: have its library copy it, "
            "in a dev.call"
        )


def shared_memory(memory: Any) -> Array | None:
    """An ndarray over the memory of a buffer or of another library's array; None if it has none."""
    if isinstance(memory, bytes):  # to NumPy, a string
        return np.frombuffer(memory, np.uint8)
    try:
        buffer = memoryview(memory)
    except TypeError:
        pass
    else:
        array: Array = np.asarray(buffer)  # of a scalar itself, NumPy would make a copy
        # ctypes and memoryview say "character", and mean a byte.
        return array.view(np.uint8) if array.dtype == "S1" else array
    if any(hasattr(memory, name) for name in _ARRAY_INTERFACES):
        return np.asarray(memory)
    if hasattr(memory, "__dlpack__") and hasattr(memory, "__dlpack_device__"):
        kind = int(memory.__dlpack_device__()[0])
        if kind not in _DLPACK_ON_HOST:
            raise TypeError(
                f"a {type(memory).__name__} on a device of DLPack's kind {kind} is not on the host"
            )
        return np.from_dlpack(memory)
    return None
