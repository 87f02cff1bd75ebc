"""``streamflow doctor``."""

from __future__ import annotations

import asyncio
import warnings
from pathlib import Path
from typing import Annotated

import typer

import streamflow as sf
from streamflow.cli.shared import (
    Backend,
    BackendOption,
    JsonOption,
    fail,
    mistake,
    print_facts,
    print_json,
    read_settings,
)

__all__ = ["doctor"]


def doctor(
    backend: BackendOption = Backend.auto,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Measure the GPU, and write a profile for SimOptions(profile=). Takes about "
            "half a minute and 4 GiB of the GPU's memory; keep it idle otherwise.",
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="The profile's file; its name ends in .json.  [default: streamflow-profile.json]",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say which device would be used and why, and see that data survive the trip.

    With --calibrate, measure what the GPU's copies, kernels and calls take.
    """
    settings = read_settings(backend)
    if calibrate:
        _calibrate(backend.value, output or Path("streamflow-profile.json"), settings, as_json)
        return
    if output is not None:
        mistake("only --calibrate writes a file", "--output")
    from streamflow.testing.doctor import examine

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", sf.SimulatorWarning)  # the report says so
            found = asyncio.run(examine(backend.value, settings))
    except sf.StreamflowError as error:
        fail(str(error))
    print_json(found) if as_json else print_facts(found)
    if not found["is_right"]:
        fail("what came back from the device is not what NumPy makes of it")


def _calibrate(backend: str, output: Path, settings: sf.Settings, as_json: bool) -> None:
    if output.suffix != ".json":
        mistake(f"a profile's name ends in .json, found {str(output)!r}", "--output")
    from streamflow.testing.calibrate import calibrate, choose_gpu, save

    try:
        profile = calibrate(
            choose_gpu(backend), settings=settings, say=lambda line: typer.echo(line, err=True)
        )
    except sf.BackendUnavailable as error:
        fail(str(error), code=2)
    except sf.StreamflowError as error:
        fail(str(error))
    try:
        save(profile, output)
    except OSError as error:
        mistake(error, "--output")
    figures = {name: figure["value"] for name, figure in profile["figures"].items()}
    facts = {"written": str(output), **figures, **profile["runtime"]}
    print_json(facts) if as_json else print_facts(facts)
