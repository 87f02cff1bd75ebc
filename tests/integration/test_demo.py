"""``streamflow demo``, as a user runs it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("typer", reason="the extra 'cli' is not installed")
pytest.importorskip("skimage", reason="the extra 'demo' is not installed")
pytest.importorskip("tqdm", reason="the extra 'demo' is not installed")
pytest.importorskip("igraph", reason="the extra 'demo' is not installed")
Image = pytest.importorskip("PIL.Image", reason="the extra 'demo' is not installed")

from typer.testing import CliRunner, Result  # noqa: E402

import streamflow as sf  # noqa: E402
from streamflow import demo  # noqa: E402
from streamflow.cli import app  # noqa: E402

FILES = ("picture.png", "graph.dot", "graph.mmd", "graph.html", "trace.json", "trace.html")

SHAPE = (75, 130, 3)  # no multiple of a tile's side


@pytest.fixture
def picture() -> np.ndarray:
    rows, columns, _ = SHAPE
    smooth = np.add.outer(np.arange(rows), np.arange(columns))[:, :, np.newaxis] * [1, 2, 3] / 3
    noise = np.random.default_rng(0).integers(0, 60, SHAPE)
    return np.clip(smooth + noise, 0, 255).astype(np.uint8)


@pytest.fixture
def picture_file(picture: np.ndarray, tmp_path: Path) -> Path:
    path = tmp_path / "in [1].png"
    Image.fromarray(picture).save(path)
    return path


def run_demo(*args: object, env: dict[str, str] | None = None) -> Result:
    command = ["demo", "--backend", "sim", *map(str, args)]
    return CliRunner().invoke(app, command, env={"COLUMNS": "300", "TERM": "dumb", **(env or {})})


def read(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


def inked_independently(picture: np.ndarray) -> np.ndarray:
    """What the kernels mean, from the definition and in double precision."""
    halo = demo.HALO
    padded = np.pad(picture / 1.0, ((halo, halo), (halo, halo), (0, 0)), mode="edge")
    line = np.array([1, 4, 6, 4, 1]) / 16
    blurred = correlate(padded, np.outer(line, line))
    grey = blurred @ [0.25, 0.5, 0.25]
    sobel = np.outer([1, 2, 1], [-1, 0, 1])
    edges = np.hypot(correlate(grey, sobel), correlate(grey, sobel.T))
    light = np.clip(1 - demo.STRENGTH * edges, 0, 1)
    return np.floor(blurred[1:-1, 1:-1] * light[:, :, np.newaxis] + 0.5).astype(np.uint8)


def correlate(pixels: np.ndarray, weights: np.ndarray) -> np.ndarray:
    windows = np.lib.stride_tricks.sliding_window_view(pixels, weights.shape, axis=(0, 1))
    return np.einsum("...ij,ij->...", windows, weights)


@pytest.mark.parametrize("clock", ["wall", "virtual"])
@pytest.mark.parametrize(("tile", "depth"), [(16, 1), (32, 4), (50, 3), (200, 2)])
def test_the_picture_is_what_numpy_makes_of_it(
    picture: np.ndarray, picture_file: Path, tmp_path: Path, tile: int, depth: int, clock: str
) -> None:
    output = tmp_path / "made" / "here"
    result = run_demo(
        *("--input", picture_file, "--output", output),
        *("--tile", tile, "--depth", depth, "--clock", clock),
    )
    assert result.exit_code == 0, result.output
    written = read(output / "picture.png")
    np.testing.assert_array_equal(written, demo.ink_whole(picture))
    assert demo.largest_difference(written, inked_independently(picture)) <= 1


def test_tiles_come_in_order_and_no_more_than_depth_at_once(
    picture: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, ops, num_unfinished = demo.submit_tile, [], []

    def counted(dev: sf.Device, source: np.ndarray) -> sf.Op[np.ndarray]:
        ops.append(submit(dev, source))
        num_unfinished.append(sum(not op.done() for op in ops))
        return ops[-1]

    async def main() -> list[demo.Box]:
        # On the virtual clock nothing ends while the program submits.
        settings = sf.Settings(sim=sf.SimOptions(clock="virtual"))
        async with sf.Device(0, backend="sim", settings=settings) as dev:
            tiles = demo.stream_tiles(dev, demo.pad(picture), boxes, depth=3)
            return [box async for box, _ in tiles]

    monkeypatch.setattr(demo, "submit_tile", counted)
    boxes = [(slice(0, 75), slice(left, left + 10)) for left in range(0, 130, 10)]
    assert asyncio.run(main()) == boxes
    assert max(num_unfinished) == 3


def test_the_graph_is_written_in_each_format(picture_file: Path, tmp_path: Path) -> None:
    assert run_demo("--input", picture_file, "--output", tmp_path, "--tile", 16).exit_code == 0
    dot = (tmp_path / "graph.dot").read_text(encoding="utf-8")
    mermaid = (tmp_path / "graph.mmd").read_text(encoding="utf-8")
    assert dot.startswith("digraph")
    assert mermaid.startswith("flowchart")
    for text in (dot, mermaid):  # of the first tiles only
        for name in ("blur", "ink"):
            nodes = re.findall(rf'(?:\blabel=|\[)"{name}\b', text)
            assert len(nodes) == demo.NUM_GRAPH_TILES
        assert "read-after-write" in text
    page = (tmp_path / "graph.html").read_text(encoding="utf-8")
    assert page.lower().startswith("<!doctype html>")
    assert len(page) < len((tmp_path / "trace.html").read_text(encoding="utf-8"))


def test_the_whole_run_is_written_for_the_trace_commands(
    picture_file: Path, tmp_path: Path
) -> None:
    assert run_demo("--input", picture_file, "--output", tmp_path, "--tile", 32).exit_code == 0
    trace = sf.Trace.load(tmp_path / "trace.json")
    assert sum(op.name == "blur" for op in trace.ops) == 3 * 5  # tiles
    result = CliRunner().invoke(app, ["trace", "summary", str(tmp_path / "trace.json"), "--json"])
    assert json.loads(result.stdout)["num_ops"] == len(trace.ops)
    page = (tmp_path / "trace.html").read_text(encoding="utf-8")
    assert page.lower().startswith("<!doctype html>")
    assert page.count("blur") > 1


def test_the_summary_names_device_work_and_files(picture_file: Path, tmp_path: Path) -> None:
    result = run_demo("--input", picture_file, "--output", tmp_path, "--tile", 64)
    summary = dict(re.findall(r"^(\S[\w ]*?)  +(.*?) *$", result.stdout, re.MULTILINE))
    assert summary["backend"] == "sim"
    assert "Simulated" in summary["device"]
    assert summary["picture"] == "130 x 75 pixels, 6 tiles"
    assert summary["ops"].endswith("12 of them copies")
    assert summary["difference"].startswith("0 of 255")
    assert "not a GPU's times" in summary["device time"]
    for engine in ("compute", "d2h", "h2d"):
        assert re.search(rf"^ +{engine} ", result.stdout, re.MULTILINE)
    for name in FILES:
        assert str(tmp_path / name) in result.stdout


def test_a_fall_back_to_the_simulator_is_explained(
    picture_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STREAMFLOW_BACKEND", raising=False)
    monkeypatch.setattr("streamflow.device.choose_backend", lambda name: ("sim", "no GPU today"))
    result = run_demo("--input", picture_file, "--output", tmp_path, "--backend", "auto")
    assert result.exit_code == 0
    assert "sim, since no GPU today" in result.stdout
    assert "Warning" not in result.output


def test_same_seed_gives_the_same_virtual_times(picture_file: Path, tmp_path: Path) -> None:
    command = ("--input", picture_file, "--output", tmp_path, "--clock", "virtual", "--tile", 32)
    first, second = (run_demo(*command).stdout for _ in range(2))
    assert without_host_time(first) == without_host_time(second)  # R15


def without_host_time(summary: str) -> str:
    return re.sub(r"^host time.*$", "", summary, flags=re.MULTILINE)


def test_a_wrong_picture_fails(
    picture_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "ink_whole", np.zeros_like)
    result = run_demo("--input", picture_file, "--output", tmp_path)
    assert result.exit_code == 1
    assert "not what NumPy makes of it" in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--input", "missing.png"], "missing.png"),
        (["--input", __file__], "cannot identify image file"),
        (["--input", "."], "."),
        (["--backend", "abacus"], "abacus"),
        (["--tile", "0"], "--tile"),
        (["--depth", "0"], "--depth"),
        (["--output", __file__], "--output"),
    ],
)
def test_a_mistake_in_the_command_line_exits_with_2(args: list[str], message: str) -> None:
    result = run_demo(*args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("name", "value"),
    [("STREAMFLOW_BLOCK", "many"), ("STREAMFLOW_BACKEND", "abacus")],
)
def test_a_mistake_in_the_environment_is_named(
    picture_file: Path, tmp_path: Path, name: str, value: str
) -> None:
    result = run_demo(
        *("--input", picture_file, "--output", tmp_path, "--backend", "auto"), env={name: value}
    )
    assert result.exit_code == 2
    assert value in result.stderr
    assert "Traceback" not in result.output


def test_help_gives_an_example() -> None:
    result = CliRunner().invoke(app, ["demo", "--help"], env={"COLUMNS": "120", "TERM": "dumb"})
    assert result.exit_code == 0
    assert "  Example:\n    streamflow demo" in result.stdout


@pytest.mark.parametrize(
    ("hidden", "extra"),
    [("typer", "cli"), ("rich", "cli"), ("skimage", "demo"), ("PIL", "demo"), ("igraph", "viz")],
)
def test_a_missing_package_names_its_extra(hidden: str, extra: str) -> None:
    program = (
        f"import sys; sys.modules[{hidden!r}] = None; sys.argv = ['streamflow', 'demo']\n"
        "from streamflow.cli import main; main()"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "STREAMFLOW_BACKEND": "sim"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 1
    assert f"streamflow-cuda[{extra}]" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_photograph_needs_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the demo went to the network")

    monkeypatch.setattr("socket.socket.connect", refuse)
    photograph = demo.photograph()
    assert photograph.dtype == np.uint8
    assert photograph.shape == (2048, 2048, 3)
