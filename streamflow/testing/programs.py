"""A small program as a value: run it on a device, or ask NumPy what it should have given."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import anyio
import numpy as np

from streamflow.device import Device
from streamflow.runtime.array import DeviceArray
from streamflow.runtime.kernel import Kernel
from streamflow.runtime.stream import Stream

__all__ = ["Kind", "Program", "Results", "Step", "checksum"]

Array: TypeAlias = np.ndarray[Any, Any]
Results: TypeAlias = dict[str, Any]
"""What was read, by name: an ndarray for each ``get``, an int for each host task."""


class Kind(Enum):
    """What a step does."""

    PUT = "put"
    FULL = "full"
    FILL = "fill"
    LAUNCH = "launch"
    COPY = "copy"
    SPLIT = "split"
    GET = "get"
    HOST = "host"
    FREE = "free"
    AWAIT = "await"
    DETACH = "detach"


@dataclass(frozen=True, slots=True)
class Step:
    """One line of a program.

    Attributes
    ----------
    kind : Kind
    names : tuple of str
        Arrays. Those that are made, or written, come first.
    result : str
        For ``GET`` and ``HOST``: the name of what is read.
    kernel : Kernel or None
    args : tuple
        For ``LAUNCH``: a name, or a scalar, for each parameter.
    size, value : int
        Of a new array, and what it is filled with.
    dtype : str
    stream : str
        Empty: the runtime picks a lane.
    """

    kind: Kind
    names: tuple[str, ...]
    result: str = ""
    kernel: Kernel | None = None
    args: tuple[Any, ...] = ()
    size: int = 0
    value: int = 0
    dtype: str = ""
    stream: str = ""

    def data(self) -> Array:
        """What ``PUT`` puts: no two neighbours are equal."""
        return (np.arange(self.size) % 97 + self.value).astype(self.dtype)

    def __str__(self) -> str:
        first, *others = self.names
        on = f", stream={self.stream}" if self.stream else ""
        match self.kind:
            case Kind.PUT:
                source = f"(np.arange({self.size}) % 97 + {self.value}).astype({self.dtype!r})"
                return f"{first} = dev.put({source}{on})"
            case Kind.FULL:
                return f"{first} = dev.full({self.size}, {self.value}, {self.dtype!r}{on})"
            case Kind.FILL:
                return f"dev.fill({first}, {self.value}{on})"
            case Kind.LAUNCH:
                assert self.kernel is not None
                args = ", ".join(str(arg) for arg in self.args)
                return f"dev.launch({self.kernel.name}, {args}{on})"
            case Kind.COPY:
                return f"dev.copy({first}, {others[0]}{on})"
            case Kind.SPLIT:
                *parts, base = self.names
                return f"{', '.join(parts)} = {base}.split({len(parts)})"
            case Kind.GET:
                return f"{self.result} = dev.get({first}{on})"
            case Kind.HOST:
                return f"{self.result} = dev.host(checksum, {first})"
            case Kind.FREE:
                return f"{first}.free({on[2:]})"
            case Kind.AWAIT:
                return f"await {first}"
            case Kind.DETACH:
                return f"cancelled: await {first}"


@dataclass(frozen=True, slots=True)
class Program:
    """Steps that are submitted in order, all without waiting but for the ``await`` among them.

    Attributes
    ----------
    steps : tuple of Step
    """

    steps: tuple[Step, ...]

    async def run(self, dev: Device) -> Results:
        """Submit every step to ``dev``, and wait for what was read and for what is left.

        Returns
        -------
        dict
            What each ``get`` and host task gave, and by its name every array that was not
            freed. Nothing of the program stays on the device.

        Ordering
        --------
        From data, and on explicit streams as submitted (rule R3). An ``await`` among the
        steps waits for the last write of its array.

        Raises
        ------
        DeviceError, ExceptionGroup
            What went wrong on the way.
        """
        return await _Run(dev, self).finish()

    def expected(self) -> Results:
        """What NumPy gives: one step after the other, kernels by their reference bodies."""
        arrays: dict[str, Array] = {}
        results: Results = {}
        for step in self.steps:
            _foretell(step, arrays, results)
        return {**results, **{name: array.copy() for name, array in arrays.items()}}

    def __repr__(self) -> str:
        return "Program:\n" + "".join(f"    {step}\n" for step in self.steps)


def checksum(values: Array) -> int:
    """Of bytes, each with a weight of its own: the host task of a program."""
    data = np.frombuffer(np.ascontiguousarray(values).tobytes(), np.uint8).astype(np.uint64)
    return int((data * np.arange(1, data.size + 1, dtype=np.uint64)).sum())


# -- NumPy -----------------------------------------------------------------------------------


def _foretell(step: Step, arrays: dict[str, Array], results: Results) -> None:
    first, *others = step.names
    match step.kind:
        case Kind.PUT:
            arrays[first] = step.data()
        case Kind.FULL:
            arrays[first] = np.full(step.size, step.value, step.dtype)
        case Kind.FILL:
            arrays[first][...] = step.value
        case Kind.LAUNCH:
            assert step.kernel is not None
            with np.errstate(all="ignore"):  # as a device has it
                step.kernel(*_arguments(step, arrays))
        case Kind.COPY:
            arrays[first][...] = arrays[others[0]]
        case Kind.SPLIT:
            *parts, base = step.names
            views = np.array_split(arrays[base], len(parts))
            arrays.update(zip(parts, views, strict=True))
        case Kind.GET:
            results[step.result] = arrays[first].copy()
        case Kind.HOST:
            results[step.result] = checksum(arrays[first])
        case Kind.FREE:
            for name in step.names:  # its parts go with it
                del arrays[name]
        case Kind.AWAIT | Kind.DETACH:
            pass


def _arguments(step: Step, arrays: Mapping[str, Any]) -> list[Any]:
    """Arrays for names; scalars as the device passes them."""
    assert step.kernel is not None
    convert = step.kernel.converters
    return [
        arrays[arg] if isinstance(arg, str) else arg if to_scalar is None else to_scalar(arg)
        for arg, to_scalar in zip(step.args, convert, strict=True)
    ]


# -- a device --------------------------------------------------------------------------------


class _Run:
    """One run of a program on a device."""

    def __init__(self, dev: Device, program: Program) -> None:
        self._dev = dev
        self._program = program
        self._arrays: dict[str, DeviceArray] = {}
        self._read: Results = {}  # first the ops, then what they gave
        self._streams: dict[str, Stream] = {}

    async def finish(self) -> Results:
        read = self._read
        try:
            for name in sorted({step.stream for step in self._program.steps} - {""}):
                self._streams[name] = self._dev.stream(name)
            for step in self._program.steps:
                await self._submit(step)
            read.update((name, self._dev.get(x)) for name, x in self._arrays.items())
            for name in tuple(read):
                read[name] = await read[name]
            # Copies: what get() gives is pinned memory, which the device would count as held.
            return deepcopy(read)
        finally:  # where it fails, who holds the error holds this run
            self._arrays.clear()
            read.clear()
            for stream in self._streams.values():
                stream.close()

    async def _submit(self, step: Step) -> None:
        dev, arrays = self._dev, self._arrays
        first, *others = step.names
        stream = self._streams.get(step.stream)
        match step.kind:
            case Kind.PUT:
                arrays[first] = dev.put(step.data(), stream=stream)
            case Kind.FULL:
                arrays[first] = dev.full(step.size, step.value, step.dtype, stream=stream)
            case Kind.FILL:
                dev.fill(arrays[first], step.value, stream=stream)
            case Kind.LAUNCH:
                assert step.kernel is not None
                args = [arrays[arg] if isinstance(arg, str) else arg for arg in step.args]
                dev.launch(step.kernel, *args, stream=stream)
            case Kind.COPY:
                dev.copy(arrays[first], arrays[others[0]], stream=stream)
            case Kind.SPLIT:
                *parts, base = step.names
                arrays.update(zip(parts, arrays[base].split(len(parts)), strict=True))
            case Kind.GET:
                self._read[step.result] = dev.get(arrays[first], stream=stream)
            case Kind.HOST:
                self._read[step.result] = dev.host(checksum, arrays[first])
            case Kind.FREE:
                for name in others:
                    del arrays[name]
                arrays.pop(first).free(stream=stream)
            case Kind.AWAIT:
                await arrays[first]
            case Kind.DETACH:
                with anyio.CancelScope() as scope:
                    scope.cancel()
                    await arrays[first]
