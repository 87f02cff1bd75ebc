"""What a run shows: a bar that is closed on every way out, and the times of its stages."""

from __future__ import annotations

import gc
import io
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import anyio
import numpy as np
import pytest
from pipelines import add_one_to, batches_of
from support import turns, until, virtual

import streamflow as sf

pytest.importorskip("tqdm", reason="the extra 'progress' is not installed")
Run = Callable[[Callable[[], Awaitable[Any]]], Any]
NBYTES = 32  # of one of the batches


class Bars:
    """Stands in for tqdm, and remembers what it has made."""

    def __init__(self) -> None:
        self.made: list[Bar] = []

    def __call__(self, **arguments: Any) -> Bar:
        self.made.append(Bar(arguments))
        return self.made[-1]

    @property
    def only(self) -> Bar:
        (bar,) = self.made
        return bar


class Bar:
    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self.num = self.num_closed = 0
        self.postfix = ""

    def update(self, n: int = 1) -> None:
        assert not self.num_closed
        self.num += n

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        self.postfix = text

    def close(self) -> None:
        self.num_closed += 1


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> Bars:
    bars = Bars()
    monkeypatch.setattr("tqdm.auto.tqdm", bars)
    return bars


def test_items_and_bytes_both_ways_are_counted(run: Run, bars: Bars) -> None:
    async def main() -> None:
        async with virtual() as dev:
            await dev.pipeline(batches_of(5), progress=True).map(add_one_to).run()

    run(main)
    assert bars.only.arguments == {"total": 5, "unit": "item"}
    assert bars.only.num == 5
    assert bars.only.postfix == f"{2 * 5 * NBYTES} B"
    assert bars.only.num_closed == 1


def test_the_bytes_of_an_item_are_shared_among_its_rows(run: Run, bars: Bars) -> None:
    async def main() -> None:
        async with virtual() as dev:
            source = [np.zeros((4, 8), np.float32)] * 5
            await dev.pipeline(source, progress=True).to_host().unbatch().run()

    run(main)
    assert bars.only.num == 20
    assert bars.only.postfix == "1.25 KiB"


@pytest.mark.parametrize(
    ("build", "total"),
    [
        (lambda p: p.batch(2), 3),
        (lambda p: p.batch(2, drop_last=True), 2),
        (lambda p: p.zip(batches_of(4)), 4),
        (lambda p: p.filter(lambda x: x[0] > 2), None),
        (lambda p: p.unbatch(), None),
    ],
    ids=["batch", "drop_last", "zip", "filter", "unbatch"],
)
def test_the_total_is_that_of_what_comes_out(
    run: Run, bars: Bars, build: Callable[[Any], Any], total: int | None
) -> None:
    async def main() -> int:
        async with virtual() as dev:
            return await build(dev.pipeline(batches_of(5), progress=True)).run()

    num = run(main)
    assert bars.only.arguments["total"] == total
    assert total in (num, None)
    assert bars.only.num == num


def test_arguments_of_tqdm_are_passed_on(run: Run) -> None:
    shown = io.StringIO()

    async def main() -> None:
        async with virtual() as dev:
            progress = {"file": shown, "desc": "frames", "mininterval": 0}
            await dev.pipeline(batches_of(3), progress=progress).map(add_one_to).run()

    run(main)
    assert "frames: 100%" in shown.getvalue()
    assert "3/3" in shown.getvalue()


def test_each_run_has_a_bar_of_its_own(run: Run, bars: Bars) -> None:
    async def main() -> None:
        async with virtual() as dev:
            pipeline = dev.pipeline(batches_of(3), progress=True)
            await pipeline.run()
            await pipeline.run()

    run(main)
    assert [(bar.num, bar.num_closed) for bar in bars.made] == [(3, 1), (3, 1)]


def test_a_bar_that_is_there_already_goes_on_over_runs(run: Run) -> None:
    bar = Bar({})

    async def main() -> None:
        async with virtual() as dev:
            pipeline = dev.pipeline(batches_of(3), progress=bar)
            await pipeline.run()
            await pipeline.run()

    run(main)
    assert (bar.num, bar.num_closed) == (6, 0)


def failing() -> Iterator[Any]:
    yield np.zeros(8, np.float32)
    raise KeyError("source")


async def break_out(dev: sf.Device) -> None:
    async with dev.pipeline(batches_of(9), progress=True).map(add_one_to) as items:
        async for _ in items:
            break


async def raise_in_the_body(dev: sf.Device) -> None:
    with pytest.raises(KeyError):
        async with dev.pipeline(batches_of(9), progress=True) as items:
            async for _ in items:
                raise KeyError


async def cancel(dev: sf.Device) -> None:
    with anyio.CancelScope() as scope:
        async with dev.pipeline(batches_of(9), progress=True) as items:
            async for _ in items:
                scope.cancel()
                await anyio.lowlevel.checkpoint()
    assert scope.cancelled_caught


async def fail_in_the_source(dev: sf.Device) -> None:
    with pytest.raises(KeyError):
        await dev.pipeline(failing, progress=True).map(add_one_to).run()


async def fail_in_a_stage(dev: sf.Device) -> None:
    def fail(x: Any) -> Any:
        return x[0] if x[0] < 1 else 1 / 0

    with pytest.raises(ZeroDivisionError):
        await dev.pipeline(batches_of(9), progress=True).to_host().map_host(fail).run()


async def just_drop(dev: sf.Device) -> None:
    async for _ in dev.pipeline(batches_of(9), progress=True):
        break
    gc.collect()
    await turns()


@pytest.mark.parametrize(
    "leave",
    [break_out, raise_in_the_body, cancel, fail_in_the_source, fail_in_a_stage, just_drop],
    ids=lambda leave: leave.__name__,
)
def test_the_bar_is_closed_on_every_way_out(
    run: Run, bars: Bars, leave: Callable[[sf.Device], Awaitable[None]]
) -> None:
    async def main() -> None:
        async with virtual() as dev:
            await leave(dev)
            await until(lambda: bars.only.num_closed)
            assert bars.only.num == 1

    run(main)
    assert bars.only.num_closed == 1


def test_what_is_no_bar_is_refused_at_the_call(run: Run) -> None:
    async def main() -> None:
        async with virtual() as dev:
            with pytest.raises(TypeError, match="mapping of tqdm's keyword arguments"):
                dev.pipeline(batches_of(3), progress=5)  # type: ignore[arg-type]

    run(main)


def test_stages_count_what_went_through_them(run: Run) -> None:
    async def main() -> sf.PipelineStats:
        async with virtual() as dev:
            pipeline = (
                dev.pipeline(batches_of(10))
                .filter(lambda x: x[0] != 3)  # 9
                .map_host(lambda x: x * 2, name="twice")
                .batch(2)  # 5
                .map(lambda dev, x: x, name="keep")
                .to_host()
                .unbatch()  # 9
                .map_host(lambda x: x + 1, workers=3, name="plus")
            )
            found = [float(x[0]) async for x in pipeline]
            assert found == [2.0 * n + 1 for n in range(10) if n != 3]
            return pipeline.stats()

    stats = run(main)
    assert [(stage.name, stage.num_items) for stage in stats.stages] == [
        ("source", 10),
        ("<lambda>", 10),
        ("twice", 9),
        ("batch", 5),
        ("put", 5),
        ("keep", 5),
        ("get", 5),
        ("unbatch", 5),
        ("plus", 9),
        ("consumer", 9),
    ]
    assert all(0 <= stage.busy_s <= stats.elapsed_s for stage in stats.stages)
    by_name = {stage.name: stage for stage in stats.stages}
    assert by_name["put"].nbytes == by_name["get"].nbytes == 9 * NBYTES


def test_stats_of_a_run_under_way_and_of_none(run: Run) -> None:
    async def main() -> None:
        async with virtual() as dev:
            pipeline = dev.pipeline(batches_of(4)).map(add_one_to)
            with pytest.raises(RuntimeError, match="has not run"):
                pipeline.stats()
            seen = [pipeline.stats().stages[-1].num_items async for _ in pipeline]
            assert seen == [0, 1, 2, 3]  # it has not come back with the last one yet
            assert pipeline.stats().stages[-1].num_items == 4

    run(main)
