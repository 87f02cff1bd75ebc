"""``SyncedArray``: one array on the host and on the device, copied when it has to be."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from streamflow.backends.origin import user_instruction
from streamflow.runtime.array import checked_dtype, checked_shape
from streamflow.runtime.op import Op
from streamflow.runtime.stream import Stream
from streamflow.runtime.submit import Submit
from streamflow.runtime.synced_blocks import DeviceBlock, HostBlock, Write
from streamflow.runtime.synced_pair import Pair
from streamflow.scheduler.synced_table import Asked, SyncedState

__all__ = ["SyncedArray", "SyncedState"]


class SyncedArray:
    """One array with a host side and a device side; each is brought up to date when it is used.

    Both sides' memory is made when first needed. While nothing has been written it reads as
    zeros. Readers of either side share it; a writer has it alone; who comes first is served
    first.

    Parameters
    ----------
    dev : Device
        Entered, on this event loop.
    shape : int or tuple of int
    dtype : dtype-like
        Of fixed size, as for :meth:`Device.empty`.

    Raises
    ------
    TypeError, ValueError
        A shape or dtype that no device array can have; not a device.

    Source
    ------
    Caffe's ``SyncedMemory``, whose states these are; what differs is in the decision
    "Synced arrays".

    Examples
    --------
    >>> m = sf.SyncedArray(dev, 1000, np.float32)
    >>> async with m.host(write="all") as a:
    ...     a[:] = 1
    >>> async with m.device(write=True) as d:  # copied there now
    ...     dev.launch(kernel, d, d.size)
    >>> async with m.host() as a:  # copied back, after the kernel
    ...     print(a.sum())
    """

    def __init__(self, dev: Submit, shape: Any, dtype: Any = np.float64) -> None:
        if not isinstance(dev, Submit):
            raise TypeError(f"SyncedArray takes a Device, found {dev!r}")
        core = dev._core
        core.check_open()
        self.dtype: np.dtype[Any] = checked_dtype(dtype)
        self.shape, self.size = checked_shape(shape, self.dtype.itemsize)
        self.nbytes = self.size * self.dtype.itemsize
        self._core = core
        self._pair = Pair(dev, self.shape, self.size, self.dtype, user_instruction())

    # -- asking ------------------------------------------------------------------------------

    @property
    def state(self) -> SyncedState:
        """Where the newest data is, as last seen; asking makes no query.

        While a block that writes is open, and while a copy is under way, it is what there
        would be if that failed.
        """
        self._core.check_here()
        return self._pair.look_at_state()

    @property
    def in_flight(self) -> Op[Any] | None:
        """The copy of the present data to the other side, from its submission to its end."""
        self._core.check_here()
        return self._pair.heads.copy  # type: ignore[no-any-return]

    @property
    def owns_host(self) -> bool:
        """False while the host memory is an adopted array."""
        return self._pair.host.is_owned

    @property
    def owns_device(self) -> bool:
        """False while the device memory is an adopted array."""
        return self._pair.device.is_owned

    @property
    def host_is_pinned(self) -> bool:
        """Whether there is host memory, and page-locked: copies need no staging then."""
        return self._pair.host.is_pinned

    # -- blocks ------------------------------------------------------------------------------

    def host(self, *, write: Write = False) -> HostBlock:
        """``async with m.host() as a``: the data as an ndarray, up to date.

        Parameters
        ----------
        write : bool or "all"
            False: to read; the ndarray is read-only. True: to change some of it. ``"all"``:
            to overwrite all of it, so that nothing is copied or zeroed first.

        Ordering
        --------
        Waits for its turn, for a copy from the device after the last work there that writes
        the array, and, to write, for copies that still read the host memory.
        Once the block is left the ndarray is read-only, and its contents are anybody's.

        A body that raises has written nothing where the device still has the data from before;
        else the array is poisoned.

        Raises
        ------
        UpstreamFailed
            What should have written the array failed; the cause is chained.
        RuntimeError
            This task is in a block of this array that excludes the new one.
        RaceDetected
            On the simulator: the host memory was changed outside of its blocks.
        Closed, DeviceLost
            The device, or this array, is closed; the device has failed.
        """
        return HostBlock(self._pair, write)

    def device(self, *, write: Write = False, dev: Submit | None = None) -> DeviceBlock:
        """``async with m.device() as d``: the data as a :class:`DeviceArray`.

        Parameters
        ----------
        write : bool or "all"
            As for :meth:`host`. To read, submit nothing that writes ``d``.
        dev : Device, optional
            Where the caller is about to use it: another device than the array's own is refused.

        Ordering
        --------
        Waits for its turn only: the copy to the device is submitted, and what uses ``d`` comes
        after it (rule R3). Leaving the block doesn't wait for the work inside: a later read on
        the host does. ``d`` can't be used after the block.

        A body that raises after something was submitted that writes ``d`` has written nothing
        where the host still has the data from before; else the array is poisoned. Work that fails
        after the block poisons it.

        Raises
        ------
        ValueError
            ``dev`` is not the array's device.
        OutOfDeviceMemory
            No room for the device side.
        UpstreamFailed, RuntimeError, RaceDetected, Closed, DeviceLost
            As for :meth:`host`; also a ``RuntimeError`` if the array was written in a block
            that reads.
        """
        if dev is not None and getattr(dev, "_core", None) is not self._core:
            raise ValueError(f"{self!r} belongs to another device than {dev!r}")
        return DeviceBlock(self._pair, write)

    # -- copies ------------------------------------------------------------------------------

    def push(self, *, stream: Stream | None = None) -> Op[None]:
        """Copy to the device if the newest data is on the host alone.

        Parameters
        ----------
        stream : Stream, optional
            Default: the current stream, else the lane ``h2d``.

        Returns
        -------
        Op
            When it has ended well, the state is ``SYNCED`` unless the data has changed since.

        Ordering
        --------
        Takes its turn as a reader, so it parks while somebody else writes. Shares a copy
        that is under way; cancelling it, or leaving its scope early, takes the copy from nobody.

        Raises
        ------
        ValueError
            Nothing was ever written.
        UpstreamFailed, RuntimeError, OutOfDeviceMemory, Closed, DeviceLost
            As for :meth:`device`; through the op if it had to wait for its turn.
        """
        return self._pair.transfer_soon(Asked.PUSH, stream)

    def pull(self, *, stream: Stream | None = None) -> Op[None]:
        """Copy to the host if the newest data is on the device alone.

        Parameters
        ----------
        stream : Stream, optional
            Default: the current stream, else the lane ``d2h``.

        Returns
        -------
        Op
            As for :meth:`push`.

        Ordering
        --------
        As for :meth:`push`; the copy comes after the last write on the device.

        Raises
        ------
        ValueError, UpstreamFailed, RuntimeError, Closed, DeviceLost
            As for :meth:`push`.
        """
        return self._pair.transfer_soon(Asked.PULL, stream)

    # -- data of the caller's ----------------------------------------------------------------

    def adopt(self, data: Any, *, discard: bool = False) -> None:
        """Use an array of the caller's as one side, with what is in it as the newest data.

        Parameters
        ----------
        data : ndarray, another writable buffer, or DeviceArray
            Of the same size and dtype. It is never freed by us, and must be used
            through this array's blocks only for as long as it is adopted.
        discard : bool
            Drop data on the other side that is newer.

        Ordering
        --------
        At once. Memory of our own that it replaces is freed after the copies and kernels that
        use it.

        Raises
        ------
        ValueError, TypeError
            Size, dtype or device differ, or it can't be written; the newest data is on the other
            side alone, and ``discard`` is false.
        RuntimeError
            The array is in a block now, or a copy still writes ``data``.
        """
        self._pair.adopt(data, discard)

    def discard(self) -> None:
        """Forget the data, and what poisoned it: the array reads as zeros again.

        Both sides keep their memory, adopted or not.

        Ordering
        --------
        At once. Copies that are under way end, and change nothing.

        Raises
        ------
        RuntimeError
            The array is in a block now.
        """
        self._pair.discard()

    def close(self) -> None:
        """Let go of the memory of both sides, now instead of with the last reference.

        Memory of our own is freed after the copies and kernels that use it. Nothing of the array
        can be used afterwards; closing twice is harmless.

        Raises
        ------
        RuntimeError
            The array is in a block now.
        """
        self._pair.close()

    # -- what a copy would mean ---------------------------------------------------------------

    def __copy__(self) -> NoReturn:
        raise TypeError("a SyncedArray is not copied: make another one, and copy the data")

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__copy__()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self.__copy__()

    def __repr__(self) -> str:
        return repr(self._pair)
