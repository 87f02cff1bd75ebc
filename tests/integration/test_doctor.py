"""``streamflow doctor``, as a user runs it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from commands import Result, assert_mistake, invoke
from odd_machine import ODD, SIZES

import streamflow as sf
from streamflow import backends
from streamflow.backends.sim.cost import CostModel
from streamflow.backends.sim.device import SimDevice
from streamflow.errors import BackendUnavailable
from streamflow.testing import calibrate as calibration
from streamflow.testing import doctor, installation
from streamflow.testing.measuring import Sizes
from streamflow.testing.quick import Calls, Copies, Quick

PROBE = "streamflow.backends.cuda.probe.why_unavailable"


def run_doctor(*args: object) -> Result:
    return invoke("doctor", *args)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little is measured."""
    sizes = Sizes(copies_nbytes=(1 << 12, 1 << 16), num_calls=10, num_reps=2)
    monkeypatch.setattr(doctor.examine, "__defaults__", (sizes,))
    monkeypatch.delenv("STREAMFLOW_BACKEND", raising=False)


def examined(*args: object, exit_code: int = 0, **env: str) -> dict:
    result = invoke("doctor", "--json", *args, env=env)
    assert result.exit_code == exit_code, result.output
    assert result.stderr == ""
    return json.loads(result.stdout)


def kinds(findings: list[dict]) -> list[str]:
    return [each["kind"] for each in findings]


# -- the whole -------------------------------------------------------------------------------


def test_it_says_which_device_it_used_and_that_data_survive() -> None:
    result = run_doctor("--backend", "sim")
    assert result.exit_code == 0, result.output
    lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines()[:4])
    assert lines["backend"] == "sim"
    assert lines["device"].startswith("Simulated H200")
    assert lines["data"].startswith("survived")
    assert lines["times"].startswith("the simulator's")
    assert result.stdout.splitlines()[-1] == "nothing is wrong"


def test_it_measures_link_launch_and_wake_up() -> None:
    # On a clock that is the model's own, the figures are known.
    found = examined("--backend", "sim", STREAMFLOW_SIM_CLOCK="virtual")["measured"]
    model = CostModel.load("h200", {})
    assert [each["nbytes"] for each in found["copies"]] == [1 << 12, 1 << 16]
    for each in found["copies"]:
        assert each["h2d_s"] == pytest.approx(model.h2d_s(each["nbytes"]))
        assert each["d2h_s"] == pytest.approx(model.d2h_s(each["nbytes"]))
        assert each["put_s"] >= each["h2d_s"] * 0.999
        assert each["get_s"] >= each["d2h_s"] * 0.999
    assert found["calls"]["plain_sync_s"] == pytest.approx(20e-6)
    assert found["calls"]["await_s"] == pytest.approx(20e-6)
    assert found["calls"]["wake_up_s"] == pytest.approx(0, abs=1e-9)


def test_launches_are_charged_where_time_is_predicted() -> None:
    found = examined(
        "--backend", "sim", STREAMFLOW_SIM_CLOCK="virtual", STREAMFLOW_SIM_PREDICT="1"
    )["measured"]["calls"]
    model = CostModel.load("h200", {})
    charged_s = model.host_launch_s + 3 * model.host_argument_s
    assert found["plain_launch_s"] == pytest.approx(charged_s, rel=0.01)
    assert found["launch_s"] > found["plain_launch_s"]


def test_it_says_why_it_is_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PROBE, lambda: "none here")
    found = examined()
    assert (found["backend"], found["why_simulated"]) == ("sim", "none here")
    assert "sim, since none here" in run_doctor().stdout


# -- what is wrong ---------------------------------------------------------------------------


def test_a_device_that_returns_something_else_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = sf.Kernel.from_source(doctor.DOUBLED.spec.source, body=lambda x, y, n: y.fill(3))
    monkeypatch.setattr(doctor, "DOUBLED", wrong)
    result = run_doctor("--backend", "sim")
    assert result.exit_code == 1
    assert "wrong: what came back from the device is not what NumPy makes of it" in result.stdout
    found = examined("--backend", "sim", exit_code=1)
    assert (found["is_right"], kinds(found["problems"])) == (False, ["data"])


def test_a_broken_driver_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise BackendUnavailable("a driver is there and broken: reboot")

    monkeypatch.setattr(PROBE, broken)
    found = examined(exit_code=1)
    assert (found["backend"], found["measured"]) == (None, None)
    assert found["problems"] == [
        {"kind": "backend", "text": "a driver is there and broken: reboot"}
    ]
    assert "wrong: a driver is there and broken" in run_doctor().stdout


def test_a_gpu_that_was_asked_for_and_is_not_there_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PROBE, lambda: "none here")
    found = examined("--backend", "cuda", exit_code=1)
    assert kinds(found["problems"]) == ["device"]
    assert "none here" in found["problems"][0]["text"]


def test_whatever_the_device_raises_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def odd(*args: object) -> None:
        raise OSError("the driver's own")

    monkeypatch.setattr(doctor, "_take_trip", odd)
    found = examined("--backend", "sim", exit_code=1)
    assert "the driver's own" in found["problems"][0]["text"]


def test_without_a_compiler_copies_are_measured_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_compiler(self: object, spec: object) -> None:
        raise BackendUnavailable("no NVRTC library found")

    monkeypatch.setattr(SimDevice, "load_kernel_blocking", no_compiler)
    monkeypatch.setattr(SimDevice, "load_kernel", lambda self, spec: None)
    monkeypatch.setattr(SimDevice, "name", "cuda")
    monkeypatch.setattr(doctor, "choose_backend", lambda name: ("cuda", None))
    monkeypatch.setitem(backends._OPENERS, "cuda", backends._OPENERS["sim"])
    monkeypatch.setattr("streamflow.backends.cuda.compiler.compiler_version", lambda: None)
    found = examined(exit_code=1)
    assert kinds(found["problems"]) == ["nvrtc"]
    assert "streamflow-cuda[nvrtc]" in found["problems"][0]["text"]
    assert found["is_right"] is None
    assert found["measured"]["calls"] is None
    assert len(found["measured"]["copies"]) == 2


def test_another_pair_of_cuda_packages_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "pair_problems", lambda: iter(["cuda-core is 0.3"]))
    found = examined("--backend", "sim", exit_code=1)
    assert found["problems"] == [{"kind": "cuda-pair", "text": "cuda-core is 0.3"}]


# -- what is worth knowing -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("STREAMFLOW_SERIAL", "1", "serial"),
        ("STREAMFLOW_DEBUG", "1", "debug"),
        ("STREAMFLOW_PINNED_BUDGET_NBYTES", "0", "pinned"),
        ("STREAMFLOW_WINDOWS", "7", "variable"),
        ("CUDA_LAUNCH_BLOCKING", "1", "launch-blocking"),
    ],
)
def test_an_environment_that_slows_is_told_and_not_wrong(name: str, value: str, kind: str) -> None:
    assert kind not in kinds(examined("--backend", "sim")["advice"])
    found = examined("--backend", "sim", **{name: value})
    assert kind in kinds(found["advice"])
    assert found["problems"] == []


@pytest.mark.parametrize(("first", "is_told"), [("fork", True), ("spawn", False)])
def test_forking_is_told_where_it_is_the_default(
    first: str, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multiprocessing.get_all_start_methods", lambda: [first, "forkserver"])
    told = [each.text for each in doctor.look_around(sf.Settings()) if each.kind == "fork"]
    assert bool(told) == is_told
    assert all("spawn" in text for text in told)


GOOD_TRIP = doctor.Trip(
    device="a card",
    memory_nbytes=1 << 36,
    free_nbytes=1 << 35,
    is_right=True,
    release_threshold_nbytes=(1 << 64) - 1,
)
GOOD_COPIES = Copies(nbytes=1 << 26, h2d_s=1.2e-3, d2h_s=1.2e-3, put_s=1.4e-3, get_s=1.4e-3)
GOOD_CALLS = Calls(launch_s=5e-6, plain_launch_s=2e-6, await_s=50e-6, plain_sync_s=30e-6)


def judged(
    backend: str = "cuda",
    trip: doctor.Trip = GOOD_TRIP,
    copies: Copies = GOOD_COPIES,
    calls: Calls = GOOD_CALLS,
) -> list[tuple[str, bool]]:
    measured = Quick(copies=(copies,), calls=calls, pipeline=None)
    return [(each.kind, each.is_wrong) for each in doctor.look_at(backend, trip, measured)]


def test_a_device_as_it_should_be_gives_nothing_to_tell() -> None:
    assert judged() == []


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        ({"trip": replace(GOOD_TRIP, release_threshold_nbytes=0)}, ("pool", True)),
        ({"trip": replace(GOOD_TRIP, release_threshold_nbytes=None)}, ("pool", False)),
        ({"trip": replace(GOOD_TRIP, free_nbytes=1 << 30)}, ("memory", False)),
        ({"trip": replace(GOOD_TRIP, is_right=False)}, ("data", True)),
        ({"copies": replace(GOOD_COPIES, put_s=1e-2)}, ("pageable", False)),
        ({"copies": replace(GOOD_COPIES, get_s=1e-2)}, ("pageable", False)),
        ({"calls": replace(GOOD_CALLS, await_s=5e-3)}, ("wake-up", False)),
    ],
)
def test_each_thing_that_is_not_as_it_should_be_is_told(
    change: dict, finding: tuple[str, bool]
) -> None:
    assert judged(**change) == [finding]


def test_the_figures_of_the_simulator_are_not_judged() -> None:
    slow = replace(GOOD_COPIES, put_s=1.0, get_s=1.0)
    assert judged("sim", copies=slow, calls=replace(GOOD_CALLS, await_s=1.0)) == []


# -- mistakes, and --calibrate ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("STREAMFLOW_WINDOW", "many"),
        ("STREAMFLOW_BACKEND", "abacus"),
        ("STREAMFLOW_SIM_PROFILE", "nope"),
        ("STREAMFLOW_SIM_RATES", "h2d_rat=1"),
    ],
)
def test_a_bad_variable_is_a_mistake(name: str, value: str) -> None:
    result = invoke("doctor", env={name: value})
    assert_mistake(result, name)
    assert value.split("=")[0] in result.stderr


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
