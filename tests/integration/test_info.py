"""``streamflow info``, as a user runs it."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable

import pytest
from commands import assert_mistake, invoke, run_process

from streamflow.errors import BackendUnavailable
from streamflow.testing import installation

PROBE = "streamflow.backends.cuda.probe.why_unavailable"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STREAMFLOW_BACKEND", raising=False)
    monkeypatch.setattr(PROBE, lambda: "there is none today")


def facts(**env: str) -> dict:
    result = invoke("info", "--json", env=env)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return json.loads(result.stdout)


def lines() -> list[str]:
    result = invoke("info")
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def test_without_a_gpu_it_says_why_and_ends_well() -> None:
    assert lines()[0] == "backend  sim: there is none today"
    assert "cuda: there is none today" in lines()
    found = facts()
    assert (found["backend"], found["why"]) == ("sim", "there is none today")
    assert found["backends"]["cuda"] == {
        "is_available": False,
        "says": "there is none today",
        "devices": [],
    }


@pytest.mark.parametrize(
    ("wanted", "backend", "why"),
    [
        ("sim", "sim", "sim was asked for by name"),
        ("cuda", None, "cuda was asked for by name, and there is none today"),
    ],
)
def test_a_backend_that_was_asked_for_is_told_as_such(
    wanted: str, backend: str | None, why: str
) -> None:
    found = facts(STREAMFLOW_BACKEND=wanted)
    assert (found["backend"], found["why"]) == (backend, why)


def test_a_broken_driver_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise BackendUnavailable("the driver is broken: reboot")

    monkeypatch.setattr(PROBE, broken)
    assert lines()[0] == "backend  none: the driver is broken: reboot"
    assert facts()["backends"]["cuda"]["says"] == "the driver is broken: reboot"


def test_each_device_tells_its_memory_and_its_pool() -> None:
    devices = facts(STREAMFLOW_SIM_DEVICES="3", STREAMFLOW_SIM_MEMORY_NBYTES=str(1 << 30))[
        "backends"
    ]["sim"]["devices"]
    assert [each["index"] for each in devices] == [0, 1, 2]
    assert devices[1]["peers"] == [0, 2]
    assert devices[2]["total_nbytes"] == 1 << 30
    assert devices[0]["pools"]["release_threshold_nbytes"] == 0
    shown = [line for line in lines() if "Simulated" in line]
    assert len(shown) == 2
    assert "4.00 GiB of 4.00 GiB free" in shown[0]


def test_a_device_that_does_not_open_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., object] = installation.open_backend

    def open_some(name: str, index: int, *rest: object) -> object:
        if index == 0:
            raise RuntimeError("exclusive mode")
        return real(name, index, *rest)

    monkeypatch.setattr(installation, "open_backend", open_some)
    first, second = facts()["backends"]["sim"]["devices"]
    assert first == {"index": 0, "error": "RuntimeError: exclusive mode"}
    assert second["name"].startswith("Simulated")
    assert any("exclusive mode" in line for line in lines())


def test_each_setting_tells_where_it_came_from() -> None:
    env = {"STREAMFLOW_WINDOW": "12", "STREAMFLOW_SIM_RATES": "h2d_rate=1e9"}
    found = {each["name"]: each for each in facts(**env, STREAMFLOW_SPIN_US="inf")["settings"]}
    assert found["window"] == {"name": "window", "value": 12, "source": "STREAMFLOW_WINDOW"}
    assert found["sim.rates"]["value"] == {"h2d_rate": 1e9}
    assert found["sim.rates"]["source"] == "STREAMFLOW_SIM_RATES"
    assert found["block"]["source"] == "default"
    assert found["spin_us"]["value"] == "inf"  # JSON has no number for it


def test_a_variable_that_no_setting_reads_is_told() -> None:
    result = invoke("info", env={"STREAMFLOW_WINDOWS": "12", "STREAMFLOW_CACHE": "/tmp"})
    assert result.exit_code == 0
    assert "STREAMFLOW_WINDOWS is set" in result.stderr
    assert "did you mean STREAMFLOW_WINDOW?" in result.stderr
    assert "STREAMFLOW_CACHE" not in result.stderr


def test_versions_and_extras_come_from_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        importlib.metadata,
        "requires",
        lambda name: ["numpy>=2", "rich>=13; extra == 'cli'", 'nothing-like-it>=1; extra == "viz"'],
    )
    found = facts()
    assert found["extras"] == {"cli": [], "viz": ["nothing-like-it"]}
    assert found["versions"]["numpy"] == importlib.metadata.version("numpy")
    assert {"python", "anyio", "cuda-core", "cuda-bindings"} <= found["versions"].keys()
    text = "\n".join(lines())
    assert "cli: installed" in text
    assert "viz: without nothing-like-it" in text


def test_a_bad_variable_is_a_mistake() -> None:
    assert_mistake(invoke("info", env={"STREAMFLOW_WINDOW": "many"}), "STREAMFLOW_WINDOW='many'")
    assert_mistake(invoke("info", env={"STREAMFLOW_BACKEND": "abacus"}), "abacus")


def test_it_works_without_a_terminal() -> None:
    result = run_process("info", env={"TERM": "", "NO_COLOR": "1"})
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) > 80  # whole lines
