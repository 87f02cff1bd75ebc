"""Random pipelines against plain Python and NumPy."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import streamflow as sf
from streamflow.config import Settings, SimOptions

LOOPS: dict[str, dict[str, Any]] = {
    "asyncio": {"backend": "asyncio"},
    "uvloop": {"backend": "asyncio", "backend_options": {"use_uvloop": True}},
    "trio": {"backend": "trio"},
}


class Broken(Exception):
    """What sources and stages fail with here."""


FAILURES = (Broken, ValueError)  # the latter: batches that are ragged


@dataclass(frozen=True)
class Stage:
    """One stage on the host, as the pipeline has it and in plain Python."""

    verb: str
    number: int
    flag: bool

    def add_to(self, pipeline: sf.Pipeline) -> sf.Pipeline:
        number, flag = self.number, self.flag
        if self.verb == "batch":
            return pipeline.batch(number, drop_last=flag)
        if self.verb == "unbatch":
            return pipeline.unbatch()
        if self.verb == "filter":
            return pipeline.filter(lambda x: self.keeps(x))
        if self.verb == "views":
            return pipeline.map_host(lambda x: x[...], workers=number)
        return pipeline.map_host(lambda x: x + number, workers=2 if flag else 1)

    def keeps(self, x: Any) -> bool:
        return bool(int(x.sum()) % (self.number + 1))

    def plainly(self, items: Iterator[Any]) -> Iterator[Any]:
        if self.verb == "batch":
            error = None
            while error is None:
                group: list[Any] = []
                try:
                    group.extend(islice(items, self.number))
                except FAILURES as failure:
                    error = failure
                if not group or (len(group) < self.number and self.flag):
                    break
                yield np.stack(group)  # which fails where they are ragged
            if error is not None:
                raise error
        elif self.verb == "unbatch":
            for item in items:
                yield from item
        elif self.verb == "filter":
            yield from (item for item in items if self.keeps(item))
        elif self.verb == "views":
            yield from items
        else:
            yield from (item + self.number for item in items)


STAGES = st.lists(
    st.builds(
        Stage,
        st.sampled_from(["batch", "unbatch", "filter", "views", "add"]),
        st.integers(1, 3),
        st.booleans(),
    ),
    max_size=3,
)


def items_of(num: int, size: int, fails: bool) -> Iterator[Any]:
    for number in range(num):
        yield np.full((2, size), number, np.int64) + np.arange(2)[:, None]
    if fails:
        raise Broken("source")


def refilled(num: int, size: int, fails: bool) -> Iterator[Any]:
    buffer = np.zeros((2, size), np.int64)
    for item in items_of(num, size, fails):
        buffer[:] = item
        yield buffer


async def awaited(num: int, size: int, fails: bool) -> Any:
    for item in refilled(num, size, fails):
        await anyio.lowlevel.checkpoint()
        yield item


def depth_of(stages: list[Stage]) -> bool:
    """Whether every unbatch has something to take apart."""
    ndim = 2
    for stage in stages:
        ndim += (stage.verb == "batch") - (stage.verb == "unbatch")
        if ndim < 1:
            return False
    return True


def double(dev: sf.Device, x: sf.DeviceArray) -> sf.DeviceArray:
    dev.call(lambda stream, a: np.multiply(a, 2, out=a), x)
    return x


def moved(dev: sf.Device, x: sf.DeviceArray) -> sf.DeviceArray:
    y = dev.empty(x.shape, x.dtype)
    dev.copy(y, x)
    return y


def collected(items: Iterator[Any]) -> tuple[list[Any], bool]:
    """The items as lists, and whether the iteration failed."""
    seen: list[Any] = []
    try:
        seen.extend(item.tolist() for item in items)
    except FAILURES:
        return seen, True
    return seen, False


@pytest.mark.parametrize("loop", LOOPS)
@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(
    before=STAGES,
    after=STAGES,
    maps=st.lists(st.sampled_from([double, moved]), max_size=3),
    source=st.sampled_from(["list", "function", "refilled", "async"]),
    num=st.integers(0, 7),
    size=st.sampled_from([1, 3, 9000]),
    fails=st.booleans(),
    depth=st.integers(1, 4),
    ordered=st.booleans(),
    on_device=st.booleans(),
    leave_at=st.none() | st.integers(0, 5),
    seed=st.integers(0, 3),
)
def test_a_pipeline_does_what_plain_python_does(
    loop: str,
    before: list[Stage],
    after: list[Stage],
    maps: list[Callable[..., Any]],
    source: str,
    num: int,
    size: int,
    fails: bool,
    depth: int,
    ordered: bool,
    on_device: bool,
    leave_at: int | None,
    seed: int,
) -> None:
    if on_device:
        after = []
    if not depth_of(before + after):
        return
    fails = fails and source != "list"
    plain = items_of(num, size, fails)
    for stage in before:
        plain = stage.plainly(plain)
    factor = 2 ** maps.count(double)
    plain = (item * factor for item in plain)
    for stage in after:
        plain = stage.plainly(plain)
    wanted, is_broken = collected(plain)
    event(f"{len(wanted)} items, {source}")

    async def main() -> None:
        given: Any = {
            "list": lambda: list(items_of(num, size, False)),
            "function": lambda: lambda: items_of(num, size, fails),
            "refilled": lambda: lambda: refilled(num, size, fails),
            "async": lambda: lambda: awaited(num, size, fails),
        }[source]()
        simulated = Settings(sim=SimOptions(clock="virtual", seed=seed))
        async with sf.Device(0, backend="sim", settings=simulated) as dev:
            pipeline = dev.pipeline(given, depth=depth, ordered=ordered)
            for stage in before:
                pipeline = stage.add_to(pipeline)
            for fn in maps:
                pipeline = pipeline.map(fn)
            pipeline = pipeline.on_device() if on_device else pipeline.to_host()
            for stage in after:
                pipeline = stage.add_to(pipeline)
            seen, was_broken = [], False
            try:
                async with pipeline as items:
                    async for item in items:
                        seen.append((await dev.get(item) if on_device else item).tolist())
                        del item
                        if len(seen) == leave_at:
                            break
            except FAILURES:
                was_broken = True
            is_left = leave_at is not None and 0 < leave_at <= len(wanted)
            regroups = any(stage.verb == "batch" for stage in before + after)
            if ordered:
                assert seen == (wanted[:leave_at] if is_left else wanted)
            elif not regroups and not is_left:
                assert sorted(map(str, seen)) == sorted(map(str, wanted))
            assert was_broken == (is_broken and not is_left)
            gc.collect()
            await dev.synchronize()
            assert dev.memory.used_nbytes == 0
            assert dev.pinned.stats().num_live == 0

    anyio.run(main, **LOOPS[loop])
