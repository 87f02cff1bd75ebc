"""Schedules: other legal orders of a simulated machine's work than the plain one.

A command that has reached the head of its stream, with every wait before it passed, could
start at any time from then on: hardware promises nothing else. So a schedule only ever *holds
back* such commands, until nothing else can run or for ``PATIENCE`` completions, and chooses how
many completions the host sees at a time. Nothing that CUDA forbids can come of that.

A deviation is named by what it does, not by when it is asked: the third command of stream 5 is
the same one in every run, whichever thread submitted first (rule R15) and whatever else of a
schedule is left out. That is what makes schedules shrink well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from streamflow.backends.sim.log import Logged

if TYPE_CHECKING:
    from streamflow.backends.sim.command import Command
    from streamflow.backends.sim.stream import SimStream

__all__ = ["IMPOSED", "Deviation", "Hold", "Imposed", "Plan", "Schedule", "Turn"]

PATIENCE = 1000
"""Completions that a command is held back for at most: hardware goes on in the end."""

_NUM_TOLD = 4
_NUM_STREAMS = 20
_HOLD = re.compile(r"(?:(\d+)\.)?(\d+)\.(\d+)(?:=(\d+))?", re.ASCII)
_TURN = re.compile(r"(\d*)@(\d+)=(\d+)", re.ASCII)
_SEEDED = re.compile(r"([a-z-]+):(\d+)", re.ASCII)


class Hold(NamedTuple):
    """A command held back until nothing else can run; of several, the lowest level goes first.

    ``number`` counts the launches, copies, fills, allocations and frees of the stream with that
    ordinal, from 1; ``world`` the machines that a run makes one after the other.
    """

    world: int
    stream: int
    number: int
    level: int = 1

    def __str__(self) -> str:
        world = f"{self.world}." if self.world else ""
        level = "" if self.level == 1 else f"={self.level}"
        return f"{world}{self.stream}.{self.number}{level}"


class Turn(NamedTuple):
    """A turn of the loop, from 1, that sees another number of completions than one."""

    world: int
    number: int
    num_ended: int

    def __str__(self) -> str:
        return f"{self.world or ''}@{self.number}={self.num_ended}"


Deviation = Hold | Turn


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done: a strategy and its seed, or a list of deviations."""

    strategy: str = ""
    seed: int = 0
    deviations: tuple[Deviation, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Read the form that :meth:`__str__` writes.

        Raises
        ------
        ValueError
            It has another form, or names no strategy.
        """
        if text in ("", "plain"):
            return cls()
        if (found := _SEEDED.fullmatch(text)) is not None and found[1] in STRATEGIES:
            return cls(found[1], int(found[2]))
        return cls(deviations=tuple(_parse_deviation(part, text) for part in text.split(",")))

    def __str__(self) -> str:
        if self.strategy:
            return f"{self.strategy}:{self.seed}"
        return ",".join(map(str, self.deviations)) or "plain"


def _parse_deviation(part: str, text: str) -> Deviation:
    if (found := _HOLD.fullmatch(part)) is not None:
        world, stream, number, level = found.groups()
        return Hold(int(world or 0), int(stream), int(number), int(level or 1))
    if (found := _TURN.fullmatch(part)) is not None:
        return Turn(int(found[1] or 0), int(found[2]), int(found[3]))
    raise ValueError(
        f"a schedule is 'plain', a strategy ({', '.join(STRATEGIES)}) with a seed such as "
        f"'random:17', or deviations such as '3.2,5.1=2,@12=0'; found {text!r}"
    )


# -- strategies ------------------------------------------------------------------------

_Key = tuple[float, ...]


class _Explicit:
    """Exactly these deviations of one world."""

    def __init__(self, deviations: Sequence[Deviation], world: int) -> None:
        self._levels = {
            (d.stream, d.number): d.level
            for d in deviations
            if isinstance(d, Hold) and d.world == world
        }
        self._turns = {
            d.number: d.num_ended for d in deviations if isinstance(d, Turn) and d.world == world
        }

    def hold(self, command: Command, number: int, since: int) -> _Key | None:
        level = self._levels.get((command.stream.ordinal, number))
        return None if level is None else (level,)

    def turn(self, number: int) -> int:
        return self._turns.get(number, 1)


class _Pace:
    """How fast the device is against the host: turns that see another number of completions."""

    def __init__(self, seed: int, world: int) -> None:
        self.prefix = f"{seed}/{world}"
        self._odds = Random(f"{self.prefix}@").choice((0.0, 0.0, 0.05, 0.4))

    def turn(self, number: int) -> int:
        if not self._odds:
            return 1
        draw = Random(f"{self.prefix}@{number}")
        return draw.choice((0, 0, 2, 8, 64)) if draw.random() < self._odds else 1

    def draw(self, command: Command, number: int) -> Random:
        """The dice of one command, the same whenever and by whomever they are thrown (R15)."""
        return Random(f"{self.prefix}/{command.stream.ordinal}/{number}")


class _Random(_Pace):
    """Any command is held back, with odds that the seed decides."""

    def __init__(self, seed: int, world: int) -> None:
        super().__init__(seed, world)
        self._odds_to_hold = Random(self.prefix).choice((0.03, 0.1, 0.3, 0.6))

    def hold(self, command: Command, number: int, since: int) -> _Key | None:
        draw = self.draw(command, number)
        return (draw.random(),) if draw.random() < self._odds_to_hold else None


class _PriorityInverting(_Pace):
    """One command at a time: the least urgent stream's first, then what became ready last.

    With an even seed all commands are held back for that, with an odd one two out of three.
    """

    def __init__(self, seed: int, world: int) -> None:
        super().__init__(seed, world)
        self._odds_to_hold = 2 / 3 if seed % 2 else 1.0

    def hold(self, command: Command, number: int, since: int) -> _Key | None:
        if self.draw(command, number).random() >= self._odds_to_hold:
            return None
        return (-command.stream.priority, -since, -command.stream.ordinal)


class _Starved(_Pace):
    """One engine, or one stream (and every 20th from there), runs only when nothing else can."""

    def __init__(self, seed: int, world: int) -> None:
        super().__init__(seed, world)
        draw = Random(self.prefix)
        is_engine = draw.random() < 0.25
        self._engine = draw.choice(("h2d", "d2h", "compute")) if is_engine else None
        self._stream = None if is_engine else draw.randrange(_NUM_STREAMS)

    def hold(self, command: Command, number: int, since: int) -> _Key | None:
        engine = command.engine
        if command.stream.ordinal % _NUM_STREAMS == self._stream or (
            engine is not None and engine.name == self._engine
        ):
            return (0.0,)
        return None


_Strategy = _Explicit | _Random | _PriorityInverting | _Starved

STRATEGIES: dict[str, Callable[[int, int], _Strategy]] = {
    "random": _Random,
    "priority-inverting": _PriorityInverting,
    "starved": _Starved,
}


# -- a schedule at work ------------------------------------------------------------------


class _Held:
    """A command that is held back, and what has ended meanwhile.

    ``since`` counts what had ended before: two that came after the same completion may have been
    submitted by two threads, in either order, and are told apart by their streams (R15).
    """

    __slots__ = ("command", "key", "num_passed", "number", "passed", "since")

    def __init__(self, command: Command, number: int, key: _Key, since: int) -> None:
        self.command = command
        self.number = number
        self.key = key
        self.since = since
        self.num_passed = 0
        self.passed: list[str] = []

    @property
    def age(self) -> tuple[int, int]:
        """Sorts the oldest first."""
        return self.since, self.command.stream.ordinal


class Schedule:
    """Decides for one world; every method runs under its lock.

    Attributes
    ----------
    story : list of (Deviation, str) or None
        Where told to keep one: what it did that a plain run would not have done, and in words.
        Holding back work that could not have run earlier anyway isn't in it.
    log : list of Logged
        What has ended, if it keeps a story.
    """

    def __init__(self, plan: Plan, world: int = 0, *, keeps_story: bool = False) -> None:
        self._world = world
        self._strategy: _Strategy = (
            STRATEGIES[plan.strategy](plan.seed, world)
            if plan.strategy
            else _Explicit(plan.deviations, world)
        )
        self._numbers: dict[int, int] = {}
        self._num_ended = self._num_turns = self._num_released = 0
        self._held: list[_Held] = []
        self._released: set[Command] = set()
        self.story: list[tuple[Deviation, str]] | None = [] if keeps_story else None
        self.log: list[Logged] = []

    def holds(self, command: Command) -> bool:
        """Whether a command that could go on now is held back; asked once, and once released."""
        if command in self._released:
            self._released.discard(command)
            return False
        ordinal = command.stream.ordinal
        number = self._numbers[ordinal] = self._numbers.get(ordinal, 0) + 1
        key = self._strategy.hold(command, number, self._num_ended)
        if key is None:
            return False
        self._held.append(_Held(command, number, key, self._num_ended))
        return True

    def release(self, is_idle: bool) -> Command | None:
        """The next command to let go, if it is time: nothing else runs, or one waited too long."""
        if not self._held:
            return None
        if is_idle:
            held = min(self._held, key=lambda each: (each.key, each.age))
        else:
            held = min(self._held, key=lambda each: each.age)
            if self._num_ended - held.since < PATIENCE:
                return None
        self._held.remove(held)
        self._released.add(held.command)
        self._num_released += 1
        # Held back, what needs no engine ends in a step of its own, and the host gets a turn.
        if self.story is not None and (held.num_passed or held.command.engine is None):
            self.story.append(self._tell(held))
        return held.command

    def forget(self, streams: set[SimStream]) -> None:
        """Their queues are dropped: a device was lost or closed."""
        self._held = [held for held in self._held if held.command.stream not in streams]
        self._released = {each for each in self._released if each.stream not in streams}

    def ended(self, command: Command, now_s: float) -> None:
        """A command has ended."""
        self._num_ended += 1
        for held in self._held:
            held.num_passed += 1
        if self.story is None:
            return
        entry = Logged.of(command, now_s)
        self.log.append(entry)
        for held in self._held:
            if len(held.passed) < _NUM_TOLD:
                held.passed.append(f"{entry.label!r} on {entry.name}")

    def next_turn(self) -> int:
        """How many completions the turn that begins may see."""
        self._num_turns += 1
        return self._strategy.turn(self._num_turns)

    def turn_saw(self, num_ended: int) -> None:
        """How many it has seen."""
        if self.story is None or num_ended == 1:
            return
        turn = Turn(self._world, self._num_turns, num_ended)
        text = (
            f"turn {turn.number} of the loop went by without a completion"
            if num_ended == 0
            else f"{num_ended} completions came at once in turn {turn.number} of the loop"
        )
        self.story.append((turn, text))

    def _tell(self, held: _Held) -> tuple[Hold, str]:
        command = held.command
        stream = command.stream
        # The order of release as the level: so it can be had again without the strategy.
        hold = Hold(self._world, stream.ordinal, held.number, self._num_released)
        label = Logged.of(command, 0.0).label
        left_out = held.num_passed - len(held.passed)
        passed = ", ".join(held.passed) + (f" and {left_out} more" if left_out > 0 else "")
        meanwhile = f"ran: {passed}" if passed else "the loop had a turn"
        return hold, (
            f"{label!r} on {stream.name}, command {held.number} there, was held back; "
            f"meanwhile {meanwhile}"
        )


class Imposed:
    """One plan for every world that is made where it is set, whatever their own settings say.

    Attributes
    ----------
    schedules : list of Schedule
        Of the worlds made so far.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.schedules: list[Schedule] = []

    def begin(self) -> Schedule:
        """The schedule of the next world."""
        schedule = Schedule(self.plan, len(self.schedules), keeps_story=True)
        self.schedules.append(schedule)
        return schedule

    @property
    def story(self) -> list[tuple[Deviation, str]]:
        """What all of them have to tell."""
        return [told for schedule in self.schedules for told in schedule.story or ()]


IMPOSED: ContextVar[Imposed | None] = ContextVar("streamflow_imposed_schedule", default=None)
"""Set by an exploration around the program it runs; threads of the runtime inherit it."""
