"""The ordering of a copy or fill, put together before it is known how it will run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from streamflow.runtime.op import Op
from streamflow.runtime.parked import After, Parked, PickLine, Run, Start
from streamflow.scheduler.hazards import Region
from streamflow.scheduler.timeline import Timeline

if TYPE_CHECKING:
    from streamflow.runtime.core import Core

__all__ = ["Submission"]


class Submission:
    """The ordering of an op, fixed before it is known how it will run."""

    __slots__ = ("after", "is_overwrite", "line", "nbytes", "op", "reads", "writes")

    def __init__(
        self,
        op: Op[Any],
        line: Timeline | PickLine,
        reads: Sequence[Region],
        writes: Sequence[Region],
        after: After,
        is_overwrite: bool,
        nbytes: int = 0,
    ) -> None:
        self.op = op
        self.line = line
        self.reads = reads
        self.writes = writes
        self.after = after
        self.is_overwrite = is_overwrite
        self.nbytes = nbytes

    def __call__(
        self, core: Core, run: Run, num_needs: int = 0, start: Start | None = None
    ) -> Parked | None:
        return core.parking.submit(
            self.op,
            run,
            line=self.line,
            reads=self.reads,
            writes=self.writes,
            after=self.after,
            is_overwrite=self.is_overwrite,
            num_needs=num_needs,
            start=start,
            nbytes=self.nbytes,
        )
