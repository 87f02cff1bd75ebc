"""What ``async with`` does with a SyncedArray: a turn, up-to-date data, and its end."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np

from streamflow.backends.origin import user_instruction
from streamflow.runtime.array import DeviceArray
from streamflow.runtime.recording import refuse
from streamflow.runtime.synced_pair import Pair
from streamflow.runtime.synced_sides import revoke
from streamflow.scheduler.synced_table import Asked, Side
from streamflow.scheduler.turns import Turn

__all__ = ["DeviceBlock", "HostBlock", "Write"]

Write = bool | Literal["all"]
Lent = TypeVar("Lent")


class _Block(Generic[Lent]):
    """One use of one side; entered once."""

    _side: ClassVar[Side]
    _asked: ClassVar[dict[object, Asked]]

    def __init__(self, pair: Pair, write: Write) -> None:
        pair.check_usable()
        refuse(pair._core, "a SyncedArray copies by itself: enter its block around the capture")
        if not isinstance(write, (bool, str)) or write not in self._asked:
            raise ValueError(f"write= takes False, True or 'all', found {write!r}")
        self._pair = pair
        self._what = self._asked[write]
        self._is_write = bool(write)
        self._turn: Turn | None = None
        self._origin = user_instruction()

    async def __aenter__(self) -> Lent:
        if self._turn is not None:
            raise RuntimeError("a block is entered once: call host() or device() again")
        pair, outer = self._pair, sys.exception()
        try:
            self._turn = await pair.take_turn(self._what, self._is_write, self._origin)
            await self._settle()
            if self._is_write:
                pair.heads.begin_write(self._side)
            self._lent = self._lend()
        except BaseException as error:
            if self._turn is not None:
                pair.leave(self._turn)
            error = _without_frames(error, outer)
            try:
                raise error
            finally:
                del error, outer, pair, self
        return self._lent

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        core = self._pair._core
        if not core.is_here():
            if kind is not GeneratorExit:  # a finaliser after the loop has ended (C12)
                core.check_here()
            return
        assert self._turn is not None
        try:
            self._end(error)
        finally:
            self._pair.leave(self._turn)

    async def _settle(self) -> None:
        """Have the side up to date."""
        raise NotImplementedError

    def _lend(self) -> Lent:
        """What the block gives."""
        raise NotImplementedError

    def _end(self, error: BaseException | None) -> None:
        """Take that back, and see what has become of the data."""
        raise NotImplementedError


class HostBlock(_Block["np.ndarray[Any, Any]"]):
    """``async with m.host()``."""

    _side = Side.CPU
    _asked: ClassVar[dict[object, Asked]] = {
        False: Asked.READ_HOST,
        True: Asked.WRITE_HOST,
        "all": Asked.WRITE_ALL_HOST,
    }

    async def _settle(self) -> None:
        await self._pair.settle_host(self._what, self._is_write, self._origin)

    def _lend(self) -> np.ndarray[Any, Any]:
        return self._pair.host.lend(is_write=self._is_write)

    def _end(self, error: BaseException | None) -> None:
        pair = self._pair
        self._lent.flags.writeable = False
        if not self._is_write:
            if error is None:
                pair.host.check_unchanged(pair)
        elif error is None:
            pair.host.note()
            pair.heads.end_write(Side.CPU)
        else:
            pair.fail_write(Side.CPU, error, self._origin)


class DeviceBlock(_Block[DeviceArray]):
    """``async with m.device()``."""

    _side = Side.GPU
    _asked: ClassVar[dict[object, Asked]] = {
        False: Asked.READ_DEVICE,
        True: Asked.WRITE_DEVICE,
        "all": Asked.WRITE_ALL_DEVICE,
    }

    async def _settle(self) -> None:
        self._pair.settle_device(self._what, self._origin)

    def _lend(self) -> DeviceArray:
        return self._pair.device.lend()

    def _end(self, error: BaseException | None) -> None:
        pair = self._pair
        revoke(self._lent)
        is_touched = pair.device.is_touched()
        pair.device.note()
        if self._is_write and error is None:
            pair.heads.end_write(Side.GPU)
        elif is_touched and self._is_write:
            assert error is not None
            pair.fail_write(Side.GPU, error, self._origin)
        elif is_touched and pair.device.has_all_of_its_hazards:
            wrong = RuntimeError(
                f"{pair!r} was written on the device in a block that reads it: use "
                "device(write=True)"
            )
            pair.heads.begin_write(Side.GPU)
            pair.fail_write(Side.GPU, wrong, self._origin)
            if error is None:
                raise wrong


def _without_frames(error: BaseException, outer: BaseException | None) -> BaseException:
    """``error`` without our frames, which hold both sides, nor those of what led to it (C23).

    ``outer`` is what the caller was handling: its own affair.
    """
    seen: set[int] = {id(None), id(outer)}
    chain: list[BaseException | None] = [error]
    while chain:
        link = chain.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            link.__traceback__ = None
            chain += (link.__cause__, link.__context__)
    return error
