"""What a program is told when memory runs short: where it is, and what to try next."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from streamflow.backends.origin import describe
from streamflow.errors import OutOfDeviceMemory
from streamflow.memory.resource import DeviceMemoryResource
from streamflow.runtime.op import Op

if TYPE_CHECKING:
    from streamflow.runtime.core import Core

__all__ = ["MemoryReport", "describe_shortage", "largest_of", "memory_report"]

_NUM_TOLD = 5


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """The memory of a device at the moment a request could not be served. Sizes in bytes.

    Attributes
    ----------
    requested_nbytes : int
    free_nbytes : int
        Free on the device, for anybody.
    reserved_nbytes : int
        Taken from the device by the resource that was asked, in use or not.
    largest_hole_nbytes : int
        The largest request that its kept memory and the device could serve now.
    live_nbytes : int
        In arrays of this device.
    holders : tuple of (str, int, int)
        The lines that made most of those: where, bytes, how many arrays.
    pending_nbytes : int
        In frees that the device has not come to.
    pending : tuple of (str, int)
        The ops that they are behind, with the bytes behind each.
    resource : str
    next_step : str
        What to try.
    """

    requested_nbytes: int
    free_nbytes: int
    reserved_nbytes: int
    largest_hole_nbytes: int
    live_nbytes: int
    holders: tuple[tuple[str, int, int], ...]
    pending_nbytes: int
    pending: tuple[tuple[str, int], ...]
    resource: str
    next_step: str

    def __str__(self) -> str:
        head = (
            f"asked {self.resource} for {self.requested_nbytes} bytes: the device has "
            f"{self.free_nbytes} free, {self.reserved_nbytes} are reserved, the largest hole has "
            f"{self.largest_hole_nbytes}, arrays hold {self.live_nbytes}"
        )
        lines = [head]
        for where, nbytes, num in self.holders:
            arrays = "1 array" if num == 1 else f"{num} arrays"
            lines.append(f"  {nbytes} bytes in {arrays} made at {where}")
        for behind, nbytes in self.pending:
            lines.append(f"  {nbytes} bytes are being freed, behind {behind}")
        lines.append(f"  try: {self.next_step}")
        return "\n".join(lines)


def largest_of(core: Core, resource: DeviceMemoryResource | None) -> float:
    """The largest request that ``resource``, or the device's own pool, could ever serve."""
    largest = None if resource is None else resource.largest_nbytes
    if largest is not None:
        return largest
    if resource is not None and resource.is_host_accessible:
        return inf
    return core.backend.properties.total_memory_nbytes


def describe_shortage(
    core: Core,
    nbytes: int,
    resource: DeviceMemoryResource | None,
    cause: BaseException | None,
    note: str = "",
    *,
    has_waited: bool = False,
) -> OutOfDeviceMemory:
    """The error for a request that nothing could serve."""
    report = memory_report(core, nbytes, resource, has_waited=has_waited)
    if resource is not None and cause is not None:
        note = f"the resource said: {cause}"
    return OutOfDeviceMemory(f"{report}\n  {note}" if note else str(report), report=report)


def memory_report(
    core: Core, nbytes: int, resource: DeviceMemoryResource | None, *, has_waited: bool = False
) -> MemoryReport:
    """What there is now, for a request of ``nbytes``, which may have waited in vain."""
    free = core.backend.memory_info()[0]
    if resource is None:
        info = core.backend.pool_info(core.memory.pool)
        reserved, kept = info.reserved_nbytes, info.reserved_nbytes - info.used_nbytes
        hole = free + kept  # the driver maps what is free together
        name = "the device's pool"
    else:
        known: Any = resource  # of those that sub-allocate
        live = getattr(known, "live_nbytes", 0)
        reserved = getattr(known, "reserved_nbytes", live)
        hole = max(getattr(known, "largest_free_nbytes", 0), free)
        name = repr(resource)
    by_line: Counter[tuple[Any, int]] = Counter()
    arrays: Counter[tuple[Any, int]] = Counter()
    for _, size, made, _ in core.memory.live.values():
        by_line[made._origin] += size
        arrays[made._origin] += 1
    holders = tuple(
        (describe(*origin), size, arrays[origin]) for origin, size in by_line.most_common(_NUM_TOLD)
    )
    behind = _pending(core)
    pending = sum(behind.values())
    return MemoryReport(
        nbytes,
        free,
        reserved,
        hole,
        by_line.total(),
        holders,
        pending,
        tuple(behind.most_common(_NUM_TOLD)),
        name,
        _next_step(core, nbytes, resource, hole, pending, holders, has_waited),
    )


def _pending(core: Core) -> Counter[str]:
    """Bytes in frees that have not run, by the op that each is behind."""
    behind: Counter[str] = Counter()
    for line in core.lines:
        ahead: Op[Any] | None = None
        for ticket in line.inflight:
            op: Op[Any] | None = ticket.op
            if op is None:
                continue
            if op.kind == "free":
                behind[_name(_first_waited(op) or ahead or op)] += op._freed_nbytes
            elif ahead is None:
                ahead = op
    for op in core.pending_ops():
        if op.kind == "free":
            behind[_name(op)] += op._freed_nbytes
    return behind


def _first_waited(op: Op[Any]) -> Op[Any] | None:
    """The oldest unfinished op of another stream that ``op`` comes after."""
    for line, position in op.ticket.seen.items():
        for ticket in line.inflight:
            if ticket.position > position:
                break
            if ticket.op is not None:
                other: Op[Any] = ticket.op
                return other
    return None


def _name(op: Op[Any]) -> str:
    return f"{op.name} on {op.stream or 'the host'} ({op.where})"


def _next_step(
    core: Core,
    nbytes: int,
    resource: DeviceMemoryResource | None,
    hole: int,
    pending: int,
    holders: tuple[tuple[str, int, int], ...],
    has_waited: bool,
) -> str:
    if resource is not None and nbytes > largest_of(core, resource):
        return f"a smaller array, or several: {resource!r} never has that much at a time"
    if nbytes > largest_of(core, resource):
        return "a smaller array, or several: the whole device has less than that"
    if pending or core.space.is_releasing:
        if has_waited:
            return "a longer timeout: frees are pending"
        return "`await dev.alloc(...)`, which waits for the frees that are pending"
    if resource is not None and hole >= nbytes:
        return f"another resource, or a larger limit for {resource!r}: the device itself has room"
    if holders:
        step = f"dropping arrays, first of all those made at {holders[0][0]}"
        if has_waited:
            return step
        return f"{step}, or `await dev.alloc(...)`, which waits until somebody does"
    if core.space.is_shared:
        return "freeing blocks of resources, or arrays of this GPU's other devices in this process"
    return "closing what else uses this GPU: no array of this device is alive"
