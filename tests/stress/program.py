"""The random program: each move is submitted to a device and foretold by the model."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np

import streamflow as sf
from tests.stress.kernels import Boom
from tests.stress.model import Move, Outcome, Place, Slot

NUM_STREAMS = 8  # of each device
NUM_SLOTS = 14
NUM_PENDING = 24
NUM_RESULTS = 64
DROP = 0.35

GOOD, REFUSED, UPSTREAM = Outcome.GOOD, Outcome.REFUSED, Outcome.UPSTREAM
CANCELLED, EITHER = Outcome.CANCELLED, Outcome.EITHER


class Program:
    """What the moves share: the devices, the pool of arrays, and what is still to come.

    Attributes
    ----------
    pending : list of callable
        What resolves the futures and cancels the ops that wait for one for ever.
    observed : list of Move or None
        While ops may be dropped by their scope at any moment: to be settled by their state.
    """

    def __init__(self, devs: Sequence[sf.Device], random: Random) -> None:
        self.devs = devs
        self.random = random
        self.is_sim = devs[0].backend == "sim"
        self.streams = [
            [dev.stream(f"d{no}s{i}", priority=-(i % 3)) for i in range(NUM_STREAMS)]
            for no, dev in enumerate(devs)
        ]
        self.slots: list[Slot] = []
        self.results: deque[Move] = deque()
        self.recent: deque[Move] = deque(maxlen=12)
        self.scalars: deque[Move] = deque(maxlen=4)
        self.pending: list[Callable[[], None]] = []
        self.observed: list[Move] | None = None
        self.is_calm = False  # nothing may fail by itself: a scope would drop the rest
        self.only_dev: int | None = None
        self.counts: Counter[str] = Counter()
        self.num_roots = 0  # ops that have failed by themselves
        self.seen: dict[int, BaseException] = {}  # those failures that were told
        self.resolver_random = Random(random.random())

    # -- choosing ------------------------------------------------------------------------

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def dev_no(self) -> int:
        if self.only_dev is not None:
            return self.only_dev
        return self.random.randrange(len(self.devs))

    def pick(self, dev_no: int) -> Place | None:
        """An array of a device or a part of one: mostly one that nothing has spoiled."""
        here = [slot for slot in self.slots if slot.dev_no == dev_no]
        if not here:
            return None
        for _ in range(3):
            slot = self.random.choice(here)
            part = self.random.randrange(3) if self.chance(0.3) else None
            if not slot.cells.is_spoiled(part):
                break
        return slot, part

    def stream_of(self, dev_no: int) -> dict[str, Any]:
        if self.chance(0.75):
            return {"stream": self.random.choice(self.streams[dev_no])}
        return {}

    # -- submitting ------------------------------------------------------------------------

    def go(
        self,
        dev_no: int,
        move: Move,
        call: Callable[..., sf.Op[Any]],
        *,
        takes_stream: bool = True,
        takes_after: bool = True,
        is_late: bool = False,
    ) -> None:
        """Submit ``move`` by ``call`` with options of its own, and foretell what it does.

        ``is_late``: its failure shows only when it runs, so nothing may come after it.
        """
        options: dict[str, Any] = self.stream_of(dev_no) if takes_stream else {}
        cancel = None
        if takes_after:
            options["after"], cancel = self.after(move)
        op = call(**options)
        self.counts["ops"] += 1
        self.touched(move, op.stream)
        if cancel is not None:
            self.pending.append(partial(cancel, op))
        if self.observed is not None:
            move.op = op
            self.observed.append(move)
            return
        move.settle(move.foresee())
        self.count(move)
        if cancel is None and self.chance(DROP):
            self.counts["dropped"] += 1
            return
        move.op = op
        self.results.append(move)
        if not is_late:
            self.recent.append(move)

    def count(self, move: Move) -> None:
        assert move.outcome is not None
        self.counts[move.outcome.name.lower()] += 1
        self.num_roots += move.outcome is REFUSED

    def touched(self, move: Move, where: str | None) -> None:
        """Count whether it uses what another stream used last; a lane may not be known yet."""
        if where is None:
            return
        is_other = False
        for slot, _ in move.places:
            is_other |= slot.where is not None and slot.where != f"{slot.dev_no}{where}"
            slot.where = f"{slot.dev_no}{where}"
        self.counts["crossing"] += is_other

    def after(self, move: Move) -> tuple[list[Any], Callable[[sf.Op[Any]], None] | None]:
        """Edges that the data don't show: ops, futures, and futures that never come."""
        after: list[Any] = []
        if self.recent and self.chance(0.12):
            before = self.random.choice(self.recent)
            move.after.append(before)
            after.append(before.op)
        how = self.random.random()
        if how < 0.015:
            event = anyio.Event()
            self.pending.append(event.set)
            after.append(event)
        elif how < 0.03:
            self.later(move, after)
        elif how < 0.10:
            return [*after, anyio.Event()], self.cancelled(move)
        elif how < 0.115:
            future: anyio.Future[None] = anyio.Future()
            self.pending.append(future.cancel)
            move.plan = CANCELLED
            after.append(future)
        return after, None

    def later(self, move: Move, after: list[Any]) -> None:
        """A future that will be an op, or an error."""
        future: anyio.Future[Any] = anyio.Future()
        if self.recent and self.chance(0.6):
            before = self.random.choice(self.recent)
            move.after.append(before)
            self.pending.append(partial(setattr, future, "return_value", before.op))
        elif not self.is_calm and self.observed is None and move.is_fed() and move.plan is GOOD:
            move.plan = UPSTREAM
            self.num_roots += 1
            self.pending.append(partial(setattr, future, "exception", Boom("a future")))
        else:
            self.pending.append(partial(setattr, future, "return_value", None))
        after.append(future)

    def cancelled(self, move: Move) -> Callable[[sf.Op[Any]], None]:
        """Have ``move`` wait for ever; it is cancelled in its time."""
        move.plan = CANCELLED
        is_foretold = self.observed is None

        def cancel(op: sf.Op[Any]) -> None:
            was_parked = op.cancel()
            if is_foretold and move.outcome is CANCELLED:
                assert was_parked, f"{op!r} has gone on without what it waits for"

        return cancel

    # -- what is still to come ---------------------------------------------------------------

    def resolve(self, num_left: int) -> None:
        """Set futures and cancel ops, in any order, until that many are left."""
        pending = self.pending
        while len(pending) > num_left:
            pending.pop(self.resolver_random.randrange(len(pending)))()

    async def resolve_forever(self) -> None:
        """Beside the program, so that it may wait for what waits for these."""
        while True:
            for _ in range(1 + self.resolver_random.randrange(12)):
                await anyio.lowlevel.checkpoint()
            if self.pending:
                self.resolve(len(self.pending) - 1)

    async def compare(self, num_left: int) -> None:
        """Await results, oldest first, until that many are left."""
        self.resolve(NUM_PENDING)
        while len(self.results) > num_left:
            await self.check(self.results.popleft())

    async def check(self, move: Move) -> None:
        """Await one op: it ends as foretold."""
        assert move.op is not None
        self.counts["awaited"] += 1
        ended: tuple[Outcome, ...] = (GOOD,)
        value, failure = None, None
        try:
            value = await move.op
        except sf.UpstreamFailed as error:
            ended, failure = (UPSTREAM, EITHER), error.__cause__
        except sf.OpCancelled:
            ended = (CANCELLED, EITHER)
        except (Boom, sf.DeviceError) as error:
            ended, failure = (REFUSED,), error
        assert move.outcome in ended, (move.what, move.outcome, ended, failure)
        if failure is not None:
            self.see(failure)
        elif isinstance(move.expected, np.ndarray):
            np.testing.assert_array_equal(value, move.expected, err_msg=move.what)
        elif move.expected is not None:
            assert value == move.expected, move.what

    def see(self, error: BaseException) -> None:
        """This root failure was told."""
        if not isinstance(error, sf.OpCancelled):
            self.seen[id(error)] = error.with_traceback(None)
            # It may have been raised while another was on its way, whose frames hold arrays.
            error.__context__ = None
            if error.__cause__ is not None:
                error.__cause__.__context__ = None

    async def look_at_failures(self) -> None:
        """Every failure is told once: by an await, or by ``synchronize``; none is made up."""
        await self.compare(0)
        self.resolve(0)
        self.recent.clear()
        self.scalars.clear()
        for dev in self.devs:
            try:
                await dev.synchronize()
            except BaseExceptionGroup as group:
                for error in group.exceptions:
                    self.see(error)
        told = Counter(map(str, self.seen.values()))
        assert len(self.seen) == self.num_roots, f"{self.num_roots} ops failed, told were {told}"
