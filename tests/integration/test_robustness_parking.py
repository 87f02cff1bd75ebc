"""Parked ops that are dropped, refused or overtaken by a fault (R2, R3, R7, R11)."""

import anyio
import anyio.lowlevel
import numpy as np
from support import error_of, virtual

import streamflow as sf

BIG = np.ones(1 << 18, np.float32)  # staged


async def turns(num=60):
    for _ in range(num):
        await anyio.lowlevel.checkpoint()


def test_a_launch_refused_after_parking_takes_nobody_elses_want(run, add_one, saxpy):
    async def main():
        async with virtual() as dev:
            stream = dev.stream()
            y, z = dev.zeros(16, np.float32), dev.zeros(1 << 18, np.float32)
            await dev.launch(add_one, y, 16)
            await dev.synchronize()
            gate, hold = dev.sim.gate(stream), dev.sim.gate("h2d")
            first = dev.launch(add_one, y, 16, stream=stream)
            parked = dev.launch(saxpy, 1.0, dev.put(BIG), z, 16, stream=stream)
            dev.sim.fail("launch", sticky=False)
            errors = []

            async def note(op):
                errors.append(await error_of(op))

            async with anyio.create_task_group() as group:
                group.start_soon(note, first)
                group.start_soon(note, parked)
                await turns()
                hold.release()
                while parked.state is not sf.OpState.FAILED:
                    await anyio.lowlevel.checkpoint()
                assert stream._line.wants == 1  # the first op is still awaited
                gate.release()
            assert sorted(type(error).__name__ for error in errors) == ["LaunchFailed", "NoneType"]
            assert dev._core.completion.is_idle

    run(main)


def test_after_two_cancellations_the_newest_parked_op_is_the_tail(run, add_one, saxpy):
    n = 1 << 18

    async def main():
        async with virtual() as dev:
            stream, other = dev.stream("s"), dev.stream("t")
            a, b, c, e = (dev.zeros(n, np.float32) for _ in range(4))
            await dev.synchronize()
            first, second = dev.sim.gate("h2d"), dev.sim.gate(other)
            p1, p2 = dev.put(BIG), dev.put(BIG, stream=other)
            dev.launch(saxpy, 1.0, p1, a, n, stream=stream)
            waiting = dev.launch(saxpy, 1.0, p2, b, n, stream=stream)
            middle = dev.launch(add_one, c, n, stream=stream)
            last = dev.launch(add_one, a, n, stream=stream)  # behind the first op by data too
            assert middle.cancel()
            assert last.cancel()
            late = dev.launch(add_one, e, n, stream=stream)
            first.release()
            await turns(200)
            assert waiting.state is sf.OpState.PARKED
            assert late.state is sf.OpState.PARKED
            second.release()
            await late
            assert waiting.ticket.position < late.ticket.position

    run(main)


def test_cancelling_a_long_chain_of_parked_ops_takes_linear_work(run, add_one, saxpy):
    async def main():
        async with virtual() as dev:
            stream, z = dev.stream(), dev.zeros(1 << 18, np.float32)
            await dev.synchronize()
            hold = dev.sim.gate("h2d")
            head = dev.launch(saxpy, 1.0, dev.put(BIG), z, 16, stream=stream)
            ops = [dev.launch(add_one, z, 16, stream=stream) for _ in range(200)]
            links = 0
            for op in ops:  # behind one another by stream and by data: each link counts once
                assert op.cancel()
                links = max(links, len(head._rare.parked.followers))
            assert links <= 2 * len(ops)
            hold.release()
            await head
            assert isinstance(await error_of(dev.get(z)), sf.UpstreamFailed)

    run(main)


def test_c22_a_staged_copy_that_waits_for_room_ends_with_its_device(run, add_one):
    async def main():
        dev = virtual(window=6)
        await dev.__aenter__()
        x, z = dev.zeros(16, np.float32), dev.zeros(16, np.float32)
        big = dev.put(BIG)
        await big
        await dev.launch(add_one, x, 16)
        dev.sim.gate("d2h")
        held = [dev.get(x) for _ in range(3)]  # these fill the window
        out = np.zeros(1 << 18, np.float32)
        staged = dev.get(big, out=out)
        while not (staged._rare.parked and staged._rare.parked.need == "room on d2h"):
            await anyio.lowlevel.checkpoint()
        dev.sim.fail("launch")
        for op in (dev.launch(add_one, z, 16), *held, staged):
            assert isinstance(await error_of(op), sf.DeviceLost)
        await dev.__aexit__(None, None, None)

    run(main)
