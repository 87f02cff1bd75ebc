"""Ops in flight whose data come from another device, which may be lost meanwhile (R2, R9).

An op that is submitted waits on the device for what it needs; if the device that makes it
is lost, the wait ends all the same, and the op runs on what was never written. Within one
device everything in flight is lost together; across devices somebody has to remember.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from streamflow.errors import DeviceLost, UpstreamFailed
from streamflow.scheduler.timeline import Ticket

if TYPE_CHECKING:
    from streamflow.runtime.core import Core
    from streamflow.runtime.op import Op

__all__ = ["Abroad"]


class Abroad:
    """What ops of one device need of others. Empty in programs with one device."""

    __slots__ = ("_core", "_needs")

    def __init__(self, core: Core) -> None:
        self._core = core
        self._needs: dict[Op[Any], list[Ticket]] = {}

    def __bool__(self) -> bool:
        return bool(self._needs)

    def submitting(self, op: Op[Any], sources: Iterable[Ticket]) -> None:
        """``op`` goes to its stream; its data come from ``sources``."""
        core = self._core
        needs: list[Ticket] = []
        for source in sources:
            if not source.position or source.is_passed:
                continue
            if source.timeline.owner is not core:
                needs.append(source)
            elif self._needs and source.op is not None:
                needs += self._needs.get(source.op, ())
        if needs:
            op.rare()  # so that its end is told
            self._needs[op] = list(dict.fromkeys(needs))
            core.choose_ways()

    def ended(self, op: Op[Any]) -> None:
        """``op`` is in its final state."""
        if self._needs.pop(op, None) is not None and not self._needs:
            self._core.choose_ways()

    def fail(self, lost: DeviceLost) -> None:
        """A device of this loop was lost: what needs work of it has failed."""
        for op, needs in list(self._needs.items()):
            for need in needs:
                if need.failure is lost and op in self._needs:
                    name = need.op.name if need.op is not None else f"op #{need.seq}"
                    text = f"{op.name} needs the result of {name}, which failed: {lost}"
                    error = UpstreamFailed(text)
                    error.__cause__ = lost
                    self._core.fail(op, error)
