"""Placements of the user's own, and how many lanes there are to choose from."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
import pytest

import streamflow as sf

N = 64
BIG = np.zeros(1 << 15, np.float32)  # staged


@pytest.fixture
def placed(open_device):
    """Open a device with a placement."""

    def open_placed(placement: Any, **options: Any) -> sf.Device:
        settings = open_device().settings
        return sf.Device(
            backend=open_device.backend, settings=settings, placement=placement, **options
        )

    return open_placed


def everything(dev: sf.Device, kernel: sf.Kernel, stream: sf.Stream | None = None) -> list[str]:
    """One of each kind of work that a lane is chosen for; where they went."""
    x = dev.zeros(N, np.float32, stream=stream)
    y = dev.empty(N, np.float32, stream=stream)
    ops = [
        x.allocation,
        y.allocation,
        dev.fill(x, 1, stream=stream),
        dev.copy(y, x, stream=stream),
        dev.launch(kernel, x, N, stream=stream),
        dev.call(lambda stream, x: None, x, stream=stream),
    ]
    return [op.stream for op in ops]


def test_a_placement_may_pin_everything_to_one_lane(run, placed, add_one):
    async def main():
        async with placed(lambda request: 2) as dev:
            await dev.launch(add_one, dev.zeros(N, np.float32), N)  # compiled
            assert set(everything(dev, add_one)) == {"compute2"}
            await dev.synchronize()

    run(main)


def test_a_placement_is_told_what_it_places(run, placed, add_one):
    asked = []

    def note(request):
        asked.append(request)
        return 0

    async def main():
        async with placed(note) as dev:
            x = dev.zeros(N, np.float32)
            await dev.launch(add_one, x, N)
            await dev.synchronize()
            asked.clear()
            everything(dev, add_one)
            kinds = ["empty", "empty", "fill", "copy", "launch", "call"]
            assert [request.kind for request in asked] == kinds
            assert asked[4].name == "add_one"
            assert [lane.name for lane in asked[4].lanes] == [f"compute{n}" for n in range(4)]
            assert asked[4].lanes[0].num_outstanding > 0
            assert (0, True) in asked[4].inputs  # the copy, which has read x
            await dev.synchronize()

    run(main)


def test_round_robin(run, placed, add_one):
    numbers = count()

    async def main():
        async with placed(lambda request: next(numbers) % len(request.lanes)) as dev:
            x = dev.zeros(N, np.float32, stream=(stream := dev.stream()))
            with stream:
                await dev.launch(add_one, x, N)
            ops = [dev.launch(add_one, x, N) for _ in range(6)]
            assert [op.stream[-1] for op in ops] == ["0", "1", "2", "3", "0", "1"]
            assert (await dev.get(x)).tolist() == [7] * N

    run(main)


def test_explicit_streams_are_not_asked_about(run, placed, add_one):
    def refuse(request):
        raise AssertionError(request)

    async def main():
        async with placed(refuse) as dev:
            stream = dev.stream("mine")
            assert set(everything(dev, add_one, stream)) == {"mine"}
            with stream:
                assert set(everything(dev, add_one)) == {"mine"}
            await dev.get(dev.put(np.zeros(N)))  # nor about copies in and out
            await dev.synchronize()

    run(main)


def refuse(request: sf.PlacementRequest) -> int:
    raise KeyError("no lane is good enough")


@pytest.mark.parametrize(
    ("placement", "error"),
    [(refuse, KeyError), (lambda _: 99, ValueError), (lambda _: "compute0", TypeError)],
    ids=["raises", "out of range", "no number"],
)
def test_a_bad_answer_is_raised_before_anything_is_submitted(
    run, placed, add_one, placement, error
):
    current = [lambda _: 0]

    async def main():
        async with placed(lambda request: current[0](request)) as dev:
            x, y = dev.zeros(N, np.float32), dev.zeros(N, np.float32)
            await dev.launch(add_one, x, N)
            await dev.synchronize()
            current[0] = placement
            before = dev.stats().num_submitted, dev.live()
            for submit in (
                lambda: dev.launch(add_one, x, N),
                lambda: dev.fill(x, 3),
                lambda: dev.copy(y, x),
                lambda: dev.call(lambda stream, x: None, x),
                lambda: dev.empty(N),
                lambda: dev.zeros(N),
            ):
                with pytest.raises(error):
                    submit()
            assert (dev.stats().num_submitted, dev.live()) == before
            assert (await dev.get(x)).tolist() == [1] * N  # no trace of the refused writes
            current[0] = lambda _: 1
            await dev.launch(add_one, x, N)
            assert (await dev.get(x)).tolist() == [2] * N

    run(main)


def test_a_bad_answer_fails_an_op_that_was_parked(run, placed, add_one):
    current = [lambda _: 0]

    async def main():
        async with placed(lambda request: current[0](request)) as dev:
            await dev.launch(add_one, dev.zeros(N, np.float32), N)
            x = dev.put(BIG)
            op = dev.launch(add_one, x, N)
            assert op.state is sf.OpState.PARKED
            found = dev.get(x)
            current[0] = refuse
            with pytest.raises(KeyError):
                await op
            with pytest.raises(sf.UpstreamFailed):
                await found
            current[0] = lambda _: 1
            await dev.fill(x, 3)
            assert (await dev.get(x))[0] == 3

    run(main)


def test_compute_lanes_replaces_the_setting(run, open_device, placed):
    async def main():
        async with placed(None, compute_lanes=2) as dev:
            assert [name for name in dev.lanes if name.startswith("compute")] == [
                "compute0",
                "compute1",
            ]
            assert dev.settings.compute_lanes == 2

    run(main)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"compute_lanes": 0}, ValueError),
        ({"compute_lanes": -1}, ValueError),
        ({"compute_lanes": 2.0}, TypeError),
        ({"compute_lanes": True}, TypeError),
        ({"placement": 3}, TypeError),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused_when_the_device_is_made(options, error):
    with pytest.raises(error):
        sf.Device(backend="sim", **options)


def test_a_coroutine_function_is_no_placement():
    async def later(request):
        raise AssertionError

    with pytest.raises(TypeError, match="plain function"):
        sf.Device(backend="sim", placement=later)
