"""What is installed here, which devices there are, and what the environment says."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from streamflow.backends import choose_backend, open_backend
from streamflow.backends.base import Backend
from streamflow.config import Settings, SimOptions
from streamflow.errors import BackendUnavailable

__all__ = [
    "CUDA_PAIR",
    "DISTRIBUTION",
    "Facts",
    "backends",
    "chosen",
    "extras",
    "pair_problems",
    "plugins",
    "settings_in_effect",
    "strange_variables",
    "versions",
]

Facts = dict[str, Any]

DISTRIBUTION = "streamflow-cuda"
CUDA_PAIR = {"cuda-bindings": "13.4.4", "cuda-core": "1.2"}
"""What versions must begin with; tests/house compares it with pyproject.toml."""

_SHOWN = ("numpy", "anyio", "cuda-python", "cuda-core", "cuda-bindings", "trio", "uvloop")
_EXTRA = re.compile(r"""extra\s*==\s*['"]([\w.-]+)['"]""")
_NAME = re.compile(r"[\w.-]+")
_OTHER_VARIABLES = ("STREAMFLOW_CACHE", "STREAMFLOW_EXPLORE")  # no fields of Settings


# -- packages --------------------------------------------------------------------------------


def version_of(package: str) -> str | None:
    """Its version; None where it isn't installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Of Python, streamflow and what it stands on; None for what isn't installed."""
    return {
        "python": platform.python_version(),
        DISTRIBUTION: version_of(DISTRIBUTION),
        **{package: version_of(package) for package in _SHOWN},
    }


def extras() -> dict[str, list[str]]:
    """By extra: which of its packages are missing. Empty where streamflow itself isn't installed.

    A checkout on the path has no metadata that names any.
    """
    try:
        required = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found: dict[str, list[str]] = {}
    for line in required:
        extra, name = _EXTRA.search(line), _NAME.match(line)
        if extra is None or name is None:
            continue
        missing = found.setdefault(extra[1], [])
        if version_of(name[0]) is None:
            missing.append(name[0])
    return found


def plugins() -> list[str]:
    """Those of ours that other tools load, as ``tool: module``."""
    return [
        f"pytest: {each.value}"
        for each in importlib.metadata.entry_points(group="pytest11")
        if each.value.startswith("pytest_streamflow")
    ]


def pair_problems() -> Iterator[str]:
    """What is wrong with the CUDA packages, in sentences (docs/decisions/0009)."""
    if sys.platform not in ("linux", "win32"):
        return
    for package, wanted in CUDA_PAIR.items():
        found = version_of(package)
        if found is None:
            yield f"{package} is not installed: pip install '{package}=={wanted}.*'"
        elif found != wanted and not found.startswith(f"{wanted}."):
            yield (
                f"{package} is {found}, and streamflow is tested with {wanted}: "
                f"pip install '{package}=={wanted}.*'"
            )


# -- devices ---------------------------------------------------------------------------------


def chosen(settings: Settings) -> tuple[str | None, str]:
    """The backend that ``Device(0)`` would open, None if it could not, and why in words."""
    try:
        name, reason = choose_backend(settings.backend)
        if settings.backend == "cuda":  # by name nothing is looked at before it is opened
            reason = choose_backend("auto")[1]
    except BackendUnavailable as error:
        return None, str(error)
    if settings.backend != "auto":
        told = f"{name} was asked for by name"
        return (name, told) if reason is None else (None, f"{told}, and {reason}")
    return name, "a driver and a device are there" if reason is None else reason


def backends(settings: Settings) -> dict[str, Facts]:
    """What each backend says of itself: ``is_available``, ``says`` and ``devices``."""
    return {"cuda": _cuda(settings), "sim": _sim(settings)}


def _sim(settings: Settings) -> Facts:
    return {
        "is_available": True,
        "says": f"{settings.sim.clock} clock, profile {settings.sim.profile}",
        "devices": _devices("sim", settings.sim.devices, settings),
    }


def _cuda(settings: Settings) -> Facts:
    from streamflow.backends.cuda.probe import why_unavailable

    try:
        reason = why_unavailable()
    except BackendUnavailable as error:
        reason = str(error)
    if reason is not None:
        return {"is_available": False, "says": reason, "devices": []}
    from streamflow.backends.cuda.compiler import compiler_version
    from streamflow.backends.cuda.versions import driver_versions, num_devices

    driver, cuda = driver_versions()
    compiler = compiler_version()
    return {
        "is_available": True,
        "says": f"driver {driver}, for CUDA {cuda}; "
        + ("no NVRTC" if compiler is None else f"NVRTC {compiler}"),
        "driver": driver,
        "cuda": cuda,
        "nvrtc": compiler,
        "devices": _devices("cuda", num_devices(), settings),
    }


def _devices(name: str, num: int, settings: Settings) -> list[Facts]:
    found: list[Facts] = []
    for index in range(num):
        facts: Facts = {"index": index}
        found.append(facts)
        try:
            backend = open_backend(name, index, settings, "info")
            try:
                facts |= _describe(backend, num)
            finally:
                backend.close()
        except Exception as error:  # a driver's own too: one device must not hide the others
            facts["error"] = f"{type(error).__name__}: {error}"
    return found


def _describe(backend: Backend, num_devices: int) -> Facts:
    properties, support = backend.properties, backend.memory_support()
    free_nbytes, total_nbytes = backend.memory_info()
    facts: Facts = {
        "name": properties.name,
        "compute_capability": ".".join(map(str, properties.compute_capability)),
        "free_nbytes": free_nbytes,
        "total_nbytes": total_nbytes,
        "multiprocessors": properties.multiprocessor_count,
        "copy_engines": properties.num_copy_engines,
        "numa_node": properties.numa_node,
        "peers": [other for other in range(num_devices) if _reaches(backend, other)],
        "pools": None,
        "managed_memory": support.has_managed_memory,
        "pool_handles": sorted(support.pool_handle_types),
    }
    if support.has_pools:
        pool = backend.pool_info(backend.default_pool())
        facts["pools"] = {
            "reserved_nbytes": pool.reserved_nbytes,
            "used_nbytes": pool.used_nbytes,
            "release_threshold_nbytes": pool.release_threshold_nbytes,
        }
    return facts


def _reaches(backend: Backend, other: int) -> bool:
    return other != backend.index and backend.can_access_peer(other)


# -- the environment ---------------------------------------------------------------------------


def settings_in_effect(
    settings: Settings, environ: Mapping[str, str] = os.environ
) -> Iterator[tuple[str, object, str]]:
    """(name, value, the variable that it came from or ``"default"``) for each setting."""
    for record, prefix, group in (
        (settings, "STREAMFLOW_", ""),
        (settings.sim, "STREAMFLOW_SIM_", "sim."),
    ):
        for item in fields(record):
            if item.name == "sim":
                continue
            value = getattr(record, item.name)
            variable = prefix + item.name.upper()
            plain = dict(value) if isinstance(value, Mapping) else value
            yield group + item.name, plain, variable if variable in environ else "default"


def strange_variables(environ: Mapping[str, str] = os.environ) -> Iterator[str]:
    """What is wrong with variables that look like ours, in sentences."""
    known = [
        *(f"STREAMFLOW_{item.name.upper()}" for item in fields(Settings) if item.name != "sim"),
        *(f"STREAMFLOW_SIM_{item.name.upper()}" for item in fields(SimOptions)),
        *_OTHER_VARIABLES,
    ]
    for name in sorted(environ):
        if name.startswith("STREAMFLOW_") and name not in known:
            close = get_close_matches(name, known, 1)
            meant = f": did you mean {close[0]}?" if close else ""
            yield f"{name} is set, and no setting has that name{meant}"
