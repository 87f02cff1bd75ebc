"""Adaptors nested in any order agree with a model, whatever fails and wherever."""

from __future__ import annotations

import contextvars
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from upstreams import Ground, Upstream, simulated

from streamflow.errors import OutOfDeviceMemory
from streamflow.memory import (
    AlignedResourceAdaptor,
    FailureCallbackResourceAdaptor,
    LimitingResourceAdaptor,
    LogAction,
    LoggingResourceAdaptor,
    Statistics,
    StatisticsResourceAdaptor,
    TrackingResourceAdaptor,
    read_log,
)

LIMIT = 1 << 14
KINDS = ("limiting", "statistics", "tracking", "logging", "callback", "aligned")


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    with simulated() as found:
        yield found


class Callback:
    """Answers, or raises, as it was drawn; frees a block of the stack now and then."""

    def __init__(self, answers: list[str]) -> None:
        self.answers = answers
        self.spill: Any = None

    def __call__(self, nbytes: int) -> bool:
        answer = self.answers.pop(0) if self.answers else "no"
        if answer == "raise":
            raise LookupError("drawn")
        if answer == "free":
            self.spill()
        return answer != "no"


class Stack:
    """One stack and all that its adaptors should say."""

    def __init__(
        self, kinds: list[str], fails_at: set[int], answers: list[str], folder: Path
    ) -> None:
        self.upstream = Upstream(fails_at=fails_at, device=0)
        self.layers: list[Any] = [self.upstream]
        for number, kind in enumerate(kinds):
            below = self.layers[-1]
            self.layers.append(
                {
                    "limiting": lambda up: LimitingResourceAdaptor(up, LIMIT),
                    "statistics": StatisticsResourceAdaptor,
                    "tracking": TrackingResourceAdaptor,
                    "logging": lambda up, n=number: LoggingResourceAdaptor(up, folder / f"{n}.csv"),
                    "callback": lambda up: FailureCallbackResourceAdaptor(
                        up, self.make_callback(answers), 3
                    ),
                    "aligned": lambda up: AlignedResourceAdaptor(up, 1024, 2000),
                }[kind](below)
            )
        self.top = self.layers[-1]
        self.blocks: list[Any] = []
        self.stream: Any = None

    def make_callback(self, answers: list[str]) -> Callback:
        callback = Callback(list(answers))
        callback.spill = self.free_oldest
        return callback

    def free_oldest(self) -> None:
        if self.blocks:
            self.top.deallocate(self.blocks.pop(0), stream=self.stream)

    def check(self) -> None:
        """Every layer says what the pieces that are out, seen from there, come to."""
        pieces = [block._piece for block in self.blocks]
        for layer in reversed(self.layers):
            pieces = [inner_at(piece, layer) for piece in pieces]
            sizes = [piece.nbytes for piece in pieces if piece.resource is layer]
            if isinstance(layer, LimitingResourceAdaptor):
                assert layer.get_allocated_bytes() == sum(-(-n // 256) * 256 for n in sizes)
                assert layer.get_allocated_bytes() <= LIMIT
            elif isinstance(layer, StatisticsResourceAdaptor):
                counts = layer.resource_counts
                assert (counts.current_bytes, counts.current_count) == (sum(sizes), len(sizes))
            elif isinstance(layer, TrackingResourceAdaptor):
                assert layer.get_allocated_bytes() == sum(sizes)
                out = {p.address for p in pieces if p.resource is layer}
                assert set(layer.get_outstanding_allocations()) == out
            elif isinstance(layer, LoggingResourceAdaptor):
                check_log(layer, {(p.address, p.nbytes) for p in pieces})
            elif layer is self.upstream:
                assert set(map(id, self.upstream.live.values())) == set(map(id, pieces))
                assert self.upstream.used_nbytes == sum(sizes)


def inner_at(piece: Any, layer: Any) -> Any:
    """The piece of ``layer``, or of the nearest one below that made one of its own."""
    depth = layer._depth
    while piece.resource._depth > depth:
        piece = piece.inner
    return piece


def check_log(layer: LoggingResourceAdaptor, out: set[tuple[int, int]]) -> None:
    live: set[tuple[int, int]] = set()
    for record in read_log(layer.get_file_name()):
        if record.action is LogAction.ALLOCATE:
            live.add((record.address, record.nbytes))
        elif record.action is LogAction.FREE:
            live.remove((record.address, record.nbytes))
    assert live == out


@settings(deadline=None, max_examples=150)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=6),
    fails_at=st.sets(st.integers(0, 30), max_size=10),
    answers=st.lists(st.sampled_from(["yes", "no", "free", "raise"]), max_size=12),
    steps=st.lists(
        st.one_of(st.integers(1, 6000), st.sampled_from(["free", "drop", "other", "refuse"])),
        max_size=30,
    ),
)
def test_any_nesting_agrees_with_the_model(
    ground: Ground, kinds: list[str], fails_at: set[int], answers: list[str], steps: list[Any]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        stack = Stack(kinds, fails_at, answers, Path(folder))
        streams = [ground.stream(), ground.stream()]
        for step in steps:
            stack.stream = streams[0]
            if step == "free":
                stack.free_oldest()
            elif step == "other":
                stack.stream = streams[1]
                stack.free_oldest()
            elif step == "refuse":
                if stack.blocks:
                    stack.upstream.num_refusals = 1
                    with pytest.raises(OutOfDeviceMemory, match="refused"):
                        stack.free_oldest()
                    stack.top.trim()
            elif step == "drop":
                if stack.blocks:
                    stack.blocks.pop()
                    stack.top.trim()
            else:
                with suppress(OutOfDeviceMemory, LookupError):
                    stack.blocks.append(stack.top.allocate(step, stream=streams[0]))
            stack.check()
        while stack.blocks:
            stack.free_oldest()
        stack.check()
        assert not stack.upstream.live


@pytest.mark.parametrize("kinds", [KINDS, KINDS[::-1], ("callback", *KINDS[:4], "callback")])
@pytest.mark.parametrize("answer", ["yes", "no", "free", "raise"])
def test_a_failure_at_every_call(
    ground: Ground, kinds: tuple[str, ...], answer: str, tmp_path: Path
) -> None:
    """The upstream fails, and the callback answers or raises, at each call in turn."""
    for index in range(12):
        folder = tmp_path / str(index)
        folder.mkdir()
        stack = Stack(list(kinds), {index}, [answer], folder)
        stack.stream = ground.stream()
        for turn in range(8):
            try:
                stack.blocks.append(stack.top.allocate(100 * (turn + 1), stream=stack.stream))
            except (OutOfDeviceMemory, LookupError):
                assert answer in ("no", "raise")
            if turn % 3 == 2:
                stack.free_oldest()
            stack.check()
        assert stack.upstream.num_takes >= 8
        while stack.blocks:
            stack.free_oldest()
        stack.check()


class Frames:
    """What counters should say: a free is counted where its allocation was."""

    def __init__(self) -> None:
        self.values = [0] * 6

    def add(self, nbytes: int) -> None:
        v = self.values
        v[0], v[1], v[4], v[5] = v[0] + nbytes, v[1] + 1, v[4] + nbytes, v[5] + 1
        v[2], v[3] = max(v[2], v[0]), max(v[3], v[1])

    def subtract(self, nbytes: int) -> None:
        self.values[0] -= nbytes
        self.values[1] -= 1

    def statistics(self) -> Statistics:
        return Statistics(*self.values)


@settings(deadline=None, max_examples=150)
@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, 2), st.sampled_from(["allocate", "free", "push", "pop"]), st.integers()
        ),
        max_size=60,
    )
)
def test_counters_of_interleaved_tasks_equal_a_model(
    ground: Ground, steps: list[tuple[int, str, int]]
) -> None:
    stats = StatisticsResourceAdaptor(Upstream(device=0))
    stream = ground.stream()
    contexts = [contextvars.Context() for _ in range(3)]
    whole = Frames()
    pushed: list[list[Frames]] = [[], [], []]
    blocks: list[tuple[Any, list[Frames]]] = []
    for task, action, number in steps:
        context, frames = contexts[task], pushed[task]
        innermost = frames[-1] if frames else whole
        if action == "allocate":
            nbytes = number % 1000 + 1
            block = context.run(stats.allocate, nbytes, stream=stream)
            charged = [whole, *frames]
            blocks.append((block, charged))
            for frame in charged:
                frame.add(nbytes)
        elif action == "free" and blocks:
            block, charged = blocks.pop(number % len(blocks))
            context.run(stats.deallocate, block, stream=stream)
            for frame in charged:
                frame.subtract(block.nbytes)
        elif action == "push":
            assert context.run(stats.push_counters) == innermost.statistics()
            frames.append(Frames())
        elif action == "pop" and frames:
            assert context.run(stats.pop_counters) == frames.pop().statistics()
        for other, inner in zip(contexts, pushed, strict=True):
            expected = (inner[-1] if inner else whole).statistics()
            assert other.run(lambda: stats.allocation_counts) == expected
        assert stats.resource_counts == whole.statistics()
