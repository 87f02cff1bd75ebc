"""Frozen settings, each also read from ``STREAMFLOW_<NAME>``."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields

__all__ = ["Settings", "SimOptions"]

_MIB = 1 << 20
_MIN_CHUNK_NBYTES = 64 << 10
_DEVIATION = r"(?:(?:\d+\.)?\d+\.\d+(?:=\d+)?|\d*@\d+=\d+)"
_SCHEDULE = re.compile(
    rf"|plain|(?:random|priority-inverting|starved):\d+|{_DEVIATION}(?:,{_DEVIATION})*", re.ASCII
)


def _default_pinned_budget_nbytes() -> int:
    try:
        ram_nbytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # no sysconf on this platform
        ram_nbytes = 8 << 30
    return min(4 << 30, ram_nbytes // 8)


def _num_cores() -> int:
    """Those that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not on this platform
        return os.cpu_count() or 1


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
    pipeline_depth : int
        Items of a pipeline between the pull and the end of what its consumer needs of them.
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
    debug : bool
        Look for sources of copies that change before they may (``array.staged``), by checksums
        of samples: the copy fails with ``RaceDetected``. The simulator's race checker looks
        without it.
    serial : bool
        Wait for each op before the next is submitted, so that a fault names its op
        (rule R9). For debugging: every submission blocks.
    sim : SimOptions
        What the simulator is like.
    """

    backend: str = "auto"
    compute_lanes: int = 4
    pipeline_depth: int = 3
    block: int = 256
    window: int = 512
    spin_us: float = 400.0
    staging_in_nbytes: int = 8 * _MIB
    staging_out_nbytes: int = 4 * _MIB
    staging_threads: int = field(default_factory=lambda: min(8, _num_cores()))
    host_workers: int = 4
    pinned_budget_nbytes: int = field(default_factory=_default_pinned_budget_nbytes)
    close_timeout_s: float = 30.0
    debug: bool = False
    serial: bool = False
    sim: SimOptions = field(default_factory=lambda: SimOptions())

    def __post_init__(self) -> None:
        for name in (
            "compute_lanes",
            "pipeline_depth",
            "block",
            "window",
            "staging_threads",
            "host_workers",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, found {getattr(self, name)}")
        for name in ("staging_in_nbytes", "staging_out_nbytes", "pinned_budget_nbytes"):
            found = getattr(self, name)
            if isinstance(found, bool) or not isinstance(found, int):
                raise TypeError(f"{name} takes bytes as an int, found {found!r}")
            if name != "pinned_budget_nbytes" and found < _MIN_CHUNK_NBYTES:
                raise ValueError(f"{name} must be at least {_MIN_CHUNK_NBYTES}, found {found}")
        if self.pinned_budget_nbytes and self.pinned_budget_nbytes < _MIN_CHUNK_NBYTES:
            raise ValueError(
                f"pinned_budget_nbytes must hold one chunk of {_MIN_CHUNK_NBYTES} bytes, or be 0 "
                f"for none, found {self.pinned_budget_nbytes}"
            )
        for name in ("spin_us", "close_timeout_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} cannot be {getattr(self, name)}")
        if not isinstance(self.sim, SimOptions):
            raise TypeError(f"sim takes SimOptions, found {self.sim!r}")

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
            A value that does not convert or lies out of range, naming the variable.
        """
        if "sim" not in overrides:
            overrides = {**overrides, "sim": SimOptions.from_environment(environ)}
        return cls(**{**_read(cls, environ, "STREAMFLOW_"), **overrides})  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimOptions:
    """What the simulator is like; each field is also read from ``STREAMFLOW_SIM_<NAME>``.

    Devices that are opened on one event loop form one machine, and the first of them decides
    about all that is not a property of one device: clock, seed and race checker.

    Attributes
    ----------
    clock : str
        ``"wall"``: real time passes. ``"virtual"``: a run is a function of program and seed
        (rule R15).
    seed : int
        Breaks ties between streams; with 0 the stream that was made first wins.
    devices : int
        How many devices there are.
    memory_nbytes : int
        Memory of each.
    copy_engines : int
        2: one for each direction. 1: one for both.
    compute_slots : int
        Kernels, fills and copies within a device that run at a time.
    profile : str
        How long work takes: ``"h200"``, or the file that ``streamflow doctor --calibrate``
        wrote.
    rates : mapping of str to float
        Fields of the cost model that replace the profile's. In the environment:
        ``h2d_rate=1e9,kernel_s=5e-6``.
    predict : bool
        Charge the host for its calls, and let engines slow each other down, so that virtual
        time predicts the profile's machine; needs ``clock="virtual"``.
    reuse_follow_event_dependencies : bool
        Pools reuse memory freed on a stream that the allocating one has waited for.
    reuse_allow_opportunistic : bool
        Pools reuse memory whose free happens to have run.
    reuse_allow_internal_dependencies : bool
        Pools that run short reuse memory whose free is pending, with a wait for it.
    check_races : bool
        Report work that nothing orders after what it needs.
    schedule : str
        Another order of work than the plain one, among those that hardware could choose:
        ``"random:17"``, or the deviations that ``streamflow.testing.explore`` found, such as
        ``"3.2,@12=0"``. Needs the virtual clock.
    """

    clock: str = "wall"
    seed: int = 0
    devices: int = 2
    memory_nbytes: int = 4 << 30
    copy_engines: int = 2
    compute_slots: int = 8
    profile: str = "h200"
    rates: Mapping[str, float] = field(default_factory=dict, hash=False)
    predict: bool = False
    reuse_follow_event_dependencies: bool = True
    reuse_allow_opportunistic: bool = True
    reuse_allow_internal_dependencies: bool = True
    check_races: bool = True
    schedule: str = ""

    def __post_init__(self) -> None:
        if self.clock not in ("wall", "virtual"):
            raise ValueError(f"clock is 'wall' or 'virtual', found {self.clock!r}")
        if self.predict and self.clock != "virtual":
            raise ValueError("predict=True needs clock='virtual': real time is not predicted")
        for name in ("devices", "memory_nbytes", "compute_slots"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, found {getattr(self, name)}")
        if self.copy_engines not in (1, 2):
            raise ValueError(f"copy_engines is 1 or 2, found {self.copy_engines}")
        for name, rate in self.rates.items():
            if not rate >= 0:
                raise ValueError(f"rates: {name} cannot be {rate}")
        if not _SCHEDULE.fullmatch(self.schedule):
            raise ValueError(
                "schedule is 'random:SEED', 'priority-inverting:SEED', 'starved:SEED', 'plain', or "
                f"deviations such as '3.2,5.1=2,@12=0'; found {self.schedule!r}"
            )
        if self.schedule and self.clock != "virtual":
            raise ValueError(f"schedule={self.schedule!r} needs clock='virtual'")

    @classmethod
    def from_environment(
        cls, environ: Mapping[str, str] = os.environ, **overrides: object
    ) -> SimOptions:
        """Read ``STREAMFLOW_SIM_<NAME>`` for every field; keywords win.

        Parameters
        ----------
        environ : mapping of str to str
            Where the variables are looked up.
        **overrides
            Fields by name.

        Raises
        ------
        ValueError
            A value that does not convert or lies out of range, naming the variable.
        """
        return cls(**{**_read(cls, environ, "STREAMFLOW_SIM_"), **overrides})  # type: ignore[arg-type]


def _as_rates(text: str) -> dict[str, float]:
    pairs = (pair.split("=", 1) for pair in text.split(",") if pair.strip())
    return {name.strip(): float(value) for name, value in pairs}


_CONVERTERS: dict[str, tuple[Callable[[str], object], str]] = {
    "int": (int, "int"),
    "float": (float, "float"),
    "str": (str, "str"),
    "bool": (_as_bool, "bool"),
    "Mapping[str, float]": (_as_rates, "list such as h2d_rate=1e6,kernel_s=5e-6"),
}


def _read(
    cls: type[Settings | SimOptions], environ: Mapping[str, str], prefix: str
) -> dict[str, object]:
    """The fields of ``cls`` that ``environ`` has."""
    values: dict[str, object] = {}
    for item in fields(cls):
        variable = prefix + item.name.upper()
        if str(item.type) not in _CONVERTERS or variable not in environ:
            continue
        convert, what = _CONVERTERS[str(item.type)]
        try:
            values[item.name] = convert(environ[variable])
        except ValueError:
            raise ValueError(f"{variable}={environ[variable]!r} is not a valid {what}") from None
        try:  # each with those before it: some go together with others only
            cls(**values)  # type: ignore[arg-type]
        except ValueError as error:
            raise ValueError(f"{variable}={environ[variable]!r}: {error}") from None
    return values
