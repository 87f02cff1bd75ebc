"""Races in programs, and in a runtime that was broken on purpose: seen, told, and where."""

from __future__ import annotations

import gc

import anyio
import numpy as np
import pytest
from support import turns, virtual

import streamflow as sf
from streamflow.backends.sim.report import RaceKind

BIG = 1 << 18


def increment(stream, y):
    y += 1


async def races_of(program, **settings):
    """What leaving the device of ``program`` raises, if anything."""
    try:
        async with virtual(**settings) as dev:
            await program(dev)
    except sf.RaceDetected as error:
        return error
    return None


@pytest.mark.parametrize("clock", ["virtual", "wall"])
def test_calls_that_say_what_they_touch_are_ordered(run, clock):
    async def program(dev):
        x = dev.zeros(4, np.float32)
        for name in ("one", "other"):
            dev.call(increment, x, stream=dev.stream(name))
        assert (await dev.get(x)).tolist() == [2] * 4

    assert run(lambda: races_of(program, clock=clock)) is None


def test_synchronize_tells_and_the_device_goes_on(run):
    async def main():
        async with virtual() as dev:
            x = dev.empty(4, np.float32)
            dev.get(x)
            with pytest.raises(sf.RaceDetected, match="read of memory never written") as caught:
                await dev.synchronize()
            assert caught.value.races[0].second.name.startswith("get#")
            await dev.synchronize()  # told once
            assert (await dev.get(dev.zeros(4))).tolist() == [0] * 4

    run(main)


def test_races_can_be_taken(run):
    async def main():
        async with virtual() as dev:
            await dev.get(dev.empty(4, np.float32))
            assert [race.kind for race in dev.sim.races] == [RaceKind.NEVER_WRITTEN]
            [race] = dev.sim.take_races()
            assert dev.sim.races == ()
            assert "empty" in race.first.name or "allocate" in race.first.name

    run(main)


@pytest.mark.parametrize("nbytes", [BIG, 1 << 24])
def test_a_source_that_changes_before_it_is_staged(run, nbytes):
    async def program(dev):
        source = np.zeros(nbytes, np.uint8)
        x = dev.put(source)
        source[:] = 1
        await x

    async def main():
        error = await races_of(program)
        [race] = error.races
        assert (race.kind, race.first) == (RaceKind.HOST_CHANGE, None)
        assert race.second.name.startswith("put#")
        assert race.second.where.startswith("test_races.py:")
        assert "await array.staged" in str(race)

    run(main)


def test_a_source_that_changes_once_it_is_staged_is_none(run):
    async def program(dev):
        source = np.zeros(BIG, np.uint8)
        x = dev.put(source)
        await x.staged
        source[:] = 1
        assert not (await dev.get(x)).any()

    assert run(lambda: races_of(program)) is None


def test_a_foreign_stream_that_nobody_ordered(run):
    """Work that another library submits beside the runtime."""

    async def program(dev):
        x = dev.zeros(16, np.uint8)
        backend = dev._core.backend
        foreign = backend.create_stream()
        backend.fill(x.address, b"\1", 16, foreign)
        await dev.get(x)

    async def main():
        error = await races_of(program)
        kinds = {race.kind for race in error.races}
        assert kinds == {
            RaceKind.USE_BEFORE_ALLOCATION,
            RaceKind.WRITE_WRITE,
            RaceKind.READ_WRITE,
            RaceKind.USE_AFTER_FREE,  # by the free at the end
        }

    run(main)


@pytest.fixture
def no_waits(monkeypatch):
    """A scheduler that issues no cross-stream wait."""
    for module in ("launch", "parking", "allocate"):
        monkeypatch.setattr(f"streamflow.runtime.{module}.needed_waits", lambda line, deps: [])


def test_a_scheduler_that_forgets_its_waits(run, no_waits, add_one):
    async def program(dev):
        x = dev.put(np.zeros(4, np.float32))
        dev.launch(add_one, x, 4)
        await dev.get(x)

    async def main():
        error = await races_of(program)
        assert RaceKind.READ_WRITE in {race.kind for race in error.races}
        text = str(error)
        assert "missing: nothing orders add_one after put#" in text
        assert "compute0 has not waited for h2d" in text

    run(main)


def test_a_scheduler_that_frees_too_early(run, monkeypatch, add_one):
    """A free that goes where it was allocated, whatever used the memory since."""

    def choose(self, home, root, deps):
        return home

    monkeypatch.setattr("streamflow.runtime.allocate.Memory._choose", choose)

    async def program(dev):
        with dev.sim.gate("compute0"), dev.sim.gate("compute1"):
            x = dev.put(np.zeros(4, np.float32))
            dev.launch(add_one, x, 4)
            del x
            gc.collect()
            dev.zeros(1)  # which lets the free go
            await turns(3)

    async def main():
        with pytest.raises(sf.DeviceLost) as caught:  # the kernel runs into it as well
            async with virtual() as dev:
                await program(dev)
        [note] = caught.value.__notes__
        assert note.startswith("RaceDetected as well: 1 race on device 0\nuse after free")
        assert "free of a dropped array (test_races.py:" in note
        assert "add_one (test_races.py:" in note

    run(main)


def test_a_staging_that_does_not_wait_for_its_chunks(run, monkeypatch):
    """Pinned reuse: a chunk is filled again while the copy before still reads it."""

    def chunk(self, index):
        if index < 2 and len(self.chunks) <= index:
            return real(self, index)
        return self.chunks[index % 2]

    from streamflow.memory.staging import _Channel

    real = _Channel.chunk
    monkeypatch.setattr(_Channel, "chunk", chunk)

    async def program(dev):
        source = np.random.default_rng(0).integers(0, 255, 1 << 20, np.uint8)
        await dev.put(source)

    async def main():
        error = await races_of(program, staging_in_nbytes=65536, staging_threads=1)
        assert {race.kind for race in error.races} == {RaceKind.HOST_CHANGE}
        assert error.races[0].second.name.startswith("put#")

    run(main)


def test_with_another_error_both_are_told(run):
    async def main():
        with pytest.raises(ExceptionGroup) as caught:
            async with virtual() as dev:
                await dev.get(dev.empty(4, np.float32))
                raise KeyError("mine")
        assert [type(error) for error in caught.value.exceptions] == [KeyError, sf.RaceDetected]
        assert caught.value.message == "device 0: races were found"

    run(main)


def test_a_race_is_not_counted_as_an_op_that_failed(run):
    async def main():
        with pytest.raises(ExceptionGroup) as caught:
            async with virtual() as dev:
                dev.call(lambda stream: 1 / 0)
                await dev.get(dev.empty(4, np.float32))
        told = "1 op failed and nobody asked for the result, and races were found"
        assert caught.value.message == f"device 0: {told}"

    run(main)


def test_a_cancellation_stays_one_and_carries_a_note(run):
    async def main():
        notes = []
        with anyio.CancelScope() as scope:
            try:
                async with virtual() as dev:
                    await dev.get(dev.empty(4, np.float32))
                    scope.cancel()
                    await anyio.sleep_forever()
            except BaseException as error:
                notes.extend(error.__notes__)
                raise
        assert any("RaceDetected" in note for note in notes)

    run(main)


def test_switched_off_it_says_nothing(run):
    async def program(dev):
        await dev.get(dev.empty(4, np.float32))

    assert run(lambda: races_of(program, check_races=False)) is None


def test_small_copies_keep_their_pinned_blocks_until_they_are_done(run):
    async def main():
        async with virtual() as dev:
            with dev.sim.gate("h2d"):
                arrays = [dev.put(np.full(256, value, np.int32)) for value in range(20)]
            for value, array in enumerate(arrays):
                assert (await dev.get(array) == value).all()

    run(main)


def test_staging_fills_a_chunk_again_once_its_copy_is_done(run):
    async def main():
        source = np.random.default_rng(0).integers(0, 255, 1 << 20, np.uint8)
        async with virtual(staging_in_nbytes=65536, staging_threads=1) as dev:
            assert (await dev.get(dev.put(source)) == source).all()

    run(main)
