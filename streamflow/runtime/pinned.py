"""``dev.pinned``: leases of page-locked memory, and who waits for one."""

from __future__ import annotations

import warnings
import weakref
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from operator import index
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from streamflow.backends.origin import describe, user_instruction
from streamflow.memory.pinned import class_nbytes
from streamflow.memory.pinned_block import PinnedBlock
from streamflow.runtime.array import checked_dtype, checked_shape
from streamflow.runtime.op import next_seq
from streamflow.scheduler.budget import parse_nbytes

if TYPE_CHECKING:
    from streamflow.runtime.core import Core

__all__ = ["Lease", "PinnedPool", "PinnedStats"]


@dataclass(frozen=True, slots=True)
class PinnedStats:
    """What a pinned pool holds right now, and has done."""

    budget_nbytes: int
    """Bound of ``pinned_nbytes``; what staging has for itself is outside."""
    pinned_nbytes: int
    """Live, cached and being pinned; without what every device has from the start (8 MiB)."""
    cached_nbytes: int
    """Of these, whole blocks that nobody has."""
    num_live: int
    """Blocks of leases, results and copies under way."""
    num_parked: int
    """Leases that were released while ops on them had not ended."""
    num_waiting: int
    """Tasks that wait for a lease."""
    num_acquired: int
    num_pins: int
    """Driver calls that pinned memory: the rest of ``num_acquired`` came from the cache."""


class Lease:
    """A pinned block on loan, until :meth:`release`.

    Ops that read or write its memory, ``put`` and ``get`` of its arrays, are ordered among each
    other as ops on a device array are (rule R3). To another event loop's devices it is memory
    as any: they stage their copies, and no release waits for those.

    Attributes
    ----------
    address : int
        Of the first byte; at least 512-byte aligned within its pool.
    nbytes : int
        What was asked for; the block may be larger.
    """

    __slots__ = ("_arrays", "_block", "_pool", "address", "nbytes")

    def __init__(self, pool: PinnedPool, block: PinnedBlock, nbytes: int) -> None:
        self._pool = pool
        self._block: PinnedBlock | None = block
        self._arrays: list[weakref.ref[np.ndarray[Any, Any]]] | None = None
        self.address = block.address
        self.nbytes = nbytes

    @property
    def is_released(self) -> bool:
        """Whether :meth:`release` was called; ops on it may not have ended yet."""
        return self._block is None

    def array(
        self, shape: int | tuple[int, ...] | None = None, dtype: Any = np.uint8
    ) -> np.ndarray[Any, Any]:
        """The memory as an ndarray, from its first byte on; its contents are what was there.

        Once the lease is released it is read-only, and so are views made of it after that.
        Views made before must not be used: on the simulator their contents are overwritten.

        Parameters
        ----------
        shape : int or tuple of int, optional
            Default: as many elements as fit, in one dimension.
        dtype : dtype
            Default: bytes.

        Raises
        ------
        ValueError
            The lease was released, or the array does not fit.
        """
        block = self._block
        if block is None:
            raise ValueError(f"the lease of {self.nbytes} bytes was released")
        kind = checked_dtype(dtype)
        if shape is None:
            shape = self.nbytes // max(1, kind.itemsize)
        sizes, size = checked_shape(shape, kind.itemsize)
        if size * kind.itemsize > self.nbytes:
            raise ValueError(
                f"an array of {size * kind.itemsize} bytes does not fit into a lease of "
                f"{self.nbytes} bytes"
            )
        array = block.array(sizes, kind)
        if self._arrays is None:
            self._arrays = []
        self._arrays.append(weakref.ref(array))
        return array

    def release(self) -> None:
        """Give the block back: at once, or when the ops on it have ended (rule R6).

        Raises
        ------
        ValueError
            It was released already.
        WrongThread
            Called on another thread or loop.
        """
        block = self._block
        if block is None:
            raise ValueError(f"the lease of {self.nbytes} bytes was released already")
        core = self._pool._core
        shell = core.shell
        if shell.current() is not shell.key and not core.is_closed:
            core.check_here()
        self._block = None
        if self._arrays is not None:
            for known in self._arrays:
                array = known()
                if array is not None:
                    array.flags.writeable = False
        core.leases.release(block)

    def __repr__(self) -> str:
        state = " released" if self._block is None else ""
        return f"<Lease of {self.nbytes} pinned bytes at {self.address:#x}{state}>"

    def __del__(self) -> None:
        block = self._block
        if block is None:
            return
        where = block.pool._holders.get(block.address)
        self._pool._leases.drop(block)  # first: a warning may be an error
        warnings.warn(
            f"{self!r} was dropped and never released"
            f"{f', made at {describe(*where)}' if isinstance(where, tuple) else ''}",
            ResourceWarning,
            source=self,
            stacklevel=1,
        )


class _Request:
    """What :meth:`PinnedPool.lease` returns: enter it to wait for the lease."""

    __slots__ = ("_lease", "_nbytes", "_pool", "_timeout_s", "_where")

    def __init__(
        self, pool: PinnedPool, nbytes: int, timeout_s: float | None, where: object
    ) -> None:
        self._pool = pool
        self._nbytes = nbytes
        self._timeout_s = timeout_s
        self._where = where
        self._lease: Lease | None = None

    async def __aenter__(self) -> Lease:
        if self._lease is not None:
            raise RuntimeError("a lease is entered once: ask for another one")
        pool = self._pool
        pool._core.check_open()
        block = pool._blocks.try_acquire(self._nbytes)
        if block is None:
            block = await pool._leases.wait(self._nbytes, self._timeout_s)
        self._lease = pool._lease(block, self._nbytes, self._where)
        return self._lease

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        lease = self._lease
        assert lease is not None
        if not lease.is_released:
            lease.release()


class PinnedPool:
    """Page-locked host memory of a device, leased to the program; ``dev.pinned``.

    Blocks are cached by size: four classes per doubling from 512 bytes to 1 MiB, so that at
    most a quarter of what is asked is wasted, then multiples of 64 KiB, where a cached block
    serves a request at most 1/8 smaller. Pinning and unpinning happen on worker threads.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._blocks = core.pinned
        self._leases = core.leases

    @property
    def budget_nbytes(self) -> int:
        """Bound of the pinned bytes, live and cached: ``settings.pinned_budget_nbytes``."""
        return self._blocks.budget_nbytes

    def try_lease(self, nbytes: int | str) -> Lease | None:
        """A lease from the cache, or None: it neither waits nor pins.

        Parameters
        ----------
        nbytes : int or str
            ``4096``, ``"1MiB"``.

        Returns
        -------
        Lease or None
            None if no block of the size is cached, or, above 64 KiB, somebody waits for a lease.

        Raises
        ------
        ValueError, TypeError
            Not a size, or more than the budget.
        """
        core = self._core
        shell = core.shell
        if core.needs_check or shell.current() is not shell.key:
            core.check_open()
        if type(nbytes) is not int or nbytes < 0 or nbytes > self._blocks.budget_nbytes:
            nbytes = self._checked(nbytes)
        block = self._blocks.try_acquire(nbytes)
        return None if block is None else self._lease(block, nbytes, user_instruction())

    def lease(
        self, nbytes: int | str, *, timeout: float | None = None
    ) -> AbstractAsyncContextManager[Lease]:
        """``async with dev.pinned.lease(n) as lease``: pinned memory until the block is left.

        Parameters
        ----------
        nbytes : int or str
            ``4096``, ``"1MiB"``.
        timeout : float, optional
            Seconds to wait, by the device's clock. Default: for as long as it takes.

        Ordering
        --------
        Entering takes a cached block at once, else waits while a worker thread pins one, and
        until the budget has room: who came first is served first, whatever the sizes, and
        results of ``get`` use pageable memory meanwhile. Only a cached block of up to 64 KiB is
        taken at once, whoever waits. Leaving gives the block back when the
        ops on it have ended, without waiting for them (rule R6).

        Raises
        ------
        ValueError, TypeError
            Not a size, or more than the budget.
        DeadlineExceeded
            On entering: not within ``timeout``.
        Closed
            On entering: the device was closed meanwhile.
        """
        self._core.check_open()
        if timeout is not None and not timeout >= 0:
            raise ValueError(f"timeout= takes seconds, found {timeout}")
        return _Request(self, self._checked(nbytes), timeout, user_instruction())

    async def trim(self, keep_nbytes: int | str = 0) -> int:
        """Unpin cached blocks, those unused for longest first; nothing that is in use.

        Parameters
        ----------
        keep_nbytes : int or str
            Cached bytes to keep.

        Returns
        -------
        int
            Bytes given back to the host. Unpinning waits for running kernels, on a worker
            thread.
        """
        core = self._core
        core.check_open()
        freed = self._blocks.trim(_as_nbytes(keep_nbytes, "keep_nbytes="))
        wake, wait = core.shell.park()
        errors: list[BaseException] = []

        def done(_: None, error: BaseException | None) -> None:
            if error is not None:
                errors.append(core.lose(error, "unpinning"))
            if not core.shell.is_over():  # else the loop has ended, with whoever waited (C12)
                wake()

        core.background.submit(next_seq(), self._blocks.unpin_blocking, done)
        core.schedule_turn()
        await wait(False)
        if errors:
            raise errors[0]
        return freed

    def stats(self) -> PinnedStats:
        """Counters, without a call of the driver."""
        blocks = self._blocks
        return PinnedStats(
            budget_nbytes=blocks.budget_nbytes,
            pinned_nbytes=blocks.counted_nbytes,
            cached_nbytes=blocks.cached_nbytes,
            num_live=blocks.num_live,
            num_parked=self._leases.num_parked,
            num_waiting=self._leases.num_waiting,
            num_acquired=blocks.num_acquired,
            num_pins=blocks.num_pins,
        )

    def __repr__(self) -> str:
        return f"<PinnedPool {self.stats()}>"

    def _checked(self, nbytes: int | str) -> int:
        size = _as_nbytes(nbytes, "a lease")
        if class_nbytes(size) > self._blocks.budget_nbytes:
            raise ValueError(
                f"a lease of {size} bytes is more than the whole budget of "
                f"{self._blocks.budget_nbytes} pinned bytes: raise pinned_budget_nbytes"
            )
        return size

    def _lease(self, block: PinnedBlock, nbytes: int, where: object) -> Lease:
        block.lease(where)
        return Lease(self, block, nbytes)


def _as_nbytes(nbytes: int | str, what: str) -> int:
    if isinstance(nbytes, str):
        return parse_nbytes(nbytes)
    if isinstance(nbytes, (bool, np.bool_)):
        raise TypeError(f"{what} takes bytes, found a bool")
    size = index(nbytes)
    if size < 0:
        raise ValueError(f"{what} takes a number of bytes, found {size}")
    return size
