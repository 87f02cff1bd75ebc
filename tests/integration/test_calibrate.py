"""Calibration: what is measured is what the machine is like, and the profile predicts it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from odd_machine import ODD, SIZES
from support import virtual

import streamflow as sf
from streamflow.backends.sim.cost import CostModel
from streamflow.backends.sim.profile import figure_name
from streamflow.testing.calibrate import calibrate, choose_gpu, fit, save


@pytest.fixture(scope="module")
def profile():
    odd = sf.SimOptions(clock="virtual", predict=True, rates=ODD)
    return calibrate("sim", sizes=SIZES, settings=sf.Settings(sim=odd))


def test_the_figures_measured_are_those_of_the_machine(profile):
    measured = {name: profile["figures"][figure_name(name)] for name in CostModel.names()}
    assert {figure["source"] for figure in measured.values()} == {"measured"}
    for name, figure in measured.items():
        # The simulator asks for nothing (rule R15): there is no cost of a query to be found.
        wanted = 0.0 if name == "host_query_s" else ODD[name]
        assert figure["value"] == pytest.approx(wanted, rel=0.02), name


def test_a_profile_keeps_what_it_was_fitted_from(profile):
    assert fit(json.loads(json.dumps(profile["measurements"]))) == profile["figures"]


def test_what_was_not_measured_is_assumed_and_says_so(profile):
    alone = {name: found for name, found in profile["measurements"].items() if name != "peer"}
    figure = fit(alone)["peer_bytes_per_s"]
    assert figure == {"value": CostModel.load("h200", {}).peer_rate, "source": "assumed"}


def test_a_profile_says_what_it_was_taken_on(profile):
    machine = profile["machine"]
    assert machine["card"].startswith("Simulated")
    assert {"backend", "host_cpu", "cores", "python", "date", "streamflow-cuda"} <= machine.keys()
    assert profile["runtime"]["put_bytes_per_s"] > 0
    assert profile["runtime"]["launch_s"] >= ODD["host_launch_s"]


def test_the_saved_profile_predicts_the_machine_it_was_taken_from(profile, tmp_path, run, spin):
    path = tmp_path / "made here" / "mine.json"
    save(profile, path)

    async def main(**options):
        async with virtual(predict=True, memory_nbytes=1 << 28, **options) as dev:
            x = dev.zeros(1 << 20)
            for _ in range(20):
                dev.launch(spin, 1e-5, grid=1, block=1)
            await dev.get(x)
            await dev.synchronize()
            return dev.sim.clock.now_s

    asked = {name: value for name, value in ODD.items() if name != "host_query_s"}
    like_it = run(lambda: main(rates=asked | {"host_query_s": 0.0}))
    assert like_it == pytest.approx(run(lambda: main(profile=str(path))), rel=0.01)
    assert like_it != pytest.approx(run(main), rel=0.1)  # the shipped profile's time


def test_a_predicting_device_gives_the_same_log_in_every_run(run, spin):
    async def main():
        log = []
        async with virtual(predict=True, seed=5) as dev:
            arrays = [dev.zeros(1 << 10) for _ in range(6)]
            for number in range(30):
                array = arrays[number % 6]
                ops = [dev.launch(spin, 1e-6 * (number % 7), grid=1, block=1), dev.get(array)]
                dev.put(np.full(1 << 10, number, np.float64), out=array)
                for kind, op in enumerate(ops):
                    op.add_done_callback(
                        lambda _, at=(number, kind): log.append((*at, dev.sim.clock.now_s))
                    )
            await dev.synchronize()
            log.append(dev.sim.clock.now_s)
        return log

    first = run(main)
    assert len(first) == 61
    assert all(run(main) == first for _ in range(5))


def test_only_a_gpu_is_calibrated(monkeypatch):
    from streamflow.testing import calibrate as module

    with pytest.raises(sf.BackendUnavailable, match="simulator has only its profile"):
        choose_gpu("sim")
    monkeypatch.setattr(module, "choose_backend", lambda name: ("sim", "the box is empty"))
    with pytest.raises(sf.BackendUnavailable, match="there is none: the box is empty"):
        choose_gpu("auto")
    monkeypatch.setattr(module, "choose_backend", lambda name: ("cuda", None))
    assert choose_gpu("auto") == "cuda"


def test_times_that_no_line_goes_through_give_the_rate_of_the_largest(profile):
    flat = dict(profile["measurements"])
    flat["h2d"] = [{"nbytes": nbytes, "median_s": 1e-3} for nbytes in (1 << 10, 1 << 20)]
    assert fit(flat)["h2d_bytes_per_s"]["value"] == pytest.approx((1 << 20) / 1e-3)


def test_predicting_needs_a_profile_that_is_there(run, tmp_path: Path):
    options = sf.SimOptions(clock="virtual", profile=str(tmp_path / "none.json"))

    async def main():
        async with sf.Device(0, backend="sim", settings=sf.Settings(sim=options)):
            pass

    with pytest.raises(ValueError, match=r"no profile .*none\.json"):
        run(main)
    assert replace(options, profile="h200").profile == "h200"
