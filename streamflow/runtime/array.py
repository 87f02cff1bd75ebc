"""Arrays in device memory: a shape over an allocation whose use is ordered for the user."""

from __future__ import annotations

from collections.abc import Generator
from math import prod
from operator import index
from sys import _getframe
from typing import TYPE_CHECKING, Any

import numpy as np

from streamflow.errors import Closed
from streamflow.runtime.op import Op
from streamflow.runtime.recording import recorder_of, refuse
from streamflow.scheduler.hazards import Region
from streamflow.scheduler.timeline import Timeline

if TYPE_CHECKING:
    from streamflow.runtime.core import Core
    from streamflow.runtime.stream import Stream

__all__ = ["Allocation", "DeviceArray", "checked_dtype", "checked_shape"]

_MAX_NBYTES = 2**63 - 1 - 256
_MAX_PLAIN = 2**48  # items: with the next line, far from overflowing
_MAX_PLAIN_ITEM_NBYTES = 2**14


class Allocation:
    """A block of device memory, shared by the arrays over it.

    When the last of them is dropped, a free is queued behind every recorded use (R6).
    """

    __slots__ = ("__weakref__", "address", "core", "home", "is_freed", "nbytes", "op", "root")

    gone = "was freed"
    """What is told of an array whose memory was given back."""
    is_lent = False
    """Whether somebody else frees it."""

    def __init__(self, core: Core, address: int, nbytes: int, op: Op[None], home: Timeline) -> None:
        self.core = core
        self.address = address
        self.nbytes = nbytes
        self.op = op
        self.home = home
        self.root = Region(op.ticket, 0, nbytes)
        self.is_freed = False

    def __del__(self) -> None:
        # A finaliser never calls the driver (R12): leave the free to the device's loop.
        if not self.is_freed and self.address:
            # Where it is garbage of a cycle, other finalisers still see it: one free is enough.
            self.is_freed = True
            self.core.post_free(self.address, self.home, self.root)


class DeviceArray:
    """C-contiguous memory on one device.

    Made by :meth:`Device.put`, ``empty``, ``zeros`` and ``full``. ``await array`` waits for
    its latest write, and returns the array.

    Attributes
    ----------
    shape : tuple of int
    dtype : numpy.dtype
    size : int
        Number of elements.
    nbytes : int
    """

    __slots__ = (
        "__weakref__",
        "_argument",
        "_core",
        "_memory",
        "_region",
        "_staged",
        "address",
        "dtype",
        "nbytes",
        "shape",
        "size",
    )

    def __init__(
        self,
        memory: Allocation,
        region: Region,
        address: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        size: int,
    ) -> None:
        self._core = memory.core
        self._memory = memory
        self._region = region
        self.address = address
        self.shape = shape
        self.dtype = dtype
        self.size = size
        self.nbytes = size * dtype.itemsize
        self._argument: Any = None
        self._staged: Op[None] | None = None

    # -- ops of this array ---------------------------------------------------------------

    @property
    def allocation(self) -> Op[None]:
        """The op that allocated the memory."""
        return self._memory.op

    @property
    def ready(self) -> Op[Any]:
        """The latest write of this memory, through whichever array."""
        self._core.check_here()
        region = self._region
        writes = (region.last_write, *(other.last_write for other in region.overlapping))
        op = self._core.op_of(max(writes, key=lambda ticket: ticket.seq))
        return self._memory.op if op is None else op

    @property
    def staged(self) -> Op[None]:
        """Ends when the source of ``put`` may be changed; of a pinned one: the copy itself."""
        return self._memory.op if self._staged is None else self._staged

    def __await__(self) -> Generator[Any, Any, DeviceArray]:
        self._core.check_here()
        refuse(self._core, "no array can be awaited before its block is left")
        # One that has failed says so through the write below, unless that was overwritten.
        if self._staged is not None and not self._staged.done():
            yield from self._staged.__await__()
        region = self._region
        for ticket in (*(other.last_write for other in region.overlapping), region.last_write):
            op = self._core.op_of(ticket)
            if op is not None:
                yield from op.__await__()
        return self

    def free(self, *, stream: Stream | None = None) -> Op[None]:
        """Queue the free of the whole allocation behind all its uses.

        Parameters
        ----------
        stream : Stream, optional
            Default: picked as below.

        Ordering
        --------
        On ``stream`` if given; else on the stream of the only outstanding use, which
        then needs no wait; else on the lane ``free`` (rule R5).

        Raises
        ------
        Closed
            The array was freed already, or the device is closed.
        """
        core = self._core
        if core.needs_check or core.shell.current() is not core.shell.key:
            core.check_open()
        memory = self._memory
        if memory.is_freed or memory.is_lent:
            self.check_usable()
            raise ValueError(f"{self!r} is lent by a SyncedArray, which frees it itself")
        if core.recording is not None and (recorder := recorder_of(core)) is not None:
            return recorder.record_free(memory, _getframe(1))
        return core.memory.free_array(memory, stream, _getframe(1))

    @property
    def is_freed(self) -> bool:
        """Whether the memory was given back."""
        return self._memory.is_freed

    def check_usable(self) -> None:
        """Raise ``Closed`` if the memory was given back."""
        if self._memory.is_freed:
            raise Closed(f"{self!r} {self._memory.gone}")
        if (recorder := recorder_of(self._core)) is not None:
            recorder.hold((self,))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3 of the protocol, for other libraries; on the simulator there is none.

        It names no stream: :meth:`Device.call` has ordered the use of the memory.
        """
        if not self._core.backend.is_cuda:
            raise AttributeError(f"{self!r} is not CUDA memory: no __cuda_array_interface__")
        self.check_usable()
        interface: dict[str, Any] = {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address if self.size else 0, False),
            "strides": None,
            "stream": None,
            "version": 3,
        }
        if self.dtype.names is not None:
            interface["descr"] = self.dtype.descr
        return interface

    # -- views -----------------------------------------------------------------------------

    def reshape(self, *shape: int | tuple[int, ...]) -> DeviceArray:
        """The same elements in another shape. Shares hazards.

        Parameters
        ----------
        *shape : int or tuple of int
            One dimension may be -1: what the others leave.

        Raises
        ------
        ValueError
            The number of elements differs.
        """
        self._core.check_here()
        wanted = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        dims = [index(n) for n in wanted]  # type: ignore[arg-type]
        if dims.count(-1) == 1:
            rest = prod(n for n in dims if n != -1)
            if rest > 0 and self.size % rest == 0:
                dims[dims.index(-1)] = self.size // rest
        if min(dims, default=0) < 0 or prod(dims) != self.size:
            raise ValueError(f"cannot reshape {self.shape} ({self.size} elements) into {wanted}")
        return self._over(self.address, tuple(dims), self.dtype)

    def view(self, dtype: Any = None) -> DeviceArray:
        """The same bytes as another dtype, as NumPy's ``view``. Shares hazards.

        Parameters
        ----------
        dtype : dtype-like, optional
            Default: the same one.

        Raises
        ------
        ValueError
            The last dimension does not divide into items of the new size, or the
            address is not aligned for them.
        """
        self._core.check_here()
        if dtype is None:
            return self._over(self.address, self.shape, self.dtype)
        new = checked_dtype(dtype)
        if self.address % new.alignment:
            raise ValueError(f"{self!r} does not start at a multiple of {new.alignment} bytes")
        if new.itemsize == self.dtype.itemsize:
            return self._over(self.address, self.shape, new)
        if not self.shape:
            raise ValueError("a 0-d array cannot change its item size in a view")
        nbytes = self.shape[-1] * self.dtype.itemsize
        if nbytes % new.itemsize:
            raise ValueError(
                f"the last dimension holds {nbytes} bytes, not a multiple of {new} items"
            )
        return self._over(self.address, (*self.shape[:-1], nbytes // new.itemsize), new)

    def __getitem__(self, key: int | slice) -> DeviceArray:
        """Rows of the first dimension: an int, or a slice with step 1. Shares hazards.

        Raises
        ------
        IndexError
            The index is out of range, or the array is 0-d.
        ValueError
            A slice with a step: its result would not be contiguous.
        """
        self._core.check_here()
        if not self.shape:
            raise IndexError("a 0-d array has no rows")
        rows, tail = self.shape[0], self.shape[1:]
        row_nbytes = prod(tail) * self.dtype.itemsize
        if isinstance(key, slice):
            start, stop, step = key.indices(rows)
            if step != 1:
                raise ValueError(f"only slices with step 1 are contiguous, found step {step}")
            shape: tuple[int, ...] = (max(0, stop - start), *tail)
        else:
            start = index(key)
            if not -rows <= start < rows:
                raise IndexError(f"index {start} is out of range for {rows} rows")
            start %= rows
            shape = tail
        address = self.address + start * row_nbytes if prod(shape) else 0
        return self._over(address, shape, self.dtype)

    def split(self, num_parts: int) -> tuple[DeviceArray, ...]:
        """Disjoint parts along the first dimension, with hazards of their own.

        Parameters
        ----------
        num_parts : int
            At least 1.

        Ordering
        --------
        Ops on different parts are not ordered against each other; an op on the whole
        array is ordered against all of them. The first parts are one row longer where
        the rows don't divide evenly, as in ``numpy.array_split``.
        """
        self._core.check_here()
        num_parts = index(num_parts)
        if not self.shape or num_parts < 1:
            raise ValueError(f"cannot split shape {self.shape} into {num_parts} parts")
        rows = self.shape[0]
        row_nbytes = prod(self.shape[1:]) * self.dtype.itemsize
        memory, parts, start = self._memory, [], 0
        for part in range(num_parts):
            stop = start + rows // num_parts + (part < rows % num_parts)
            offset = self.address - memory.address + start * row_nbytes
            nbytes = (stop - start) * row_nbytes
            region = self._region.carve(memory.root, offset, offset + nbytes)
            shape = (stop - start, *self.shape[1:])
            address = self.address + start * row_nbytes if nbytes else 0
            parts.append(DeviceArray(memory, region, address, shape, self.dtype, prod(shape)))
            start = stop
        return tuple(parts)

    def _over(self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceArray:
        self.check_usable()
        view = DeviceArray(self._memory, self._region, address, shape, dtype, prod(shape))
        view._staged = self._staged
        return view

    # -- for the runtime ---------------------------------------------------------------------

    @property
    def is_whole_region(self) -> bool:
        """Whether writing all of this array overwrites all its hazards speak of (rule R9)."""
        return self.nbytes == self._region.stop - self._region.start

    def argument(self) -> Any:
        """What the backend's ``launch`` takes for this array."""
        argument = self._argument
        if argument is None:
            argument = self._argument = self._core.backend.array_argument(
                self.address, self.shape, self.dtype
            )
        return argument

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d array")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<DeviceArray {self.shape} {self.dtype} on device {self._core.backend.index}>"


def checked_dtype(dtype: Any) -> np.dtype[Any]:
    """``dtype`` as one whose items are plain bytes.

    Raises
    ------
    TypeError
        Object and variable-size types, and date types.
    """
    try:
        known = _CHECKED.get(dtype)
    except TypeError:  # not hashable: a list of fields, say
        known = None
    if known is not None:
        return known
    checked: np.dtype[Any] = np.dtype(dtype)
    if checked.hasobject or checked.itemsize == 0 or checked.kind in "MmSUT" or checked.subdtype:
        raise TypeError(f"dtype {checked} cannot be moved to a device: {_remedy(checked)}")
    return checked


def _remedy(dtype: np.dtype[Any]) -> str:
    if dtype.kind in "Mm":
        return "its integers can be: pass array.view(np.int64)"
    if dtype.kind == "S" and dtype.itemsize:
        return "its bytes can be: pass array.view(np.uint8)"
    if dtype.kind in "UT":
        return "encode it as bytes, with np.strings.encode, and pass .view(np.uint8) of that"
    plain = "a boolean, integer, floating, complex or structured type of fixed size"
    if dtype.hasobject:
        return (
            "it holds references to Python objects, which mean nothing there; "
            f"convert it with array.astype to {plain}"
        )
    return f"use {plain}"


# What users write most; np.dtype() of these costs more than the rest of a check.
_CHECKED: dict[Any, np.dtype[Any]] = {
    key: np.dtype(name)
    for name in ("?", "b", "B", "h", "H", "i", "I", "q", "Q", "e", "f", "d", "F", "D")
    for key in (np.dtype(name), np.dtype(name).type)
}


def checked_shape(shape: Any, itemsize: int) -> tuple[tuple[int, ...], int]:
    """``shape`` as a tuple of ints whose bytes fit an address space, and its size.

    Raises
    ------
    TypeError
        A dimension is not an integer (``bool`` is refused).
    ValueError
        A dimension is negative, or the array has 2**63 bytes or more.
    """
    if shape.__class__ is int and 0 <= shape <= _MAX_PLAIN and itemsize <= _MAX_PLAIN_ITEM_NBYTES:
        return (shape,), shape
    dims = shape if isinstance(shape, (tuple, list)) else (shape,)
    if any(isinstance(n, (bool, np.bool_)) for n in dims):
        raise TypeError(f"a dimension is an integer, found a bool in {shape!r}")
    checked = tuple([index(n) for n in dims])
    if checked and min(checked) < 0:
        raise ValueError(f"negative dimension in shape {checked}")
    if prod(n for n in checked if n) * itemsize > _MAX_NBYTES:
        raise ValueError(f"shape {checked} with {itemsize}-byte items has 2**63 bytes or more")
    return checked, prod(checked)
