"""``streamflow replay``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import streamflow as sf
from streamflow.cli.shared import (
    JsonOption,
    fail,
    mistake,
    print_facts,
    print_json,
    print_table,
)

if TYPE_CHECKING:
    from streamflow.memory.replay import Plan, Replayed

__all__ = ["replay"]


def replay(
    log: Annotated[
        Path,
        typer.Argument(
            metavar="LOG",
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
    as_json: JsonOption = False,
) -> None:
    """Run a log of allocations against memory resources.

    They run on the simulator. Says for each what it reserved at most, how scattered its free
    memory was, how often it made streams wait, and what its calls took the host. Fails if one
    could not serve the log.
    """
    from streamflow.memory import log as logs
    from streamflow.memory import replay as replaying
    from streamflow.memory.spec import parse_resource
    from streamflow.scheduler.budget import parse_nbytes

    try:
        specs = [parse_resource(text) for text in resource]
    except ValueError as error:
        mistake(error, "--resource")
    try:
        plan = replaying.plan_replay(logs.read_log(log))
    except (OSError, ValueError) as error:
        mistake(error, "LOG")
    try:
        nbytes = max(4 << 30, 2 * plan.peak_live_nbytes) if memory is None else parse_nbytes(memory)
    except ValueError as error:
        mistake(error, "--memory")
    for problem in plan.problems:
        typer.echo(f"streamflow: {log}: {problem}", err=True)
    outcomes = []
    for spec in specs:
        try:
            outcomes.append(replaying.replay(plan, spec, memory_nbytes=nbytes, lag_s=lag))
        except sf.StreamflowError as error:  # some are also ValueErrors
            fail(f"{spec.text}: {error}")
        except (TypeError, ValueError) as error:
            mistake(f"{spec.text}: {error}", "--resource")
    _print_replayed(log, plan, outcomes, nbytes, as_json)
    failed = [outcome.resource for outcome in outcomes if outcome.num_failures]
    if failed:
        fail(f"not enough memory in {', '.join(failed)}")


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
        print_json({**facts, "problems": list(plan.problems), "resources": rows})
        return
    from streamflow.runtime.units import spell_bytes

    print_facts({**facts, "problems": len(plan.problems) or None})
    print_table(
        (
            *("peak reserved", "fragmentation", "waits", "stalls", "refused", "allocate", "free"),
            "resource",  # the longest last: a narrow terminal breaks it
        ),
        [
            (
                spell_bytes(each.peak_reserved_nbytes),
                "-" if each.fragmentation is None else f"{each.fragmentation:.1%}",
                str(each.num_waits),
                str(each.num_stalls),
                str(each.num_failures),
                f"{each.allocate_us:.1f} us",
                f"{each.free_us:.1f} us",
                each.resource,
            )
            for each in outcomes
        ],
        left=("resource",),
    )
