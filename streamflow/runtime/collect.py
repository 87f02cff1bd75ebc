"""Waiting for several ops at once (anyio's own take coroutines, not futures)."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import Any

from streamflow.runtime.op import Op

__all__ = ["as_completed", "gather"]


async def gather(*ops: Op[Any]) -> list[Any]:
    """The results of ``ops`` in the order given.

    Parameters
    ----------
    *ops : Op
        Of any devices of this loop.

    Raises
    ------
    Exception
        The first failure, as soon as it is known; the other ops go on.
    """
    results: dict[Op[Any], Any] = {}
    async for op in as_completed(ops):
        results[op] = op.result()
    return [results[op] for op in ops]


async def as_completed(ops: Iterable[Op[Any]]) -> AsyncIterator[Op[Any]]:
    """Yield each op once it has ended, in the order they end; failed ones too.

    Parameters
    ----------
    ops : iterable of Op
        Of any devices of this loop.

    Ask the op for its :meth:`~Op.result`. Leaving early detaches from the rest.
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
    for op in waiting:
        op.add_done_callback(note)
    for _ in range(len(waiting)):
        while not ended:
            wake, wait = next(iter(waiting))._core.shell.park()
            await wait(False)
            wake = None
        yield ended.popleft()
