"""``dev.pipeline``: from a source through the device to the consumer, all of it overlapping."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from inspect import iscoroutine
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any

from streamflow.backends.origin import user_instruction
from streamflow.pipeline.assembly import MeterClock, Options, Part, Stage, assemble
from streamflow.pipeline.progress import Progress, check_progress, open_progress
from streamflow.pipeline.pump import Pump
from streamflow.pipeline.sources import Source, SourceLike, checked_count
from streamflow.pipeline.stats import Meter, PipelineStats
from streamflow.pipeline.work import Work
from streamflow.runtime.host import is_async
from streamflow.scheduler.budget import parse_nbytes

if TYPE_CHECKING:
    from streamflow.runtime.core import Core
    from streamflow.runtime.submit import Submit

__all__ = ["Items", "Pipeline", "make_pipeline"]

HostFunction = Callable[[Any], Any]
DeviceFunction = Callable[[Any, Any], Any]


class Pipeline:
    """A source and what is done to its items. Made by :meth:`Device.pipeline`.

    Every method that adds a stage returns a new pipeline, and leaves this one as it is. Stages
    on the host before the first ``map`` work on what the source yields, those after ``to_host``
    on results. ``async for`` begins a run; where the source can be gone through again, so can the
    pipeline, once per epoch say.

    An *item* is an ndarray, or a tuple, list, dict, dataclass or NamedTuple with some, nested at
    will. Other values in one go along untouched.
    """

    def __init__(
        self, dev: Submit, source: Source, options: Options, origin: tuple[CodeType, int]
    ) -> None:
        self._dev = dev
        self._source = source
        self._options = options
        self._origin = origin
        self._stages: tuple[Stage, ...] = ()
        self._part = Part.BEFORE
        self._meter: Meter | None = None
        self._entered: list[tuple[object, Items]] = []

    # -- building --------------------------------------------------------------------------

    def map(self, fn: DeviceFunction, *, name: str | None = None) -> Pipeline:
        """Have ``fn(dev, item)`` work on the device.

        Parameters
        ----------
        fn : callable
            Called on the loop with the item's arrays as device arrays; submits what it likes
            and returns an item of device arrays. It must not wait.
        name : str, optional
            For stats and errors; default: the function's own.

        Ordering
        --------
        Called as soon as the item's copy to the device is submitted, so its work comes after
        that, and overlaps with the copies of other items. A ``with stream:`` around the pipeline
        is not seen by it: it runs on lanes, unless it names streams itself.

        Raises
        ------
        TypeError
            Not a function, or a coroutine function.
        ValueError
            After ``to_host`` or ``on_device``.
        """
        _check_function(fn, "map", "fn(dev, item)")
        if is_async(fn):
            raise TypeError("map takes a plain function: it submits, and waits for nothing")
        self._check_part("map", Part.BEFORE, Part.DEVICE)
        name = self._unique(name or _name_of(fn))
        return self._with(Stage("map", Part.DEVICE, name, fn), Part.DEVICE)

    def map_host(self, fn: HostFunction, *, workers: int = 1, name: str | None = None) -> Pipeline:
        """Have ``fn(item)`` work on ndarrays, on worker threads.

        Parameters
        ----------
        fn : callable
            Called on a worker thread; a coroutine function on the loop. After ``to_host`` it may
            return anything, before the device an item.
        workers : int
            Calls of it at a time; at most ``settings.host_workers`` are of all.
        name : str, optional
            For stats and errors; default: the function's own.

        Raises
        ------
        TypeError, ValueError
            Not a function, not a number of workers, or a stage that is on the device.
        """
        _check_function(fn, "map_host", "fn(item)")
        workers = checked_count(workers, "workers")
        return self._on_host("map_host", name or _name_of(fn), function=fn, count=workers)

    def batch(self, n: int, *, drop_last: bool = False) -> Pipeline:
        """Make one item of ``n``: arrays stacked along a new first axis, other values as lists.

        Parameters
        ----------
        n : int
        drop_last : bool
            Leave out a last batch that is not full.

        Raises
        ------
        TypeError, ValueError
            Not a number of items, or a stage that is on the device. From the run: the items
            differ in their parts, shapes or dtypes.
        """
        return self._on_host(
            "batch", "batch", count=checked_count(n, "n"), drop_last=bool(drop_last)
        )

    def unbatch(self) -> Pipeline:
        """Make an item of each row along the first axis of an item's arrays.

        Raises
        ------
        ValueError
            A stage that is on the device. From the run: first axes that differ.
        """
        return self._on_host("unbatch", "unbatch")

    def filter(self, fn: HostFunction) -> Pipeline:
        """Keep the items that ``fn(item)`` is true of.

        Parameters
        ----------
        fn : callable
            Called on a worker thread.

        Raises
        ------
        TypeError, ValueError
            Not a function, or a stage that is on the device.
        """
        _check_function(fn, "filter", "fn(item)")
        if is_async(fn):
            raise TypeError("filter takes a plain function: it runs on a worker thread")
        return self._on_host("filter", _name_of(fn), function=fn)

    def zip(self, other: SourceLike) -> Pipeline:
        """Make pairs of items and those of another source; ends with the shorter one.

        Pairs are asked for ahead, so some items more of the longer one may have been pulled.

        Parameters
        ----------
        other : iterable, async iterable or callable
            As :meth:`Device.pipeline` takes; ``source_owns`` speaks of both.

        Raises
        ------
        TypeError, ValueError
            No source, or a stage that is on the device.
        """
        found = Source(other, batch_size=None, is_owner=self._source.is_declared_owner)
        return self._on_host("zip", "zip", other=found)

    def to_host(self) -> Pipeline:
        """Copy what the last ``map`` returned to the host: the end, unless another is named.

        Raises
        ------
        ValueError
            The end was named already.
        """
        self._check_part("to_host", Part.BEFORE, Part.DEVICE)
        return self._with(None, Part.AFTER)

    def on_device(self) -> Pipeline:
        """Hand the items over as device arrays: for a training loop that is fed.

        An item's slot returns once the consumer has come back for the next one, or has left,
        and all that was submitted on its arrays until then has ended (rule R6).

        Raises
        ------
        ValueError
            The end was named already.
        """
        self._check_part("on_device", Part.BEFORE, Part.DEVICE)
        return self._with(None, Part.LOADER)

    def _on_host(self, verb: str, name: str, **known: Any) -> Pipeline:
        self._check_part(verb, Part.BEFORE, Part.AFTER)
        return self._with(Stage(verb, self._part, self._unique(name), **known), self._part)

    def _with(self, stage: Stage | None, part: Part) -> Pipeline:
        made = Pipeline(self._dev, self._source, self._options, self._origin)
        made._stages = self._stages if stage is None else (*self._stages, stage)
        made._part = part
        return made

    def _check_part(self, verb: str, *parts: Part) -> None:
        if self._part in parts:
            return
        remedy = {
            Part.DEVICE: "call .to_host() first, or put it before the first map",
            Part.AFTER: "put it before .to_host()",
            Part.LOADER: "put it before .on_device(), which is the end",
        }[self._part]
        raise ValueError(f"{verb} can't come where items are {self._part.value}: {remedy}")

    def _unique(self, name: str) -> str:
        taken = {"source", "put", "get", "consumer", *(stage.name for stage in self._stages)}
        found, number = name, 1
        while found in taken:
            number += 1
            found = f"{name} {number}"
        return found

    # -- running ---------------------------------------------------------------------------

    def __aiter__(self) -> Items:
        """Begin a run.

        Raises
        ------
        RuntimeError
            The source can be gone through once, and was.
        WrongThread, Closed, DeviceLost
            The device is not this loop's, or takes no work.
        """
        core = self._dev._core
        core.check_open()
        opened = [source.begin() for source in self._sources()]
        bar = open_progress(self._options.progress, self._total())
        work = Work(core, self._origin)
        names = self._names()
        meter = self._meter = Meter(names)
        options = self._options
        sources = list(zip(self._sources(), opened, strict=True))
        is_loader = self._part is Part.LOADER
        node = assemble(self._dev, work, meter, self._stages, sources, options, is_loader=is_loader)
        pump = Pump(
            core,
            work,
            node,
            opened,
            meter,
            MeterClock(core, meter, len(names) - 1),
            bar,
            depth=options.depth,
            ordered=options.ordered,
        )
        return Items(pump, core)

    async def __aenter__(self) -> Items:
        """Begin a run that ends with the block, also where the body leaves early."""
        items = self.__aiter__()
        self._entered.append((self._dev._core.shell.task(), items))
        return items

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        entered, task = self._entered, self._dev._core.shell.task()
        mine = [place for place, (owner, _) in enumerate(entered) if owner is task]
        _, items = entered.pop(mine[-1] if mine else -1)
        await items.aclose()

    async def run(self, sink: Callable[[Any], Any] | None = None) -> int:
        """Go through all items.

        Parameters
        ----------
        sink : callable, optional
            Called with each one, on the loop; a coroutine that it returns is awaited.

        Returns
        -------
        int
            How many there were.

        Raises
        ------
        TypeError
            ``sink`` is no function.
        Exception
            What the source, a stage, the device or the sink has raised.
        """
        if sink is not None:
            _check_function(sink, "run", "sink(item)")
        num = 0
        async with self as items:
            async for item in items:
                if sink is not None:
                    result = sink(item)
                    if iscoroutine(result):
                        await result
                    del result
                del item  # its memory is for the next one
                num += 1
        return num

    def stats(self) -> PipelineStats:
        """Where the time of the run that began last goes, so far.

        Raises
        ------
        RuntimeError
            None has begun.
        """
        if self._meter is None:
            raise RuntimeError("this pipeline has not run yet")
        return self._meter.stats()

    def _names(self) -> list[str]:
        """The stages in the order that an item goes through them."""
        parts = {part: [s.name for s in self._stages if s.part is part] for part in Part}
        ends = [] if self._part is Part.LOADER else ["get", *parts[Part.AFTER]]
        return ["source", *parts[Part.BEFORE], "put", *parts[Part.DEVICE], *ends, "consumer"]

    def _total(self) -> int | None:
        """How many items will come out, where that is known."""
        total = self._source.total
        for stage in self._stages:
            if total is None:
                break
            if stage.verb in ("filter", "unbatch"):
                total = None
            elif stage.verb == "batch":
                total = total // stage.count if stage.drop_last else math.ceil(total / stage.count)
            elif stage.other is not None:
                other = stage.other.total
                total = None if other is None else min(total, other)
        return total

    def _sources(self) -> list[Source]:
        return [self._source, *(stage.other for stage in self._stages if stage.other is not None)]

    def __repr__(self) -> str:
        return f"<Pipeline {' > '.join(self._names())}>"


class Items:
    """One run of a pipeline: the items, in an ``async for``.

    Left early, also by a ``break``, it pulls nothing more, drops what is parked, and has the
    source's ``finally`` run. ``async with`` (or :meth:`aclose`) waits for that.
    """

    def __init__(self, pump: Pump, core: Core) -> None:
        self._pump = pump
        self._core = core

    def __aiter__(self) -> Items:
        return self

    async def __anext__(self) -> Any:
        """The next item. A cancellation while it waits loses none: ask again, or leave.

        Raises
        ------
        StopAsyncIteration
            There is none.
        Exception
            What failed at this place; the good items before it have come. The run is over then.
        """
        try:
            return await self._pump.next_item()
        finally:
            del self  # what is raised has this frame, and would keep the run from ending

    async def aclose(self) -> None:
        """Leave: returns once the work in flight has ended and the source was closed."""
        await self._pump.close()

    def __del__(self) -> None:
        # No driver call from here (R12), and any thread may be the one that collects.
        pump = self._pump
        if not pump.is_over:
            self._core.shell.call_soon_threadsafe(pump.begin_stop)


def make_pipeline(
    dev: Submit,
    source: SourceLike,
    *,
    depth: int | None,
    limit: int | str | None,
    progress: Progress,
    ordered: bool,
    source_owns: bool,
    batch_size: int | None,
) -> Pipeline:
    """What :meth:`Device.pipeline` returns."""
    core = dev._core
    core.check_open()
    check_progress(progress)
    options = Options(
        core.settings.pipeline_depth if depth is None else checked_count(depth, "depth"),
        None if limit is None else parse_nbytes(limit),
        progress,
        bool(ordered),
    )
    found = Source(source, batch_size=batch_size, is_owner=bool(source_owns))
    return Pipeline(dev, found, options, user_instruction())


def _check_function(function: object, verb: str, form: str) -> None:
    if not callable(function):
        raise TypeError(f"{verb} takes a function, called as {form}; found {function!r}")


def _name_of(function: Callable[..., Any]) -> str:
    while isinstance(function, partial):
        function = function.func
    name: str = getattr(function, "__name__", type(function).__name__)
    return name
