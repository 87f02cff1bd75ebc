"""Look an installation over: packages, environment, one device; and say what is wrong with it."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

import streamflow as sf
from streamflow.backends import choose_backend
from streamflow.runtime.units import spell_bytes, spell_seconds
from streamflow.testing import installation
from streamflow.testing.measuring import Sizes
from streamflow.testing.quick import DOUBLED, Quick, measure

__all__ = ["Examined", "Finding", "Trip", "examine", "look_around", "look_at"]

SIZES = Sizes(
    copies_nbytes=(1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 26), num_calls=100, num_reps=5
)
_NUM = 1 << 16
_PAGEABLE_MIN = 0.5  # of the rate of plain copies between pinned memory
_FREE_MIN = 0.1  # of the device's memory
_WAKE_UP_MAX_S = 200e-6  # an idle host takes a tenth of that


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to know, in a sentence. ``is_wrong``: it has to be put right."""

    kind: str
    is_wrong: bool
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Trip:
    """What an array's way through the device has shown. Sizes in bytes."""

    device: str
    memory_nbytes: int
    free_nbytes: int
    is_right: bool | None
    """What came back is what NumPy makes of it; None without a compiler for the kernel."""
    release_threshold_nbytes: int | None
    """Of the device's own pool; None where there are no pools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """All that was found. ``backend`` is None where none can start; then nothing was measured."""

    backend: str | None
    why_simulated: str | None
    trip: Trip | None
    measured: Quick | None
    findings: tuple[Finding, ...]

    @property
    def is_wrong(self) -> bool:
        """Whether anything has to be put right."""
        return any(finding.is_wrong for finding in self.findings)


def examine(settings: sf.Settings, sizes: Sizes = SIZES) -> Examined:
    """Look at packages and environment, send an array through device 0, and measure it.

    Parameters
    ----------
    settings : Settings
        Of the device. What is wrong with it is among the findings and raises nothing.
    sizes : Sizes
        How much is measured.
    """
    findings = list(look_around(settings))
    name, why, trip, measured = None, None, None, None
    try:
        name, why = choose_backend(settings.backend)
        has_compiler = name != "cuda" or _has_compiler()
        if not has_compiler:
            findings.append(
                Finding(
                    "nvrtc",
                    True,
                    "there is no NVRTC library, so kernels given as source can't be compiled: "
                    "pip install 'streamflow-cuda[nvrtc]', or install a CUDA toolkit",
                )
            )
        trip = asyncio.run(_take_trip(name, settings, has_compiler))
        measured = measure(name, settings, sizes, has_compiler=has_compiler, with_pipeline=False)
    except Exception as error:  # whatever it is, somebody asked what is wrong
        kind = "backend" if name is None else "device"
        told = str(error) if isinstance(error, sf.StreamflowError) else repr(error)
        findings.append(Finding(kind, True, told))
    if name is not None and trip is not None:
        findings += look_at(name, trip, measured)
    findings.sort(key=lambda finding: not finding.is_wrong)
    return Examined(
        backend=name, why_simulated=why, trip=trip, measured=measured, findings=tuple(findings)
    )


def look_around(
    settings: sf.Settings, environ: Mapping[str, str] = os.environ
) -> Iterator[Finding]:
    """What packages and environment tell without a device."""
    for text in installation.pair_problems():
        yield Finding("cuda-pair", True, text)
    for text in installation.strange_variables(environ):
        yield Finding("variable", False, text)
    # The first is the platform's default; asking for the one in use would fix it.
    if multiprocessing.get_all_start_methods()[0] == "fork":
        yield Finding(
            "fork",
            False,
            "multiprocessing starts processes by 'fork' here, and a child of a process that has "
            "used a device can't use one: use multiprocessing.get_context('spawn')",
        )
    if settings.serial:
        yield Finding(
            "serial", False, "STREAMFLOW_SERIAL is on: each submission waits until its op has ended"
        )
    if settings.debug:
        yield Finding("debug", False, "STREAMFLOW_DEBUG is on: each source of a copy is checked")
    if settings.pinned_budget_nbytes == 0:
        yield Finding(
            "pinned",
            False,
            "STREAMFLOW_PINNED_BUDGET_NBYTES is 0: results of get are copied once more, into "
            "pageable memory",
        )
    if environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        yield Finding(
            "launch-blocking",
            False,
            "CUDA_LAUNCH_BLOCKING is set: each launch blocks until its kernel has ended",
        )


def look_at(backend: str, trip: Trip, measured: Quick | None) -> Iterator[Finding]:
    """What the device's answers tell. Figures of the simulator are not judged."""
    if trip.is_right is False:
        yield Finding("data", True, "what came back from the device is not what NumPy makes of it")
    threshold = trip.release_threshold_nbytes
    if threshold is None:
        yield Finding(
            "pool", False, "the device has no stream-ordered pools: allocating blocks the host"
        )
    elif threshold < trip.memory_nbytes:
        yield Finding(
            "pool",
            True,
            f"the device's pool keeps no more than {spell_bytes(threshold)}: it gives memory back "
            "each time that the host waits for the device, and takes it anew",
        )
    if backend == "sim":
        return
    if trip.free_nbytes < _FREE_MIN * trip.memory_nbytes:
        yield Finding(
            "memory",
            False,
            f"other programs hold the device's memory: {spell_bytes(trip.free_nbytes)} of "
            f"{spell_bytes(trip.memory_nbytes)} are free",
        )
    if measured is None:
        return
    largest = measured.copies[-1]
    for verb, ours_s, plain_s in (
        ("put from", largest.put_s, largest.h2d_s),
        ("get into", largest.get_s, largest.d2h_s),
    ):
        if plain_s < _PAGEABLE_MIN * ours_s:
            yield Finding(
                "pageable",
                False,
                f"{verb} pageable memory runs at {largest.nbytes / ours_s / 1e9:.1f} GB/s, where "
                f"the link does {largest.nbytes / plain_s / 1e9:.1f}: lease pinned memory "
                "(dev.pinned), or give staging more threads (STREAMFLOW_STAGING_THREADS)",
            )
    if measured.calls is not None and measured.calls.wake_up_s > _WAKE_UP_MAX_S:
        yield Finding(
            "wake-up",
            False,
            f"an await goes on {spell_seconds(measured.calls.wake_up_s)} later than a blocked "
            "thread would: other work keeps this machine's cores busy",
        )


def _has_compiler() -> bool:
    from streamflow.backends.cuda.compiler import compiler_version

    return compiler_version() is not None


async def _take_trip(backend: str, settings: sf.Settings, has_compiler: bool) -> Trip:
    source = np.arange(_NUM, dtype=np.float32)
    async with sf.Device(0, backend=backend, settings=settings) as dev:
        is_right = None
        if has_compiler:
            x, y = dev.put(source), dev.empty(_NUM, np.float32)
            dev.launch(DOUBLED, x, y, _NUM)
            is_right = bool(np.array_equal(await dev.get(y), 2 * source))
            del x, y
        opened = dev._core.backend
        has_pools = opened.memory_support().has_pools
        return Trip(
            device=dev.properties.name,
            memory_nbytes=dev.properties.total_memory_nbytes,
            free_nbytes=opened.memory_info()[0],
            is_right=is_right,
            release_threshold_nbytes=dev.memory.release_threshold_nbytes if has_pools else None,
        )
