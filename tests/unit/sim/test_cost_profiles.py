"""Profiles: what is shipped, what a file has to say, and how each mistake is named."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streamflow.backends.sim.cost import CostModel
from streamflow.backends.sim.profile import FORMAT, VERSION, figure_name, shipped


@pytest.fixture
def profile() -> dict[str, Any]:
    figures = {
        figure_name(name): {"value": place + 1.0, "source": "measured"}
        for place, name in enumerate(CostModel.names())
    }
    return {"format": FORMAT, "version": VERSION, "machine": {}, "figures": figures}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mine.json"


def refusal(path: Path, text: object) -> str:
    path.write_text(text if isinstance(text, str) else json.dumps(text), encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        CostModel.load(str(path), {})
    return str(caught.value)


def test_every_shipped_profile_loads_and_says_where_its_figures_come_from() -> None:
    assert "h200" in shipped()
    here = Path(CostModel.load.__code__.co_filename).parent
    for name in shipped():
        assert CostModel.load(name, {}).h2d_rate > 0
        text = json.loads((here / "profiles" / f"{name}.json").read_text(encoding="utf-8"))
        assert text["machine"]["card"]
        assert text["machine"]["driver"]
        assert text["machine"]["date"]
        sources = {figure["source"] for figure in text["figures"].values()}
        assert sources <= {"measured", "assumed", "data sheet"}


def test_a_file_gives_every_field_its_own_value(profile: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(profile), encoding="utf-8")
    model = CostModel.load(str(path), {})
    assert [getattr(model, name) for name in CostModel.names()] == [
        place + 1.0 for place in range(len(CostModel.names()))
    ]


def test_every_figure_names_its_unit() -> None:
    for name in CostModel.names():
        assert figure_name(name).endswith(("_bytes_per_s", "_s"))


def test_rates_replace_single_fields() -> None:
    shipped_model = CostModel.load("h200", {})
    model = CostModel.load("h200", {"h2d_rate": 1e9, "host_launch_s": 0.0})
    assert model == replace(shipped_model, h2d_rate=1e9, host_launch_s=0.0)
    assert model.h2d_s(10**9) == pytest.approx(1 + model.copy_latency_s)


def test_rates_that_are_no_field_or_no_rate_are_named() -> None:
    with pytest.raises(ValueError, match=r"no pcie_rate; known: .*h2d_rate"):
        CostModel.load("h200", {"pcie_rate": 1e9})
    with pytest.raises(ValueError, match="h2d_rate must be positive, found 0"):
        CostModel.load("h200", {"h2d_rate": 0.0})


def test_a_name_that_is_not_shipped_lists_those_that_are() -> None:
    with pytest.raises(ValueError, match=r"no profile 'b200'; shipped: .*h200.*ends in \.json"):
        CostModel.load("b200", {})


def test_a_file_that_is_missing_is_named(path: Path) -> None:
    with pytest.raises(ValueError, match=r"no profile .*mine\.json.*No such file"):
        CostModel.load(str(path), {})


def test_text_that_is_no_profile_is_refused(path: Path) -> None:
    assert "is not JSON" in refusal(path, "{")
    assert "is no profile" in refusal(path, [])
    assert "is no profile" in refusal(path, {"version": VERSION, "figures": {}})


def test_another_version_says_how_to_get_this_one(profile: dict[str, Any], path: Path) -> None:
    message = refusal(path, profile | {"version": VERSION + 1})
    assert f"version {VERSION + 1}" in message
    assert "doctor --calibrate" in message


def test_unknown_and_missing_figures_are_named(profile: dict[str, Any], path: Path) -> None:
    figures = profile["figures"]
    more = figures | {"pcie_bytes_per_s": {"value": 1.0, "source": "measured"}}
    assert "unknown in its figures: pcie_bytes_per_s" in refusal(path, profile | {"figures": more})
    less = {name: figure for name, figure in figures.items() if name != "kernel_s"}
    assert "missing in its figures: kernel_s" in refusal(path, profile | {"figures": less})
    assert "an object 'figures'" in refusal(path, profile | {"figures": None})


@pytest.mark.parametrize("value", [None, "fast", True, float("nan"), float("inf")])
def test_a_value_that_is_no_number_is_refused(
    profile: dict[str, Any], path: Path, value: object
) -> None:
    profile["figures"]["kernel_s"]["value"] = value
    assert "kernel_s has no number" in refusal(path, profile)


def test_a_figure_is_not_negative_and_a_rate_is_not_zero(
    profile: dict[str, Any], path: Path
) -> None:
    profile["figures"]["kernel_s"]["value"] = 0
    profile["figures"]["h2d_bytes_per_s"]["value"] = 0
    assert "h2d_bytes_per_s must be positive, found 0" in refusal(path, profile)
    profile["figures"]["h2d_bytes_per_s"]["value"] = 1
    profile["figures"]["kernel_s"]["value"] = -1e-6
    assert "kernel_s must be positive, found -1e-06" in refusal(path, profile)
