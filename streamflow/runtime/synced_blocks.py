"""What ``async with`` does with a SyncedArray: a turn, up-to-date data, and its end."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, ClassVar, Literal

import numpy as np

from streamflow.backends.origin import user_instruction
from streamflow.runtime.array import DeviceArray
from streamflow.runtime.synced_pair import Pair
from streamflow.runtime.synced_sides import revoke
from streamflow.scheduler.synced_table import Asked, Side
from streamflow.scheduler.turns import Turn

__all__ = ["DeviceBlock", "HostBlock", "Write"]

Write = bool | Literal["all"]


class _Block:
    """One use of one side; entered once."""

    _asked: ClassVar[dict[object, Asked]]

    def __init__(self, pair: Pair, write: Write) -> None:
        pair.check_usable()
        if not isinstance(write, (bool, str)) or write not in self._asked:
            raise ValueError(f"write= takes False, True or 'all', found {write!r}")
        self._pair = pair
        self._what = self._asked[write]
        self._is_write = bool(write)
        self._turn: Turn | None = None
        self._origin = user_instruction()

    async def _take_turn(self) -> None:
        if self._turn is not None:
            raise RuntimeError("a block is entered once: call host() or device() again")
        self._turn = await self._pair.take_turn(self._what, self._is_write, self._origin)

    def _may_leave(self, kind: type[BaseException] | None) -> bool:
        """False for a finaliser after the loop has ended, which can wake nobody (C12)."""
        is_here = self._pair.is_here()
        if not is_here and kind is not GeneratorExit:
            self._pair.check_here()
        return is_here

    def _leave(self) -> None:
        assert self._turn is not None
        self._pair.leave(self._turn)


class HostBlock(_Block):
    """``async with m.host()``."""

    _asked: ClassVar[dict[object, Asked]] = {
        False: Asked.READ_HOST,
        True: Asked.WRITE_HOST,
        "all": Asked.WRITE_ALL_HOST,
    }

    async def __aenter__(self) -> np.ndarray[Any, Any]:
        await self._take_turn()
        pair, outer = self._pair, sys.exception()
        try:
            await pair.settle_host(self._what, self._is_write, self._origin)
            if self._is_write:
                pair.begin_write(Side.CPU)
            self._view = pair.host.lend(is_write=self._is_write)
        except BaseException as error:
            self._leave()
            error = _without_frames(error, outer)
            try:
                raise error
            finally:
                del error, outer, pair, self
        return self._view

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pair = self._pair
        self._view.flags.writeable = False
        if not self._may_leave(kind):
            return
        try:
            if not self._is_write:
                if error is None:
                    pair.host.check_unchanged(pair)
            elif error is None:
                pair.host.note()
                pair.heads.end_write(Side.CPU)
            else:
                pair.fail_write(Side.CPU, error, self._origin)
        finally:
            self._leave()


class DeviceBlock(_Block):
    """``async with m.device()``."""

    _asked: ClassVar[dict[object, Asked]] = {
        False: Asked.READ_DEVICE,
        True: Asked.WRITE_DEVICE,
        "all": Asked.WRITE_ALL_DEVICE,
    }

    async def __aenter__(self) -> DeviceArray:
        await self._take_turn()
        pair, outer = self._pair, sys.exception()
        try:
            pair.settle_device(self._what, self._origin)
            if self._is_write:
                pair.begin_write(Side.GPU)
            self._lent = pair.device.lend()
        except BaseException as error:
            self._leave()
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
        pair = self._pair
        if not self._may_leave(kind):
            return
        revoke(self._lent)
        is_touched = pair.device.is_touched()
        pair.device.note()
        try:
            if self._is_write and error is None:
                pair.heads.end_write(Side.GPU)
            elif is_touched:
                self._tell_touched(error)
        finally:
            self._leave()

    def _tell_touched(self, error: BaseException | None) -> None:
        pair = self._pair
        if self._is_write:
            assert error is not None
            pair.fail_write(Side.GPU, error, self._origin)
        elif pair.device.has_all_of_its_hazards:
            wrong = RuntimeError(
                f"{pair!r} was written on the device in a block that reads it: use "
                "device(write=True)"
            )
            pair.begin_write(Side.GPU)
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
