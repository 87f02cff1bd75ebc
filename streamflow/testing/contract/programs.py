"""Random programs of raw verbs: the results are NumPy's, and the order is the one asked for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from streamflow.testing.contract.harness import Harness, Rig, drain, fidelity, settle
from streamflow.testing.contract.kernels import AXPY

__all__ = ["ProgramContract"]

_NUM_STREAMS = 3
_NUM_BLOCKS = 4
_NUM_STEPS = 40
_SIZE = 256
_NBYTES = 4 * _SIZE
_F32 = np.dtype(np.float32)

Floats = npt.NDArray[np.float32]


@dataclass(slots=True)
class _Block:
    """Device memory, what it ought to hold, and the steps that a next one comes after."""

    address: int
    holds: Floats
    last_write: int | None = None
    reads: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Step:
    """What was submitted: its event, and whether it can't have run yet."""

    stream: int
    event: Any
    is_held: bool


class _Program:
    """Submits steps in one order and orders them on the device by what they touch, as (R3) says.

    From a step on, one stream is held. A step is *held* if it was submitted there since, or if
    it comes after a held one: by its stream, or by a wait.
    """

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig = rig
        self.backend = rig.backend
        self.draw = Random(seed)
        extra = [rig.backend.create_stream() for _ in range(_NUM_STREAMS - 1)]
        self.streams = [rig.stream, *extra]
        self.kernel = rig.backend.load_kernel_blocking(AXPY)
        self.config = rig.backend.launch_config((2, 1, 1), (128, 1, 1), 0)
        self.steps: list[_Step] = []
        self.held_stream: int | None = None
        self.last_on: list[int | None] = [None] * _NUM_STREAMS
        self.host, self.host_bytes = rig.pinned(2 * _NUM_STEPS * _NBYTES)
        self.num_host = 0
        self.expected_out: list[tuple[int, Floats]] = []
        self.blocks = []
        for number in range(_NUM_BLOCKS):
            holds = np.full(_SIZE, number, np.float32)
            address = self.backend.allocate(rig.pool, _NBYTES, rig.stream)
            self.backend.fill(address, holds[:1].tobytes(), _SIZE, rig.stream)
            self.blocks.append(_Block(address, holds))
        rig.finish()

    def step(self) -> None:
        """Draw one step and submit it."""
        make = self.draw.choice(
            [self._fill, self._copy, self._axpy, self._axpy, self._put, self._get, self._renew]
        )
        make(self.draw.randrange(_NUM_STREAMS), *self.draw.sample(self.blocks, 2))

    def _submit(
        self,
        number: int,
        reads: list[_Block],
        writes: list[_Block],
        submit: Callable[[Any], object],
    ) -> None:
        stream = self.streams[number]
        before = {block.last_write for block in (*reads, *writes)}
        before.update(step for block in writes for step in block.reads)
        before.discard(None)
        here = len(self.steps)
        is_held = number == self.held_stream
        for step in sorted(step for step in before if step is not None):
            is_held |= self.steps[step].is_held
            if self.steps[step].stream != number:
                stream.wait(self.steps[step].event)
        last = self.last_on[number]
        if last is not None:
            is_held |= self.steps[last].is_held
        submit(stream)
        self.steps.append(_Step(number, self.rig.mark(stream), is_held))
        self.last_on[number] = here
        for block in reads:
            block.reads.append(here)
        for block in writes:
            block.last_write, block.reads = here, []

    def _fill(self, number: int, dst: _Block, _: _Block) -> None:
        value = np.float32(self.draw.randrange(100))
        dst.holds = np.full(_SIZE, value, np.float32)
        self._submit(
            number,
            [],
            [dst],
            lambda stream: self.backend.fill(dst.address, value.tobytes(), _SIZE, stream),
        )

    def _copy(self, number: int, dst: _Block, src: _Block) -> None:
        dst.holds = src.holds.copy()
        self._submit(
            number,
            [src],
            [dst],
            lambda stream: self.backend.copy_d2d(dst.address, src.address, _NBYTES, stream),
        )

    def _axpy(self, number: int, y: _Block, x: _Block) -> None:
        y.holds = y.holds + x.holds
        views = [self.backend.array_argument(b.address, (_SIZE,), _F32) for b in (y, x)]
        self._submit(
            number,
            [x],
            [y],
            lambda stream: self.backend.launch(
                stream, self.config, self.kernel, views[0], np.float32(1), views[1], _SIZE
            ),
        )

    def _put(self, number: int, dst: _Block, _: _Block) -> None:
        host, view = self._host()
        view[:] = [self.draw.randrange(100) for _ in range(_SIZE)]
        dst.holds = view.copy()
        self._submit(
            number,
            [],
            [dst],
            lambda stream: self.backend.copy_h2d(dst.address, host, _NBYTES, stream),
        )

    def _get(self, number: int, src: _Block, _: _Block) -> None:
        at = self.num_host
        host, _view = self._host()
        self.expected_out.append((at, src.holds.copy()))
        self._submit(
            number,
            [src],
            [],
            lambda stream: self.backend.copy_d2h(host, src.address, _NBYTES, stream),
        )

    def _renew(self, number: int, block: _Block, _: _Block) -> None:
        """Free the block and take new memory in its place, in the stream's order."""
        value = np.float32(self.draw.randrange(100))
        block.holds = np.full(_SIZE, value, np.float32)

        def submit(stream: Any) -> None:
            self.backend.deallocate(block.address, stream)
            block.address = self.backend.allocate(self.rig.pool, _NBYTES, stream)
            self.backend.fill(block.address, value.tobytes(), _SIZE, stream)

        self._submit(number, [], [block], submit)

    def _host(self) -> tuple[int, Floats]:
        """A pinned block of this step's own."""
        start = self.num_host * _NBYTES
        self.num_host += 1
        return self.host + start, self._view(start)

    def _view(self, start: int) -> Floats:
        return self.host_bytes[start : start + _NBYTES].view(np.float32)

    def check_order(self) -> None:
        """While the stream is held: what has no part in that ends, and nothing else has."""
        for step in self.steps:
            if not step.is_held:
                drain(self.backend, step.event)
        settle(self.backend)
        ended_early = [
            number for number, step in enumerate(self.steps) if step.is_held and step.event.is_done
        ]
        assert not ended_early

    def check_results(self) -> None:
        """Once everything has ended: memory and what was copied out is as NumPy says."""
        for step in self.steps:
            drain(self.backend, step.event)
        for at, expected in self.expected_out:
            np.testing.assert_array_equal(self._view(at * _NBYTES), expected)
        for block in self.blocks:
            found = self.rig.get(block.address, _NBYTES).view(np.float32)
            np.testing.assert_array_equal(found, block.holds)
            self.backend.deallocate(block.address, self.rig.stream)
        self.rig.finish()
        for stream in self.streams[1:]:
            stream.close()


class ProgramContract(Harness):
    """Verbs in any combination."""

    @fidelity
    @pytest.mark.parametrize("seed", range(12))
    def test_random_programs_keep_their_order_and_give_numpys_results(
        self, rig: Rig, seed: int
    ) -> None:
        """Any program gives NumPy's results, and runs in the order it asks for and no other.

        Behind a held stream nothing runs that depends on it; all the rest does.
        """
        program = _Program(rig, seed)
        held_from = program.draw.randrange(_NUM_STEPS)
        with ExitStack() as stack:
            for number in range(_NUM_STEPS):
                if number == held_from:
                    program.held_stream = program.draw.randrange(_NUM_STREAMS)
                    held = program.streams[program.held_stream]
                    stack.enter_context(self.stall(rig, held))
                program.step()
            program.check_order()
        program.check_results()
