"""``streamflow bench``, and how measurements are shown."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

import streamflow as sf
from streamflow.cli.shared import (
    Backend,
    BackendOption,
    JsonOption,
    fail,
    print_facts,
    print_json,
    print_table,
    read_settings,
)
from streamflow.runtime.units import spell_bytes, spell_seconds

if TYPE_CHECKING:
    from streamflow.testing.quick import Calls, Copies, PipelineRun, Quick

__all__ = ["bench", "measured_as_json", "print_measured", "source_of"]


def bench(
    backend: BackendOption = Backend.auto,
    largest: Annotated[
        int, typer.Option(min=16, max=30, help="Copies of up to so many bytes, as a power of two.")
    ] = 26,
    num_reps: Annotated[
        int, typer.Option("--repeat", min=1, max=1000, help="Repetitions; medians are shown.")
    ] = 7,
    as_json: JsonOption = False,
) -> None:
    """Measure what copies, launches, awaits and a pipeline take.

    Takes a few seconds. Beside each figure stands what the driver's own calls take in the same
    run: copies between pinned memory and the device, a bare launch, a thread blocked until a
    kernel has ended.
    """
    settings = read_settings(backend)
    from streamflow.testing import installation
    from streamflow.testing.measuring import Sizes
    from streamflow.testing.quick import measure

    name, why = installation.chosen(settings)
    if name is None:
        fail(why)
    sizes = Sizes(
        copies_nbytes=tuple(1 << power for power in range(12, largest + 1, 2)),
        staged_nbytes=1 << largest,
        num_reps=num_reps,
        num_calls=100,
    )
    try:
        found = measure(name, settings, sizes, has_compiler=True, with_pipeline=True)
    except sf.StreamflowError as error:
        fail(str(error))
    facts = {"backend": name, "why": why, "source": source_of(name, settings)}
    if as_json:
        print_json({**facts, **measured_as_json(found)})
        return
    print_facts(facts)
    print_measured(found)


def source_of(backend: str, settings: sf.Settings) -> str:
    """Whose times these are."""
    if backend != "sim":
        return "measured on the device"
    if settings.sim.clock == "wall":
        return "the simulator's: this machine's NumPy, and a model of a GPU's link"
    return "the simulator's: a model of a GPU, nothing was measured"


def measured_as_json(found: Quick) -> dict[str, Any]:
    calls = None
    if found.calls is not None:
        calls = {**asdict(found.calls), "wake_up_s": found.calls.wake_up_s}
    return {
        "copies": [asdict(each) for each in found.copies],
        "calls": calls,
        "pipeline": None if found.pipeline is None else asdict(found.pipeline),
    }


def print_measured(found: Quick) -> None:
    typer.echo()
    _print_copies(found.copies)
    if found.calls is not None:
        typer.echo()
        _print_calls(found.calls)
    if found.pipeline is not None:
        typer.echo()
        _print_pipeline(found.pipeline)


def _print_copies(copies: tuple[Copies, ...]) -> None:
    print_table(
        ("copies", "put", "plain h2d", "of it", "get", "plain d2h", "of it"),
        [
            (
                spell_bytes(each.nbytes),
                _rate(each.nbytes, each.put_s),
                _rate(each.nbytes, each.h2d_s),
                _part(each.h2d_s, each.put_s),
                _rate(each.nbytes, each.get_s),
                _rate(each.nbytes, each.d2h_s),
                _part(each.d2h_s, each.get_s),
            )
            for each in copies
        ],
    )


def _print_calls(calls: Calls) -> None:
    print_table(
        ("calls", "streamflow", "plain", "more"),
        [
            (
                name,
                spell_seconds(ours_s),
                spell_seconds(plain_s),
                spell_seconds(ours_s - plain_s),
            )
            for name, ours_s, plain_s in (
                ("launch", calls.launch_s, calls.plain_launch_s),
                ("wait for a kernel of 20 us", calls.await_s, calls.plain_sync_s),
            )
        ],
        left=("calls",),
    )


def _print_pipeline(run: PipelineRun) -> None:
    print_facts(
        {
            "pipeline": f"{spell_bytes(run.nbytes)} in and out in {spell_seconds(run.elapsed_s)}, "
            f"{_rate(run.nbytes, run.elapsed_s)} each way; overlap {run.overlap:.0%}, "
            f"ideal {spell_seconds(run.ideal_s)}"
        }
    )


def _rate(nbytes: int, seconds: float) -> str:
    if not seconds:
        return "-"
    rate = nbytes / seconds / 1e6
    return f"{rate / 1e3:.2f} GB/s" if rate >= 1e3 else f"{rate:.0f} MB/s"


def _part(plain_s: float, ours_s: float) -> str:
    return f"{plain_s / ours_s:.0%}" if ours_s else "-"
