"""What the commands share: options, the environment, mistakes, and how results are printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from enum import Enum, StrEnum
from math import isfinite
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from streamflow.backends.sim.cost import CostModel
from streamflow.config import Settings

__all__ = [
    "Backend",
    "BackendOption",
    "JsonOption",
    "examples",
    "fail",
    "mistake",
    "print_facts",
    "print_json",
    "print_table",
    "read_settings",
]


class Backend(StrEnum):
    auto = "auto"
    sim = "sim"
    cuda = "cuda"


BackendOption = Annotated[
    Backend, typer.Option(help="auto: CUDA where there is a GPU, else the simulator.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def examples(*commands: str) -> str:
    r"""The end of a command's help; ``\b`` keeps the lines as they are."""
    title = "Example:" if len(commands) == 1 else "Examples:"
    return "\n".join(["\b", title, *(f"  {command}" for command in commands)])


# -- the environment -----------------------------------------------------------------------


def read_settings(backend: Backend = Backend.auto) -> Settings:
    """The environment's, with the backend that the command line asks for."""
    try:
        settings = Settings.from_environment()
    except ValueError as error:
        fail(str(error), code=2)
    try:
        # Else the device says so when it opens, and the program has begun by then.
        CostModel.load(settings.sim.profile, settings.sim.rates)
    except (OSError, ValueError) as error:
        fail(f"STREAMFLOW_SIM_PROFILE or STREAMFLOW_SIM_RATES: {error}", code=2)
    if backend is not Backend.auto:
        return replace(settings, backend=backend.value)
    if settings.backend not in list(Backend):
        fail(
            f"STREAMFLOW_BACKEND={settings.backend!r}: no backend of that name; "
            f"known: {', '.join(Backend)}",
            code=2,
        )
    return settings


# -- mistakes --------------------------------------------------------------------------------


def fail(message: str, *, code: int = 1) -> NoReturn:
    """End with a sentence and an exit code."""
    typer.echo(f"streamflow: {message}", err=True)
    raise typer.Exit(code)


def mistake(error: object, where: str) -> NoReturn:
    """End with 2: something on the command line can't be used. ``where`` names it."""
    raise typer.BadParameter(str(error), param_hint=where) from None


# -- results ---------------------------------------------------------------------------------


def print_json(found: object) -> None:
    """As JSON proper, which has no infinity: that becomes text."""
    typer.echo(json.dumps(_plain(found), indent=1, allow_nan=False))


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return _plain({item.name: getattr(value, item.name) for item in fields(value)})
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value


def print_facts(facts: Mapping[str, object]) -> None:
    """Names and values, one a line; without those that are None."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if value is not None:
            text = f"{value:.4g}" if isinstance(value, float) else str(value)
            table.add_row(name, text)
    # Folded where somebody looks; a pipe gets whole lines.
    _print(table, None if sys.stdout.isatty() else 10_000)


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[str] = ()
) -> None:
    """A table whose columns are numbers, but those named in ``left``."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    # As wide as it gets: a table that is fitted to the terminal loses columns.
    _print(table, 10_000)


def _print(table: Table, width: int | None) -> None:
    # Bold headings where somebody looks; no colours at all, so none of NO_COLOR's business.
    console = Console(markup=False, highlight=False, emoji=False, width=width, no_color=True)
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        typer.echo(line.rstrip())
