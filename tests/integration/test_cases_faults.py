"""C2, C22: sticky faults, in processes of their own, and serial mode, which names the culprit."""

from __future__ import annotations

import re
import textwrap

import pytest
from programs import Program

pytestmark = pytest.mark.timeout(120)

KERNELS = """
import anyio

def write_far(x, far):
    x[far] = 1  # an IndexError: the simulated device's bad address

WILD = sf.Kernel.from_source(
    '''extern "C" __global__ void wild(float* x, unsigned long long far) { x[far] = 1.f; }''',
    body=write_far)
FAR = 1 << 44
ONE = dict(grid=1, block=1)

async def outcome(op):
    '''What awaiting an op, or something else, comes to; a hang is an error.'''
    with anyio.fail_after(30):
        try:
            await op
        except (sf.StreamflowError, ExceptionGroup) as error:
            return error
        return None

async def outcomes(*ops):
    '''The same for many that are awaited at the same time.'''
    found = {}
    async def note(op):
        found[op] = await outcome(op)
    async with anyio.create_task_group() as group:
        for op in ops:
            group.start_soon(note, op)
    return [found[op] for op in ops]

def check(is_so, *what):
    assert is_so, what
"""


def program_text(body: str) -> str:
    return textwrap.dedent(KERNELS) + textwrap.dedent(body)


HEALTHY = program_text("""
    async def main():
        async with device() as dev:
            x = dev.zeros(4, np.float32)
            await dev.launch(ADD, x, grid=1, block=4)
            print((await dev.get(x)).tolist(), dev.is_healthy)

    run(main)
    """)


def test_c2_every_waiter_on_the_stream_of_a_fault_is_told(program: Program) -> None:
    """Whatever it waits for, and however: an op, the stream, the device, several ops."""
    out, _ = program.run(
        program_text("""
        async def main():
            async with device() as dev:
                x, stream = dev.zeros(1 << 18, np.float32), dev.stream("faulty")
                await x
                held = stall(dev, stream)
                bad = dev.launch(WILD, x, FAR, **ONE, stream=stream, name="bad")
                behind = [
                    dev.launch(ADD, x, **ONE, stream=stream),
                    stream.record(),
                    dev.get(x, stream=stream),
                    dev.copy(x, BIG, stream=stream),
                    dev.call(lambda stream, x: None, x, stream=stream),
                    dev.get(x, out=np.empty_like(BIG), stream=stream),
                    dev.host(np.sum, x),
                    dev.put(BIG, after=[bad]).ready,
                    dev.zeros(4, stream=stream).ready,
                ]
                waiters = [stream.synchronize(), dev.synchronize(), sf.gather(*behind)]
                if BACKEND == "sim":
                    held.release()
                found = await outcomes(bad, *behind, *waiters)
                kinds = (sf.DeviceLost, sf.UpstreamFailed)
                for op, error in zip([bad, *behind, *waiters], found):
                    check(isinstance(error, kinds), op, error)
                    lost = error if isinstance(error, sf.DeviceLost) else error.__cause__
                    check(isinstance(lost, sf.DeviceLost), op, lost)
                    check({"bad", "wild"} & set(lost.suspects), op, lost)
                check(isinstance(found[0], sf.DeviceLost), found[0])
                check(not dev.is_healthy)
                print("left")
        run(main)
        """)
    )
    assert out == "left\n"


def test_c2_another_device_and_another_process_go_on(program: Program) -> None:
    if program.backend == "cuda":
        other = "None"  # a fault takes all of a process's work on that GPU
    else:
        other = "await device(1).__aenter__()"
    text = program_text(f"""
        async def main():
            other = {other}
            x = None if other is None else other.zeros(4, np.float32)
            async with device() as dev:
                y = dev.zeros(4, np.float32)
                bad = dev.launch(WILD, y, FAR, **ONE)
                ops = []
                if other is not None:
                    ops = [other.launch(ADD, x, grid=1, block=4)]
                found = await outcomes(bad, *ops)
                check(isinstance(found[0], sf.DeviceLost), found)
                if other is not None:
                    check(found[1] is None and other.is_healthy, found)
                    check((await other.get(x) == 1).all())
                    await other.__aexit__(None, None, None)
        run(main)
        """)
    assert program.run(text) == ("", "")
    assert program.run(HEALTHY)[0] == "[1.0, 1.0, 1.0, 1.0] True\n"


GRAPH = """
    async def main():
        async with device(**SETTINGS) as dev:
            x, y, z = (dev.zeros(64, np.float32) for _ in range(3))
            free = dev.zeros(64, np.float32)
            await sf.gather(x.ready, y.ready, z.ready, free.ready)
            one = dev.launch(ADD, x, **ONE, name="one")
            two = dev.launch(ADD, y, **ONE, name="two")
            refused = []
            def submit(call):
                try:
                    refused.append(call())
                except sf.DeviceLost as error:
                    refused.append(error)
            three = dev.launch(WILD, x, FAR, **ONE, name="three")  # the culprit
            ops = refused
            for name, array in (("four", x), ("five", x), ("six", y)):
                submit(lambda: dev.launch(ADD, array, **ONE, name=name))
            submit(lambda: dev.get(x))
            lost = await outcome(three)
            check(isinstance(lost, sf.DeviceLost), lost)
            for op in refused:
                error = op if isinstance(op, Exception) else await outcome(op)
                on_its_own = getattr(op, "name", None) == "six"  # may have ended before
                check(on_its_own or isinstance(error, (sf.DeviceLost, sf.UpstreamFailed)), op)
            check(not dev.is_healthy and "lost" in str(dev.report()))
            for call in (lambda: dev.launch(ADD, z, **ONE), lambda: dev.put(BIG), dev.stream,
                         lambda: dev.zeros(3), lambda: dev.get(free), lambda: dev.host(print),
                         free.free, dev.scope):
                try:
                    call()
                except sf.DeviceLost:
                    continue
                raise AssertionError(call)
            print(lost.suspects)
            print(lost)
    run(main)
    """


def culprit_line(program: Program) -> int:
    lines = program.path.read_text(encoding="utf-8").splitlines()
    return next(n for n, line in enumerate(lines, 1) if line.endswith("# the culprit"))


def test_c22_a_fault_in_a_graph_names_its_op_and_leaving_does_not_hang(program: Program) -> None:
    out, _ = program.run(program_text("\n    SETTINGS = {}\n" + GRAPH))
    suspects, told = out.split("\n", 1)
    if program.backend == "sim":
        assert suspects == "('wild',)"
    else:
        assert "'three'" in suspects
        assert f"three (program.py:{culprit_line(program)})" in told
    assert program.run(HEALTHY)[0].endswith("True\n")


@pytest.mark.parametrize("how", ["settings", "environment"])
def test_c22_serial_mode_names_exactly_the_culprit_with_its_line(
    program: Program, how: str
) -> None:
    if how == "settings":
        text, env = "\n    SETTINGS = dict(serial=True)\n", {}
    else:
        text = "\n    device = lambda: sf.Device(backend=BACKEND)\n    SETTINGS = {}\n"
        env = {"STREAMFLOW_SERIAL": "1", "STREAMFLOW_SIM_CLOCK": program.clock or "wall"}
    out, _ = program.run(program_text(text + GRAPH), **env)
    suspects, told = out.split("\n", 1)
    assert suspects == "('three',)"
    assert re.findall(r"\((program\.py:\d+)\)", told) == [f"program.py:{culprit_line(program)}"]


def test_c22_serial_mode_names_a_staged_and_a_foreign_culprit(program: Program) -> None:
    """The fault shows in a later call of a worker or a function; the op is named all the same."""
    out, _ = program.run(
        program_text("""
        async def main():
            async with device(serial=True) as dev:
                x = dev.put(BIG)
                await dev.get(x)
                held = dev.host(lambda: None)
                bad = dev.launch(WILD, x, FAR, **ONE, after=[held], name="parked")
                behind = dev.copy(x, BIG)
                found = await outcomes(bad, behind)
                check(isinstance(found[0], sf.DeviceLost), found)
                check(isinstance(found[1], (sf.DeviceLost, sf.UpstreamFailed)), found)
                print(found[0].suspects)
        run(main)
        """)
    )
    assert out == "('parked',)\n"


@pytest.mark.parametrize("where", ["scope", "device"])
def test_c22_a_fault_nobody_awaits_is_raised_once_on_leaving(program: Program, where: str) -> None:
    out, _ = program.run(
        program_text(f"""
        WHERE = {where!r}

        async def inside(dev):
            x = dev.zeros(4, np.float32)
            dev.launch(WILD, x, FAR, **ONE)

        async def main():
            try:
                async with device() as dev:
                    if WHERE == "device":
                        await inside(dev)
                    else:
                        try:
                            async with dev.scope():
                                await inside(dev)
                        except sf.DeviceLost:
                            print("scope")
            except sf.DeviceLost:
                print("device")

        run(main)
        """)
    )
    assert out == f"{where}\n"
