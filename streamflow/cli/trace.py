"""``streamflow trace``: look at a trace that a program has saved."""

from __future__ import annotations

import webbrowser
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer

from streamflow.cli.shared import (
    JsonOption,
    examples,
    fail,
    mistake,
    print_facts,
    print_json,
    print_table,
)
from streamflow.runtime.units import spell_bytes, spell_seconds
from streamflow.trace import Overlap, Trace, TracedOp
from streamflow.trace.critical import CriticalPath
from streamflow.trace.looks import printable

__all__ = ["trace"]

_MAX_OPS = 5000
_NUM_STEPS_SHOWN = 20

FileArgument = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        exists=True,
        dir_okay=False,
        readable=True,
        help="What trace.save wrote to a .json file.",
    ),
]
MaxOpsOption = Annotated[
    int, typer.Option(min=1, help="Draw no picture of single ops where there are more than these.")
]

trace = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Look at a trace that a program has saved.",
)


@trace.command(
    epilog=examples(
        "streamflow trace view run.json",
        "streamflow trace view run.json --output /tmp/run.html --no-open",
    )
)
def view(
    file: FileArgument,
    output: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False, help="The page; ends in .html.  [default: beside FILE, by its name]"
        ),
    ] = None,
    is_opened: Annotated[
        bool, typer.Option("--open/--no-open", help="Show it in the browser.")
    ] = True,
) -> None:
    """Write a trace's page, and show it in the browser.

    The page is one file, which needs no network: graph, timeline and memory.
    """
    page = file.with_suffix(".html") if output is None else output
    if page.suffix.lower() != ".html":
        mistake(f"a page's name ends in .html, found {str(page)!r}", "--output")
    _refuse_same(page, [file], "--output")
    _save(_load(file), page, _MAX_OPS, "--output")
    typer.echo(page)
    if is_opened and not webbrowser.open(page.absolute().as_uri()):
        typer.echo("streamflow: no browser was found: open the page yourself", err=True)


@trace.command(
    epilog=examples(
        "streamflow trace convert run.json run.chrome.json",
        "streamflow trace convert run.json run.svg",
        "streamflow trace convert worker0.json worker1.json both.html",
    )
)
def convert(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            readable=True,
            help="What trace.save wrote to .json files; several are merged.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT", dir_okay=False, help="The file to write: its ending is the format."
        ),
    ],
    max_ops: MaxOpsOption = _MAX_OPS,
) -> None:
    """Write a trace in another format, or several traces as one."""
    _refuse_same(out, files, "OUT")
    parts = [_load(file) for file in files]
    try:
        whole = Trace.merged(parts) if len(parts) > 1 else parts[0]
    except ValueError as error:
        mistake(error, "FILE")
    _save(whole, out, max_ops, "OUT")


@trace.command(
    epilog=examples(
        "streamflow trace summary run.json", "streamflow trace summary run.json --longest 20 --json"
    )
)
def summary(
    file: FileArgument,
    num_longest: Annotated[
        int, typer.Option("--longest", min=0, help="How many of the longest ops to name.")
    ] = 5,
    as_json: JsonOption = False,
) -> None:
    """Say what a trace holds, and what bounds the run.

    Ops by kind, busy engines and their overlap, memory at most, the longest ops, the critical
    path, and hints at what could be better.
    """
    found = _load(file)
    overlap, path = found.overlap(), found.critical_path()
    facts = {"file": str(file), **_summary(found, overlap, path, num_longest)}
    if as_json:
        print_json(facts)
    else:
        _print_summary(facts, overlap, path)


@trace.command(
    epilog=examples(
        "streamflow trace explain run.json saxpy", "streamflow trace explain run.json 42 --json"
    )
)
def explain(
    file: FileArgument,
    op: Annotated[str, typer.Argument(metavar="OP", help="Its name, or its id.")],
    as_json: JsonOption = False,
) -> None:
    """Say what one op waited for, and why."""
    found = _load(file)
    answer = found.explain(_find(found, op))
    if as_json:
        print_json(answer)
    else:
        _print_part(str(answer))


def _summary(
    found: Trace, overlap: Overlap, path: CriticalPath, num_longest: int
) -> dict[str, Any]:
    kinds: dict[str, list[TracedOp]] = defaultdict(list)
    for op in found.ops:
        kinds[op.kind].append(op)
    timed = [op for op in found.ops if op.duration_s is not None and op.engine is not None]
    peaks: dict[tuple[int, int], tuple[int, int]] = {}
    for each in found.memory:
        key = each.process, each.device
        nbytes, pinned_nbytes = peaks.get(key, (0, 0))
        peaks[key] = max(nbytes, each.nbytes), max(pinned_nbytes, each.pinned_nbytes)
    return {
        "devices": [asdict(device) for device in found.devices],
        "num_ops": len(found.ops),
        "num_dropped": found.num_dropped,
        "num_failed": sum(op.state == "failed" for op in found.ops),
        "num_edges": len(found.edges),
        "num_issued": sum(edge.issued for edge in found.edges),
        "kinds": [
            {
                "kind": kind,
                "num_ops": len(ops),
                "nbytes": sum(op.nbytes for op in ops),
                "duration_s": sum(op.duration_s or 0.0 for op in ops),
            }
            for kind, ops in sorted(kinds.items())
        ],
        "overlap": asdict(overlap),
        "memory": [
            {
                "process": process,
                "device": device,
                "peak_nbytes": nbytes,
                "peak_pinned_nbytes": pinned_nbytes,
            }
            for (process, device), (nbytes, pinned_nbytes) in sorted(peaks.items())
        ],
        "longest": [
            {
                "id": op.id,
                "name": op.name,
                "kind": op.kind,
                "stream": op.stream,
                "device": op.device,
                "duration_s": op.duration_s,
                "where": op.where,
            }
            for op in sorted(timed, key=lambda op: -(op.duration_s or 0.0))[:num_longest]
        ],
        "critical_path": {
            "length_s": path.length_s,
            "busy_s": path.busy_s,
            "steps": [
                {
                    "id": step.op.id,
                    "name": step.op.name,
                    "reason": step.reason,
                    "wait_s": step.wait_s,
                    "ran_s": step.ran_s,
                    "why": step.why,
                }
                for step in path.steps
            ],
        },
        "hints": [{"kind": hint.kind, "text": hint.text} for hint in found.hints()],
    }


def _print_summary(facts: dict[str, Any], overlap: Overlap, path: CriticalPath) -> None:
    others = [
        f"{facts[f'num_{name}']} {name}" for name in ("failed", "dropped") if facts[f"num_{name}"]
    ]
    print_facts(
        {
            "file": facts["file"],
            "devices": "\n".join(
                f"{each['name']}{', virtual time' if each['is_virtual'] else ''}"
                for each in facts["devices"]
            )
            or None,
            "ops": ", ".join([str(facts["num_ops"]), *others]),
            "edges": f"{facts['num_edges']}, {facts['num_issued']} of them waits on the device",
            "memory": "\n".join(
                (f"device {each['device']}: " if len(facts["memory"]) > 1 else "")
                + f"{spell_bytes(each['peak_nbytes'])} at most, "
                f"and {spell_bytes(each['peak_pinned_nbytes'])} pinned"
                for each in facts["memory"]
            )
            or None,
        }
    )
    typer.echo()
    print_table(
        ("kind", "ops", "bytes", "time"),
        [
            (
                printable(each["kind"]),
                str(each["num_ops"]),
                spell_bytes(each["nbytes"]),
                spell_seconds(each["duration_s"]),
            )
            for each in facts["kinds"]
        ],
        left=("kind",),
    )
    typer.echo()
    _print_part(str(overlap))
    if facts["longest"]:
        typer.echo("\nthe longest ops")
        print_table(
            ("id", "time", "name", "stream", "where"),
            [
                (
                    str(each["id"]),
                    spell_seconds(each["duration_s"]),
                    printable(each["name"]),
                    printable(each["stream"]),
                    printable(each["where"] or ""),
                )
                for each in facts["longest"]
            ],
            left=("name", "stream", "where"),
        )
    typer.echo("\nthe critical path")
    lines = str(path).splitlines()  # a heading, the steps, and their length
    num_left_out = len(lines) - 2 - _NUM_STEPS_SHOWN
    if num_left_out > 0:
        lines[1 + _NUM_STEPS_SHOWN : -1] = [f"and {num_left_out} steps more"]
    _print_part("\n".join(lines))
    for hint in facts["hints"]:
        typer.echo()
        _print_part(f"hint: {hint['text']}")


def _print_part(text: str) -> None:
    for line in text.splitlines():
        typer.echo(printable(line))


def _load(file: Path) -> Trace:
    try:
        return Trace.load(file)
    except (OSError, ValueError) as error:
        mistake(error, "FILE")


def _refuse_same(path: Path, files: Iterable[Path], where: str) -> None:
    if path.resolve() in [file.resolve() for file in files]:
        mistake(f"{str(path)!r} is also what is read", where)


def _save(found: Trace, path: Path, max_ops: int, where: str) -> None:
    try:
        found.save(path, max_ops=max_ops)
    except ModuleNotFoundError as missing:
        fail(str(missing))
    except (OSError, ValueError) as error:
        mistake(error, where)


def _find(found: Trace, which: str) -> TracedOp:
    """By its name, else by its id."""
    try:
        if which.isdecimal() and all(op.name != which for op in found.ops):
            return found.op(int(which))
        return found.op(which)
    except LookupError as error:
        names: Iterable[str] = {op.name for op in found.ops}
        close = get_close_matches(which, names, 1)
        meant = f"; did you mean {close[0]!r}?" if close and close[0] != which else ""
        mistake(f"{error.args[0]}{meant}", "OP")
