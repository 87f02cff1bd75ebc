"""Serial mode: the same results, one op at a time (R9), and one Ctrl-C ends a scope."""

from __future__ import annotations

import signal
import textwrap

import numpy as np
import pytest
from programs import Program

import streamflow as sf

BIG = np.arange(1 << 18, dtype=np.float32)


async def ordinary(dev, saxpy, add_one):
    """Some of everything a program does; returns what it has worked out."""
    out, stream = np.empty_like(BIG), dev.stream("s")
    x, y = dev.put(BIG), dev.zeros(BIG.shape, np.float32)
    dev.launch(saxpy, 2.0, x, y, y.size)
    dev.launch(add_one, y, y.size, stream=stream)
    dev.call(lambda stream, a: None, y, stream=stream)
    async with dev.scope(limit="8MiB", deadline=60.0) as scope:
        z = dev.full(y.shape, 1, np.float32)
        dev.copy(z, y)
        dev.launch(add_one, z[:10], 10, after=[x])
        dev.get(z, out=out)
        total = dev.host(np.sum, z, name="total")
        later = dev.launch(saxpy, 1.0, x, z, z.size, after=[total])
    assert scope.num_unfinished == 0
    assert later.done()
    z.free()
    parts = [p.ready for p in y.split(4)]
    await sf.gather(*parts, stream.record())
    small = dev.put(np.arange(8, dtype=np.int32))
    results = [await dev.get(y), out, await total, await dev.get(small)]
    await dev.synchronize()
    return results


def test_serial_mode_gives_the_results_of_any_program(run, open_device, saxpy, add_one):
    async def main():
        found = []
        for serial in (False, True):
            async with open_device(serial=serial) as dev:
                found.append(await ordinary(dev, saxpy, add_one))
                assert dev.live().keys() <= {"stream", "array", "pinned block"}
        for parallel, one_by_one in zip(*found, strict=True):
            np.testing.assert_array_equal(parallel, one_by_one)

    run(main)


def test_serial_mode_ends_each_op_before_the_next(run, open_device, add_one):
    async def main():
        async with open_device(serial=True) as dev:
            x, y = dev.zeros(4, np.float32), dev.zeros(4, np.float32)
            await dev.launch(add_one, x, 4)  # compiled from here on
            for _ in range(5):
                op = dev.launch(add_one, x, 4)
                assert op.state is sf.OpState.DONE
                assert dev.fill(y, 1).state is sf.OpState.DONE
                assert dev.stats().num_in_flight == 0
            return await dev.get(x)

    assert run(main).tolist() == [6] * 4


def test_serial_mode_on_virtual_time_goes_on_past_a_gate(run, add_one):
    async def main():
        settings = sf.Settings(serial=True, sim=sf.SimOptions(clock="virtual"))
        async with sf.Device(0, backend="sim", settings=settings) as dev:
            x, stream = dev.zeros(4, np.float32), dev.stream()
            with dev.sim.gate(stream):
                op = dev.launch(add_one, x, 4, stream=stream)
                assert op.state is sf.OpState.SUBMITTED
            await op

    run(main)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("where", ["await", "draining", "host task"])
def test_c45_one_ctrl_c_ends_a_scope_with_stalled_work(program: Program, where: str) -> None:
    """The KeyboardInterrupt is all that is said, however the scope was being left."""
    waits = {"await": "await op", "draining": "pass", "host task": "await dev.host(np.sum, x)"}
    text = f"""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored

    async def main():
        async with device(close_timeout_s=0.3) as dev:
            x, stream = dev.zeros(4, np.float32), dev.stream()
            await x
            stall(dev, stream, 1.5)
            async with dev.scope(name="work"):
                op = dev.launch(ADD, x, grid=1, block=4, stream=stream)
                print("waiting", flush=True)
                {waits[where]}

    run(main)
    """
    process = program.start(textwrap.dedent(text))
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGINT)
    _, err = program.finish(process, code=-signal.SIGINT, stderr=None)
    said, _, notes = err.partition("\nKeyboardInterrupt\n")
    assert said.startswith("Traceback"), err
    assert not notes or notes.startswith("device 0 was closed with work"), err
    for other in ("Exception ignored", "never retrieved", "never awaited", "DeadlineExceeded"):
        assert other not in err, err
