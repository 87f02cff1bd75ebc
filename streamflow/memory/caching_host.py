"""CMSSW's caching allocator of pinned host memory: its rules and its byte counts, not its flaws."""

from __future__ import annotations

from operator import index
from typing import Any, ClassVar, overload

from streamflow.backends.origin import describe, user_instruction
from streamflow.errors import Closed, OutOfDeviceMemory
from streamflow.memory.current import checked_device, find_space
from streamflow.memory.host_blocks import Cell, HostBlock, HostBlockInfo, HostBytes
from streamflow.memory.host_cache import INVALID_BIN, HostCache
from streamflow.memory.sizes import checked_nbytes, checked_size
from streamflow.memory.space import Place, Space, space_of
from streamflow.scheduler.guards import check_process

__all__ = ["CachingHostAllocator"]

_MAX_NBYTES = 2**63 - 1


class CachingHostAllocator:
    """Pinned host memory, cached in bins whose sizes grow geometrically.

    Without ``bin_growth``: 8, 3, 7 and 6 291 455 cached bytes, so bins of 512 B, 4 KiB, 32 KiB,
    256 KiB and 2 MiB. With it: no largest bin and no limit.

    Parameters
    ----------
    bin_growth : int
        Each bin is so many times the one below; 2 or more.
    min_bin : int
        The smallest bin has ``bin_growth ** min_bin`` bytes; smaller requests are raised to it.
    max_bin : int
        Requests above ``bin_growth ** max_bin`` bytes get exactly what they ask for, and are never
        cached. ``INVALID_BIN``: no request is.
    max_cached_bytes : int or str
        What the cache holds at most; ``INVALID_SIZE``: anything.
    skip_cleanup : bool
        Leave the cache pinned when the allocator is dropped.
    debug : bool
        Print each allocation, reuse, return and free.
    device : Device or int, optional
        Whose driver pins what is asked for without a stream. Default: the task's current device.

    Raises
    ------
    TypeError, ValueError
        Not such numbers, or bins without a ``bin_growth``.

    Notes
    -----
    A request looks into its own bin only, and takes the block that has been there longest of those
    whose streams have passed their free. Any stream of any device may be named. Every method may
    be called from any thread; pinning blocks its caller (0.7 ms for 1 MiB on an H200).

    A block counts as large as its bin, but what is pinned is what it was asked for, raised by a
    quarter or 511 bytes at most. One that is reused for a larger request is pinned anew, up to
    twelve times in a bin that is 8 times the one below; then it has grown as large as that.
    """

    INVALID_BIN: ClassVar[int] = INVALID_BIN
    INVALID_SIZE: ClassVar[int] = 2**64 - 1
    INVALID_DEVICE_ORDINAL: ClassVar[int] = -1

    @overload
    def __init__(
        self, *, skip_cleanup: bool = False, debug: bool = False, device: Any = None
    ) -> None: ...

    @overload
    def __init__(
        self,
        bin_growth: int,
        min_bin: int = 1,
        max_bin: int = INVALID_BIN,
        max_cached_bytes: int | str = INVALID_SIZE,
        skip_cleanup: bool = False,
        debug: bool = False,
        device: Any = None,
    ) -> None: ...

    def __init__(
        self,
        bin_growth: int | None = None,
        min_bin: int | None = None,
        max_bin: int | None = None,
        max_cached_bytes: int | str | None = None,
        skip_cleanup: bool = False,
        debug: bool = False,
        device: Any = None,
    ) -> None:
        is_default = bin_growth is None
        if is_default and not min_bin is max_bin is max_cached_bytes is None:
            raise TypeError(
                "bins need a bin_growth: CachingHostAllocator(bin_growth, min_bin, ...)"
            )
        growth, smallest, largest = (8, 3, 7) if is_default else (bin_growth, 1, INVALID_BIN)
        self._bin_growth = _whole(growth, "bin_growth", 2)
        self._min_bin = _whole(smallest if min_bin is None else min_bin, "min_bin", 0)
        self._max_bin = _whole(largest if max_bin is None else max_bin, "max_bin", self._min_bin)
        self._min_bin_bytes = self._bin_bytes(self._min_bin)
        self._max_bin_bytes = self._bin_bytes(self._max_bin)
        if self._min_bin_bytes > _MAX_NBYTES:
            raise ValueError(f"a smallest bin of {growth} ** {self._min_bin} bytes fits nowhere")
        if max_cached_bytes is None:
            limit = 3 * self._max_bin_bytes - 1 if is_default else self.INVALID_SIZE
        else:
            limit = self._checked_limit(max_cached_bytes)
        self._skip_cleanup = bool(skip_cleanup)
        self._debug = bool(debug)
        self._device: int | None = None if device is None else checked_device(device)
        named = device is not None and not hasattr(device, "__index__")
        self._named: Space | None = find_space(device) if named else None
        self._cache = HostCache(limit, self._debug)

    # -- sizes ---------------------------------------------------------------------------------

    @staticmethod
    def int_pow(base: int, exp: int) -> int:
        """``base`` to the power of ``exp``, exactly.

        Parameters
        ----------
        base, exp : int
            Neither is negative.

        Raises
        ------
        TypeError, ValueError
            Not such numbers.
        """
        return int(_whole(base, "base", 0) ** _whole(exp, "exp", 0))

    @staticmethod
    def nearest_power_of(base: int, value: int) -> tuple[int, int]:
        """The smallest power of ``base`` that is at least ``value``.

        Parameters
        ----------
        base : int
            2 or more.
        value : int
            Not negative.

        Returns
        -------
        tuple of int
            The exponent, and the power.

        Raises
        ------
        TypeError, ValueError
            Not such numbers.
        """
        factor, least = _whole(base, "base", 2), _whole(value, "value", 0)
        power, rounded = 0, 1
        while rounded < least:
            rounded *= factor
            power += 1
        return power, rounded

    def _bin_bytes(self, order: int) -> int:
        # INVALID_BIN's power has more digits than there is memory.
        if order * (self._bin_growth.bit_length() - 1) >= 64:
            return self.INVALID_SIZE
        return min(self.int_pow(self._bin_growth, order), self.INVALID_SIZE)

    def _sized(self, nbytes: int) -> tuple[int, int]:
        """The bin of a request, and the bytes that are handed out for it."""
        power, rounded = self.nearest_power_of(self._bin_growth, nbytes)
        if power > self._max_bin:
            return INVALID_BIN, nbytes
        if power < self._min_bin:
            return self._min_bin, self._min_bin_bytes
        if rounded > _MAX_NBYTES:
            raise OutOfDeviceMemory(
                f"{nbytes} bytes are rounded up to {rounded}, which no host has: set a max_bin"
            )
        return power, rounded

    # -- the calls -----------------------------------------------------------------------------

    def host_allocate(self, nbytes: int, stream: Any = None) -> HostBlock:
        """Pinned memory of at least ``nbytes``. May block its thread, where it has to be pinned.

        Parameters
        ----------
        nbytes : int
            0 takes nothing, and gives address 0.
        stream : Stream or Lane, optional
            Which uses the memory, or a stream of the backend's own; more may be noted by
            ``block.record_stream``. None: only the host uses it.

        Ordering
        --------
        Usable by the host, and on every stream, when this returns: nothing else uses it. Issues
        nothing.

        Raises
        ------
        TypeError, ValueError
            Not a size, not a stream.
        OutOfDeviceMemory
            The host has not that much, also after the cache was freed.
        Closed
            The stream is closed, or no device is open.
        ForkedProcess
            In a fork of a process that had entered a device.
        """
        check_process()
        checked = checked_nbytes(nbytes)
        space, place = self._where(stream)
        if not checked:
            return HostBlock(self, None, space.index, stream)
        order, size = self._sized(checked)
        taken: list[Cell] = []

        def prepare(cell: Cell) -> None:
            cell.num_asked = checked
            cell.stream = stream
            cell.uses = {} if place is None else {place.line.uid: (space, stream)}
            taken.append(cell)

        self._cache.enter(space)
        is_reused = self._cache.take(space, order, size, checked, prepare)
        (cell,) = taken
        block = HostBlock(self, cell, space.index, stream)
        if self._debug:
            did = "reused" if is_reused else "allocated"
            self._cache.tell(
                f"{did} {size} bytes at {cell.address:#x} for {stream!r} on device {space.index}"
            )
        return block

    def host_free(self, block: HostBlock) -> None:
        """Take ``block`` back: into its bin, if it has one, and the cache may hold that much.

        A full cache gives up what was freed longest ago.

        Parameters
        ----------
        block : HostBlock

        Ordering
        --------
        Records an event on each stream that uses the block, and waits for nothing: everything
        given to them before is ordered before its next use, and so are the ops that were given
        its array. If this raises, the block is live as before.

        Raises
        ------
        TypeError
            Not a block.
        ValueError
            Another allocator's, or freed already: names the lines.
        ForkedProcess
            As :meth:`host_allocate`.
        """
        check_process()
        cell = self._check(block)
        try:
            block._claims.pop()
        except IndexError:
            raise ValueError(f"{block!r} was freed already, at {block._freed_where()}") from None
        block._freed_at = user_instruction()
        if cell is None:
            return
        try:
            self._cache.give(cell)
        except BaseException:
            if self._cache.is_live(cell):  # else it is back, and another one was refused
                block._freed_at = None
                block._claims.append(True)
            raise
        self._cache.collect()

    def free_all_cached(self) -> None:
        """Unpin what is cached, off the loop; what is still in use once it no longer is.

        Raises
        ------
        ForkedProcess
            As :meth:`host_allocate`.
        """
        check_process()
        self._cache.collect()
        self._cache.free_all_cached()

    def set_max_cached_bytes(self, max_cached_bytes: int | str) -> None:
        """Change what the cache may hold. Frees nothing: later frees go by it.

        Parameters
        ----------
        max_cached_bytes : int or str
            As the constructor's.

        Raises
        ------
        TypeError, ValueError
            Not a size.
        """
        self._cache.max_cached_bytes = self._checked_limit(max_cached_bytes)

    # -- what there is -------------------------------------------------------------------------

    @property
    def bin_growth(self) -> int:
        """How many times the one below each bin is."""
        return self._bin_growth

    @property
    def min_bin(self) -> int:
        """The smallest bin."""
        return self._min_bin

    @property
    def max_bin(self) -> int:
        """The largest bin; ``INVALID_BIN`` where there is none."""
        return self._max_bin

    @property
    def min_bin_bytes(self) -> int:
        """The bytes of the smallest bin's blocks."""
        return self._min_bin_bytes

    @property
    def max_bin_bytes(self) -> int:
        """The bytes of the largest bin's blocks; ``INVALID_SIZE`` where there is none."""
        return self._max_bin_bytes

    @property
    def max_cached_bytes(self) -> int:
        """What the cache may hold."""
        return self._cache.max_cached_bytes

    @property
    def skip_cleanup(self) -> bool:
        """Whether the cache stays pinned when the allocator is dropped."""
        return self._skip_cleanup

    @property
    def debug(self) -> bool:
        """Whether it prints what it does."""
        return self._debug

    @property
    def cached_bytes(self) -> HostBytes:
        """Bytes in the cache (``free``) and in the program's hands (``live``), by bins' sizes."""
        return HostBytes(self._cache.free_nbytes, self._cache.live_nbytes)

    @property
    def asked_bytes(self) -> int:
        """What the live blocks were asked for: the rest of ``pinned_bytes.live`` is waste."""
        return sum(cell.num_asked for cell in self._cache.live())

    @property
    def pinned_bytes(self) -> HostBytes:
        """What is pinned of ``cached_bytes``: a block, for the most it was ever asked for."""
        cache = self._cache
        free, live = (
            sum(cell.pinned_nbytes for cell in cells) for cells in (cache.cached(), cache.live())
        )
        return HostBytes(free, live)

    @property
    def pending_bytes(self) -> int:
        """Pinned bytes that left the cache, or never entered it, and wait for their uses to end."""
        return self._cache.pending_nbytes

    @property
    def cached_blocks(self) -> tuple[HostBlockInfo, ...]:
        """The blocks in the cache, by size and then by age."""
        return tuple(cell.info() for cell in self._cache.cached())

    @property
    def live_blocks(self) -> tuple[HostBlockInfo, ...]:
        """The blocks in the program's hands, by address."""
        return tuple(cell.info() for cell in self._cache.live())

    @property
    def num_hits(self) -> int:
        """How many requests got a block of the cache."""
        return self._cache.num_hits

    @property
    def num_misses(self) -> int:
        """How many requests had a block pinned."""
        return self._cache.num_misses

    # -- inside --------------------------------------------------------------------------------

    def _where(self, stream: Any) -> tuple[Space, Place | None]:
        """The device that a stream belongs to; of none, the allocator's or the task's."""
        if stream is None:
            if self._named is not None and self._named.is_open:
                return self._named, None
            return find_space(self._device), None
        if getattr(stream, "is_closed", False):  # before it is asked for its device
            raise Closed(f"{stream!r} is closed")
        ours: Any = getattr(getattr(stream, "_line", None), "owner", None)
        device: Any = getattr(stream, "device", None)
        if ours is not None:
            space = space_of(ours.backend)
        elif hasattr(device, "space"):
            space = space_of(device)
        else:  # cuda.core's say which ordinal
            space = find_space(getattr(device, "device_id", self._device))
        return space, space.place(stream)

    def _record_stream(self, block: HostBlock, stream: Any) -> None:
        check_process()
        cell = self._check(block)
        if stream is None:
            raise TypeError("record_stream takes a stream, found None")
        space, place = self._where(stream)
        if block.is_freed:
            raise Closed(f"{block!r} was freed, at {block._freed_where()}")
        if cell is not None and place is not None:
            self._cache.enter(space)
            self._cache.note_use(cell, place.line.uid, space, stream)

    def _check(self, block: HostBlock) -> Cell | None:
        if not isinstance(block, HostBlock):
            raise TypeError(f"takes a HostBlock, found {block!r}")
        if block._allocator is not self:
            made_at = describe(*block._made_at)
            raise ValueError(
                f"{block!r} is another allocator's: allocated at {made_at}, "
                f"freed here at {describe(*user_instruction())}"
            )
        return block._cell

    def _checked_limit(self, value: int | str) -> int:
        return checked_size(value, "max_cached_bytes", largest=self.INVALID_SIZE)

    def __del__(self) -> None:
        # What is cached goes back by a later call there (R12).
        cache = getattr(self, "_cache", None)
        if cache is not None and not self._skip_cleanup:
            cache.abandon()

    def __repr__(self) -> str:
        return (
            f"<CachingHostAllocator {self._bin_growth} ** {self._min_bin}.."
            f"{'' if self._max_bin == INVALID_BIN else self._max_bin}>"
        )


def _whole(value: Any, name: str, least: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} is an int, found {value!r}")
    checked = index(value)
    if checked < least:
        raise ValueError(f"{name} is {least} or more, found {checked}")
    return checked
