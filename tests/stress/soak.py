"""Run the soak on two devices of one loop, and check that nothing is left."""

from __future__ import annotations

import gc
from collections import Counter
from random import Random
from typing import Any

import streamflow as sf
from streamflow.backends.sim.controls import Rule
from tests.stress.episodes import Soak

SHARES = {"crossing": 0.30, "cancelled": 0.05, "refused": 0.05, "dropped": 0.05, "good": 0.5}
"""The least share of the ops; ``refused`` are failures of an op's own."""


def soak_settings(seed: int, **sim: Any) -> sf.Settings:
    return sf.Settings(
        sim=sf.SimOptions(seed=seed, **sim),
        window=32,
        staging_threads=2,
        staging_in_nbytes=65536,
        staging_out_nbytes=65536,
        close_timeout_s=10.0,
    )


async def soak_simulated(num_ops: int, seed: int, clock: str) -> Counter[str]:
    """The soak on two simulated devices; returns what was counted."""
    settings = soak_settings(seed, clock=clock, memory_nbytes=64 << 20)
    async with (
        sf.Device(0, backend="sim", settings=settings) as one,
        sf.Device(1, backend="sim", settings=settings) as two,
    ):
        for dev in (one, two):
            refuse_launches(dev)
        soak = Soak((one, two), Random(seed))
        try:
            await soak.run(num_ops)
        finally:
            soak.let_go()
        for dev in (one, two):
            check_nothing_is_left(dev)
            assert dev.sim.counters["would_block"] == 0
    return soak.counts


def refuse_launches(dev: sf.Device) -> None:
    """Refuse every launch of ``refused``, as a driver refuses too many threads."""
    Rule(
        dev.sim,
        kind="launch",
        name="refused",
        num_before=0,
        repeats=True,
        error=None,
        sticky=False,
    )


def check_nothing_is_left(dev: sf.Device) -> None:
    gc.collect()  # what was raised and caught meanwhile makes cycles of its own
    live = dev.live()
    assert live == {}, live
    assert dev.memory.used_nbytes == 0
    stats = dev.stats()
    assert stats.num_pending == stats.num_in_flight == 0
    assert stats.num_submitted == stats.num_finished


def check_shares(counts: Counter[str], num_ops: int) -> None:
    """The program did what a soak is for."""
    assert counts["ops"] >= num_ops
    for what, share in SHARES.items():
        assert counts[what] >= share * counts["ops"], (what, counts)
