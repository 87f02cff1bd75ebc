"""Scopes around some moves: left in the ordinary way, cancelled, or cut short by a failure."""

from __future__ import annotations

import math
import time

import anyio

import streamflow as sf
from tests.stress.kernels import Boom
from tests.stress.model import Move, Outcome
from tests.stress.moves import Moves

FINAL = (sf.OpState.DONE, sf.OpState.FAILED, sf.OpState.CANCELLED)


class Soak(Moves):
    """The whole program."""

    async def run(self, num_ops: int, *, until_s: float = math.inf) -> None:
        """Make moves until that many ops were submitted, or until that time."""
        async with anyio.create_task_group() as group:
            group.start_soon(self.resolve_forever)
            next_look = 0
            while self.counts["ops"] < num_ops and time.monotonic() < until_s:
                how = self.random.random()
                if how < 0.004:
                    await self.calm_scope()
                elif how < 0.010:
                    await self.cut_scope()
                elif how < 0.014:
                    await self.detach()
                else:
                    self.one()
                await self.compare(64)
                if self.counts["ops"] >= next_look:
                    next_look += 2000
                    await self.look_at_failures()
            await self.finish()
            group.cancel_scope.cancel()

    def let_go(self) -> None:
        """Open every gate, so that the devices can be closed after a mismatch."""
        self.resolve(0)

    def limit(self) -> str | None:
        return "192KiB" if self.chance(0.5) else None

    async def calm_scope(self) -> None:
        """A scope in which nothing fails by itself: all that is submitted runs."""
        self.only_dev = dev_no = self.random.randrange(len(self.devs))
        self.is_calm = True
        async with self.devs[dev_no].scope(limit=self.limit()) as scope:
            for _ in range(self.random.randrange(4, 24)):
                self.one()
        assert scope.num_unfinished == scope.in_flight_nbytes == 0
        self.only_dev, self.is_calm = None, False
        self.counts["scopes"] += 1

    async def cut_scope(self) -> None:
        """A scope that ends early: its ops have ended, and the model takes what they say."""
        how = self.random.choice(("cancelled", "failed", "raised"))
        self.only_dev = dev_no = self.random.randrange(len(self.devs))
        self.is_calm = how == "cancelled"
        self.observed = moves = []
        surfaced: list[BaseException] = []
        try:
            with anyio.CancelScope() as cancel_scope:
                async with self.devs[dev_no].scope(limit=self.limit()):
                    for _ in range(self.random.randrange(4, 24)):
                        self.one()
                    if how == "cancelled":
                        cancel_scope.cancel()
                    elif how == "raised":
                        raise Boom("the body")
        except Boom as error:
            surfaced.append(error)
        except BaseExceptionGroup as group:
            surfaced.extend(group.exceptions)
        self.observed, self.only_dev, self.is_calm = None, None, False
        unfinished = [move.op.story() for move in moves if move.op.state not in FINAL]
        assert not unfinished, (how, unfinished)
        roots = {id(error) for move in moves if (error := self.observe(move)) is not None}
        # What surfaced are failures of the ops, or of the body, and nothing else.
        others = [error for error in surfaced if id(error) not in roots]
        assert len(others) == (how == "raised"), (how, surfaced)
        moves.clear()  # the body's error, whose frame holds them, may be the context of another
        self.counts["cut scopes"] += 1

    def observe(self, move: Move) -> BaseException | None:
        """Settle ``move`` by the state of its op; returns its failure if it is a root."""
        op = move.op
        assert op is not None
        error = op.exception()
        root = None
        if error is None:
            assert move.is_fed(), f"{op!r} ran without what it needs"
            assert move.plan is Outcome.GOOD
            move.settle(Outcome.GOOD)
            self.results.append(move)
        elif isinstance(error, sf.UpstreamFailed):
            # Where it had all it needs, the scope dropped what it was made of: the read of a
            # host task, or the place of a staged copy on its stream.
            assert not move.is_fed() or isinstance(error.__cause__, sf.OpCancelled), op.story()
            move.settle(Outcome.UPSTREAM)
            assert error.__cause__ is not None
            self.see(error.__cause__)
        elif isinstance(error, sf.OpCancelled):
            move.settle(Outcome.CANCELLED)
        else:
            move.settle(Outcome.REFUSED)
            root = error
            self.see(error)
        self.count(move)
        return root
