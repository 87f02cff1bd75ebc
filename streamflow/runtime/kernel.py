"""Kernel: CUDA code, its signature, and what it means in NumPy."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import update_wrapper
from pathlib import Path
from typing import Final, TypeAlias

from streamflow.backends.base import Access, KernelSpec, Parameter
from streamflow.runtime.parameters import override_access
from streamflow.runtime.scalars import Converter, make_converter
from streamflow.runtime.signature import parse_parameters, parse_signature

__all__ = ["Kernel", "kernel"]

Body: TypeAlias = Callable[..., object]
Cost: TypeAlias = Callable[..., float]
AccessByName: TypeAlias = Mapping[str, str | Access]


class Kernel:
    """One CUDA kernel that ``dev.launch`` takes.

    Made by :func:`kernel` or by one of :meth:`from_source`, :meth:`from_file` and
    :meth:`from_module`; making one compiles nothing and needs no GPU.

    Parameters
    ----------
    spec : KernelSpec
        Everything a backend needs to launch it.

    Attributes
    ----------
    spec : KernelSpec
        One per kernel; backends keep what they compiled by its identity.
    converters : tuple of (callable or None)
        One per parameter: checks an argument and makes the scalar that
        :meth:`~streamflow.backends.base.Backend.launch` takes; None for a pointer.

    Raises
    ------
    TypeError
        The reference body or the cost is not callable with the kernel's arguments.
    """

    spec: Final[KernelSpec]
    converters: Final[tuple[Converter | None, ...]]

    def __init__(self, spec: KernelSpec) -> None:
        if spec.body is not None:
            _check_callable("reference body", spec.body, spec)
        if spec.cost_s is not None:
            _check_callable("cost", spec.cost_s, spec)
        if spec.body is not None:
            update_wrapper(self, spec.body)
        self.spec = spec
        self.converters = tuple(make_converter(each, spec.name) for each in spec.parameters)

    @classmethod
    def from_source(
        cls,
        source: str,
        *,
        name: str | None = None,
        body: Body | None = None,
        access: AccessByName | None = None,
        options: Sequence[str] = (),
        cost: Cost | None = None,
    ) -> Kernel:
        """A kernel of CUDA C++ source.

        Parameters
        ----------
        source : str
            CUDA C++ source with at least one ``__global__`` function.
        name : str, optional
            The function wanted. By default the one named as ``body``, or the only one.
        body : callable, optional
            What the kernel means, on NumPy arrays and scalars; parameters correspond by
            position. The simulator runs it, so a kernel without one needs a GPU.
        access : mapping of str to str or Access, optional
            By parameter name, ``"read"``, ``"write"`` (overwrites all of it) or
            ``"read-write"``. By default ``const T*`` is read and ``T*`` is read and written.
        options : sequence of str, optional
            Compiler options, as NVRTC takes them.
        cost : callable, optional
            An estimate of the run time in seconds, from the same arguments as ``body``.

        Raises
        ------
        ValueError
            No such function, several to choose from, a template, a parameter that cannot be
            passed from Python, or an ``access`` that does not fit the signature.
        TypeError
            ``body`` or ``cost`` is not callable with as many arguments.
        """
        if not isinstance(source, str):
            raise TypeError(f"source must be a str of CUDA C++; found {type(source).__name__}")
        hint = getattr(body, "__name__", None)
        found, parameters = parse_signature(source, name=name, hint=hint)
        return cls(
            KernelSpec(
                name=found,
                parameters=override_access(parameters, access, found),
                source=source,
                options=_checked_options(options),
                body=body,
                cost_s=cost,
                filename=f"{found.rpartition('::')[2]}.cu",
            )
        )

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        *,
        name: str | None = None,
        body: Body | None = None,
        access: AccessByName | None = None,
        options: Sequence[str] = (),
        cost: Cost | None = None,
    ) -> Kernel:
        """A kernel of a CUDA C++ file, read now; its name shows in compiler messages.

        Parameters and errors are those of :meth:`from_source`, and ``OSError``.
        """
        source = Path(path).read_text(encoding="utf-8")
        made = cls.from_source(
            source, name=name, body=body, access=access, options=options, cost=cost
        )
        return cls(replace(made.spec, filename=os.fspath(path)))

    @classmethod
    def from_module(
        cls,
        image_or_path: bytes | str | os.PathLike[str],
        name: str,
        signature: str,
        *,
        body: Body | None = None,
        access: AccessByName | None = None,
        cost: Cost | None = None,
    ) -> Kernel:
        """A kernel of a compiled module: cubin, PTX or fatbin.

        Parameters
        ----------
        image_or_path : bytes, str or os.PathLike
            The module itself as bytes, or the file that holds it (read now).
        name : str
            The kernel's name in the module; the mangled one unless it is ``extern "C"``.
        signature : str
            Its parameter list, ``"float a, const float* x, float* y"``, or a whole
            ``__global__`` declaration. A module doesn't carry it, so it is trusted.
        body, access, cost
            As for :meth:`from_source`.

        Raises
        ------
        ValueError
            The signature does not parse, or declares a function of another name.
        TypeError
            ``body`` or ``cost`` is not callable with as many arguments.
        """
        if isinstance(image_or_path, bytes | bytearray | memoryview):
            image = bytes(image_or_path)
        elif isinstance(image_or_path, str | os.PathLike):
            image = Path(image_or_path).read_bytes()
        else:
            raise TypeError(
                f"image_or_path must be bytes or a path; found {type(image_or_path).__name__}"
            )
        if "__global__" in signature:
            # A mangled name can't be compared with the declaration's.
            _, parameters = parse_signature(signature, name=None if name.startswith("_Z") else name)
        else:
            parameters = parse_parameters(signature, kernel=name)
        return cls(
            KernelSpec(
                name=name,
                parameters=override_access(parameters, access, name),
                image=image,
                body=body,
                cost_s=cost,
            )
        )

    @property
    def name(self) -> str:
        """The CUDA function's name."""
        return self.spec.name

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The CUDA function's parameters, in order."""
        return self.spec.parameters

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the reference body here and now, on NumPy arrays; ``dev.launch`` runs the kernel."""
        if self.spec.body is None:
            raise TypeError(f"kernel {self.name!r} has no reference body to call: pass body=")
        return self.spec.body(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<Kernel {_spell(self.spec)}>"


def kernel(
    source: str,
    *,
    name: str | None = None,
    access: AccessByName | None = None,
    options: Sequence[str] = (),
    cost: Cost | None = None,
) -> Callable[[Body], Kernel]:
    """Make a :class:`Kernel` of CUDA C++ source and the reference body that it decorates.

    Parameters and errors are those of :meth:`Kernel.from_source`. The body says in NumPy what
    the kernel means: it writes into the arrays it is given, and what it returns is not used.

    Examples
    --------
    >>> @kernel('''extern "C" __global__ void negate(float* x, int n) {
    ...     int i = blockIdx.x * blockDim.x + threadIdx.x;
    ...     if (i < n) x[i] = -x[i];
    ... }''')
    ... def negate(x, n):
    ...     x[:n] *= -1
    >>> negate
    <Kernel negate(float* x, int n)>
    """
    if callable(source):
        raise TypeError("kernel takes the CUDA C++ source: write @kernel('''...''') above the body")

    def decorate(body: Body) -> Kernel:
        return Kernel.from_source(
            source, name=name, body=body, access=access, options=options, cost=cost
        )

    return decorate


def _check_callable(role: str, function: object, spec: KernelSpec) -> None:
    """Raise unless ``function`` can be called with one argument per parameter."""
    if not callable(function):
        raise TypeError(
            f"kernel {spec.name!r}: the {role} must be callable; found {type(function).__name__}"
        )
    if inspect.iscoroutinefunction(function):
        raise TypeError(f"kernel {spec.name!r}: the {role} must be a plain function, not async")
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in functions have none to show
        return
    try:
        signature.bind(*spec.parameters)
    except TypeError:
        spelled = getattr(function, "__name__", role) + str(signature)
        raise TypeError(
            f"kernel {_spell(spec)} has {len(spec.parameters)} parameters, which its {role} "
            f"{spelled} does not take by position"
        ) from None


def _checked_options(options: Sequence[str]) -> tuple[str, ...]:
    if isinstance(options, str) or not all(isinstance(option, str) for option in options):
        raise TypeError(f"options must be a sequence of str; found {options!r}")
    return tuple(options)


def _spell(spec: KernelSpec) -> str:
    declared = ", ".join(f"{each.ctype} {each.name}" for each in spec.parameters)
    return f"{spec.name}({declared})"
