"""The meter against a line of servers whose service times are known."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streamflow.pipeline.stats import Meter

TIMES = st.integers(0, 9).map(float)  # whole numbers: sums are exact


@st.composite
def lines(draw: st.DrawFn) -> tuple[list[list[float]], int, bool]:
    """Service times by stage and item, the number of slots, and whether the source owns items."""
    num_stages, num_items = draw(st.integers(2, 5)), draw(st.integers(1, 12))
    services = [
        draw(st.lists(TIMES, min_size=num_items, max_size=num_items)) for _ in range(num_stages)
    ]
    return services, draw(st.integers(1, 4)), draw(st.booleans())


@given(line=lines(), start_s=TIMES)
def test_busy_times_are_the_service_times(
    line: tuple[list[list[float]], int, bool], start_s: float
) -> None:
    services, depth, source_owns = line
    num_items = len(services[0])
    ends: list[list[float]] = [[0.0] * num_items for _ in services]
    notes: list[tuple[float, int, int, int]] = []  # time, stage, item, 0 for came or 1 for ended
    for item in range(num_items):
        # A pull waits for a slot and, if there is one buffer, for its being read by stage 1.
        may_begin_s = max(
            start_s,
            ends[-1][item - depth] if item >= depth else 0.0,
            ends[1][item - 1] if item and not source_owns else 0.0,
            ends[0][item - 1] if item else 0.0,
        )
        notes.append((may_begin_s, 0, item, 0))
        came_s = may_begin_s
        for stage, times in enumerate(services):
            came_s = max(came_s, ends[stage][item - 1] if item else 0.0) + times[item]
            ends[stage][item] = came_s
            notes.append((came_s, stage, item, 1))

    meter = Meter([f"stage {stage}" for stage in range(len(services))])
    meter.begun(start_s)
    # What happens at one time is seen stage by stage; a pull that may begin is noted first.
    for time_s, stage, item, is_end in sorted(notes, key=lambda n: (n[0], n[2], n[3], n[1])):
        if is_end:
            meter.ended(stage, item, time_s, 10)
        else:
            meter.came(stage, item, time_s)
    meter.finished(ends[-1][-1])

    stats = meter.stats()
    true_s = [sum(times) for times in services]
    assert [stage.busy_s for stage in stats.stages] == true_s
    assert [stage.nbytes for stage in stats.stages] == [10 * num_items] * len(services)
    assert stats.elapsed_s == ends[-1][-1] - start_s
    assert stats.ideal_s == max(true_s) <= stats.elapsed_s
    assert 0 <= stats.overlap <= 1
    if max(true_s) > 0:
        assert stats.bottleneck == f"stage {true_s.index(max(true_s))}"
