"""What a program still holds of a device that it leaves."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamflow.backends.origin import describe

if TYPE_CHECKING:
    from streamflow.runtime.core import Core

__all__ = ["Held", "LiveArrays"]


@dataclass(frozen=True, slots=True)
class LiveArrays:
    """Arrays alive when their device is closed, which frees them all the same.

    ``where`` are the lines that made them.
    """

    index: int
    num: int
    nbytes: int
    where: tuple[str, ...]

    @classmethod
    def of(cls, core: Core) -> LiveArrays:
        """Those of ``core`` now."""
        core.drain_dropped()
        live = core.memory.live.values()
        nbytes = sum(size for _, size, _, _ in live)
        where = tuple(made.where for _, _, made, _ in live)
        return cls(core.backend.index, len(live), nbytes, where)

    def __str__(self) -> str:
        arrays = "1 array" if self.num == 1 else f"{self.num} arrays"
        lines = Counter(self.where)
        made = ", ".join(f"{line} ({n})" if n > 1 else line for line, n in lines.items())
        return (
            f"device {self.index} was closed with {arrays} of {self.nbytes} bytes still alive"
            f"{f', made at {made}' if made else ''}: drop or free() them before leaving it"
        )

    def warn(self, *, stacklevel: int) -> None:
        """One ``ResourceWarning`` if there are any."""
        if self.num:
            warnings.warn(str(self), ResourceWarning, stacklevel=stacklevel)


class Held:
    """Arrays, streams and pinned results that may outlive their device.

    Noted before the device is closed, and asked about once it is: what only its work had
    held is gone by then.
    """

    def __init__(self, core: Core) -> None:
        core.drain_dropped()
        self._core = core
        self.index = core.backend.index
        self._arrays = [
            (memory, describe(*made._origin)) for memory, _, made, _ in core.memory.live.values()
        ]
        self._lines = [line for line in core.lines if line.is_ordered and line.stream is not None]

    def counts(self) -> Counter[tuple[str, str]]:
        """What is held now, by kind and by the line that made it."""
        core = self._core
        if core.lost is not None or core.left_behind is not None:
            return Counter()  # there is something worse to tell
        lines = [line for line in self._lines if line.stream is not None]
        dropped = core.closed_lines.dropped
        results = (holder for holder in core.pinned.holders() if holder is not None)
        return Counter(
            [
                *(("array", where) for memory, where in self._arrays if memory() is not None),
                *(("stream", line.where) for line in lines if line not in dropped),
                *(("pinned block", describe(*holder)) for holder in results),  # type: ignore[misc]
            ]
        )
