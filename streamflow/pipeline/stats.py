"""Where a pipeline's time goes: the time each stage worked, from when its items ended it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streamflow.runtime.units import spell_bytes, spell_seconds

__all__ = ["Meter", "PipelineStats", "StageStats"]

# Items that a filter drops, or a batch takes up, end no later stage: what is remembered of them
# is bounded by this.
_MOST_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class StageStats:
    """What one stage of a pipeline has done.

    Attributes
    ----------
    name : str
        Unique in its pipeline.
    num_items : int
        Items that have ended this stage.
    nbytes : int
        Their bytes; 0 for a stage that does not count them.
    busy_s : float
        How long the stage worked, in seconds: without the times when it waited for an item.
    share : float
        ``busy_s`` as a part of the whole run.
    """

    name: str
    num_items: int
    nbytes: int
    busy_s: float
    share: float


@dataclass(frozen=True, slots=True)
class PipelineStats:
    """Where the time of a run of a pipeline went; ``pipeline.stats()`` makes one.

    A stage is busy while an item is in it whose turn has come. Nothing on the device is timed
    for this: the host notes when it *sees* an item end a stage, which is late by up to 1.5 % of
    how long it has waited (at least 50 us), so stages far shorter than that are told apart badly.

    Attributes
    ----------
    stages : tuple of StageStats
        In the order that an item goes through them.
    elapsed_s : float
        From the first pull to the end of the run, or until the last thing that was seen.
    """

    stages: tuple[StageStats, ...]
    elapsed_s: float

    @property
    def bottleneck(self) -> str | None:
        """The name of the stage that was busy longest; None before any item has ended one."""
        busiest = max(self.stages, key=lambda stage: stage.busy_s, default=None)
        return busiest.name if busiest is not None and busiest.busy_s > 0 else None

    @property
    def ideal_s(self) -> float:
        """The bottleneck's busy time: with these stages no run is shorter."""
        return max((stage.busy_s for stage in self.stages), default=0.0)

    @property
    def overlap(self) -> float:
        """``ideal_s / elapsed_s``: 1.0 where the other stages cost no time of their own."""
        return self.ideal_s / self.elapsed_s if self.elapsed_s else 0.0

    def __str__(self) -> str:
        width = max([len("stage"), *(len(stage.name) for stage in self.stages)])
        lines = [f"{'stage':<{width}}  {'items':>8}  {'bytes':>8}  {'busy':>8}  of run"]
        for stage in self.stages:
            nbytes = spell_bytes(stage.nbytes) if stage.nbytes else ""
            lines.append(
                f"{stage.name:<{width}}  {stage.num_items:>8,}  {nbytes:>8}  "
                f"{spell_seconds(stage.busy_s):>8}  {stage.share:6.0%}"
            )
        lines.append(
            f"elapsed {spell_seconds(self.elapsed_s)}, ideal {spell_seconds(self.ideal_s)} "
            f"({self.overlap:.0%} of elapsed), bottleneck: {self.bottleneck or 'none yet'}"
        )
        return "\n".join(lines)


class _Stage:
    __slots__ = ("busy_s", "early", "last_s", "nbytes", "num_items", "waiting")

    def __init__(self) -> None:
        self.busy_s = 0.0
        self.last_s = 0.0  # when an item was last seen to end this stage
        self.num_items = 0
        self.nbytes = 0
        self.waiting: dict[int, float] = {}  # items in here, and since when
        self.early: dict[int, float] = {}  # items seen to leave before they were seen to come

    def enter(self, item: int, time_s: float) -> None:
        if self.early.pop(item, None) is None:
            _remember(self.waiting, item, time_s)

    def leave(self, item: int, time_s: float) -> None:
        since_s = self.waiting.pop(item, None)
        if since_s is None:
            _remember(self.early, item, time_s)
        else:
            self.busy_s += time_s - max(since_s, self.last_s)
        self.last_s = time_s


def _remember(items: dict[int, float], item: int, time_s: float) -> None:
    items[item] = time_s
    if len(items) > _MOST_REMEMBERED:
        del items[next(iter(items))]


class Meter:
    """Takes notes of one run: which item was seen to end which stage, and when.

    An item's time in a stage begins when it has ended the stage before, but not before the stage
    was done with the item that ended it last: so waiting in line counts for nobody. Only sums
    are kept. Where one look at the device shows several ends at once, the first of the stages
    is charged with the time.

    All times are of one clock, 0 or later, and none is earlier than one noted before.

    Parameters
    ----------
    names : sequence of str
        Of the stages, in order; the first one pulls from the source.
    """

    __slots__ = ("_begun_s", "_last_s", "_names", "_stages")

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._stages = tuple(_Stage() for _ in self._names)
        self._begun_s: float | None = None
        self._last_s = 0.0

    def begun(self, time_s: float) -> None:
        """Note that the run begins."""
        self._begun_s = self._last_s = time_s

    def came(self, stage: int, item: int, time_s: float) -> None:
        """Note that ``stage`` may begin with ``item`` now.

        For the first stage: that the source may be asked for it, since a slot is free and the
        source's one buffer has been read; else the source would be charged with that wait. For
        a later one: only if the stage before didn't know the item by this number. The last
        call counts.
        """
        self._stages[stage].enter(item, time_s)

    def ended(self, stage: int, item: int, time_s: float, nbytes: int = 0) -> None:
        """Note that ``item`` was seen to end a stage, and so to come to the next one.

        Parameters
        ----------
        stage : int
            Its place among the names.
        item : int
            The number by which it came.
        time_s : float
        nbytes : int
            To add to the stage's bytes.
        """
        found = self._stages[stage]
        found.leave(item, time_s)
        found.num_items += 1
        found.nbytes += nbytes
        self._last_s = time_s
        if stage + 1 < len(self._stages):
            self._stages[stage + 1].enter(item, time_s)

    def finished(self, time_s: float) -> None:
        """Note the end of the run."""
        self._last_s = time_s

    def stats(self) -> PipelineStats:
        """What was noted until now."""
        elapsed_s = 0.0 if self._begun_s is None else self._last_s - self._begun_s
        return PipelineStats(
            stages=tuple(
                StageStats(
                    name=name,
                    num_items=stage.num_items,
                    nbytes=stage.nbytes,
                    busy_s=stage.busy_s,
                    share=stage.busy_s / elapsed_s if elapsed_s else 0.0,
                )
                for name, stage in zip(self._names, self._stages, strict=True)
            ),
            elapsed_s=elapsed_s,
        )
