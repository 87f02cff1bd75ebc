"""Waiting for several ops at once (anyio's own take coroutines, not futures)."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

import anyio

from streamflow.runtime.op import Op

__all__ = ["as_completed", "gather"]


async def gather(*ops: Op[Any]) -> list[Any]:
    """The results of ``ops`` in the order given.

    Cancelled, it detaches from the ops, but waits first for those that write the
    caller's own memory (rule R8).

    Parameters
    ----------
    *ops : Op
        Of any devices of this loop.

    Raises
    ------
    Exception
        The first failure, as soon as it is known; the other ops go on.
    """
    for op in ops:
        if isinstance(op, Op):
            op._core.check_here()  # before anyio is asked, which needs a loop of its own
    failed = None
    try:
        async with aclosing(as_completed(ops)) as ended:
            async for op in ended:
                if op.exception() is not None:
                    failed = op
                    break
    except anyio.get_cancelled_exc_class():
        with anyio.CancelScope(shield=True):
            for op in ops:
                if op.writes_host:
                    await _outlast(op)
        raise
    if failed is not None:
        ops = ()  # what is raised holds this frame: not the results of the others (C23)
        failed.result()
    return [op.result() for op in ops]


async def as_completed(ops: Iterable[Op[Any]]) -> AsyncGenerator[Op[Any], None]:
    """Yield each op once it has ended, in the order they end; failed ones too.

    Ask the op for its :meth:`~Op.result`. Leaving early detaches from the rest; trio
    wants the iterator closed then (``contextlib.aclosing``).

    Parameters
    ----------
    ops : iterable of Op
        Of any devices of this loop.
    """
    waiting = dict.fromkeys(ops)
    ended: deque[Op[Any]] = deque()
    wake = None

    def note(op: Op[Any]) -> None:
        ended.append(op)
        if wake is not None:
            wake()

    for op in waiting:
        if not isinstance(op, Op):
            raise TypeError(f"expected ops, found {op!r}")
        if op._core.recording is not None:
            op._core.recording.refuse_await(op)
    try:
        for op in waiting:
            op.add_done_callback(note)
        for _ in range(len(waiting)):
            while not ended:
                wake, wait = next(iter(waiting))._core.shell.park()
                await wait(False)
                wake = None
            yield ended.popleft()
    finally:
        for op in waiting:
            op.remove_done_callback(note)


async def _outlast(op: Op[Any]) -> None:
    try:
        await op
    # Cancelled once more, it still waits for the others; the op itself keeps a failure.
    except (Exception, anyio.get_cancelled_exc_class()):
        return
