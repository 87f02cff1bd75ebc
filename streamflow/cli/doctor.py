"""``streamflow doctor``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import streamflow as sf
from streamflow.cli.bench import measured_as_json, print_measured, source_of
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
from streamflow.runtime.units import spell_bytes

if TYPE_CHECKING:
    from streamflow.testing.doctor import Examined, Finding

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
    """Check the installation, and say what is wrong with it.

    Looks at packages and environment, sends an array through the device that a program would
    get, and measures copies, launches and how soon an await goes on. Ends with 1 where
    something has to be put right. With --calibrate, measures all that the simulator's model
    needs of a GPU.
    """
    settings = read_settings(backend)
    if calibrate:
        _calibrate(backend.value, output or Path("streamflow-profile.json"), settings, as_json)
        return
    if output is not None:
        mistake("only --calibrate writes a file", "--output")
    from streamflow.testing.doctor import examine

    found = examine(settings)
    print_json(_as_json(found, settings)) if as_json else _print(found, settings)
    if found.is_wrong:
        raise typer.Exit(1)


def _as_json(found: Examined, settings: sf.Settings) -> dict[str, Any]:
    trip = {} if found.trip is None else asdict(found.trip)
    return {
        "backend": found.backend,
        "why_simulated": found.why_simulated,
        **trip,
        "source": None if found.backend is None else source_of(found.backend, settings),
        "measured": None if found.measured is None else measured_as_json(found.measured),
        "problems": [_finding(each) for each in found.findings if each.is_wrong],
        "advice": [_finding(each) for each in found.findings if not each.is_wrong],
    }


def _finding(each: Finding) -> dict[str, str]:
    return {"kind": each.kind, "text": each.text}


def _print(found: Examined, settings: sf.Settings) -> None:
    backend, trip = found.backend, found.trip
    why = "" if found.why_simulated is None else f", since {found.why_simulated}"
    facts: dict[str, object] = {"backend": f"{backend or 'none'}{why}"}
    if trip is not None:
        facts["device"] = f"{trip.device}, {spell_bytes(trip.memory_nbytes)}"
        facts["data"] = {
            True: "survived the way through a kernel and back",
            False: "came back changed",
            None: "not tried: no kernel can be compiled",
        }[trip.is_right]
    if backend is not None and found.measured is not None:
        facts["times"] = source_of(backend, settings)
    print_facts(facts)
    if found.measured is not None:
        print_measured(found.measured)
    typer.echo()
    for each in found.findings:
        typer.echo(f"{'wrong' if each.is_wrong else 'note'}: {each.text}")
    if not found.is_wrong:
        typer.echo("nothing is wrong")


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
