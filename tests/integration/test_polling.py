"""C20: what waiting costs: how many queries, of which events, and none when idle (R11)."""

from __future__ import annotations

import time
from collections import Counter
from math import log

import anyio
import pytest
from anyio.lowlevel import checkpoint
from support import Opener, turns

import streamflow as sf
from streamflow.backends.sim.event import SimEvent

NUM_STREAMS, OPS_EACH = 8, 25


def num_queries(dev):
    stats = dev.stats()
    return stats.num_queries + stats.num_helper_queries


def virtual():
    return sf.Device(0, backend="sim", settings=sf.Settings(sim=sf.SimOptions(clock="virtual")))


@pytest.fixture
def asked(monkeypatch):
    """How often each event was asked."""
    counts = Counter()
    is_done = SimEvent.is_done

    def ask(self):
        counts[self] += 1
        return is_done.__get__(self)

    monkeypatch.setattr(SimEvent, "is_done", property(ask))
    return counts


class Stalled:
    """200 ops on 8 streams, each awaited by a task; the first of one stream is behind a gate."""

    def __init__(self, dev, spin):
        self.streams = [dev.stream() for _ in range(NUM_STREAMS)]
        self.gate = dev.sim.gate(self.streams[0])
        self.ops = [
            dev.launch(spin, 1.0 if place == 0 else 1e-3, grid=1, block=1, stream=stream)
            for place in range(OPS_EACH)
            for stream in self.streams
        ]
        self.events = [op.ticket.event for op in self.ops]
        self.free = [op for op in self.ops if op.stream != self.streams[0].name]
        self.ended = []

    async def wait(self):
        async def one(op):
            await op
            self.ended.append(op)

        async with anyio.create_task_group() as group:
            for op in self.ops:
                group.start_soon(one, op)

    async def until_the_rest_has_ended(self):
        with anyio.fail_after(20):
            while len(self.ended) < len(self.free):
                await checkpoint()
        await turns()


def test_c20_each_completion_takes_at_most_two_queries_of_each_head(run, spin):
    """In virtual time: one look before it passes and one after, and those that retire."""

    async def main():
        async with virtual() as dev:
            stalled, before = Stalled(dev, spin), num_queries(dev)
            async with anyio.create_task_group() as group:
                group.start_soon(stalled.wait)
                await stalled.until_the_rest_has_ended()
                taken = num_queries(dev) - before
                stalled.gate.release()
            assert num_queries(dev) - before < 2 * taken
            # Every await asks once when it begins.
            bound = len(stalled.ops) + (2 * NUM_STREAMS + 4) * (len(stalled.free) + 10)
            assert taken <= bound
            assert dev.stats().num_turns <= 2 * len(stalled.ops)
            for op in stalled.ops:
                assert op.state is sf.OpState.DONE

    run(main)


def test_c20_behind_a_stall_only_the_head_is_asked(run, spin, asked):
    async def main():
        async with virtual() as dev:
            stalled = Stalled(dev, spin)
            async with anyio.create_task_group() as group:
                group.start_soon(stalled.wait)
                await stalled.until_the_rest_has_ended()
                head, *behind = [
                    asked[event]
                    for op, event in zip(stalled.ops, stalled.events, strict=True)
                    if op.stream == stalled.streams[0].name
                ]
                stalled.gate.release()
            return head, behind

    head, behind = run(main)
    assert head > 0
    assert behind == [0] * (OPS_EACH - 1)


def test_c20_a_stalled_op_that_is_awaited_costs_nothing_in_virtual_time(run, spin, asked):
    """Nothing can move, so nothing is asked until the gate opens."""

    async def main():
        async with virtual() as dev:
            stalled = Stalled(dev, spin)
            async with anyio.create_task_group() as group:
                group.start_soon(stalled.wait)
                await stalled.until_the_rest_has_ended()
                before, num_turns = asked.total(), dev.stats().num_turns
                await turns(100)
                found = asked.total() - before, dev.stats().num_turns - num_turns
                stalled.gate.release()
            assert len(stalled.ended) == len(stalled.ops)
            return found

    assert run(main) == (0, 0)


def test_c20_a_short_op_beside_a_stalled_one_resolves_within_a_few_turns(run, spin):
    async def main():
        async with virtual() as dev:
            stalled, num_turns = Stalled(dev, spin), []
            async with anyio.create_task_group() as group:
                group.start_soon(stalled.wait)
                await stalled.until_the_rest_has_ended()
                for _ in range(3):
                    before = dev.stats().num_turns
                    await dev.launch(spin, 50e-6, grid=1, block=1)
                    num_turns.append(dev.stats().num_turns - before)
                stalled.gate.release()
            return num_turns

    assert max(run(main)) <= 3


def test_c20_the_counters_count_what_the_events_saw(run, spin, asked):
    async def main():
        async with virtual() as dev:
            stalled = Stalled(dev, spin)
            stalled.gate.release()
            await stalled.wait()
            return num_queries(dev), asked.total()

    counted, seen = run(main)
    assert counted == seen > 0


def num_looks_max(wait_s):
    """Naps of the helper in ``wait_s``: 50 us each until 1.5 % of the wait are more."""
    return 50e-6 / 0.015 / 50e-6 + log(max(1.0, wait_s / (50e-6 / 0.015))) / log(1.015)


@pytest.mark.parametrize(
    "open_device",
    [Opener("sim", "wall"), pytest.param(Opener("cuda", "host"), marks=pytest.mark.gpu)],
    ids=["wall", "cuda"],
)
def test_c20_in_real_time_waiting_takes_few_queries_and_little_processor(run, open_device, spin):
    async def main():
        async with open_device() as dev:
            streams = [dev.stream() for _ in range(NUM_STREAMS)]
            await dev.launch(spin, 0.0, grid=1, block=1)
            before = dev.stats()
            wall_s, cpu_s = time.monotonic(), time.process_time()
            async with anyio.create_task_group() as group:

                async def one(op):
                    await op

                for place in range(OPS_EACH):
                    for stream in streams:
                        is_stalled = place == 0 and stream is streams[0]
                        seconds = 1.0 if is_stalled else 0.0
                        op = dev.launch(spin, seconds, grid=1, block=1, stream=stream)
                        group.start_soon(one, op)
            wall_s, cpu_s = time.monotonic() - wall_s, time.process_time() - cpu_s
            after = dev.stats()
            await turns()
            assert num_queries(dev) == after.num_queries + after.num_helper_queries  # idle
            assert wall_s >= 0.9
            assert cpu_s < 0.5 * wall_s
            num_turns = after.num_turns - before.num_turns
            assert after.num_finished - before.num_finished == NUM_STREAMS * OPS_EACH
            # While one head is left the helper asks it alone; the others end within a few looks.
            num_looks = after.num_helper_queries - before.num_helper_queries
            assert num_looks <= 2 * num_looks_max(wall_s) + 50 * NUM_STREAMS
            # On the loop: each turn asks each head, each await and each look that retires a few.
            num_asked = after.num_queries - before.num_queries
            assert num_asked <= NUM_STREAMS * num_turns + 20 * NUM_STREAMS * OPS_EACH
            assert after.num_wakes - before.num_wakes <= NUM_STREAMS * OPS_EACH

    run(main)


def test_c20_nothing_is_asked_while_nobody_awaits(run, open_device, spin):
    async def main():
        async with open_device() as dev:
            await dev.launch(spin, 0.0, grid=1, block=1)
            await turns()
            op = dev.launch(spin, 1e-3, grid=1, block=1)
            before = dev.stats()
            await turns(100)
            after = dev.stats()
            await op
            return before == after

    assert run(main)
