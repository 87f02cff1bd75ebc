"""``streamflow demo``."""

from __future__ import annotations

import asyncio
import warnings
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import streamflow as sf
from streamflow.cli.shared import (
    Backend,
    BackendOption,
    fail,
    mistake,
    print_facts,
    read_settings,
)

if TYPE_CHECKING:
    from streamflow.demo import Outcome

__all__ = ["demo"]

TOLERANCE = 1  # of 255: a device may round the last bit its own way
GRAPHS = ("graph.dot", "graph.mmd", "graph.html")  # of the first tiles
TRACES = ("trace.json", "trace.html")  # of the whole run


class Clock(StrEnum):
    wall = "wall"
    virtual = "virtual"


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
    backend: BackendOption = Backend.auto,
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
    """Stream a picture through the device in tiles.

    Every tile is copied in, blurred, has its edges drawn in ink, and is copied out, with the
    copies under the kernels. Writes picture.png, the graph of the first tiles as graph.dot,
    graph.mmd and graph.html, and the whole run as trace.html, pages for the browser both, and
    trace.json, for the trace commands. Fails if the picture is not what NumPy makes of it.
    """
    try:
        from streamflow import demo as work

        picture = work.photograph() if input is None else work.open_picture(input)
    except ModuleNotFoundError as missing:
        fail(f"the demo needs the package {missing.name}: pip install 'streamflow-cuda[demo]'")
    except (OSError, ValueError) as error:
        mistake(error, "--input")
    settings = read_settings(backend)
    if clock is not None:
        settings = replace(settings, sim=replace(settings.sim, clock=clock.value))

    async def process() -> Outcome:
        async with sf.Device(0, settings=settings) as dev:
            return await work.process(picture, dev, tile=tile, depth=depth)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", sf.SimulatorWarning)  # the summary says so
            outcome = asyncio.run(process())
    except sf.StreamflowError as error:
        fail(str(error))
    difference = work.largest_difference(outcome.picture, work.ink_whole(picture))
    try:
        output.mkdir(parents=True, exist_ok=True)
        work.save_picture(outcome.picture, output / "picture.png")
        for name in GRAPHS:
            outcome.graph.save(output / name)
        for name in TRACES:
            outcome.trace.save(output / name)
    except ModuleNotFoundError as missing:
        fail(str(missing))
    except OSError as error:
        mistake(error, "--output")
    _print_outcome(outcome, output, settings.sim.clock, difference)
    if difference > TOLERANCE:
        fail("the picture is not what NumPy makes of it")


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
    print_facts(
        {
            "backend": backend,
            "device": outcome.device_name,
            "picture": f"{columns} x {rows} pixels, {outcome.num_tiles} tiles",
            "ops": f"{len(outcome.trace.ops)}, {len(copies)} of them copies",
            "moved": f"{moved_nbytes / 1e6:.1f} MB",
            "memory": f"the pool grew to {outcome.pool_nbytes / 1e6:.1f} MB",
            "host time": f"{outcome.host_s:.3f} s",
            "device time": source,
            "": str(outcome.trace.overlap()),
            "difference": f"{difference} of 255 at most, from the whole picture done in NumPy",
            "written": "\n".join(str(output / name) for name in ("picture.png", *GRAPHS, *TRACES)),
        }
    )
