"""One trace of several devices and processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from streamflow.trace.model import Contents, TracedArray, TracedDevice, TracedEdge, TracedOp

__all__ = ["merge"]

_Clock = tuple[str, bool]
"""A process has the host's clock, and the simulator's."""


def merge(parts: Sequence[Contents]) -> Contents:
    """See :meth:`Trace.merged <streamflow.trace.trace.Trace.merged>`."""
    if not parts:
        raise ValueError("there are no traces to merge")
    for part in parts:
        if not part.devices:
            raise ValueError("a trace without devices can't be merged: nothing tells its clock")
    first_unix_s = min(device.began_unix_s for part in parts for device in part.devices)
    bases: dict[_Clock, TracedDevice] = {}  # the first device of each clock
    numbers: dict[str, int] = {}
    id_shifts: dict[str, int] = {}
    for part in parts:
        for device in part.devices:
            clock = _clock_of(device)
            bases[clock] = min(bases.get(clock, device), device, key=_began)
            numbers.setdefault(device.process_key, len(numbers))
    next_id = 0
    for key in numbers:
        mine = [part for part in parts if part.devices[0].process_key == key]
        id_shifts[key] = next_id
        ids = [op.id for part in mine for op in part.ops]
        ids += [array.id for part in mine for array in part.arrays]
        next_id += 1 + max(ids, default=0)
    moved = [_moved(part, bases, numbers, id_shifts, first_unix_s) for part in parts]
    ops = sorted((op for part in moved for op in part.ops), key=lambda op: op.submitted_s)
    known_ids = {op.id for op in ops}
    if len(known_ids) < len(ops):
        raise ValueError("two of the traces hold the same op: they overlap")
    arrays: dict[int, TracedArray] = {}
    for array in (array for part in moved for array in part.arrays):
        other = arrays.get(array.id)
        if other is not None:
            made = other if array.where is None else array  # on the device that has it
            array = replace(made, nbytes=max(array.nbytes, other.nbytes))
        arrays[array.id] = array
    edges: list[TracedEdge] = []
    loose: list[TracedEdge] = []
    for part in moved:
        edges.extend(part.edges)
        for edge in part.loose:
            (edges if edge.src in known_ids else loose).append(edge)
    return Contents(
        ops=tuple(ops),
        edges=tuple(edges),
        arrays=tuple(arrays[key] for key in sorted(arrays)),
        memory=tuple(
            sorted((each for part in moved for each in part.memory), key=lambda each: each.time_s)
        ),
        devices=tuple(device for part in moved for device in part.devices),
        loose=tuple(loose),
        num_dropped=sum(part.num_dropped for part in parts),
    )


def _clock_of(device: TracedDevice) -> _Clock:
    return device.process_key, device.is_virtual


def _began(device: TracedDevice) -> float:
    return device.began_unix_s


def _moved(
    part: Contents,
    bases: dict[_Clock, TracedDevice],
    numbers: dict[str, int],
    id_shifts: dict[str, int],
    first_unix_s: float,
) -> Contents:
    """``part`` on the common axis, with the ids of its process."""
    device = min(part.devices, key=_began)  # its times are counted from there
    key = device.process_key
    if any(each.process_key != key for each in part.devices):
        raise ValueError("a trace of several processes can't be merged again: merge its parts")
    base = bases[_clock_of(device)]
    # Within a process the clocks of a kind are one, and know better than the time of day.
    shift_s = (base.began_unix_s - first_unix_s) + (device.began_s - base.began_s)
    shift, process = id_shifts[key], numbers[key]

    def moved_edge(edge: TracedEdge) -> TracedEdge:
        array = None if edge.array is None else edge.array + shift
        return replace(edge, src=edge.src + shift, dst=edge.dst + shift, array=array)

    return Contents(
        ops=tuple(_moved_op(op, shift, shift_s, process) for op in part.ops),
        edges=tuple(map(moved_edge, part.edges)),
        arrays=tuple(replace(each, id=each.id + shift, process=process) for each in part.arrays),
        memory=tuple(
            replace(each, time_s=each.time_s + shift_s, process=process) for each in part.memory
        ),
        devices=tuple(replace(each, process=process) for each in part.devices),
        loose=tuple(map(moved_edge, part.loose)),
    )


def _moved_op(op: TracedOp, shift: int, shift_s: float, process: int) -> TracedOp:
    def moved(time_s: float | None) -> float | None:
        return None if time_s is None else time_s + shift_s

    return replace(
        op,
        id=op.id + shift,
        process=process,
        submitted_s=op.submitted_s + shift_s,
        begun_s=moved(op.begun_s),
        issued_s=moved(op.issued_s),
        start_s=moved(op.start_s),
        end_s=moved(op.end_s),
        seen_s=moved(op.seen_s),
        reads=tuple(each + shift for each in op.reads),
        writes=tuple(each + shift for each in op.writes),
    )
