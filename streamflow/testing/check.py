"""``check_kernel``: whether CUDA code does what its reference body says."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Literal, TypeAlias

import anyio
import anyio.to_thread
import numpy as np

from streamflow.backends import choose_backend
from streamflow.backends.base import KernelSpec
from streamflow.config import Settings
from streamflow.device import Device
from streamflow.errors import BackendUnavailable, CompileFailed
from streamflow.runtime.kernel import Kernel
from streamflow.scheduler.loops import current_shell
from streamflow.testing.compare import Tolerance
from streamflow.testing.trial import SIZE, KernelMismatch, Template, Trial

__all__ = [
    "EDGE_SIZES",
    "SIZE",
    "KernelMismatch",
    "KernelNotChecked",
    "KernelReport",
    "Template",
    "check_kernel",
    "check_kernel_async",
]

EDGE_SIZES = (1, 2, 31, 32, 33, 255, 256, 257, 1000, 65535, 65537)
"""Around a warp, a block, and what 16 bits hold."""

_NUM_RANDOM = 5
_RANDOM_MIN, _RANDOM_MAX = 64, 200_000
_REQUIRED = (None, "compiler", "gpu")

Geometry: TypeAlias = int | tuple[int, ...]
Require: TypeAlias = Literal["compiler", "gpu"] | None


class KernelNotChecked(UserWarning):
    """Only the reference body was run: there was neither a GPU nor a compiler."""


@dataclass(frozen=True, slots=True)
class KernelReport:
    """What a check of a kernel has really done.

    Attributes
    ----------
    kernel : str
        Its name.
    backend : str
        Where it ran: ``"cuda"``, ``"sim"`` (the reference body only) or a registered name.
    compared : bool
        A GPU ran the kernel, and its results were those of the body.
    compiled : bool
        The CUDA source was compiled.
    sizes : tuple of int
        The sizes that were run.
    seed : int
        What the values were drawn from.
    why_not : str
        Why it was not compared, or not compiled; empty where both were done.
    """

    kernel: str
    backend: str
    compared: bool
    compiled: bool
    sizes: tuple[int, ...]
    seed: int
    why_not: str = ""


def check_kernel(
    kernel: Kernel,
    *args: Template,
    rtol: float | None = None,
    atol: float | None = None,
    sizes: Sequence[int] | None = None,
    seed: int = 0,
    backend: str = "auto",
    grid: Geometry | Callable[[int], Geometry] | None = None,
    block: Geometry | None = None,
    shared_bytes: int = 0,
    require: Require = None,
    arch: str = "sm_90",
) -> KernelReport:
    """Compare a kernel with its reference body, over many sizes.

    On a GPU each size runs the kernel and the body on the same values and compares every array,
    and the bytes before and behind it. Without one the source is compiled, where NVRTC is
    installed, and the body runs on the simulator. The report says which; ``require`` insists.

    Parameters
    ----------
    kernel : Kernel
        With a reference body.
    *args : ndarray, scalar, SIZE or callable
        One for each parameter, a template for its argument at size ``n``. An ndarray: ``n``
        elements of its dtype, drawn from its own. A scalar: as it is. ``SIZE``: ``n``. A
        callable: ``f(n, rng)`` gives the array, of any shape, or the scalar.
    rtol, atol : float, optional
        For floats: ``abs(found - expected) <= atol + rtol * abs(expected)``, and NaN equals
        NaN. Default: 1e-5 and 1e-6 for single, 1e-12 and 1e-14 for double, 1e-3 and 1e-3 for
        half precision. Structures are compared field by field. Everything else has to be equal.
    sizes : sequence of int, optional
        Default: ``EDGE_SIZES``, and five more at random, up to 200 000.
    seed : int
        Of the values, and of the sizes at random.
    backend : str
        As for ``Device``.
    grid : int, tuple of int or callable, optional
        As for ``launch``, or ``f(n)``.
    block, shared_bytes
        As for ``launch``.
    require : str, optional
        ``"gpu"``: comparing is a must. ``"compiler"``: compiling is, at least.
    arch : str
        What is compiled for where there is no GPU.

    Returns
    -------
    KernelReport

    Raises
    ------
    KernelMismatch
        An element differs (the first is named), or bytes outside of an array were written.
    CompileFailed
        The source does not compile, or has no kernel of that name once compiled.
    BackendUnavailable
        What ``require`` asks for is not there.
    TypeError, ValueError
        Arguments that the kernel does not take.
    RuntimeError
        Called while an event loop runs: await :func:`check_kernel_async` there.

    Notes
    -----
    What the body raises comes out with a note of the size. A kernel that touches memory which isn't
    there faults, and no GPU work of this process can succeed afterwards.
    """
    if _is_in_loop():
        raise RuntimeError(
            "check_kernel runs a loop of its own, and one is running: await check_kernel_async"
        )
    launch = _Launch(grid, block, shared_bytes)
    trial = Trial(kernel, args, Tolerance(rtol, atol), seed)
    report = anyio.run(_check, trial, launch, _sizes(sizes, seed), backend, require, arch)
    _warn(report)
    return report


async def check_kernel_async(
    kernel: Kernel,
    *args: Template,
    rtol: float | None = None,
    atol: float | None = None,
    sizes: Sequence[int] | None = None,
    seed: int = 0,
    backend: str = "auto",
    grid: Geometry | Callable[[int], Geometry] | None = None,
    block: Geometry | None = None,
    shared_bytes: int = 0,
    require: Require = None,
    arch: str = "sm_90",
) -> KernelReport:
    """Do the same in a coroutine.

    Parameters and errors are those of :func:`check_kernel`.
    """
    launch = _Launch(grid, block, shared_bytes)
    trial = Trial(kernel, args, Tolerance(rtol, atol), seed)
    report = await _check(trial, launch, _sizes(sizes, seed), backend, require, arch)
    _warn(report)
    return report


@dataclass(frozen=True, slots=True)
class _Launch:
    """The geometry of the launches."""

    grid: Geometry | Callable[[int], Geometry] | None
    block: Geometry | None
    shared_bytes: int

    def at(self, size: int) -> dict[str, object]:
        grid = self.grid(size) if callable(self.grid) else self.grid
        return {"grid": grid, "block": self.block, "shared_bytes": self.shared_bytes}


async def _check(
    trial: Trial,
    launch: _Launch,
    sizes: tuple[int, ...],
    backend: str,
    require: Require,
    arch: str,
) -> KernelReport:
    if require not in _REQUIRED:
        raise ValueError(f"require is 'gpu', 'compiler' or None, found {require!r}")
    kernel = trial.kernel
    settings = Settings.from_environment()
    in_thread = anyio.to_thread.run_sync
    wanted = settings.backend if backend == "auto" else backend
    name, reason = await in_thread(choose_backend, wanted)
    is_compared = name != "sim"
    is_compiled = kernel.spec.source is not None
    why_not = "" if is_compiled else "not compiled: it was given as a compiled image"
    if not is_compared:
        settings = replace(settings, sim=replace(settings.sim, clock="virtual"))
        why_not = f"not compared: {reason or 'the simulator was asked for'}"
        if require == "gpu":
            raise BackendUnavailable(f"kernel {kernel.name!r} has to be compared; {why_not}")
        why_not_compiled = await in_thread(_compile_blocking, kernel.spec, arch)
        is_compiled = why_not_compiled is None
        if not is_compiled:
            why_not += f"; not compiled: {why_not_compiled}"
        if require == "compiler" and not is_compiled:
            raise BackendUnavailable(f"kernel {kernel.name!r} has to be compiled; {why_not}")
    async with Device(0, backend=name, settings=settings) as dev:
        for size in sizes:
            await trial.run(dev, size, launch.at(size))
    return KernelReport(kernel.name, name, is_compared, is_compiled, sizes, trial.seed, why_not)


def _warn(report: KernelReport) -> None:
    if not (report.compared or report.compiled):
        warnings.warn(
            f"of kernel {report.kernel!r} only the reference body was run: {report.why_not}. "
            "require='compiler' or 'gpu' makes that an error",
            KernelNotChecked,
            stacklevel=3,
        )


def _is_in_loop() -> bool:
    try:
        current_shell()
    except RuntimeError:
        return False
    return True


def _sizes(sizes: Sequence[int] | None, seed: int) -> tuple[int, ...]:
    if sizes is None:
        rng = np.random.default_rng(seed)
        found = dict.fromkeys(EDGE_SIZES)
        while len(found) < len(EDGE_SIZES) + _NUM_RANDOM:
            # As many of three digits as of five.
            found[int(np.exp(rng.uniform(np.log(_RANDOM_MIN), np.log(_RANDOM_MAX))))] = None
        return tuple(found)
    chosen = tuple(index(size) for size in sizes)
    if not chosen or min(chosen) < 1:
        raise ValueError(f"sizes are at least one, each at least 1; found {list(chosen)}")
    return chosen


def _compile_blocking(spec: KernelSpec, arch: str) -> str | None:
    """Compile for ``arch``; why that can't be done here, or None where it was."""
    if spec.source is None:
        return "it was given as a compiled image"
    try:
        from streamflow.backends.cuda.compiler import compile_cubin, open_cache

        cubin = compile_cubin(
            spec.source, spec.filename, arch=arch, options=spec.options, cache=open_cache()
        )
    except (ImportError, BackendUnavailable) as error:
        return str(error)
    # Each kernel's code is a section by its name.
    if f".text.{spec.name}\0".encode() not in cubin:
        raise CompileFailed(
            f"{spec.filename} compiles and has no kernel named {spec.name!r}: declare it "
            f'extern "C" __global__ void {spec.name}(...)'
        )
    return None
