"""One kernel and its reference body on the same values, with guards around every array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from streamflow.backends.base import Access, Parameter
from streamflow.device import Device
from streamflow.runtime.array import DeviceArray
from streamflow.runtime.kernel import Kernel
from streamflow.testing.compare import Difference, Tolerance, first_difference

__all__ = ["SIZE", "KernelMismatch", "Template", "Trial"]

Array = npt.NDArray[Any]

_GUARD_NBYTES = 4096
_LEFT_ALONE = (b"\xa5", b"\x5a")
"""What an array holds that is written only: one for the body, another for the kernel, so that an
element which both leave alone shows."""


class _Size:
    """Stands for the current size among the arguments of ``check_kernel``."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "SIZE"


SIZE: Final = _Size()
"""The size at hand, as an argument of ``check_kernel``."""

Template: TypeAlias = (
    Array
    | np.generic
    | bool
    | int
    | float
    | complex
    | _Size
    | Callable[[int, np.random.Generator], object]
)


class KernelMismatch(AssertionError):
    """A kernel does not do what its reference body says.

    Attributes
    ----------
    kernel, argument : str
        The kernel, and the parameter whose array is wrong.
    size : int
        The size at which it is.
    index : tuple of int
        The first element, in C order, that differs; for bytes written outside of the array, the
        element that they would be part of, as if the array were flat and went on.
    expected, found : object
        That element, by the body and by the kernel; of bytes outside, None.
    num_different : int
        How many elements differ; of bytes outside, how many have changed.
    """

    def __init__(
        self, message: str, *, kernel: str, argument: str, size: int, what: Difference
    ) -> None:
        super().__init__(message)
        self.kernel = kernel
        self.argument = argument
        self.size = size
        self.index = what.index
        self.expected = what.expected
        self.found = what.found
        self.num_different = what.num_different


@dataclass(frozen=True, slots=True)
class _Guarded:
    """An array on the device between two guards, and what all of it was filled with."""

    parameter: Parameter
    filled: npt.NDArray[np.uint8]
    whole: DeviceArray
    array: DeviceArray


class Trial:
    """Runs a kernel at one size after the other.

    Parameters
    ----------
    kernel : Kernel
    args : sequence of Template
    tolerance : Tolerance
    seed : int

    Raises
    ------
    TypeError
        The kernel has no body, or takes another number of arguments.
    """

    def __init__(
        self, kernel: Kernel, args: Sequence[Template], tolerance: Tolerance, seed: int
    ) -> None:
        if not isinstance(kernel, Kernel):
            raise TypeError(f"check_kernel takes a streamflow Kernel, found {kernel!r}")
        if kernel.spec.body is None:
            raise TypeError(f"kernel {kernel.name!r} has no reference body to compare with")
        if len(args) != len(kernel.parameters):
            names = ", ".join(parameter.name for parameter in kernel.parameters)
            raise TypeError(
                f"kernel {kernel.name!r} takes {len(kernel.parameters)} arguments ({names}), "
                f"found {len(args)}"
            )
        self.kernel = kernel
        self.seed = seed
        self._args = args
        self._tolerance = tolerance

    async def run(self, dev: Device, size: int, geometry: dict[str, Any]) -> None:
        """Run both at ``size`` and compare.

        Raises
        ------
        KernelMismatch
        Exception
            What the body, or the launch, raises; with a note of the size.
        """
        try:
            await self._run(dev, size, geometry)
        except Exception as error:
            if not isinstance(error, KernelMismatch):
                error.add_note(f"check_kernel: {self._replay(size)}")
            raise

    async def _run(self, dev: Device, size: int, geometry: dict[str, Any]) -> None:
        kernel = self.kernel
        rng = np.random.default_rng((self.seed, size))  # one size alone draws the same values
        values = [
            self._value(parameter, template, size, rng)
            for parameter, template in zip(kernel.parameters, self._args, strict=True)
        ]
        expected = self._by_body(values)
        guarded: list[_Guarded] = []
        arguments: list[Any] = []
        for parameter, value in zip(kernel.parameters, values, strict=True):
            if parameter.is_pointer:
                held = _guard(dev, parameter, value, rng)
                guarded.append(held)
                arguments.append(held.array)
            else:
                arguments.append(value)
        await dev.launch(kernel, *arguments, **geometry)
        for held, wanted in zip(guarded, expected, strict=True):
            found = await dev.get(held.whole)
            self._compare(held, wanted, found, size)

    def _value(
        self, parameter: Parameter, template: Template, size: int, rng: np.random.Generator
    ) -> Any:
        """The argument that a template stands for."""
        value: object
        if isinstance(template, _Size):
            value = size
        elif isinstance(template, np.ndarray) and template.ndim:
            if not template.size:
                raise ValueError(f"{parameter.name!r}: an empty array has no values to draw from")
            value = template.reshape(-1)[rng.integers(0, template.size, size)]
        elif callable(template):
            value = template(size, rng)
        else:
            value = template
        is_array = isinstance(value, np.ndarray) and value.ndim > 0
        if is_array is not parameter.is_pointer:
            wanted = "an array" if parameter.is_pointer else "a scalar"
            raise TypeError(
                f"kernel {self.kernel.name!r}: parameter {parameter.name!r} is "
                f"{parameter.ctype} and takes {wanted}; found {type(value).__name__} at size {size}"
            )
        if isinstance(value, np.ndarray) and parameter.dtype not in (None, value.dtype):
            raise TypeError(
                f"kernel {self.kernel.name!r}: parameter {parameter.name!r} takes "
                f"{parameter.dtype}, found {value.dtype}"
            )
        return value

    def _by_body(self, values: Sequence[Any]) -> list[Array]:
        """The arrays as the reference body leaves them."""
        kernel = self.kernel
        arguments: list[Any] = []
        arrays: list[Array] = []
        for parameter, convert, value in zip(
            kernel.parameters, kernel.converters, values, strict=True
        ):
            if convert is not None:
                arguments.append(convert(value))
                continue
            array = np.array(value, order="C")
            if parameter.access is Access.WRITE:
                array = _filled_with(_LEFT_ALONE[0], array)
            view = array.view()
            view.flags.writeable = parameter.access is not Access.READ
            arguments.append(view)
            arrays.append(array)
        kernel(*arguments)
        return arrays

    def _compare(
        self, held: _Guarded, expected: Array, whole: npt.NDArray[np.uint8], size: int
    ) -> None:
        stop = _GUARD_NBYTES + expected.nbytes
        inside = whole[_GUARD_NBYTES:stop].view(expected.dtype).reshape(expected.shape)
        name, where = held.parameter.name, f"at size {size}"
        is_const = held.parameter.access is Access.READ
        tolerance = Tolerance(0.0, 0.0) if is_const else self._tolerance
        difference = first_difference(expected, inside, tolerance)
        if difference is not None:
            index = ", ".join(map(str, difference.index))
            self._fail(
                held,
                size,
                difference,
                f"{where} {name}[{index}] is {difference.found}, and the reference body makes it "
                f"{difference.expected}; {difference.num_different} of {expected.size} elements "
                f"differ (compared {tolerance.says(expected.dtype)}){_hint(held.parameter)}",
            )
        changed = np.flatnonzero(whole != held.filled)
        changed = changed[(changed < _GUARD_NBYTES) | (changed >= stop)]
        if changed.size:
            first = int(changed[0])
            at = (first - _GUARD_NBYTES) // expected.dtype.itemsize
            side = "before its begin" if first < _GUARD_NBYTES else "past its end"
            self._fail(
                held,
                size,
                Difference((at,), None, None, int(changed.size)),
                f"{where} the kernel writes outside of {name}: {changed.size} bytes {side} have "
                f"changed, the first where element {at} of {expected.size} would be",
            )

    def _fail(self, held: _Guarded, size: int, what: Difference, said: str) -> None:
        name = self.kernel.name
        raise KernelMismatch(
            f"kernel {name}: {said}. {self._replay(size)}",
            kernel=name,
            argument=held.parameter.name,
            size=size,
            what=what,
        )

    def _replay(self, size: int) -> str:
        return (
            f"This size alone: check_kernel({self.kernel.name}, ..., sizes=[{size}], "
            f"seed={self.seed})"
        )


def _guard(dev: Device, parameter: Parameter, value: Array, rng: np.random.Generator) -> _Guarded:
    """Put ``value`` on the device in the middle of random bytes."""
    filled = rng.integers(0, 256, 2 * _GUARD_NBYTES + value.nbytes, np.uint8)
    stop = _GUARD_NBYTES + value.nbytes
    if parameter.access is Access.WRITE:
        value = _filled_with(_LEFT_ALONE[1], value)
    filled[_GUARD_NBYTES:stop] = np.frombuffer(value.tobytes(), np.uint8)
    whole = dev.put(filled)
    if value.nbytes:
        array = whole[_GUARD_NBYTES:stop].view(value.dtype).reshape(value.shape)
    else:
        array = dev.empty(value.shape, value.dtype)
    return _Guarded(parameter, filled, whole, array)


def _filled_with(pattern: bytes, like: Array) -> Array:
    if like.dtype.kind == "b":  # other bytes are no bool
        return np.full(like.shape, pattern == _LEFT_ALONE[1])
    return np.frombuffer(pattern * like.nbytes, like.dtype).reshape(like.shape).copy()


def _hint(parameter: Parameter) -> str:
    if parameter.access is Access.WRITE:
        return (
            f". access= promises that all of {parameter.name!r} is written: it held other values "
            "before the kernel than before the body"
        )
    if parameter.access is Access.READ:
        return f". {parameter.name!r} is const: nothing may write there"
    return ""
