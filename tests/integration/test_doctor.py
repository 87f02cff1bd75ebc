"""``streamflow doctor``, as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the extra 'cli' is not installed")

from odd_machine import ODD, SIZES
from typer.testing import CliRunner, Result

import streamflow as sf
from streamflow.backends.sim.cost import CostModel
from streamflow.cli import app
from streamflow.testing import calibrate as calibration
from streamflow.testing import doctor


def run_doctor(*args: object) -> Result:
    command = ["doctor", *map(str, args)]
    return CliRunner().invoke(app, command, env={"COLUMNS": "300", "TERM": "dumb"})


def test_it_says_which_device_it_used_and_that_data_survive() -> None:
    result = run_doctor("--backend", "sim")
    assert result.exit_code == 0, result.output
    lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert lines["backend"].strip() == "sim"
    assert lines["device"].startswith("Simulated H200")
    assert lines["is_right"].strip() == "True"


def test_as_json_it_is_for_programs() -> None:
    result = run_doctor("--backend", "sim", "--json")
    assert json.loads(result.stdout)["backend"] == "sim"


def test_it_says_why_it_is_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamflow.backends.cuda.probe.why_unavailable", lambda: "none here")
    found = json.loads(run_doctor("--json").stdout)
    assert (found["backend"], found["why_simulated"]) == ("sim", "none here")


def test_a_device_that_returns_something_else_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = sf.Kernel.from_source(doctor._DOUBLED.spec.source, body=lambda x, y, n: y.fill(3))
    monkeypatch.setattr(doctor, "_DOUBLED", wrong)
    result = run_doctor("--backend", "sim")
    assert result.exit_code == 1
    assert "not what NumPy makes of it" in result.stderr


@pytest.mark.parametrize("backend", ["auto", "cuda", "sim"])
def test_without_a_gpu_there_is_nothing_to_calibrate(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamflow.backends.cuda.probe.why_unavailable", lambda: "none here")
    path = tmp_path / "mine.json"
    result = run_doctor("--calibrate", "--backend", backend, "--output", path)
    assert result.exit_code == 2
    assert result.stderr.startswith("streamflow: ")
    assert ("simulator" if backend == "sim" else "none here") in result.stderr
    assert "Traceback" not in result.output
    assert not path.exists()


def test_only_calibrating_writes_a_file(tmp_path: Path) -> None:
    result = run_doctor("--output", tmp_path / "mine.json")
    assert result.exit_code == 2
    assert "only --calibrate writes a file" in result.stderr


def test_a_profile_that_could_not_be_found_again_is_not_written(tmp_path: Path) -> None:
    result = run_doctor("--calibrate", "--output", tmp_path / "mine.txt")
    assert result.exit_code == 2
    assert "ends in .json" in result.stderr


def test_calibrating_writes_a_profile_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = calibration.calibrate
    odd = sf.Settings(sim=sf.SimOptions(clock="virtual", predict=True, rates=ODD))

    def tiny(name: str, *, settings: sf.Settings, say: object) -> object:
        return real(name, sizes=SIZES, settings=odd, say=say)  # type: ignore[arg-type]

    monkeypatch.setattr(calibration, "choose_gpu", lambda name: "sim")
    monkeypatch.setattr(calibration, "calibrate", tiny)
    path = tmp_path / "deep" / "mine.json"
    result = run_doctor("--calibrate", "--output", path, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["written"] == str(path)
    assert found["h2d_bytes_per_s"] == pytest.approx(ODD["h2d_rate"], rel=0.01)
    assert "host_launch_3_arguments" in result.stderr  # each measurement, as it is made
    assert CostModel.load(str(path), {}).h2d_rate == found["h2d_bytes_per_s"]
