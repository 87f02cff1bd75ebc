"""``explore``: one program under many legal schedules of the simulator's virtual clock."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import index
from traceback import format_exception_only

from streamflow.backends.sim.schedule import STRATEGIES, Deviation, Hold, Plan
from streamflow.config import Settings
from streamflow.errors import StreamflowError
from streamflow.testing.replay import VARIABLE, replay_line
from streamflow.testing.runs import Run, Runner
from streamflow.testing.shrink import shrink

__all__ = ["ExplorationFailed", "Explored", "explore"]

_NUM_RUNS_TO_SHRINK = 200
_NUM_HUNG_RUNS_TO_SHRINK = 10
_NUM_TOLD = 12


class ExplorationFailed(StreamflowError, AssertionError):
    """A program failed under one of its legal schedules; ``__cause__`` is how.

    Attributes
    ----------
    seed : int or None
        The first that failed; None where the plain run did.
    schedule : str
        With the fewest deviations that still fail, as ``SimOptions(schedule=...)`` takes it.
    deviations : tuple of str
        In words.
    replay : str
        One line that runs it again in a fresh process.
    """

    def __init__(
        self,
        message: str,
        *,
        seed: int | None = None,
        schedule: str = "",
        deviations: Sequence[str] = (),
        replay: str = "",
    ) -> None:
        super().__init__(message)
        self.seed = seed
        self.schedule = schedule
        self.deviations = tuple(deviations)
        self.replay = replay


@dataclass(frozen=True, slots=True)
class Explored:
    """What was tried, where nothing failed.

    Attributes
    ----------
    num_schedules : int
        Runs of the program, the plain one among them.
    num_distinct : int
        Different orders in which its work has ended. Where this stays small, more seeds won't
        find more.
    """

    num_schedules: int
    num_distinct: int


def explore(
    fn: Callable[..., Awaitable[object]],
    *,
    seeds: int | Iterable[int] = 200,
    strategy: str = "random",
    settings: Settings | None = None,
    loop: str = "asyncio",
    timeout_s: float = 10.0,
) -> Explored:
    """Run ``fn`` under many schedules that hardware could choose, until one makes it fail.

    First comes the plain run, then one for each seed. A failure is shrunk to the fewest
    deviations from the plain run that still make it.

    Parameters
    ----------
    fn : coroutine function
        The program, with its own assertions. It gets as many simulated devices as it has
        required parameters; with none, it opens its own, which are put on the virtual clock
        too. Its runs must not depend on each other.
    seeds : int or iterable of int
        How many, counted from 0, or which.
    strategy : str
        ``"random"``: any command may be held back. ``"priority-inverting"``: one command at a
        time, of the least urgent stream first, and the youngest first. ``"starved"``: one
        engine or stream runs only when nothing else can.
    settings : Settings, optional
        Of the devices that ``fn`` is given. Default: from ``STREAMFLOW_<NAME>``, with two
        staging threads, so that a schedule means the same on machines with more cores.
    loop : str
        ``"asyncio"``, ``"uvloop"`` or ``"trio"``, whose own choices are made the same each time.
    timeout_s : float
        Real seconds for one run. A run that takes longer hangs, which is a failure.

    Returns
    -------
    Explored
        Nothing failed.

    Raises
    ------
    ExplorationFailed
        With the schedule, its deviations in words, and the line that replays it. With
        ``STREAMFLOW_EXPLORE`` set, exactly that schedule runs, once, and what it raises comes
        through as it is.
    ValueError
        No such strategy or loop, a negative seed, settings with ``predict=True``, no simulated
        device was opened, or a bad schedule in the variable.
    RuntimeError
        Called on an event loop: it runs loops of its own.
    """
    runner = Runner(fn, settings, loop, timeout_s)
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy is one of {', '.join(STRATEGIES)}; found {strategy!r}")
    if wanted := os.environ.get(VARIABLE):
        run = runner.run(Plan.parse(wanted))
        if run.error is not None:
            raise run.error
        return Explored(1, 1)
    plans = [Plan(), *(Plan(strategy, seed) for seed in _numbers(seeds))]
    orders: set[int] = set()
    for num_before, plan in enumerate(plans):
        run = runner.run(plan)
        if run.error is not None:
            raise _failure(runner, plan, run, num_before) from run.error
        if not run.imposed.schedules:
            raise ValueError(
                f"{runner.name} opened no simulated device, so there is nothing to explore: "
                "give it a parameter, or open devices with backend='sim'"
            )
        orders.add(run.order)
    return Explored(len(plans), len(orders))


def _numbers(seeds: int | Iterable[int]) -> Sequence[int]:
    if isinstance(seeds, int):
        if seeds < 0:  # nothing would be explored, and so nothing found
            raise ValueError(f"seeds is how many, found {seeds}")
        return range(seeds)
    numbers = [index(seed) for seed in seeds]
    if min(numbers, default=0) < 0:
        raise ValueError(f"a seed is at least 0, found {min(numbers)}")
    return numbers


def _failure(runner: Runner, plan: Plan, run: Run, num_before: int) -> ExplorationFailed:
    """What to raise; ``run`` becomes the one that is told of."""
    seed = plan.seed if plan.strategy else None
    intro = f"{runner.name} fails in the plain run; no exploring is needed"
    outro = ""
    if seed is not None:
        original, num_found = plan, len(run.imposed.story)
        plan, outro = _shrunk(runner, plan, run)
        intro = f"{runner.name} fails under schedule {original}, after {num_before} that passed"
        if plan is not original:
            intro += f"; {num_found} deviations shrunk to {len(plan.deviations)}"
    words = [text for _, text in run.imposed.story]
    told = [f"  - {text}" for text in words[:_NUM_TOLD]]
    if len(words) > _NUM_TOLD:
        told.append(f"  - and {len(words) - _NUM_TOLD} more")
    replay = replay_line(str(plan))
    lines = [
        intro,
        *_what(run.error),
        *(["against the plain run:", *told] if told else []),
        "what ended last:",
        *(f"  {entry}" for entry in run.log[-_NUM_TOLD:]),
        "to run that schedule again:",
        f"  {replay}",
        outro,
    ]
    return ExplorationFailed(
        "\n".join(line for line in lines if line),
        seed=seed,
        schedule=str(plan),
        deviations=words,
        replay=replay,
    )


def _what(error: BaseException | None) -> list[str]:
    lines = ["".join(format_exception_only(error)).strip()]
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            lines += [f"  {line}" for line in _what(each)]
    return lines


def _shrunk(runner: Runner, plan: Plan, run: Run) -> tuple[Plan, str]:
    """The plan with the fewest deviations, and what is to be said about it."""
    kind = run.kind
    max_runs = _NUM_HUNG_RUNS_TO_SHRINK if run.is_hung else _NUM_RUNS_TO_SHRINK

    def fails(deviations: Sequence[Deviation]) -> bool:
        again = runner.run(Plan(deviations=tuple(deviations)))
        if again.kind != kind:
            return False
        run.imposed, run.error = again.imposed, again.error
        return True

    found = [deviation for deviation, _ in run.imposed.story]
    if not fails(found):
        again = runner.run(plan)
        if again.kind == kind:
            run.imposed, run.error = again.imposed, again.error
            return plan, ""
        return plan, (
            "It did not fail again when run once more: it depends on something else than the "
            "schedule, such as real time, threads, or what an earlier run left behind."
        )
    kept = shrink(found, fails, max_runs)
    simple = [d._replace(level=1) if isinstance(d, Hold) else d for d in kept]
    if simple != kept and fails(simple):
        kept = simple
    else:
        kept = _ranked(kept)
        fails(kept)
    if not kept:
        return Plan(), (
            "The plain run, which passed before, fails as well now: what is wrong depends on "
            "something else than the schedule."
        )
    return Plan(deviations=tuple(kept)), ""


def _ranked(deviations: Sequence[Deviation]) -> list[Deviation]:
    """The same, with levels from 1 and without gaps."""
    levels = sorted({d.level for d in deviations if isinstance(d, Hold)})
    return [
        d._replace(level=levels.index(d.level) + 1) if isinstance(d, Hold) else d
        for d in deviations
    ]
