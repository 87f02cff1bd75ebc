"""``streamflow bench``, as a user runs it."""

from __future__ import annotations

import json

import pytest
from commands import assert_mistake, invoke, run_process

from streamflow.backends.sim.cost import CostModel
from streamflow.errors import BackendUnavailable

FEW = ("--largest", 16, "--repeat", 2)
VIRTUAL = {"STREAMFLOW_SIM_CLOCK": "virtual"}


def measured(**env: str) -> dict:
    result = invoke("bench", "--backend", "sim", "--json", *FEW, env={**VIRTUAL, **env})
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return json.loads(result.stdout)


def test_copies_stand_beside_those_of_the_driver() -> None:
    model = CostModel.load("h200", {})
    found = measured()
    assert [each["nbytes"] for each in found["copies"]] == [1 << 12, 1 << 14, 1 << 16]
    for each in found["copies"]:
        assert each["h2d_s"] == pytest.approx(model.h2d_s(each["nbytes"]))
        assert each["put_s"] >= each["h2d_s"] * 0.999


def test_the_pipeline_overlaps() -> None:
    run = measured()["pipeline"]
    assert run["nbytes"] == 1 << 16
    assert run["overlap"] > 0.5
    assert run["elapsed_s"] >= run["ideal_s"]


def test_waiting_is_measured_from_the_launch() -> None:
    calls = measured()["calls"]
    assert calls["await_s"] == pytest.approx(20e-6)
    assert calls["plain_sync_s"] == pytest.approx(20e-6)


def test_same_seed_same_figures() -> None:
    assert measured() == measured()  # R15


def test_as_text_it_says_whose_times_these_are() -> None:
    result = run_process("bench", *FEW, env={"STREAMFLOW_BACKEND": "sim", "NO_COLOR": "1"})
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "the simulator's: this machine's NumPy" in result.stdout
    for text in ("4.00 KiB", "launch", "wait for a kernel of 20 us", "overlap"):
        assert text in result.stdout


@pytest.mark.parametrize(
    ("args", "env", "message"),
    [
        (("--largest", "99"), {}, "--largest"),
        (("--repeat", "0"), {}, "--repeat"),
        (("--backend", "abacus"), {}, "abacus"),
        ((), {"STREAMFLOW_BACKEND": "abacus"}, "abacus"),
        ((), {"STREAMFLOW_BLOCK": "-1"}, "STREAMFLOW_BLOCK"),
    ],
)
def test_a_mistake_is_2(args: tuple[str, ...], env: dict[str, str], message: str) -> None:
    assert_mistake(invoke("bench", *args, env=env), message)


@pytest.mark.parametrize("backend", ["auto", "cuda"])
def test_without_a_device_it_fails_in_a_sentence(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise BackendUnavailable("a driver is there and broken")

    monkeypatch.delenv("STREAMFLOW_BACKEND", raising=False)
    monkeypatch.setattr("streamflow.backends.cuda.probe.why_unavailable", broken)
    result = invoke("bench", "--backend", backend)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "streamflow: a driver is there and broken\n"


def test_memory_that_does_not_do_is_told() -> None:
    result = invoke("bench", "--backend", "sim", env={"STREAMFLOW_SIM_MEMORY_NBYTES": "1000000"})
    assert result.exit_code == 1
    assert "1000000 bytes free" in result.stderr
    assert "Traceback" not in result.output
