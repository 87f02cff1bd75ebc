"""How long simulated work takes: one frozen table of rates and latencies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

__all__ = ["CostModel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Modelled durations. Times in seconds, rates in bytes per second.

    A model for overlap and ordering, not a performance prediction: engines don't slow
    each other down (on an H200 both directions at once reach 50.7 GB/s, not 55).
    Allocating, freeing, waiting and recording take no time.

    Attributes
    ----------
    copy_latency_s : float
        Fixed part of every copy and fill. Assumed; not measured.
    h2d_rate, d2h_rate : float
        Pinned copies over PCIe, measured on one H200.
    memory_rate : float
        Device memory, bytes read plus bytes written, from a device copy measured on one H200.
    peer_rate : float
        NVLink, one way: half of the 900 GB/s on the H200's data sheet.
    kernel_s : float
        Fixed part of every kernel: one empty launch, measured on one H200.

    Source
    ------
    docs/explanation/performance, "Measured floors" (H200, driver 580.159, CUDA 13.0).
    """

    copy_latency_s: float = 2.0e-6
    h2d_rate: float = 55.3e9
    d2h_rate: float = 55.2e9
    memory_rate: float = 4.3e12
    peer_rate: float = 450e9
    kernel_s: float = 3.5e-6

    @classmethod
    def load(cls, profile: str, rates: Mapping[str, float]) -> CostModel:
        """The model of a profile, with some of its fields replaced.

        Raises
        ------
        ValueError
            There is no such profile, or no such field.
        """
        known = {item.name for item in fields(cls)}
        if unknown := sorted(set(rates) - known):
            raise ValueError(f"rates: no {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        if profile != "h200":
            raise ValueError(f"no profile {profile!r}; shipped: h200")
        return cls(**rates)

    def h2d_s(self, nbytes: int) -> float:
        """Host to device."""
        return self.copy_latency_s + nbytes / self.h2d_rate

    def d2h_s(self, nbytes: int) -> float:
        """Device to host."""
        return self.copy_latency_s + nbytes / self.d2h_rate

    def d2d_s(self, nbytes: int) -> float:
        """Within one device: every byte is read and written."""
        return self.copy_latency_s + 2 * nbytes / self.memory_rate

    def peer_s(self, nbytes: int) -> float:
        """Between two devices."""
        return self.copy_latency_s + nbytes / self.peer_rate

    def fill_s(self, nbytes: int) -> float:
        """Write a pattern."""
        return self.copy_latency_s + nbytes / self.memory_rate

    def launch_s(self, nbytes: int) -> float:
        """Run a kernel that touches each byte of its array arguments once."""
        return self.kernel_s + nbytes / self.memory_rate
