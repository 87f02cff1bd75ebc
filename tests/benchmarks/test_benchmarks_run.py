"""The benchmarks still run: each with tiny sizes, on the simulator. Their figures mean nothing."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2]))


@pytest.mark.parametrize(
    "name",
    [
        *("P1", "P2", "P3", "P4P5", "P6", "P7", "P8", "P9", "P10", "P12", "P13", "R1", "R4R7"),
        *("overhead", "calibration", "suballocators", "fragmentation", "mapped"),
    ],
)
def test_it_runs(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.benchmarks.run import main

    path = tmp_path / "found.json"
    status = main([name, "--backend", "sim", "--tiny", "--json", str(path)])
    printed = capsys.readouterr().out
    assert status == 0, printed
    (report,) = json.loads(path.read_text(encoding="utf-8"))["reports"]
    assert report["name"] == name
    assert report["rows"]
    assert "0 benchmarks broke down" in printed


def test_p6_draws_a_picture(tmp_path: Path) -> None:
    from tests.benchmarks.run import main

    assert main(["P6", "--backend", "sim", "--tiny", "--output", str(tmp_path)]) == 0
    bars = ET.parse(tmp_path / "p06_pipeline.svg").findall("{*}g/{*}title")
    assert len([bar for bar in bars if (bar.text or "").startswith("blend")]) == 5


def test_every_benchmark_is_listed() -> None:
    from tests.benchmarks.run import BENCHMARKS

    here = Path(__file__).parent
    found = {path.stem for path in here.glob("[pr][01][0-9]_*.py")}
    assert found <= set(BENCHMARKS.values())
