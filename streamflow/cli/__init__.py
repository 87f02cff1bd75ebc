"""The ``streamflow`` command: one module for each of its commands.

Exit codes, of all of them: 0 all went well; 1 the work failed, or its result is wrong; 2 a
mistake in the command line or around it: an option, a variable, a file that can't be used.
An interrupt (Ctrl-C) ends any of them with 130.
"""

from __future__ import annotations

try:
    import rich  # noqa: F401
    import typer  # what is imported below needs both
except ModuleNotFoundError as missing:
    # Here and not in main(): the options below are typer's.
    raise SystemExit(
        f"the streamflow command needs the package {missing.name}: "
        "pip install 'streamflow-cuda[cli]'"
    ) from None

import errno
import os
import sys
from typing import Annotated

from streamflow.cli.bench import bench as _bench
from streamflow.cli.demo import demo as _demo
from streamflow.cli.doctor import doctor as _doctor
from streamflow.cli.info import info as _info
from streamflow.cli.replay import replay as _replay
from streamflow.cli.shared import examples
from streamflow.cli.trace import trace as _trace

__all__ = ["app", "main"]

app = typer.Typer(
    name="streamflow",
    no_args_is_help=True,
    rich_markup_mode=None,  # help and mistakes as plain lines: boxes cut paths where they fold
    add_completion=False,
    pretty_exceptions_enable=False,  # a traceback that is shown is a bug of ours: show it plainly
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from streamflow.testing.installation import DISTRIBUTION, version_of

        typer.echo(f"streamflow {version_of(DISTRIBUTION) or 'from a checkout'}")
        raise typer.Exit


@app.callback()
def streamflow(
    is_version_asked: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Say which.")
    ] = False,
) -> None:
    """An async task-graph runtime for CUDA, and its simulator."""


app.command(epilog=examples("streamflow info", "streamflow info --json | jq .backends"))(_info)
app.command(
    epilog=examples("streamflow demo --input photo.jpg --output inked --tile 512 --depth 3")
)(_demo)
app.command(
    epilog=examples("streamflow doctor", "streamflow doctor --calibrate --output my-gpu.json")
)(_doctor)
app.command(
    epilog=examples("streamflow replay log.csv --resource 'pool(cuda, 1GiB)' --resource async")
)(_replay)
app.command(epilog=examples("streamflow bench", "streamflow bench --backend cuda --largest 28"))(
    _bench
)
app.add_typer(_trace, name="trace")


def main() -> None:
    """Run the command line."""
    if sys.stdout is None:  # closed by who started us
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (for as long as the process lives)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a name that the terminal can't show is no failure
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except OSError as error:  # not from a file that a command was told of: that one it names
        if error.errno != errno.ENOSPC:
            raise
        typer.echo(f"streamflow: the output could not be written: {error.strerror}", err=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left would fail again at exit
        sys.exit(2)
