"""What a program still holds of a device that it leaves."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamflow.runtime.core import Core

__all__ = ["LiveArrays"]


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
        nbytes = sum(root.stop - root.start for _, root, _ in live)
        where = tuple(made.where for _, _, made in live)
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
