"""Staged copies: when they are worked on and by whom, what they leave, and what they promise."""

import sys
import threading

import anyio
import numpy as np
import pytest
from support import error_of, turns, virtual

import streamflow as sf
from streamflow.memory import page_locked

CHUNK = 65536
RNG = np.random.default_rng(11)


def is_pinned(array):
    return page_locked.find(array) is not None


# -- C25 -----------------------------------------------------------------------------------


def test_c25_a_copy_to_an_ordinary_array_waits_for_its_turn_and_blocks_nobody(run, open_device):
    values = RNG.integers(0, 255, 1 << 22, np.uint8)

    async def main():
        async with open_device() as dev:
            x, out, stream = await dev.put(values), np.zeros(1 << 22, np.uint8), dev.stream()
            stall = open_device.stall(dev, stream)
            op = dev.get(x, out=out, stream=stream)  # returns at once
            others = [await dev.get(dev.put(values)), np.zeros_like(out)]
            await dev.get(x, out=others[1])  # nor is another staged copy held up
            was_done = op.done()
            stall.release()
            assert await op is out
            return was_done, out, others

    was_done, out, others = run(main)
    assert not was_done
    for back in (out, *others):
        np.testing.assert_array_equal(back, values)


def test_c25_the_loop_itself_copies_no_more_than_64_kib(run, open_device, monkeypatch):
    """Rule R1's bound, whatever the layout: all else is for worker threads."""
    real, on_loop, elsewhere = np.copyto, [], []

    def copyto(to, source, **options):
        if not sys._getframe(1).f_globals["__name__"].startswith("streamflow.backends"):
            is_here = threading.get_ident() == loop_thread
            (on_loop if is_here else elsewhere).append(to.nbytes)
        real(to, source, **options)

    async def main():
        async with open_device() as dev:
            monkeypatch.setattr(np, "copyto", copyto)
            for shape in ((1 << 14,), (1 << 14) + 1, (1 << 20,), (64, 1 << 10, 9)):
                x = dev.put(np.broadcast_to(np.float32(2), shape))
                await dev.get(x, out=np.zeros(shape, np.float32)[::-1])
                await dev.copy(np.zeros(shape, np.float32), np.ones(shape, np.float32))
            monkeypatch.undo()

    loop_thread = threading.get_ident()
    run(main)
    assert on_loop
    assert max(on_loop) <= 64 << 10
    assert len(elsewhere) > 8


def test_r1_what_lies_far_apart_is_written_by_a_thread_however_little(run):
    async def main():
        async with virtual() as dev:
            x = await dev.put(np.full(4096, 3, np.uint8))
            table, before = np.zeros((4096, 1024), np.uint8), dev._core.stagers.num_tasks
            await dev.get(x, out=table[:, 5])
            assert dev._core.stagers.num_tasks == before + 1
            return table

    table = run(main)
    assert (table[:, 5] == 3).all()
    assert table.sum() == 3 * 4096


# -- C32 -----------------------------------------------------------------------------------

SIGNS = [(1, 1, -1), (1, -1, 1), (-1, 1, 1), (-2, -1, 3), (-1, -1, -1)]


@pytest.mark.parametrize("num", [9, 60], ids=["inline", "staged"])
@pytest.mark.parametrize("steps", SIGNS, ids=str)
def test_c32_negative_steps_both_ways(run, open_device, steps, num):
    key = tuple(slice(None, None, step) for step in steps)
    base = RNG.random((num, num, num))

    async def main():
        async with open_device() as dev:
            x = dev.put(base[key])
            canvas = np.full((num, num, num), -1.0)
            await dev.get(x, out=canvas[key])
            return await dev.get(x), canvas

    back, canvas = run(main)
    np.testing.assert_array_equal(back, base[key])
    expected = np.full((num, num, num), -1.0)
    expected[key] = base[key]
    np.testing.assert_array_equal(canvas, expected)


def test_c32_a_device_array_has_no_negative_steps(run, open_device):
    """It is contiguous: so a copy on the device has none either, and nothing is submitted."""

    async def main():
        async with open_device() as dev:
            x = await dev.zeros((4, 4))
            before = dev.stats().num_submitted
            for key in (slice(None, None, -1), slice(3, 0, -2)):
                with pytest.raises(ValueError, match="step"):
                    dev.copy(x, x[key])
            assert dev.stats().num_submitted == before

    run(main)


# -- C35 -----------------------------------------------------------------------------------

KEPT = {
    "big-endian float": ">f4",
    "big-endian int": ">i4",
    "big-endian complex": ">c16",
    "bool": "?",
    "float16": "f2",
    "complex": "c8",
    "uint64": "u8",
    "long double": "g",
    "void": "V7",
    "mixed": [("a", ">i2"), ("b", "f8"), ("c", "S3")],
    "padded": np.dtype([("a", "i1"), ("b", "f8")], align=True),
    "nested": [("a", [("x", "u1"), ("y", ">f4")]), ("b", "i2", (2, 3))],
    "dates in fields": [("when", "M8[s]"), ("what", "i4")],
    "items larger than a chunk": [("a", "u1", (CHUNK + 5,))],
}
REFUSED = ["O", "M8[D]", "m8[s]", "S4", "U4", [("a", "i4"), ("b", "O")], np.dtypes.StringDType()]


@pytest.mark.parametrize("nbytes", [3_000, 300_000], ids=["inline", "staged"])
@pytest.mark.parametrize("name", KEPT)
def test_c35_a_dtype_is_kept_with_its_values(run, open_device, name, nbytes):
    dtype = np.dtype(KEPT[name])
    num = 2 * (nbytes // dtype.itemsize // 2) + 2
    source = RNG.integers(0, 2 if dtype.kind == "b" else 100, num * dtype.itemsize, np.uint8)
    source = source.view(dtype)

    async def main():
        async with open_device(staging_in_nbytes=CHUNK, staging_out_nbytes=CHUNK) as dev:
            x, odd = dev.put(source), dev.put(source[::-2])
            assert (x.dtype, odd.dtype) == (dtype, dtype)
            out, rest = np.zeros(num, dtype), np.zeros((num, 2), dtype)
            await dev.get(x, out=out)
            await dev.get(x, out=rest[::-1, 1])
            return await dev.get(x), out, rest, await dev.get(odd)

    def plain(array):
        if name == "padded":  # what pads a structure is nobody's
            return array.tolist()
        return array.view((np.void, dtype.itemsize)).tobytes()

    back, out, rest, odd = run(main)
    assert back.dtype == odd.dtype == dtype
    assert plain(back) == plain(out) == plain(source)
    assert plain(odd) == plain(source[::-2])
    assert plain(rest[::-1, 1].copy()) == plain(source)
    assert not rest[:, 0].view((np.void, dtype.itemsize)).tobytes().strip(b"\0")


@pytest.mark.parametrize("dtype", REFUSED, ids=str)
def test_c35_a_dtype_that_cannot_be_kept_is_a_type_error(run, dtype):
    source = np.zeros(3, dtype)

    async def main():
        async with virtual() as dev:
            before = dev.stats().num_submitted
            x = await dev.zeros(3)
            for call in (lambda: dev.put(source), lambda: dev.copy(x, source)):
                with pytest.raises(TypeError, match="cannot be moved to a device: "):
                    call()
            with pytest.raises(TypeError, match="dtype"):
                dev.get(x, out=source)
            await dev.synchronize()
            assert dev.stats().num_submitted == before + 2

    run(main)


# -- what a source promises ------------------------------------------------------------------


def test_r1_a_small_source_is_read_before_put_returns_however_short_pinned_memory_is(
    run, monkeypatch
):
    """Where no block is cached, it is the program that would see the difference."""

    async def main():
        async with virtual() as dev:
            monkeypatch.setattr(dev._core.pinned, "try_acquire", lambda *_, **__: None)
            source = np.full(16 << 10, 3, np.float32)
            x = dev.put(source)
            source[:] = 4
            monkeypatch.undo()
            return await dev.get(x)

    assert (run(main) == 3).all()


DEBUGGING = {"debug": True, "check_races": False}


@pytest.mark.parametrize("nbytes", [1 << 20, 1 << 24])
def test_debug_tells_of_a_source_that_changes_too_early(run, open_device, nbytes):
    async def main():
        async with open_device(**DEBUGGING) as dev:
            source = np.zeros(nbytes, np.uint8)
            x = dev.put(source)
            source[:] = 1
            error = await error_of(x)
            assert isinstance(error, sf.RaceDetected)
            [race] = error.races
            assert race.second.name.startswith("put#")
            assert race.second.where.startswith("test_staging.py:")
            assert "host change of memory in flight" in str(error)
            assert "await array.staged" in str(error)
            assert x.staged.exception() is error
            assert isinstance(await error_of(dev.get(x)), sf.UpstreamFailed)
            assert (await dev.get(await dev.put(source, out=x))).all()

    run(main)


def test_debug_tells_of_a_pinned_source_that_changes_too_early(run):
    async def main():
        async with virtual(**DEBUGGING) as dev, dev.pinned.lease(1 << 20) as lease:
            source, stream = lease.array(), dev.stream()
            source[:] = 0
            gate = dev.sim.gate(stream)
            x = dev.put(source, stream=stream)
            await turns()
            source[:] = 1
            gate.release()
            error = await error_of(x)
            assert isinstance(error, sf.RaceDetected)
            assert "test_staging.py:" in str(error)
            source[:] = 2
            assert (await dev.get(dev.put(source)) == 2).all()

    run(main)


def test_debug_takes_no_later_copy_to_a_lease_for_a_change(run):
    """Both have ended before the loop looks: the second has written what the first had read."""

    async def main():
        async with virtual(**DEBUGGING) as dev, dev.pinned.lease(1 << 20) as lease:
            source = lease.array()
            source[:] = 1
            x = dev.put(source)
            dev.get(dev.zeros(1 << 20, np.uint8), out=source)
            while dev._core.backend.advance(0):
                pass
            assert not source.any()
            return await dev.get(x)

    assert (run(main) == 1).all()


@pytest.mark.parametrize("debug", [False, True])
def test_debug_finds_nothing_where_nothing_is_wrong(run, open_device, debug):
    async def main():
        async with open_device(debug=debug) as dev:
            source = np.zeros(1 << 20, np.uint8)
            for value in range(3):
                source[::2] = value
                x = dev.put(source[::2])
                await x.staged
            return await dev.get(x)

    assert (run(main) == 2).all()


# -- get -------------------------------------------------------------------------------------


def test_results_above_the_budget_are_pageable_and_never_starve_a_put(run, open_device):
    mib = 1 << 20

    async def main():
        async with open_device(pinned_budget_nbytes=3 * mib) as dev:
            x = await dev.put(RNG.integers(0, 255, mib, np.uint8))
            results = [await dev.get(x) for _ in range(6)]
            assert [is_pinned(each) for each in results] == [True] * 3 + [False] * 3
            assert dev.pinned.stats().pinned_nbytes <= 3 * mib
            y = await dev.put(results[0][::-1])
            assert (await dev.get(y) == results[5][::-1]).all()
            del results[1]
            again = await dev.get(x)
            assert is_pinned(again)  # it came back as the array was collected
            assert dev.pinned.stats().pinned_nbytes <= 3 * mib
            return results[0], again

    first, again = run(main)
    np.testing.assert_array_equal(first, again)


def test_without_a_budget_all_results_are_pageable(run):
    async def main():
        async with virtual(pinned_budget_nbytes=0) as dev:
            x = dev.put(np.arange(1 << 18))
            return await dev.get(x), await dev.get(x[:100])

    large, small = run(main)
    np.testing.assert_array_equal(large, np.arange(1 << 18))
    np.testing.assert_array_equal(small, np.arange(100))
    assert not is_pinned(large)


def test_r8_cancelling_the_await_of_a_staged_get_waits_for_the_write(run, open_device):
    async def main():
        async with open_device(staging_out_nbytes=CHUNK, staging_threads=1) as dev:
            x = await dev.put(np.full(1 << 20, 5, np.uint8))
            out, stream, seen = np.zeros(1 << 20, np.uint8), dev.stream(), []
            stall = open_device.stall(dev, stream)
            op = dev.get(x, out=out, stream=stream)

            async def waiting():
                try:
                    await op
                finally:
                    seen.append((op.done(), bool(out.all())))

            async with anyio.create_task_group() as group:
                group.start_soon(waiting)
                await turns()
                group.cancel_scope.cancel()
                stall.release()
            return seen

    assert run(main) == [(True, True)]


def test_r8_a_get_that_is_stopped_between_chunks_leaves_what_was_written_and_fails(run):
    async def main():
        async with virtual(staging_out_nbytes=CHUNK, staging_threads=1) as dev:
            x, out = await dev.put(np.full(64 * CHUNK, 5, np.uint8)), np.zeros(64 * CHUNK, np.uint8)
            with anyio.CancelScope() as cancel:
                async with dev.scope():
                    op = dev.get(x, out=out)
                    while not out[:CHUNK].any():
                        await anyio.lowlevel.checkpoint()
                    cancel.cancel()
                    await anyio.lowlevel.checkpoint()
            assert isinstance(await error_of(op), sf.OpCancelled)
            written = int(np.count_nonzero(out))
            assert 0 < written < out.nbytes
            assert written % CHUNK == 0
            assert (out[:written] == 5).all()
            await dev.get(x, out=out)  # the chunks are free again
            return out

    assert (run(main) == 5).all()


# -- threads and chunks ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbytes", "num_tasks", "num_copies"),
    [
        (200 << 10, 1, 1),  # one hop to a thread, one copy
        (1 << 20, 1, 1),
        (3 << 20, 3, 3),
        (4 << 20, 4, 6),  # all four threads: pieces of 1/4, 2/4, 3/4 and 1 MiB, and the rest
        (64 << 20, 4, 34),  # 2 MiB, and the first ones shorter: so that the link begins early
        (1 << 28, 4, 66),
    ],
)
def test_an_array_is_cut_so_that_all_threads_share_it(run, nbytes, num_tasks, num_copies):
    async def main():
        async with virtual(staging_threads=4) as dev:
            before = dev._core.stagers.num_tasks, dev.sim.counters["copy_h2d"]
            await dev.put(np.broadcast_to(np.uint8(3), (nbytes,)))
            after = dev._core.stagers.num_tasks, dev.sim.counters["copy_h2d"]
            return after[0] - before[0], after[1] - before[1]

    assert run(main) == (num_tasks, num_copies)


def test_staging_pins_two_chunks_for_each_thread_outside_the_budget(run):
    async def main():
        async with virtual(
            staging_threads=2, staging_in_nbytes=CHUNK, staging_out_nbytes=CHUNK
        ) as dev:
            x = await dev.put(np.ones(4 << 20, np.uint8))
            await dev.get(x, out=np.zeros(4 << 20, np.uint8))
            return dev.sim.counters["allocate_pinned_blocking"], dev.pinned.stats().pinned_nbytes

    num_pinned, in_budget = run(main)
    assert num_pinned == 1 + 2 * 2 * 2  # what small copies need, and the chunks of both ways
    assert in_budget == 0


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"staging_in_nbytes": 65535}, ValueError, "staging_in_nbytes.*65536.*65535"),
        ({"staging_out_nbytes": 0}, ValueError, "staging_out_nbytes"),
        ({"staging_in_nbytes": 1e6}, TypeError, "staging_in_nbytes takes bytes as an int"),
        ({"staging_threads": 0}, ValueError, "staging_threads"),
        ({"pinned_budget_nbytes": 1000}, ValueError, "pinned_budget_nbytes must hold one chunk"),
        ({"pinned_budget_nbytes": -1}, ValueError, "pinned_budget_nbytes"),
        ({"spin_us": float("nan")}, ValueError, "spin_us"),
        ({"close_timeout_s": -1.0}, ValueError, "close_timeout_s"),
    ],
    ids=str,
)
def test_settings_of_staging_are_checked(settings, error, match):
    with pytest.raises(error, match=match):
        sf.Settings(**settings)


def test_debug_is_set_in_the_environment():
    assert sf.Settings.from_environment({"STREAMFLOW_DEBUG": "1"}).debug
    assert not sf.Settings.from_environment({}).debug


def test_the_default_number_of_threads_follows_the_cores_of_the_process(monkeypatch):
    from streamflow import config

    for num_cores, num_threads in ((1, 1), (2, 2), (4, 4), (16, 8)):
        monkeypatch.setattr(config.os, "sched_getaffinity", lambda _, n=num_cores: range(n))
        assert sf.Settings().staging_threads == num_threads


@pytest.mark.parametrize("is_in", [True, False], ids=["put", "get"])
def test_a_copy_that_began_with_few_threads_gets_those_that_others_leave(run, open_device, is_in):
    """Else the second of two that come together is copied by one thread to its end."""

    async def main():
        settings = {"staging_in_nbytes": CHUNK, "staging_out_nbytes": CHUNK, "staging_threads": 2}
        async with open_device(**settings) as dev:
            staging = dev._core.staging
            begun = []  # (job, channels at work before)
            submit = staging._submit

            def noted(job, *args):
                begun.append(job)
                submit(job, *args)

            staging._submit = noted
            small = np.ones(16 * CHUNK, np.uint8)
            large = np.ones(512 * CHUNK, np.uint8)
            if is_in:
                arrays = [dev.put(small), dev.put(large)]
                for array in arrays:
                    await array
            else:
                arrays = [await dev.put(small), await dev.put(large)]
                begun.clear()
                sinks = [np.zeros_like(small), np.zeros_like(large)]
                for op in [dev.get(x, out=y) for x, y in zip(arrays, sinks, strict=True)]:
                    await op
                assert all(sink.all() for sink in sinks)
            first, second = dict.fromkeys(begun)
            assert begun.count(first) == 2
            if dev._core.backend.is_virtual:
                assert begun.count(second) >= 1  # dealt out beforehand
            else:
                assert begun.count(second) == 2
            del staging._submit

    run(main)
