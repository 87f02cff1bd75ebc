"""Any slice of any array, as a source and as a destination: NumPy's result, and nothing else."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import anyio
import numpy as np
from hypothesis import event, given, settings
from hypothesis import strategies as st

import streamflow as sf
from streamflow.config import Settings, SimOptions

Array = np.ndarray[Any, Any]

CHUNK = 65536
GUARD_NBYTES = 64

DTYPES = {
    "bool": "?",
    "int": "i4",
    "unsigned": "u1",
    "float": "f8",
    "half": "f2",
    "complex": "c16",
    "big-endian": ">f4",
    "big-endian int": ">i8",
    "void": "V3",
    "structured": [("a", ">i2"), ("b", "f8"), ("c", "S3")],
    "nested": [("a", [("x", "u1"), ("y", "f4")]), ("b", "i2", (3,))],
    "padded": np.dtype([("a", "i1"), ("b", "f8"), ("c", "u2")], align=True),
}


class Layout(NamedTuple):
    """How to make a view of some bytes.

    ``start`` is where the base begins in its buffer, aligned or not.
    """

    shape: tuple[int, ...]
    order: Any
    key: tuple[Any, ...]
    axes: tuple[int, ...]
    start: int

    def view(self, memory: Array, dtype: np.dtype[Any]) -> Array:
        base: Array = np.ndarray(self.shape, dtype, memory.data, self.start, order=self.order)
        return base[self.key].transpose(self.axes) if self.axes else base[(*self.key, ...)]


@st.composite
def slices(draw: st.DrawFn, size: int) -> slice:
    step = draw(st.sampled_from([1, 1, -1, 2, -2, 3]))
    if draw(st.booleans()):
        return slice(None, None, step)
    ends = st.none() | st.integers(-size - 1, size + 1)
    return slice(draw(ends), draw(ends), step)


@st.composite
def layouts(draw: st.DrawFn, itemsize: int, is_large: bool) -> Layout:
    shape = draw(st.lists(st.integers(int(is_large), 5), min_size=int(is_large), max_size=4))
    long = draw(st.integers(0, len(shape) - 1)) if is_large else None
    if long is not None:
        wanted = draw(st.integers(3 * CHUNK, 20 * CHUNK))
        shape[long] = 1
        shape[long] = -(-wanted // (prod(shape) * itemsize))
    key: list[Any] = []
    for axis, size in enumerate(shape):
        if draw(st.integers(0, 9)) == 0:
            key.append(None)
        is_index = draw(st.integers(0, 9)) == 0 and size > 0 and axis != long
        if is_index:
            key.append(draw(st.integers(-size, size - 1)))
        elif axis == long:
            step = draw(st.sampled_from([1, -1, 2]))
            key.append(slice(None, None, step))
        else:
            key.append(draw(slices(size)))
    ndim = sum(not isinstance(part, int) for part in key)
    axes = tuple(draw(st.permutations(range(ndim)))) if draw(st.booleans()) else ()
    order = draw(st.sampled_from("CF"))
    start = GUARD_NBYTES + draw(st.sampled_from([0, 0, 1, 8]))
    return Layout(tuple(shape), order, tuple(key), axes, start)


def memory_for(layout: Layout, dtype: np.dtype[Any], seed: int) -> Array:
    nbytes = prod(layout.shape) * dtype.itemsize + layout.start + GUARD_NBYTES
    values = np.random.default_rng(seed).integers(0, 255, nbytes, np.uint8)
    return values & 1 if dtype.kind == "b" else values


def plain(array: Array) -> list[bytes]:
    """The bytes of every element, but for what pads it."""
    if array.dtype.isalignedstruct:
        return [array[name].tobytes() for name in array.dtype.names or ()]
    return [array.view((np.void, array.dtype.itemsize)).tobytes()]


def on_a_device(main: Any, memory: Array, is_pinned: bool) -> Any:
    """Run ``main(dev, memory)``; the memory is a lease's if ``is_pinned``."""

    async def run() -> Any:
        options = Settings(
            staging_in_nbytes=CHUNK,
            staging_out_nbytes=CHUNK,
            staging_threads=2,
            sim=SimOptions(clock="virtual"),
        )
        async with sf.Device(backend="sim", settings=options) as dev:
            if not is_pinned:
                return await main(dev, memory)
            async with dev.pinned.lease(memory.nbytes) as lease:
                leased = lease.array()
                leased[:] = memory
                result = await main(dev, leased)
                memory[:] = leased
                return result

    return anyio.run(run)


quick = settings(deadline=None, max_examples=150)
cases = {
    "name": st.sampled_from(sorted(DTYPES)),
    "is_large": st.booleans(),
    "is_pinned": st.booleans(),
    "data": st.data(),
}


def note_event(view: Array, is_pinned: bool) -> None:
    size = "staged" if view.nbytes > CHUNK else "inline"
    event(f"{'pinned' if is_pinned else size}, {view.ndim} axes")


@quick
@given(**cases)
def test_any_slice_is_a_source(
    name: str, is_large: bool, is_pinned: bool, data: st.DataObject
) -> None:
    dtype = np.dtype(DTYPES[name])
    layout = data.draw(layouts(dtype.itemsize, is_large))
    repeats = data.draw(st.sampled_from([0, 0, 1, 3]))

    async def main(dev: sf.Device, memory: Array) -> tuple[Any, ...]:
        view = layout.view(memory, dtype)
        if repeats:
            view = np.broadcast_to(view, (repeats, *view.shape))
        note_event(view, is_pinned)
        x = dev.put(view)
        y = dev.empty(view.shape, dtype)
        await dev.copy(y, view)
        return view.shape, plain(view), x, await dev.get(x), await dev.get(y)

    memory = memory_for(layout, dtype, 1)
    shape, wanted, x, back, copied = on_a_device(main, memory, is_pinned)
    assert x.shape == back.shape == copied.shape == shape
    assert back.dtype == copied.dtype == dtype
    assert plain(back) == plain(copied) == wanted


@quick
@given(way=st.sampled_from(["get", "copy", "on the host"]), **cases)
def test_any_slice_is_a_destination_and_all_else_is_left_alone(
    name: str, is_large: bool, is_pinned: bool, way: str, data: st.DataObject
) -> None:
    dtype = np.dtype(DTYPES[name])
    layout = data.draw(layouts(dtype.itemsize, is_large))
    memory = memory_for(layout, dtype, 2)
    before, seen = memory.copy(), layout.view(memory, dtype)
    source = np.random.default_rng(3).integers(0, 2, seen.nbytes, np.uint8)
    values = source.view(dtype).reshape(seen.shape) if seen.size else np.empty(seen.shape, dtype)
    note_event(seen, is_pinned)

    async def main(dev: sf.Device, memory: Array) -> None:
        view = layout.view(memory, dtype)
        if way == "on the host":
            assert await dev.copy(view, values) is view
        elif way == "copy":
            assert await dev.copy(view, dev.put(values)) is view
        else:
            assert await dev.get(dev.put(values), out=view) is view

    on_a_device(main, memory, is_pinned)
    assert plain(seen) == plain(values)
    selected = np.zeros_like(memory)
    layout.view(selected, np.dtype((np.void, dtype.itemsize)))[...] = b"\xff" * dtype.itemsize
    outside = selected == 0
    np.testing.assert_array_equal(memory[outside], before[outside])
