"""How long simulated work takes: one frozen table of rates and latencies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from streamflow.backends.sim.profile import read_figures

__all__ = ["CostModel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Modelled durations. Times in seconds, rates in bytes per second.

    Its figures come from a profile: a shipped one, or one that ``streamflow doctor
    --calibrate`` wrote. Those of the host, and the rates of both directions at once, count
    with ``SimOptions(predict=True)`` only.

    Attributes
    ----------
    copy_latency_s : float
        Fixed part of every copy in, out, and between devices.
    h2d_rate, d2h_rate : float
        Pinned copies, one direction at a time.
    h2d_duplex_rate, d2h_duplex_rate : float
        The same while the other direction is busy.
    d2d_rate : float
        Copies within the device: bytes copied, so half of the bytes moved.
    fill_rate : float
        Fills.
    peer_rate : float
        Copies between two devices, one way.
    memory_rate : float
        Bytes that a kernel reads plus those it writes.
    kernel_s : float
        Fixed part of every kernel, fill, and copy within the device.
    host_launch_s, host_argument_s : float
        What a launch takes its caller, and each of its arguments.
    host_copy_s, host_fill_s, host_record_s, host_wait_s : float
        What these calls take theirs.
    host_query_s : float
        What asking takes, or waiting for what is done already.
    host_allocate_s, host_free_s : float
        The stream-ordered ones.
    host_sync_s : float
        From the end of the work until the thread that has waited for it goes on.
    """

    copy_latency_s: float
    h2d_rate: float
    d2h_rate: float
    h2d_duplex_rate: float
    d2h_duplex_rate: float
    d2d_rate: float
    fill_rate: float
    peer_rate: float
    memory_rate: float
    kernel_s: float
    host_launch_s: float
    host_argument_s: float
    host_copy_s: float
    host_fill_s: float
    host_record_s: float
    host_wait_s: float
    host_query_s: float
    host_allocate_s: float
    host_free_s: float
    host_sync_s: float

    @classmethod
    def load(cls, profile: str, rates: Mapping[str, float]) -> CostModel:
        """The model of a profile, with some of its fields replaced.

        Parameters
        ----------
        profile : str
            A shipped name, or the path of a file that ends in ``.json``.
        rates : mapping of str to float
            By field.

        Raises
        ------
        ValueError
            There is no such profile or field, or the file is not a profile.
        """
        known = cls.names()
        if unknown := sorted(set(rates) - set(known)):
            raise ValueError(f"rates: no {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        for name, rate in rates.items():
            if not rate >= 0 or (rate == 0 and name.endswith("_rate")):
                raise ValueError(f"rates: {name} must be positive, found {rate}")
        return replace(cls(**read_figures(profile, known)), **rates)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Its fields, in order."""
        return tuple(item.name for item in fields(cls))

    def h2d_s(self, nbytes: int) -> float:
        """Host to device."""
        return self.copy_latency_s + nbytes / self.h2d_rate

    def d2h_s(self, nbytes: int) -> float:
        """Device to host."""
        return self.copy_latency_s + nbytes / self.d2h_rate

    def d2d_s(self, nbytes: int) -> float:
        """Within one device, where the copy is a kernel."""
        return self.kernel_s + nbytes / self.d2d_rate

    def peer_s(self, nbytes: int) -> float:
        """Between two devices."""
        return self.copy_latency_s + nbytes / self.peer_rate

    def fill_s(self, nbytes: int) -> float:
        """Write a pattern."""
        return self.kernel_s + nbytes / self.fill_rate

    def launch_s(self, nbytes: int) -> float:
        """Run a kernel that touches each byte of its array arguments once."""
        return self.kernel_s + nbytes / self.memory_rate
