"""Times of stages from the moments when items ended them, by hand-made notes."""

from __future__ import annotations

import gc
import tracemalloc

from streamflow.pipeline.stats import Meter, PipelineStats, StageStats


def busy(meter: Meter) -> list[float]:
    return [stage.busy_s for stage in meter.stats().stages]


def test_nothing_noted_yet() -> None:
    stats = Meter(["source", "put"]).stats()
    assert stats.elapsed_s == stats.ideal_s == stats.overlap == 0
    assert stats.bottleneck is None
    assert [stage.num_items for stage in stats.stages] == [0, 0]
    assert "none yet" in str(stats)


def test_a_pipeline_without_stages() -> None:
    meter = Meter([])
    meter.begun(1.0)
    meter.finished(3.0)
    assert meter.stats() == PipelineStats((), 2.0)
    assert meter.stats().bottleneck is None
    assert "elapsed 2.00 s" in str(meter.stats())


def test_one_item_is_in_one_stage_at_a_time() -> None:
    meter = Meter(["source", "put", "map"])
    meter.begun(10.0)
    meter.came(0, 0, 10.0)
    meter.ended(0, 0, 11.0)
    meter.ended(1, 0, 13.0, 64)
    meter.ended(2, 0, 17.0)
    meter.finished(18.0)
    stats = meter.stats()
    assert stats == PipelineStats(
        (
            StageStats("source", 1, 0, 1.0, 1 / 8),
            StageStats("put", 1, 64, 2.0, 2 / 8),
            StageStats("map", 1, 0, 4.0, 4 / 8),
        ),
        8.0,
    )
    assert (stats.bottleneck, stats.ideal_s, stats.overlap) == ("map", 4.0, 0.5)


def test_waiting_in_line_counts_for_nobody() -> None:
    meter = Meter(["source", "put"])
    meter.begun(0.0)
    for item in range(3):  # all are there at once
        meter.came(0, item, 0.0)
        meter.ended(0, item, 0.0)
    for item in range(3):
        meter.ended(1, item, 5.0 * (item + 1))
    assert busy(meter) == [0.0, 15.0]


def test_the_source_is_not_charged_while_it_may_not_be_asked() -> None:
    meter = Meter(["source", "put"])
    meter.begun(0.0)
    meter.came(0, 0, 0.0)
    meter.ended(0, 0, 1.0)
    meter.came(0, 1, 1.0)
    meter.came(0, 1, 8.0)  # its buffer has been read only now
    meter.ended(1, 0, 8.0)
    meter.ended(0, 1, 9.0)
    assert busy(meter) == [2.0, 7.0]


def test_ends_seen_at_once_in_any_order_are_charged_to_the_first_stage() -> None:
    meter = Meter(["source", "put", "map"])
    meter.begun(0.0)
    meter.came(0, 0, 0.0)
    meter.ended(0, 0, 1.0)
    meter.ended(2, 0, 4.0)
    meter.ended(1, 0, 4.0)
    assert busy(meter) == [1.0, 3.0, 0.0]
    meter.came(0, 1, 4.0)
    meter.ended(0, 1, 5.0)
    meter.ended(1, 1, 7.0)
    meter.ended(2, 1, 9.0)
    assert busy(meter) == [2.0, 5.0, 2.0]


def test_workers_side_by_side_are_one_stage() -> None:
    meter = Meter(["source", "map_host"])
    meter.begun(0.0)
    for item in range(4):
        meter.came(0, item, 0.0)
        meter.ended(0, item, 0.0)
    for item in (2, 0, 3, 1):
        meter.ended(1, item, 6.0)
    assert busy(meter) == [0.0, 6.0]
    assert meter.stats().stages[1].num_items == 4


def test_items_under_new_numbers() -> None:
    meter = Meter(["source", "unbatch", "put"])
    meter.begun(0.0)
    meter.came(0, 0, 0.0)
    meter.ended(0, 0, 2.0)
    meter.ended(1, 0, 3.0)
    for part in (100, 101):
        meter.came(2, part, 3.0)
    meter.ended(2, 100, 5.0)
    meter.ended(2, 101, 7.0)
    assert busy(meter) == [2.0, 1.0, 4.0]


def test_items_that_a_filter_drops_leave_nothing_behind() -> None:
    meter = Meter(["source", "filter", "put"])
    meter.begun(0.0)

    def run(first: int, num: int) -> None:
        for item in range(first, first + num):
            meter.came(0, item, float(item))
            meter.ended(0, item, float(item))
            meter.ended(1, item, float(item))

    run(0, 10_000)
    gc.collect()
    tracemalloc.start()
    try:
        run(10_000, 20_000)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert grown < 500_000  # 20 000 remembered ones take 2 MB
    assert meter.stats().stages[1].num_items == 30_000


def test_the_table() -> None:
    meter = Meter(["source", "put", "sharpen"])
    meter.begun(0.0)
    meter.came(0, 0, 0.0)
    meter.ended(0, 0, 0.001)
    meter.ended(1, 0, 0.003, 3 << 20)
    meter.ended(2, 0, 0.004)
    assert str(meter.stats()).splitlines() == [
        "stage       items     bytes      busy  of run",
        "source          1             1.00 ms     25%",
        "put             1  3.00 MiB   2.00 ms     50%",
        "sharpen         1             1.00 ms     25%",
        "elapsed 4.00 ms, ideal 2.00 ms (50% of elapsed), bottleneck: put",
    ]
