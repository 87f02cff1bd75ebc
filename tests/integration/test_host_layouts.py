"""Whatever NumPy can see is a source, and whatever it can write to a destination."""

import array
import ctypes
import mmap

import numpy as np
import pytest
from support import virtual

import streamflow as sf

N = 50_000
VALUES = np.random.default_rng(3).integers(0, 255, 8 * N, np.uint8)


class WithInterface:
    """An object of another library: no buffer, but NumPy's array interface."""

    def __init__(self, values):
        self._values = values
        self.__array_interface__ = values.__array_interface__


class WithArray:
    """One that NumPy has to ask for an array."""

    def __init__(self, values):
        self._values = values

    def __array__(self, dtype=None, copy=None):
        return self._values


class WithDlpack:
    def __init__(self, values, kind=1):
        self._values, self._kind = values, kind

    def __dlpack__(self, **options):
        return self._values.__dlpack__(**options)

    def __dlpack_device__(self):
        return (self._kind, 0)


def mapped(values):
    memory = mmap.mmap(-1, len(values))
    memory[:] = values.tobytes()
    return memory


def mapped_file(values, tmp_path):
    memory = np.memmap(tmp_path / "values", np.uint8, "w+", shape=values.shape)
    memory[:] = values
    return memory


# What each makes of some bytes, and which of them can be written.
BUFFERS = {
    "bytes": (bytes, False),
    "bytearray": (bytearray, True),
    "memoryview": (lambda v: memoryview(bytearray(v)), True),
    "memoryview of characters": (lambda v: memoryview(bytearray(v)).cast("c"), True),
    "reversed memoryview": (lambda v: memoryview(bytearray(v[::-1]))[::-1], True),
    "read-only memoryview": (lambda v: memoryview(bytes(v)), False),
    "array.array": (lambda v: array.array("B", v.tobytes()), True),
    "mmap": (mapped, True),
    "ctypes": (lambda v: (ctypes.c_uint8 * len(v)).from_buffer_copy(v), True),
    "ctypes characters": (lambda v: (ctypes.c_char * len(v)).from_buffer_copy(v), True),
    "array interface": (lambda v: WithInterface(v.copy()), True),
    "DLPack": (lambda v: WithDlpack(v.copy()), True),
    "subclass": (lambda v: v.copy().view(type("Sub", (np.ndarray,), {})), True),
    "record array": (lambda v: v.copy().view(np.recarray), True),
}


@pytest.mark.parametrize("nbytes", [1000, 8 * N], ids=["inline", "staged"])
@pytest.mark.parametrize("name", BUFFERS)
def test_buffers_are_sources(run, name, nbytes):
    values = VALUES[:nbytes]
    source = BUFFERS[name][0](values)

    async def main():
        async with virtual() as dev:
            x = dev.put(source)
            assert (x.shape, x.dtype) == ((nbytes,), np.uint8)
            y = dev.empty(nbytes, np.uint8)
            await dev.copy(y, source)
            return await dev.get(x), await dev.get(y)

    for back in run(main):
        np.testing.assert_array_equal(back, values)


@pytest.mark.parametrize("nbytes", [1000, 8 * N], ids=["inline", "staged"])
@pytest.mark.parametrize("name", [name for name in BUFFERS if BUFFERS[name][1]])
def test_writable_buffers_are_destinations(run, name, nbytes):
    values = VALUES[:nbytes]
    make = BUFFERS[name][0]

    async def main():
        async with virtual() as dev:
            x = dev.put(values)
            outs = [make(np.zeros(nbytes, np.uint8)) for _ in range(3)]
            assert await dev.get(x, out=outs[0]) is outs[0]
            assert await dev.copy(outs[1], x) is outs[1]
            assert await dev.copy(outs[2], values) is outs[2]
            return outs

    for out in run(main):
        seen = out._values if isinstance(out, WithInterface | WithDlpack) else out
        assert np.asarray(seen).tobytes() == values.tobytes()


def test_a_mapped_file_goes_both_ways(run, tmp_path):
    source = mapped_file(VALUES, tmp_path)

    async def main():
        async with virtual() as dev:
            x = dev.put(source[::-2])
            await dev.get(x, out=source[: 4 * N])

    run(main)
    source.flush()
    seen = np.fromfile(tmp_path / "values", np.uint8)
    np.testing.assert_array_equal(seen[: 4 * N], VALUES[::-2])
    np.testing.assert_array_equal(seen[4 * N :], VALUES[4 * N :])


@pytest.mark.filterwarnings("ignore:the matrix subclass")
@pytest.mark.parametrize("num", [30, 400])
def test_a_matrix_is_the_array_that_it_is_of(run, num):
    source, whole = np.asmatrix(np.eye(num)).T[::-1], np.asmatrix(np.zeros((num, num)))
    out = np.asmatrix(np.zeros((num, 2 * num)))[:, ::2]

    async def main():
        async with virtual(staging_out_nbytes=65536) as dev:
            x = dev.put(source)
            assert await dev.get(x, out=out) is out
            await dev.get(x, out=whole)
            await dev.put(whole, out=x)
            return await dev.get(x)

    np.testing.assert_array_equal(run(main), np.eye(num)[::-1])
    np.testing.assert_array_equal(out, np.eye(num)[::-1])
    np.testing.assert_array_equal(whole, np.eye(num)[::-1])


@pytest.mark.parametrize("num", [30, 30_000], ids=["inline", "staged"])
@pytest.mark.parametrize("is_leased", [False, True])
def test_fields_that_an_out_does_not_select_are_left_alone(run, num, is_leased):
    dtype = np.dtype([("a", "i4"), ("b", "i4"), ("c", "f8")])
    source = np.zeros(num, dtype)
    source["a"], source["b"], source["c"] = 1, 2, 3

    async def main():
        options = {"staging_out_nbytes": 65536}
        async with virtual(**options) as dev, dev.pinned.lease(32 * num) as lease:
            x = dev.put(source[["a", "c"]])
            memory = lease.array() if is_leased else np.empty(32 * num, np.uint8)
            memory[:] = 0
            table = memory[: 32 * num].view(dtype).reshape(num, 2)
            table["b"] = 9
            rows = table.reshape(-1)[:num]
            await dev.get(x, out=rows[["a", "c"]])
            assert [set(rows[name].tolist()) for name in "abc"] == [{1}, {9}, {3}]
            rows["a"] = 0
            await dev.get(x, out=table[::-1, 1][["a", "c"]])
            assert [set(table[:, 1][name].tolist()) for name in "abc"] == [{1}, {9}, {3}]

    run(main)


def test_items_with_gaps_that_no_chunk_can_hold_are_refused_as_an_out(run):
    dtype = np.zeros(1, [("a", "u1", (70_000,)), ("b", "i4"), ("c", "i4")])[["a", "c"]].dtype

    async def main():
        async with virtual(staging_out_nbytes=65536) as dev:
            x = dev.put(np.zeros(3, dtype))
            with pytest.raises(
                ValueError, match=r"70008 bytes with gaps.*staging_out_nbytes.*65536"
            ):
                dev.get(x, out=np.zeros(3, dtype))
            return await dev.get(x)

    assert run(main).dtype == dtype


def test_what_numpy_has_to_ask_is_a_source_and_no_destination(run):
    async def main():
        async with virtual() as dev:
            x = dev.put(WithArray(np.arange(5.0)))
            for out in (WithArray(np.zeros(5)), [0.0] * 5, 3, None):
                with pytest.raises(TypeError, match="takes an ndarray or another writable buffer"):
                    dev.copy(out, np.zeros(5)) if out is None else dev.get(x, out=out)
            return await dev.get(x)

    np.testing.assert_array_equal(run(main), np.arange(5.0))


def test_lists_and_scalars_are_sources_as_in_numpy(run):
    async def main():
        async with virtual() as dev:
            return [await dev.get(dev.put(each)) for each in ([[1, 2], [3, 4]], 2.5, np.int8(3))]

    for back, given in zip(run(main), ([[1, 2], [3, 4]], 2.5, np.int8(3)), strict=True):
        np.testing.assert_array_equal(back, given)
        assert back.dtype == np.asarray(given).dtype


MASKED = np.ma.masked_array([1.0, 2.0], [False, True])

REFUSED = {
    "a mask": (lambda dev, x: dev.put(MASKED), TypeError, "mask would be lost.*filled"),
    "a mask as out": (lambda dev, x: dev.get(x[:2], out=MASKED), TypeError, "mask would be lost"),
    "a mask on the host": (lambda dev, x: dev.copy(MASKED, np.zeros(2)), TypeError, "mask"),
    "objects": (lambda dev, x: dev.put([{}, 2]), TypeError, "references to Python.*astype"),
    "an object field": (
        lambda dev, x: dev.put(np.zeros(3, [("a", "f4"), ("b", "O")])),
        TypeError,
        "references to Python.*astype",
    ),
    "StringDType": (
        lambda dev, x: dev.put(np.array(["a"], np.dtypes.StringDType())),
        TypeError,
        "StringDType.*encode",
    ),
    "str": (lambda dev, x: dev.put("abc"), TypeError, "U3.*encode"),
    "byte strings": (lambda dev, x: dev.put(np.array([b"ab"])), TypeError, "S2.*np.uint8"),
    "dates": (lambda dev, x: dev.put(np.array(["2020"], "M8[D]")), TypeError, "np.int64"),
    "a GPU's": (
        lambda dev, x: dev.put(type("G", (), {"__cuda_array_interface__": {}})()),
        TypeError,
        "on a GPU already.*dev.call",
    ),
    "a GPU's by DLPack": (
        lambda dev, x: dev.put(WithDlpack(np.zeros(3), kind=2)),
        TypeError,
        "kind 2 is not on the host",
    ),
    "an array of the device as out": (lambda dev, x: dev.get(x, out=x), TypeError, "dev.copy"),
    "bytes as out": (
        lambda dev, x: dev.get(dev.zeros(3, np.uint8), out=b"abc"),
        ValueError,
        "out= is read-only",
    ),
    "a scalar as out": (
        lambda dev, x: dev.get(x[:1].reshape(()), out=np.float64(0)),
        ValueError,
        "out= is read-only",
    ),
    "a read-only out": (
        lambda dev, x: dev.get(x, out=np.broadcast_to(np.float64(0), 4)),
        ValueError,
        "out= is read-only",
    ),
    "equal elements": (
        lambda dev, x: dev.get(
            x, out=np.lib.stride_tricks.as_strided(np.zeros(1), (4,), (0,), writeable=True)
        ),
        ValueError,
        "share bytes",
    ),
    "overlapping elements": (
        lambda dev, x: dev.copy(
            np.lib.stride_tricks.as_strided(np.zeros(9), (4,), (4,), writeable=True), x
        ),
        ValueError,
        "share bytes",
    ),
    "overlapping on the host": (
        lambda dev, x: dev.copy(
            np.lib.stride_tricks.sliding_window_view(np.zeros(6), 3, writeable=True),
            np.zeros((4, 3)),
        ),
        ValueError,
        "share bytes",
    ),
    "another shape": (lambda dev, x: dev.get(x, out=np.zeros(5)), ValueError, r"\(5,\).*\(4,\)"),
    "the other byte order": (
        lambda dev, x: dev.get(x, out=np.zeros(4, ">f8")),
        TypeError,
        ">f8.*float64",
    ),
    "too large": (
        lambda dev, x: dev.put(np.broadcast_to(np.float64(1), (1 << 30,))),
        sf.OutOfDeviceMemory,
        "8589934592",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_before_anything_is_submitted(run, name):
    call, error, match = REFUSED[name]

    async def main():
        async with virtual(memory_nbytes=1 << 28) as dev:
            x = await dev.put(np.arange(4.0))
            await dev.zeros(3, np.uint8).free()
            before = (dev.pinned.stats().num_live, dev.live(), dev.memory.used_nbytes)
            with pytest.raises(error, match=match):
                call(dev, x)
            await dev.synchronize()
            after = (dev.pinned.stats().num_live, dev.live(), dev.memory.used_nbytes)
            assert after == before
            np.testing.assert_array_equal(await dev.get(x), np.arange(4.0))

    run(main)
