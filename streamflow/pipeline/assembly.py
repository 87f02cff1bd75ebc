"""The stages of a pipeline as it was built, and how one run of it is put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from streamflow.pipeline.flow import Node
from streamflow.pipeline.on_device import OnDevice, Step
from streamflow.pipeline.progress import Progress
from streamflow.pipeline.sources import Opened, Source
from streamflow.pipeline.stages import Batch, Clock, Filter, Map, Pulls, Unbatch, Zip
from streamflow.pipeline.stats import Meter
from streamflow.pipeline.work import Work

if TYPE_CHECKING:
    from streamflow.runtime.core import Core
    from streamflow.runtime.submit import Submit

__all__ = ["MeterClock", "Options", "Part", "Stage", "assemble"]


class Part(Enum):
    """Where the stages named so far have brought the items."""

    BEFORE = "before the device"
    DEVICE = "on the device"
    AFTER = "back on the host"
    LOADER = "handed over on the device"


@dataclass(frozen=True, slots=True)
class Stage:
    """One call of the builder.

    Attributes
    ----------
    verb : str
    part : Part
        Where its items are.
    name : str
        For stats and errors, unique in its pipeline.
    """

    verb: str
    part: Part
    name: str
    function: Callable[..., Any] | None = None
    count: int = 0
    drop_last: bool = False
    other: Source | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """What :meth:`Device.pipeline` was told, checked."""

    depth: int
    limit_nbytes: int | None
    progress: Progress
    ordered: bool


def assemble(
    dev: Submit,
    work: Work,
    meter: Meter,
    stages: Sequence[Stage],
    sources: Sequence[tuple[Source, Opened]],
    options: Options,
    *,
    is_loader: bool,
) -> Node:
    """The stages of one run, each asking the one before."""
    core, number = dev._core, 0

    def clock() -> MeterClock:
        nonlocal number
        number += 1
        return MeterClock(core, meter, number - 1)

    before = [stage for stage in stages if stage.part is Part.BEFORE]
    copies = any(stage.verb not in ("filter", "zip") for stage in before)
    left = list(sources)

    def pulls(clock: MeterClock | _Unnoted, copies: bool = copies) -> Pulls:
        source, opening = left.pop(0)
        lends = not source.is_owner
        return Pulls(work, opening, clock, lends=lends, copies=lends and copies)

    node: Node = pulls(clock())
    for stage in before:
        other = pulls(_Unnoted()) if stage.other is not None else None
        node = _host_node(work, node, stage, clock(), other, options.ordered)
    put_clock = clock()
    steps = [
        Step(stage.function, stage.name, clock())
        for stage in stages
        if stage.part is Part.DEVICE and stage.function is not None
    ]
    node = OnDevice(
        dev,
        work,
        node,
        steps,
        put_clock,
        _Unnoted() if is_loader else clock(),
        depth=options.depth,
        limit_nbytes=options.limit_nbytes,
        ordered=options.ordered,
        is_loader=is_loader,
    )
    for stage in stages:
        if stage.part is Part.AFTER:  # nothing tells when such an item has been read
            other = pulls(_Unnoted(), copies=True) if stage.other is not None else None
            node = _host_node(work, node, stage, clock(), other, options.ordered)
    return node


def _host_node(
    work: Work, node: Node, stage: Stage, clock: Clock, other: Node | None, ordered: bool
) -> Node:
    function = stage.function
    if other is not None:
        return Zip(node, other, clock)
    if stage.verb == "unbatch":
        return Unbatch(node, clock, ordered=ordered)
    if stage.verb == "batch":
        return Batch(work, node, clock, stage.count, drop_last=stage.drop_last, ordered=ordered)
    assert function is not None
    if stage.verb == "filter":
        return Filter(work, node, clock, function, ordered=ordered, name=stage.name)
    return Map(work, node, clock, function, workers=stage.count, name=stage.name)


class MeterClock:
    """Notes of one stage for the meter, by the device's clock."""

    __slots__ = ("_core", "_meter", "_stage")

    def __init__(self, core: Core, meter: Meter, stage: int) -> None:
        self._core = core
        self._meter = meter
        self._stage = stage

    def came(self, number: int) -> None:
        self._meter.came(self._stage, number, self._core.clock_s())

    def ended(self, number: int, nbytes: int = 0) -> None:
        self._meter.ended(self._stage, number, self._core.clock_s(), nbytes)


class _Unnoted:
    """For what is no stage of its own."""

    __slots__ = ()

    def came(self, number: int) -> None:
        """Nobody asks."""

    def ended(self, number: int, nbytes: int = 0) -> None:
        """Nobody asks."""
