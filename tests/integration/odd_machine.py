"""A machine that resembles none, for calibration to find out about; and how little of it to ask."""

from __future__ import annotations

from streamflow.testing.measuring import Sizes

SIZES = Sizes(
    copies_nbytes=(1 << 12, 1 << 16, 1 << 20, 1 << 22),
    duplex_nbytes=(1 << 20, 1 << 22),
    device_nbytes=(1 << 20, 1 << 22),
    arrays_nbytes=(1 << 20, 1 << 22),
    staged_nbytes=1 << 20,
    num_calls=40,
    num_reps=2,
)
ODD = {
    "copy_latency_s": 7e-6,
    "h2d_rate": 31e9,
    "d2h_rate": 23e9,
    "h2d_duplex_rate": 19e9,
    "d2h_duplex_rate": 19e9,
    "d2d_rate": 0.7e12,
    "fill_rate": 1.3e12,
    "peer_rate": 111e9,
    "memory_rate": 1.9e12,
    "kernel_s": 2.7e-6,
    "host_launch_s": 6.1e-6,
    "host_argument_s": 0.4e-6,
    "host_copy_s": 3.3e-6,
    "host_fill_s": 2.9e-6,
    "host_record_s": 0.8e-6,
    "host_wait_s": 0.9e-6,
    "host_query_s": 0.3e-6,
    "host_allocate_s": 1.7e-6,
    "host_free_s": 1.1e-6,
    "host_sync_s": 12e-6,
}
"""No figure is the shipped profile's, and none is another's."""
