"""What the random program may do, one move at a time."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import anyio
import numpy as np

import streamflow as sf
from tests.stress.kernels import (
    REFUSED_BLOCK,
    call_fails,
    call_step,
    checksum,
    checksum_async,
    fails,
    fails_async,
    mix,
    refused,
    step,
)
from tests.stress.model import Move, Outcome, Place, Slot
from tests.stress.program import NUM_SLOTS, Program

SIZES = (48, 48, 48, 1000, 1000, 20_000)  # int32s: the last is more than 64 KiB, so it is staged


class Moves(Program):
    """Every kind of op, each done twice: on a device in its time, and on the model now."""

    # -- arrays come and go ------------------------------------------------------------------

    def new(self) -> None:
        dev_no = self.dev_no()
        dev, num, how = self.devs[dev_no], self.random.choice(SIZES), self.random.random()
        data = self.numbers(num)
        if how < 0.3:
            data[:] = value = self.random.randrange(1000)
            options = self.stream_of(dev_no)
            array = dev.full(num, value, np.int32, **options)
        elif how < 0.5:
            array = dev.empty(num, np.int32, **self.stream_of(dev_no))
            slot = self.added(dev_no, array, data)
            self.put_into((slot, None), data)
            return
        else:
            slot = self.added(dev_no, None, data)
            self.put_into((slot, None), data)
            return
        self.go(
            dev_no,
            Move("full", lambda: None, overwrites=[(self.added(dev_no, array, data), None)]),
            lambda: array.ready,
            takes_stream=False,
            takes_after=False,
        )

    def added(self, dev_no: int, array: sf.DeviceArray | None, data: np.ndarray) -> Slot:
        slot = Slot(dev_no, array, data)
        self.slots.append(slot)
        return slot

    def numbers(self, num: int) -> np.ndarray:
        return np.arange(num, dtype=np.int32) * 7 + self.random.randrange(1000)

    def drop(self) -> None:
        places = [i for i, slot in enumerate(self.slots) if self.only_dev in (None, slot.dev_no)]
        if not places:
            return
        slot = self.slots.pop(self.random.choice(places))
        if self.chance(0.5):
            self.counts["dropped arrays"] += 1  # freed by the finaliser
            return
        move = Move("free", lambda: None, after=(), reads=())
        self.go(slot.dev_no, move, slot.array.free, takes_after=False)

    # -- writes --------------------------------------------------------------------------------

    def step(self, dev_no: int, place: Place) -> None:
        c, after = self.number()
        x, cells = place[0].at(place[1]), place[0].cells.at(place[1])
        scalar = after[0] if after else None

        def effect() -> None:
            cells[:] = 5 * cells + (c if scalar is None else scalar.expected)

        argument = c if scalar is None else scalar.op
        move = Move("step", effect, writes=[place], after=after)
        self.go(dev_no, move, partial(self.devs[dev_no].launch, step, x, x.size, argument))

    def number(self) -> tuple[int, list[Move]]:
        """A scalar for a launch: now and then what a host task returns."""
        if self.scalars and self.chance(0.3):
            return 0, [self.random.choice(self.scalars)]
        return self.random.randrange(100), []

    def mix_or_copy(self, dev_no: int, place: Place) -> None:
        (slot, part), dev = place, self.devs[dev_no]
        is_mix = self.chance(0.5)
        source = self.pick(dev_no if is_mix or self.only_dev is not None else self.dev_no())
        x_model, y_model = source and source[0].cells.at(source[1]), slot.cells.at(part)
        if source is None or source[0] is slot or len(x_model) != len(y_model):
            self.step(dev_no, place)
            return
        x, y, c = source[0].at(source[1]), slot.at(part), self.random.randrange(100)
        if is_mix:

            def effect() -> None:
                y_model[:] = 3 * y_model + x_model + c

            move = Move("mix", effect, reads=[source], writes=[place])
            self.go(dev_no, move, partial(dev.launch, mix, x, y, x.size, c))
        else:
            copy = partial(np.copyto, y_model, x_model)
            move = Move("copy", copy, reads=[source], overwrites=[place])
            by = self.random.choice((dev_no, source[0].dev_no))
            self.go(by, move, partial(self.devs[by].copy, y, x))

    def fill(self, dev_no: int, place: Place) -> None:
        value, cells = self.random.randrange(1000), place[0].cells.at(place[1])
        move = Move("fill", partial(cells.fill, value), overwrites=[place])
        fill = partial(self.devs[dev_no].fill, place[0].at(place[1]), value)
        self.go(dev_no, move, fill, takes_after=False)

    def put(self, dev_no: int, place: Place) -> None:
        self.put_into(place, self.numbers(len(place[0].cells.at(place[1]))))

    def put_into(self, place: Place, data: np.ndarray) -> None:
        (slot, part), dev = place, self.devs[place[0].dev_no]
        source = data.copy()
        effect = partial(np.copyto, slot.cells.at(part), data)
        move = Move("put", effect, overwrites=[place])
        if slot.array is not None:
            self.go(slot.dev_no, move, partial(dev.copy, slot.at(part), source))
            return

        def put(**options: Any) -> sf.Op[Any]:
            array = dev.put(source, **options)
            slot.hold(array)
            return array.ready

        self.go(slot.dev_no, move, put)

    def call(self, dev_no: int, place: Place) -> None:
        if not self.is_sim:
            self.fill(dev_no, place)
            return
        cells, c = place[0].cells.at(place[1]), self.random.randrange(100)
        move = Move("call", lambda: call_step(None, cells, c), writes=[place])
        x = place[0].at(place[1])
        self.go(dev_no, move, partial(self.devs[dev_no].call, call_step, x, c))

    # -- reads ----------------------------------------------------------------------------------

    def get(self, dev_no: int, place: Place) -> None:
        x, cells = place[0].at(place[1]), place[0].cells.at(place[1])
        out = np.empty(x.shape, np.int32) if self.chance(0.3) else None
        move = Move("get", cells.copy, reads=[place])
        self.go(dev_no, move, partial(self.devs[dev_no].get, x, out=out))

    def host(self, dev_no: int, place: Place) -> None:
        (slot, part), c = place, self.random.randrange(100)
        function = checksum_async if self.chance(0.4) else checksum
        cells = slot.cells.at(part)
        move = Move("host", lambda: checksum(cells, c), reads=[place])
        host = partial(self.devs[dev_no].host, function, slot.at(part), c)
        self.go(dev_no, move, host, takes_stream=False)
        if move.op is not None and self.observed is None:
            self.scalars.append(move)

    # -- failures ----------------------------------------------------------------------------------

    def fail(self, dev_no: int, place: Place) -> None:
        dev, how = self.devs[dev_no], self.random.random()
        x = place[0].at(place[1])
        if self.is_calm:
            self.get(dev_no, place)
        elif how < 0.3:
            launch = partial(dev.launch, refused, x, x.size, grid=1, block=REFUSED_BLOCK)
            move = Move("refused", lambda: None, writes=[place], plan=Outcome.REFUSED)
            self.go(dev_no, move, launch)
        elif how < 0.5 and self.is_sim:
            move = Move("call", lambda: None, reads=[place], plan=Outcome.REFUSED)
            self.go(dev_no, move, partial(dev.call, call_fails, x, reads=x), is_late=True)
        elif how < 0.6:
            function = fails_async if self.chance(0.5) else fails
            move = Move("host", lambda: None, reads=[place], plan=Outcome.REFUSED)
            self.go(dev_no, move, partial(dev.host, function, x), takes_stream=False)
        else:
            function = fails_async if self.chance(0.2) else fails
            move = Move("host", lambda: None, plan=Outcome.REFUSED)
            self.go(dev_no, move, partial(dev.host, function), takes_stream=False)

    # -- the rest ------------------------------------------------------------------------------

    def order(self, dev_no: int) -> None:
        """Order by hand: a stream waits for an op, or is marked."""
        stream = self.random.choice(self.streams[dev_no])
        if self.recent and self.chance(0.5):
            op = self.random.choice(self.recent).op
            assert op is not None
            stream.wait_for(op)
        else:
            move = Move("record", lambda: None)
            self.go(dev_no, move, stream.record, takes_stream=False, takes_after=False)

    def gate(self, dev_no: int) -> None:
        if self.is_sim:
            gate = self.devs[dev_no].sim.gate(self.random.choice(self.streams[dev_no]))
            self.pending.append(gate.release)

    async def detach(self) -> None:
        """Cancel a task that awaits an op: the op is left alone."""
        good = [move.op for move in self.recent if move.outcome is Outcome.GOOD]
        if good:
            op = self.random.choice(good)
            assert op is not None
            with anyio.CancelScope() as cancel_scope:
                cancel_scope.cancel()
                await op
            self.counts["detached"] += 1

    KINDS = (
        *["step"] * 5,
        *["mix_or_copy"] * 6,
        *["fill", "put", "call", "get", "get", "get", "host", *["fail"] * 3],
    )

    def one(self) -> None:
        """One move."""
        if len(self.slots) < NUM_SLOTS:
            self.new()
            return
        dev_no, how = self.dev_no(), self.random.random()
        if how < 0.03:
            self.drop()
        elif how < 0.05:
            self.order(dev_no)
        elif how < 0.055:
            self.gate(dev_no)
        else:
            place = self.pick(dev_no)
            if place is None:
                self.new()
            else:
                kind = self.random.choice(self.KINDS)
                if place[0].cells.is_spoiled(place[1]) and self.chance(0.5):
                    kind = self.random.choice(("fill", "put"))  # which clears the failure
                getattr(self, kind)(dev_no, place)

    def get_all(self, slot: Slot) -> None:
        self.get(slot.dev_no, (slot, None))

    async def finish(self) -> None:
        """Compare all that is left, and give everything back."""
        while self.slots:
            self.get_all(self.slots.pop())
        await self.look_at_failures()
        for streams in self.streams:
            for stream in streams:
                stream.close()
        gc.collect()
        for dev in self.devs:
            await dev.synchronize()
