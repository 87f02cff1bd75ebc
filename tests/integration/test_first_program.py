"""The first program of the README, and the order it relies on (rules R1 to R3)."""

import numpy as np

import streamflow as sf


def test_saxpy_equals_numpy(run, open_device, saxpy):
    n = 1 << 20
    source = np.arange(n, dtype=np.float32)

    async def main():
        async with open_device() as dev:
            x = dev.put(source)
            y = dev.zeros(n, np.float32)
            dev.launch(saxpy, 2.0, x, y, y.size)
            return await dev.get(y)

    np.testing.assert_array_equal(run(main), source * np.float32(2))


def test_a_thousand_dependent_launches_in_program_order(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            y = dev.put(np.zeros(300, np.float32))
            for _ in range(1000):
                dev.launch(add_one, y, y.size)
            return await dev.get(y)

    np.testing.assert_array_equal(run(main), np.full(300, 1000, np.float32))


def test_put_small_reads_its_source_before_it_returns(run, open_device):
    async def main():
        async with open_device() as dev:
            source = np.arange(16)
            x = dev.put(source)
            source[:] = -1
            return await dev.get(x)

    np.testing.assert_array_equal(run(main), np.arange(16))


def test_put_large_has_read_its_source_once_staged(run, open_device):
    async def main():
        async with open_device() as dev:
            source = np.arange(1 << 18, dtype=np.int64)
            x = dev.put(source)
            await x.staged
            source[:] = -1
            assert await x is x
            return await dev.get(x)

    np.testing.assert_array_equal(run(main), np.arange(1 << 18))


def test_put_and_get_into_existing_arrays(run, open_device):
    async def main():
        async with open_device() as dev:
            x = dev.full(1 << 18, 7, np.int32)
            dev.put(np.arange(1 << 18, dtype=np.int32), out=x)
            out = np.zeros(1 << 18, np.int32)
            assert await dev.get(x, out=out) is out
            small = np.zeros(8, np.int32)
            await dev.get(x[8:16], out=small)
            return out, small

    out, small = run(main)
    np.testing.assert_array_equal(out, np.arange(1 << 18))
    np.testing.assert_array_equal(small, np.arange(8, 16))


def test_get_result_outlives_the_device(run, open_device):
    async def main():
        async with open_device() as dev:
            return await dev.get(dev.put(np.arange(1 << 16, dtype=np.float64)))

    first, second = run(main), run(main)
    np.testing.assert_array_equal(first, np.arange(1 << 16))
    np.testing.assert_array_equal(second, first)


def test_copy_between_arrays_and_hosts(run, open_device):
    async def main():
        async with open_device() as dev:
            a, b = dev.put(np.arange(1000.0)), dev.zeros(1000)
            await dev.copy(b, a)
            host = np.zeros(1000)
            await dev.copy(host, b)
            dev.copy(a, host * 2)
            other = np.zeros(1000)
            await dev.copy(other, host)
            return host, await dev.get(a), other

    host, doubled, other = run(main)
    np.testing.assert_array_equal(host, np.arange(1000.0))
    np.testing.assert_array_equal(doubled, np.arange(1000.0) * 2)
    np.testing.assert_array_equal(other, host)


def test_copy_between_two_devices(run, open_device):
    if open_device.backend == "cuda":
        return  # needs two GPUs; the contract suite covers the verb where there are two

    async def main():
        async with open_device(0) as one, open_device(1) as two:
            a = one.put(np.arange(100_000.0))
            b = two.zeros(100_000)
            two.copy(b, a)
            one.fill(a, -1.0)  # after the copy has read it
            return await two.get(b), await one.get(a)

    copied, filled = run(main)
    np.testing.assert_array_equal(copied, np.arange(100_000.0))
    assert (filled == -1).all()


def test_fill_patterns_of_every_width(run, open_device):
    values = {
        np.int8: -3,
        np.uint16: 513,
        np.int32: -70_000,
        np.float32: 1.5,
        np.float64: -2.25,
        np.complex128: 1 - 2j,
        np.bool_: True,
    }

    async def main():
        async with open_device() as dev:
            filled = {t: await dev.get(dev.full(1001, v, t)) for t, v in values.items()}
            three = np.dtype([("a", "i1"), ("b", "i2")])  # 3 bytes: no memset writes it
            filled[three] = await dev.get(dev.full(11, (1, 2), three))
            return filled

    filled = run(main)
    for dtype, value in values.items():
        np.testing.assert_array_equal(filled[dtype], np.full(1001, value, dtype))
    three = np.dtype([("a", "i1"), ("b", "i2")])
    assert filled[three].tolist() == [(1, 2)] * 11


def test_streams_keep_program_order_and_wait_for_ops(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            async with dev.stream("mine") as mine, dev.stream("yours") as yours:
                y = dev.zeros(64, np.float32)
                with mine:
                    first = dev.launch(add_one, y, 64)
                yours.wait_for(first)
                with yours:
                    second = dev.launch(add_one, y, 64)
                assert (first.stream, second.stream) == ("mine", "yours")
                await yours.synchronize()
                assert first.done()
            return await dev.get(y)

    assert (run(main) == 2).all()


def test_split_parts_are_independent_and_the_whole_waits_for_all(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            slow = dev.stream()
            whole = dev.zeros(1000, np.float32)
            # Loading a module waits for running kernels, so not behind the stall.
            await dev.launch(add_one, whole, 1000)
            left, right = whole.split(2)
            stall = open_device.stall(dev, slow, 1.5)
            dev.launch(add_one, left, 500, stream=slow)
            quick = dev.launch(add_one, right, 500)
            await quick  # not held up by its neighbour
            both = dev.launch(add_one, whole, 1000)
            assert not both.done()
            stall.release()
            return await dev.get(whole)

    assert (run(main) == 3).all()


def test_gather_and_as_completed(run, open_device):
    async def main():
        async with open_device() as dev:
            ops = [dev.get(dev.put(np.array([i]))) for i in range(5)]
            results = await sf.gather(*ops)
            ended = [op async for op in sf.as_completed(ops)]
            return results, ended == ops

    results, same = run(main)
    assert [int(r[0]) for r in results] == [0, 1, 2, 3, 4]
    assert same


def test_done_callback_runs_on_the_loop(run, open_device):
    async def main():
        seen = []
        async with open_device() as dev:
            op = dev.get(dev.put(np.arange(3)))
            op.add_done_callback(lambda op: seen.append(op.result().tolist()))
            await dev.synchronize()
        return seen

    assert run(main) == [[0, 1, 2]]
