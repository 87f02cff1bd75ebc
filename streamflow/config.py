"""Frozen settings, each also read from ``STREAMFLOW_<NAME>``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields

__all__ = ["Settings"]

_MIB = 1 << 20


def _default_pinned_budget_nbytes() -> int:
    try:
        ram_nbytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # no sysconf on this platform
        ram_nbytes = 8 << 30
    return min(4 << 30, ram_nbytes // 8)


def _as_bool(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off", ""):
        return False
    raise ValueError(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a device behaves. Build one with :meth:`from_environment` or by keyword.

    Attributes
    ----------
    backend : str
        ``"auto"``, ``"cuda"``, ``"sim"`` or a registered name (rule R14).
    compute_lanes : int
        Streams that kernels without an explicit stream are spread over.
    block : int
        Threads per block of the default geometry.
    window : int
        Driver calls outstanding on one stream before ops park (rule R7).
    spin_us : float
        How long a completion is polled once per loop turn before the poller backs off.
    staging_in_nbytes, staging_out_nbytes : int
        Chunk size of staged copies to and from the device.
    staging_threads : int
        Threads that fill and empty staging chunks.
    host_workers : int
        Threads that run host tasks.
    pinned_budget_nbytes : int
        Pinned bytes for results of ``get``, live and cached together.
    close_timeout_s : float
        Bound of the drain when a device is left, or a scope by cancellation (rule R8).
    serial : bool
        Wait for each op before the next is submitted, so that a fault names its op
        (rule R9). For debugging: every submission blocks.
    sim_clock : str
        ``"wall"`` or ``"virtual"``, for the simulator only.
    sim_devices : int
        How many devices the simulator shows.
    sim_memory_nbytes : int
        Memory of each simulated device.
    seed : int
        Seed of the simulator's schedule (rule R15).
    """

    backend: str = "auto"
    compute_lanes: int = 4
    block: int = 256
    window: int = 512
    spin_us: float = 400.0
    staging_in_nbytes: int = 8 * _MIB
    staging_out_nbytes: int = 4 * _MIB
    staging_threads: int = field(default_factory=lambda: min(8, os.cpu_count() or 1))
    host_workers: int = 4
    pinned_budget_nbytes: int = field(default_factory=_default_pinned_budget_nbytes)
    close_timeout_s: float = 30.0
    serial: bool = False
    sim_clock: str = "wall"
    sim_devices: int = 2
    sim_memory_nbytes: int = 4 << 30
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (
            "compute_lanes",
            "block",
            "window",
            "staging_threads",
            "host_workers",
            "sim_devices",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, found {getattr(self, name)}")
        for name in ("staging_in_nbytes", "staging_out_nbytes"):
            if getattr(self, name) < 65536:
                raise ValueError(f"{name} must be at least 65536, found {getattr(self, name)}")
        if self.sim_clock not in ("wall", "virtual"):
            raise ValueError(f"sim_clock is 'wall' or 'virtual', found {self.sim_clock!r}")

    @classmethod
    def from_environment(
        cls, environ: Mapping[str, str] = os.environ, **overrides: object
    ) -> Settings:
        """Read ``STREAMFLOW_<NAME>`` for every field; keywords win.

        Parameters
        ----------
        environ : mapping of str to str
            Where the variables are looked up.
        **overrides
            Fields by name.

        Raises
        ------
        ValueError
            A value that does not convert, naming the variable.
        """
        values: dict[str, object] = {}
        for item in fields(cls):
            text = environ.get(f"STREAMFLOW_{item.name.upper()}")
            if text is None:
                continue
            converters: dict[str, Callable[[str], object]] = {
                "int": int,
                "float": float,
                "str": str,
                "bool": _as_bool,
            }
            convert = converters[str(item.type)]
            try:
                values[item.name] = convert(text)
            except ValueError:
                raise ValueError(
                    f"STREAMFLOW_{item.name.upper()}={text!r} is not a valid {item.type}"
                ) from None
        return cls(**{**values, **overrides})  # type: ignore[arg-type]
