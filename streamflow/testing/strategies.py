"""Hypothesis strategies: arrays that a device takes, small programs, schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeAlias

import numpy as np

from streamflow.backends.base import Parameter
from streamflow.runtime.kernel import Kernel, kernel
from streamflow.testing.programs import Kind, Program, Step

try:
    import hypothesis.extra.numpy as hnp
    import hypothesis.strategies as st
except ImportError as error:
    raise ImportError(
        "streamflow.testing.strategies needs Hypothesis: pip install 'streamflow-cuda[testing]'"
    ) from error

__all__ = ["DTYPES", "EDGES", "SCHEDULES", "arrays", "programs", "schedules"]

Array: TypeAlias = np.ndarray[Any, Any]

DTYPES = (
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
"""What kernels have types for."""

EDGES = (0, 1, 255, 256, 257)
"""None, one, and around a block of threads."""

SCHEDULES = ("random", "priority-inverting", "starved")
"""Names of ways to break ties."""


def arrays(
    dtype: Any = None, *, min_size: int = 0, max_size: int = 300
) -> st.SearchStrategy[Array]:
    """One-dimensional arrays of a dtype that kernels have a type for.

    Parameters
    ----------
    dtype : dtype-like or strategy, optional
        Default: one of ``DTYPES``.
    min_size, max_size : int
        Of the sizes; those of ``EDGES`` between them are drawn often.

    Returns
    -------
    strategy of ndarray
        With the values that are hard to get right: NaN, infinities, -0.0, subnormal
        numbers, and the limits of integers.
    """
    if not 0 <= min_size <= max_size:
        raise ValueError(f"min_size and max_size: 0 <= {min_size} <= {max_size} does not hold")
    dtypes = st.sampled_from(DTYPES) if dtype is None else dtype
    if not isinstance(dtypes, st.SearchStrategy):
        dtypes = st.just(np.dtype(dtypes))
    sizes = _sizes(min_size, max_size)
    return dtypes.flatmap(lambda chosen: hnp.arrays(np.dtype(chosen), sizes))


def _sizes(min_size: int, max_size: int) -> st.SearchStrategy[int]:
    edges = [size for size in EDGES if min_size <= size <= max_size]
    small = st.integers(min_size, min(max_size, max(min_size, 16)))
    any_size = st.integers(min_size, max_size)
    return st.one_of(small, *([st.sampled_from(edges)] if edges else []), any_size)


def schedules() -> st.SearchStrategy[str]:
    """Texts for ``SimOptions(schedule=...)``: ``"random:17"``, ``"starved:3"``, ...

    Returns
    -------
    strategy of str
        Shrinks to ``"random:0"``.
    """
    return st.builds("{}:{}".format, st.sampled_from(SCHEDULES), st.integers(0, 9999))


# -- programs --------------------------------------------------------------------------------


@kernel(
    """extern "C" __global__ void advance(unsigned int* x, unsigned int c, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) x[i] = 5u * x[i] + c;
    }"""
)
def advance(x: Array, c: Any, n: int) -> None:
    x[:n] = 5 * x[:n] + np.uint32(c)


@kernel(
    """extern "C" __global__
    void mix(const unsigned int* x, unsigned int* y, unsigned int c, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) y[i] = 3u * y[i] + x[i] + c;
    }"""
)
def mix(x: Array, y: Array, c: Any, n: int) -> None:
    y[:n] = 3 * y[:n] + x[:n] + np.uint32(c)


_KINDS = (
    *(Kind.FULL, Kind.PUT, Kind.LAUNCH, Kind.LAUNCH, Kind.LAUNCH, Kind.COPY, Kind.FILL),
    *(Kind.GET, Kind.HOST, Kind.SPLIT, Kind.FREE, Kind.AWAIT, Kind.DETACH),
)
_MAX_ARRAYS = 6


def programs(
    kernels: Sequence[Kernel] = (advance, mix),
    *,
    max_steps: int = 30,
    max_size: int = 300,
    num_streams: int = 2,
) -> st.SearchStrategy[Program]:
    """Small programs: puts, fills, launches, copies, splits, frees, reads, host tasks, awaits.

    Every value is right by construction: ``await program.run(dev)`` has to equal
    ``program.expected()``, whatever the schedule.

    Parameters
    ----------
    kernels : sequence of Kernel
        With reference bodies. The arrays of one launch have one size; an integer parameter
        called ``n``, ``num``, ``size``, ``count`` or ``length`` is that size, other scalars
        are small numbers.
    max_steps : int
        Of a program. It shrinks to fewer.
    max_size : int
        Elements of an array, at least 1.
    num_streams : int
        Explicit streams that steps may be given; the rest goes to lanes.

    Returns
    -------
    strategy of Program

    Raises
    ------
    ValueError
        A kernel without a reference body, or with a pointer to anything.
    """
    for each in kernels:
        untyped = [p.name for p in each.parameters if p.dtype is None]
        if each.spec.body is None or untyped:
            raise ValueError(f"{each!r}: programs need a reference body and typed parameters")
    found = {str(p.dtype): None for each in kernels for p in each.parameters if p.is_pointer}
    dtypes = tuple(found) or ("uint32",)
    number = st.integers(0, 255)
    # Four choices for a step, no more: what shrinks a list deletes at most five in a row.
    raw = st.tuples(st.sampled_from(_KINDS), st.integers(0, 4095), number, number)
    sizes = st.lists(_sizes(1, max_size), min_size=1, max_size=3)

    def build(sizes: list[int], raw: list[tuple[Kind, int, int, int]]) -> Program:
        builder = _Builder(tuple(kernels), dtypes, tuple(sizes), num_streams)
        for each in raw:
            builder.add(*each)
        return Program(tuple(builder.steps))

    # Left alone, a list has five elements or so, whatever it may have.
    steps = st.one_of(
        st.lists(raw, max_size=max_steps),
        st.lists(raw, min_size=max_steps // 2, max_size=max_steps),
    )
    return st.builds(build, sizes, steps)


_IS_SIZE = {"n", "num", "size", "count", "length"}


@dataclass(slots=True)
class _Known:
    """An array that a program has at some point."""

    name: str
    dtype: str
    size: int
    base: str
    """The array whose memory it is a part of; itself if it owns it."""


@dataclass(slots=True)
class _Builder:
    """Makes steps of numbers: whatever the numbers, a step makes sense where it stands."""

    kernels: tuple[Kernel, ...]
    dtypes: tuple[str, ...]
    sizes: tuple[int, ...]
    num_streams: int
    steps: list[Step] = field(default_factory=list)
    known: list[_Known] = field(default_factory=list)
    num_arrays: count[int] = field(default_factory=count)
    num_results: count[int] = field(default_factory=count)

    def add(self, kind: Kind, place: int, b: int, value: int) -> None:
        where, a = divmod(place, 2 * _MAX_ARRAYS)
        where %= 2 * self.num_streams + 1
        stream = f"s{where - 1}" if 0 < where <= self.num_streams else ""
        if not self.known and kind is not Kind.FULL:
            kind = Kind.PUT
        if kind in (Kind.PUT, Kind.FULL):
            if len(self.known) < _MAX_ARRAYS:
                dtype = self.dtypes[a % len(self.dtypes)]
                self.make(kind, dtype, self.sizes[b % len(self.sizes)], value, stream)
            return
        x = self.known[a % len(self.known)]
        match kind:
            case Kind.FILL:
                self.steps.append(Step(kind, (x.name,), value=value % 2, stream=stream))
            case Kind.LAUNCH:
                if self.kernels:
                    self.launch(self.kernels[b % len(self.kernels)], x, value, stream)
            case Kind.COPY:
                if (y := self.other(x, x.dtype, b)) is not None:
                    self.steps.append(Step(kind, (x.name, y.name), stream=stream))
            case Kind.SPLIT:
                self.split(x, 2 + b % 2)
            case Kind.GET | Kind.HOST:
                result = f"r{next(self.num_results)}"
                stream = stream if kind is Kind.GET else ""
                self.steps.append(Step(kind, (x.name,), result=result, stream=stream))
            case Kind.FREE:
                parts = [each.name for each in self.known if each.base == x.base != each.name]
                self.steps.append(Step(kind, (x.base, *parts), stream=stream))
                self.known = [each for each in self.known if each.base != x.base]
            case _:
                self.steps.append(Step(kind, (x.name,)))

    def make(self, kind: Kind, dtype: str, size: int, value: int, stream: str) -> None:
        name = f"a{next(self.num_arrays)}"
        value = value % 2 if kind is Kind.FULL or dtype == "bool" else value % 30
        self.known.append(_Known(name, dtype, size, name))
        step = Step(kind, (name,), size=size, value=value, dtype=dtype, stream=stream)
        self.steps.append(step)

    def other(self, x: _Known, dtype: str, choice: int, taken: Sequence[str] = ()) -> _Known | None:
        """An array as long as ``x``, in memory that is neither its nor of those ``taken``."""
        fits = [
            each
            for each in self.known
            if each.dtype == dtype and each.size == x.size
            if each.base != x.base and each.base not in taken
        ]
        return fits[choice % len(fits)] if fits else None

    def launch(self, launched: Kernel, first: _Known, value: int, stream: str) -> None:
        args: list[Any] = []
        chosen: list[_Known] = []
        for position, parameter in enumerate(launched.parameters):
            if not parameter.is_pointer:
                args.append(_scalar(parameter, first.size, value))
                continue
            dtype = str(parameter.dtype)
            if not chosen and dtype == first.dtype:
                x: _Known | None = first
            else:
                taken = [each.base for each in chosen]
                x = self.other(first, dtype, value + position, taken)
            if x is None:
                return
            chosen.append(x)
            args.append(x.name)
        names = tuple(each.name for each in chosen)
        step = Step(Kind.LAUNCH, names, kernel=launched, args=tuple(args), stream=stream)
        self.steps.append(step)

    def split(self, x: _Known, num_parts: int) -> None:
        if x.size < num_parts or len(self.known) + num_parts > 2 * _MAX_ARRAYS:
            return
        names = [f"a{next(self.num_arrays)}" for _ in range(num_parts)]
        self.steps.append(Step(Kind.SPLIT, (*names, x.name)))
        for part, name in enumerate(names):
            size = x.size // num_parts + (part < x.size % num_parts)
            self.known.append(_Known(name, x.dtype, size, x.base))


def _scalar(parameter: Parameter, size: int, value: int) -> Any:
    assert parameter.dtype is not None
    kind = parameter.dtype.kind
    if kind == "b":
        return bool(value % 2)
    if kind in "iu":
        return size if parameter.name in _IS_SIZE else value % 100
    return value % 100 / 4
