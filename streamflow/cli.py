"""The ``streamflow`` command.

Exit codes: 0 all went well; 1 the work failed, or its result is wrong; 2 a mistake in the
command line or the environment.
"""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import streamflow as sf

try:
    import typer
    from rich.console import Console
    from rich.table import Table
except ModuleNotFoundError as missing:
    # Here and not in main(): the decorators below need typer.
    raise SystemExit(
        f"the streamflow command needs the package {missing.name}: "
        "pip install 'streamflow-cuda[cli]'"
    ) from None

if TYPE_CHECKING:
    from streamflow.demo import Outcome
    from streamflow.memory.replay import Plan, Replayed

__all__ = ["app", "main"]

TOLERANCE = 1  # of 255: a device may round the last bit its own way

app = typer.Typer(
    name="streamflow",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    add_completion=False,
    pretty_exceptions_enable=False,  # a traceback that is shown is a bug of ours: show it plainly
)


def main() -> None:
    """Run the command line."""
    app()


@app.callback()
def streamflow() -> None:
    """An async task-graph runtime for CUDA, and its simulator."""


class Backend(StrEnum):
    auto = "auto"
    sim = "sim"
    cuda = "cuda"


class Clock(StrEnum):
    wall = "wall"
    virtual = "virtual"


@app.command(
    epilog="Example: streamflow demo --input photo.jpg --output inked --tile 512 --depth 3"
)
def demo(
    input: Annotated[  # noqa: A002  (the option's name)
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            readable=True,
            help="A picture. Default: a photograph that comes with scikit-image, enlarged.",
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option(file_okay=False, help="Where to write; made if it is missing.")
    ] = Path("demo-output"),
    backend: Annotated[
        Backend, typer.Option(help="auto: CUDA where there is a GPU, else the simulator.")
    ] = Backend.auto,
    tile: Annotated[int, typer.Option(min=16, max=8192, help="Pixels along a tile's side.")] = 256,
    depth: Annotated[
        int, typer.Option(min=1, max=256, help="Tiles on their way at once; bounds the memory.")
    ] = 4,
    clock: Annotated[
        Clock | None,
        typer.Option(
            help="Of the simulator. wall: kernels take as long as their NumPy bodies on this "
            "machine; virtual: as long as a model of a GPU says.  [default: wall]"
        ),
    ] = None,
) -> None:
    """Stream a picture through the device in tiles, with the copies under the kernels.

    Every tile is copied in, blurred, has its edges drawn in ink, and is copied out. Writes
    picture.png, and the graph of the first tiles as graph.dot and graph.mmd. Fails if the
    picture is not what NumPy makes of it.
    """
    try:
        from streamflow import demo as work

        picture = work.photograph() if input is None else work.open_picture(input)
    except ModuleNotFoundError as missing:
        _fail(f"the demo needs the package {missing.name}: pip install 'streamflow-cuda[demo]'")
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--input") from None
    try:
        settings = sf.Settings.from_environment()
    except ValueError as error:
        _fail(str(error), code=2)
    if clock is not None:
        settings = replace(settings, sim=replace(settings.sim, clock=clock.value))

    async def process() -> Outcome:
        async with sf.Device(0, backend=backend.value, settings=settings) as dev:
            return await work.process(picture, dev, tile=tile, depth=depth)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", sf.SimulatorWarning)  # the summary says so
            outcome = asyncio.run(process())
    except sf.StreamflowError as error:
        _fail(str(error))
    difference = work.largest_difference(outcome.picture, work.ink_whole(picture))
    try:
        output.mkdir(parents=True, exist_ok=True)
        work.save_picture(outcome.picture, output / "picture.png")
        outcome.graph.save(output / "graph.dot")
        outcome.graph.save(output / "graph.mmd")
    except OSError as error:
        raise typer.BadParameter(str(error), param_hint="--output") from None
    _print_outcome(outcome, output, settings.sim.clock, difference)
    if difference > TOLERANCE:
        _fail("the picture is not what NumPy makes of it")


def _print_outcome(outcome: Outcome, output: Path, clock: str, difference: int) -> None:
    rows, columns, _ = outcome.picture.shape
    copies = [op for op in outcome.trace.ops if op.engine in ("h2d", "d2h")]
    moved_nbytes = sum(op.nbytes for op in copies)
    backend = outcome.backend
    if outcome.why_simulated is not None:
        backend += f", since {outcome.why_simulated}"
    if outcome.backend != "sim":
        source = "measured on the device"
    elif clock == "wall":
        source = "kernels took as long as NumPy does here: not a GPU's times"
    else:
        source = "as the simulator models a GPU: nothing was measured"
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in (
        ("backend", backend),
        ("device", outcome.device_name),
        ("picture", f"{columns} x {rows} pixels, {outcome.num_tiles} tiles"),
        ("ops", f"{len(outcome.trace.ops)}, {len(copies)} of them copies"),
        ("moved", f"{moved_nbytes / 1e6:.1f} MB"),
        ("memory", f"the pool grew to {outcome.pool_nbytes / 1e6:.1f} MB"),
        ("host time", f"{outcome.host_s:.3f} s"),
        ("device time", source),
        ("", str(outcome.trace.overlap())),
        ("difference", f"{difference} of 255 at most, from the whole picture done in NumPy"),
        *(("written", str(output / name)) for name in ("picture.png", "graph.dot", "graph.mmd")),
    ):
        table.add_row(name, value)
    Console(markup=False, highlight=False, emoji=False).print(table)


@app.command(epilog="Example: streamflow doctor --calibrate --output my-gpu.json")
def doctor(
    backend: Annotated[
        Backend, typer.Option(help="auto: CUDA where there is a GPU, else the simulator.")
    ] = Backend.auto,
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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Say which device would be used and why, and see that data survive the trip.

    With --calibrate, measure what the GPU's copies, kernels and calls take.
    """
    try:
        settings = sf.Settings.from_environment()
    except ValueError as error:
        _fail(str(error), code=2)
    if calibrate:
        _calibrate(backend.value, output or Path("streamflow-profile.json"), settings, as_json)
        return
    if output is not None:
        raise typer.BadParameter("only --calibrate writes a file", param_hint="--output")
    from streamflow.testing.doctor import examine

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", sf.SimulatorWarning)  # the report says so
            found = asyncio.run(examine(backend.value, settings))
    except sf.StreamflowError as error:
        _fail(str(error))
    _print_facts(found, as_json)
    if not found["is_right"]:
        _fail("what came back from the device is not what NumPy makes of it")


def _calibrate(backend: str, output: Path, settings: sf.Settings, as_json: bool) -> None:
    if output.suffix != ".json":
        raise typer.BadParameter(
            f"a profile's name ends in .json, found {str(output)!r}", param_hint="--output"
        )
    from streamflow.testing.calibrate import calibrate, choose_gpu, save

    try:
        profile = calibrate(
            choose_gpu(backend), settings=settings, say=lambda line: typer.echo(line, err=True)
        )
    except sf.BackendUnavailable as error:
        _fail(str(error), code=2)
    except sf.StreamflowError as error:
        _fail(str(error))
    try:
        save(profile, output)
    except OSError as error:
        raise typer.BadParameter(str(error), param_hint="--output") from None
    figures = {name: figure["value"] for name, figure in profile["figures"].items()}
    _print_facts({"written": str(output), **figures, **profile["runtime"]}, as_json)


def _print_facts(facts: Mapping[str, object], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if value is not None:
            text = f"{value:.4g}" if isinstance(value, float) else str(value)
            table.add_row(name, text)
    Console(markup=False, highlight=False, emoji=False).print(table)


@app.command(
    epilog="Example: streamflow replay log.csv --resource 'pool(cuda, 1GiB)' --resource async"
)
def replay(
    log: Annotated[
        Path,
        typer.Argument(
            exists=True,
            dir_okay=False,
            readable=True,
            help="A CSV file that a LoggingResourceAdaptor wrote, or RMM's.",
        ),
    ],
    resource: Annotated[
        list[str],
        typer.Option(
            help="A stack to run it against, such as 'limiting(pool(cuda), 1GiB)'; may be given "
            "several times."
        ),
    ],
    memory: Annotated[
        str | None,
        typer.Option(
            help="What the simulated device has.  [default: 4GiB, or twice the log's peak]"
        ),
    ] = None,
    lag: Annotated[
        float, typer.Option(min=0, help="Seconds that the device is behind the program.")
    ] = 1e-4,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Run a log of allocations against several memory resources, on the simulator.

    Says for each what it reserved at most, how scattered its free memory was, how often it made
    streams wait, and what its calls took the host. Fails if one could not serve the log.
    """
    from streamflow.memory import log as logs
    from streamflow.memory import replay as replaying
    from streamflow.memory.spec import parse_resource
    from streamflow.scheduler.budget import parse_nbytes

    try:
        specs = [parse_resource(text) for text in resource]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--resource") from None
    try:
        plan = replaying.plan_replay(logs.read_log(log))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="LOG") from None
    try:
        nbytes = max(4 << 30, 2 * plan.peak_live_nbytes) if memory is None else parse_nbytes(memory)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--memory") from None
    for problem in plan.problems:
        typer.echo(f"streamflow: {log}: {problem}", err=True)
    outcomes = []
    for spec in specs:
        try:
            outcomes.append(replaying.replay(plan, spec, memory_nbytes=nbytes, lag_s=lag))
        except sf.StreamflowError as error:  # some are also ValueErrors
            _fail(f"{spec.text}: {error}")
        except (TypeError, ValueError) as error:
            raise typer.BadParameter(f"{spec.text}: {error}", param_hint="--resource") from None
    _print_replayed(log, plan, outcomes, nbytes, as_json)
    failed = [outcome.resource for outcome in outcomes if outcome.num_failures]
    if failed:
        _fail(f"not enough memory in {', '.join(failed)}")


def _print_replayed(
    log: Path, plan: Plan, outcomes: list[Replayed], memory_nbytes: int, as_json: bool
) -> None:
    facts = {
        "log": str(log),
        "blocks": sum(not step.is_free for step in plan.steps),
        "never_freed": plan.num_left,
        "failed_when_logged": plan.num_failures,
        "streams": plan.num_streams,
        "threads": plan.num_threads,
        "peak_live_nbytes": plan.peak_live_nbytes,
        "memory_nbytes": memory_nbytes,
    }
    if as_json:
        rows = [asdict(outcome) for outcome in outcomes]
        typer.echo(
            json.dumps({**facts, "problems": list(plan.problems), "resources": rows}, indent=1)
        )
        return
    from streamflow.runtime.units import spell_bytes

    _print_facts({**facts, "problems": len(plan.problems) or None}, as_json=False)
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    names = ("peak reserved", "fragmentation", "waits", "stalls", "refused", "allocate", "free")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("resource", no_wrap=True)  # the longest last: a narrow terminal breaks it
    for each in outcomes:
        scattered = each.fragmentation
        table.add_row(
            spell_bytes(each.peak_reserved_nbytes),
            "-" if scattered is None else f"{scattered:.1%}",
            str(each.num_waits),
            str(each.num_stalls),
            str(each.num_failures),
            f"{each.allocate_us:.1f} us",
            f"{each.free_us:.1f} us",
            each.resource,
        )
    # As wide as it gets: a table that is fitted to the terminal loses columns.
    Console(markup=False, highlight=False, emoji=False, width=10_000).print(table)


def _fail(message: str, *, code: int = 1) -> NoReturn:
    typer.echo(f"streamflow: {message}", err=True)
    raise typer.Exit(code)
