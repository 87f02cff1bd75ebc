"""Forks (C44) and the ends of processes (C45), each in a process of its own."""

from __future__ import annotations

import signal
import textwrap
from pathlib import Path

import pytest
from programs import Program

pytestmark = pytest.mark.timeout(120)


# -- fork --------------------------------------------------------------------------------------


def test_c44_every_public_call_in_a_fork_says_spawn(program: Program) -> None:
    """Also of the loop that was running at the fork, and of a new one."""
    out, _ = program.run(
        """
        from public_calls import nothing, public_calls

        async def main():
            async with device() as dev:
                x, stream = dev.zeros(8, np.float32), dev.stream()
                held = stall(dev, stream)
                op = dev.launch(nothing, x, stream=stream)
                done = dev.get(x)
                calls = list(public_calls(dev, op, x, stream))
                calls += [("done", done.result), ("enter", lambda: dev.__aenter__().send(None)),
                          ("new", lambda: device().__aenter__().send(None)),
                          ("gather", lambda: sf.gather(op).send(None))]

                def look():
                    wrong = []
                    for name, call in calls:
                        try:
                            call()
                        except sf.ForkedProcess as error:
                            if '"spawn"' not in str(error):
                                wrong.append((name, str(error)))
                        except BaseException as error:
                            wrong.append((name, repr(error)))
                        else:
                            wrong.append((name, "returned"))
                    return wrong or "all"

                async def anew():
                    return look()

                def look_on_a_new_loop():
                    threading.Thread(target=lambda: said.append(asyncio.run(anew()))).start()
                    while not said:
                        time.sleep(0.001)
                    return said[0]

                said = []
                print(in_fork(look), in_fork(look_on_a_new_loop))
                if BACKEND == "sim":
                    held.release()
                await op
                print((await dev.get(x)).sum(), len(calls) > 40)  # the parent goes on

        run(main)
        """
    )
    assert out.split() == ["all", "all", "0.0", "True"]


def test_c44_a_fork_reads_results_and_frees_nothing(program: Program) -> None:
    out, _ = program.run(
        """
        async def main():
            async with device() as dev:
                x, extra = dev.put(BIG), dev.zeros(1 << 20, np.uint8)
                results = [await dev.get(x), await dev.get(x[:16])]
                stream = dev.stream()
                before = dev.memory.used_nbytes, dev._core.pinned.num_live

                def look():
                    nonlocal extra, results, stream
                    total = sum(float(each.sum()) for each in results)
                    extra = results = stream = None
                    gc.collect()
                    from streamflow.scheduler.reaper import orphans
                    core = dev._core
                    left = len(orphans), len(core._dropped), len(core.closed_lines.dropped)
                    return total, left[:2], dev._core.pinned.num_live

                print(in_fork(look))
                await dev.synchronize()
                assert (dev.memory.used_nbytes, dev._core.pinned.num_live) == before
                assert results[0].sum() == BIG.size
                assert (await dev.get(x)).sum() == BIG.size
            kept = results

            def look_after_closing():  # blocks on loan go to the reaper: not from here
                nonlocal results, kept
                total = float(results[0].sum())
                results = kept = None
                from streamflow.scheduler.reaper import orphans
                return total, len(orphans)

            print(in_fork(look_after_closing))

        run(main)
        """
    )
    assert out.splitlines() == [f"({(1 << 18) + 16.0}, (0, 0), 2)", f"({float(1 << 18)}, 0)"]


def test_c44_locks_that_other_threads_held_do_not_block_a_fork(program: Program) -> None:
    out, _ = program.run(
        """
        async def main():
            async with device() as dev:
                x = dev.zeros(8, np.float32)
                result = await dev.get(x)
                core = dev._core
                locks = [core.pinned._lock, *(pool._lock for pool in core.pools),
                         core.poller.backoff._lock, core.staging._lock]
                from streamflow.runtime import poller, registry
                from streamflow.scheduler import guards
                locks += [poller._lock, registry._lock, guards._lock]
                if BACKEND == "sim":
                    from streamflow.backends.sim import host_memory, worlds
                    locks += [core.backend.world.lock, host_memory._lock, worlds._lock]
                held, forked = threading.Event(), threading.Event()

                def hold():
                    for lock in locks:
                        lock.acquire()
                    held.set()
                    forked.wait(30)
                    for lock in locks:
                        lock.release()

                def look():
                    nonlocal result, x
                    result = x = None
                    gc.collect()
                    dev.zeros(8)

                thread = threading.Thread(target=hold)
                thread.start()
                held.wait(30)
                print(in_fork(look)[:13])
                forked.set()
                thread.join()
                print((await dev.get(x)).sum())

        run(main)
        """
    )
    assert out.split() == ["ForkedProcess", "0.0"]


def test_c44_a_fork_that_ends_by_itself_says_nothing(program: Program) -> None:
    """Through the interpreter's end, which finalises whatever is left."""
    program.run(
        """
        async def main():
            async with device() as dev:
                x = dev.put(BIG)
                kept.extend([dev, x, await dev.get(x), dev.stream()])
                await dev.synchronize()

        kept = []
        run(main)
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            sys.exit(7)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status == 7, status
        """
    )


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_c44_multiprocessing(program: Program, method: str) -> None:
    out, _ = program.run(
        f"""
        import multiprocessing

        def use(queue):
            async def main():
                async with device() as dev:
                    return float((await dev.get(dev.put(BIG))).sum())
            try:
                if LOOP == "trio" and {method!r} == "fork":
                    device().__aenter__().send(None)  # trio.run() would refuse: it is running
                queue.put(run(main))
            except BaseException as error:
                queue.put(type(error).__name__)

        async def main():
            async with device() as dev:
                x = dev.put(BIG)
                await x
                queue = context.SimpleQueue()
                process = context.Process(target=use, args=(queue,))
                process.start()
                print(queue.get())
                process.join()
                print((await dev.get(x)).sum())

        if __name__ == "__main__":
            context = multiprocessing.get_context({method!r})
            run(main)
        """
    )
    total = str(float(1 << 18))
    assert out.split() == ["ForkedProcess" if method == "fork" else total, total]


def test_c44_importing_alone_initialises_nothing(program: Program) -> None:
    out, _ = program.run(
        """
        dev = device()  # made, not entered

        async def main():
            async with dev:
                return float((await dev.get(dev.put(BIG))).sum())

        for _ in range(2):
            print(in_fork(lambda: run(main)))
        print(run(main))
        """
    )
    assert out.split() == [str(float(1 << 18))] * 3


# -- the end of the process ----------------------------------------------------------------------

LEFT = """
    kept = []

    class Node:
        pass

    async def leave_things(dev):
        x, small = dev.put(BIG), dev.zeros(64, np.float32)
        result = await dev.get(x)
        garbage = Node()
        garbage.itself, garbage.array, garbage.result = garbage, dev.zeros(8), await dev.get(x)
        stream = dev.stream()
        held = stall(dev, stream)
        ops = [dev.launch(ADD, small, grid=1, block=64, stream=stream)]
        ops += [dev.put(BIG, after=ops).ready, dev.get(x, after=ops), dev.get(small)]
        ops += [dev.get(x, out=np.empty_like(BIG))]  # through a worker
        globals().update(x=x, small=small, result=result, stream=stream, held=held, ops=ops)
        cycle = Node()
        cycle.dev, cycle.x, cycle.ops, cycle.itself = dev, x, ops, cycle
        kept.append(cycle)
        kept.append(lambda: (dev, x, small, result, stream, held, ops))
        ops[0].add_done_callback(kept.append)
        return ops
"""


@pytest.mark.parametrize("is_left", [True, False], ids=["left", "open"])
@pytest.mark.parametrize("ending", ["normally", "exit", "exception"])
def test_c45_a_process_that_ends_with_everything_left(
    program: Program, ending: str, is_left: bool
) -> None:
    end = {"normally": "return", "exit": "sys.exit(3)", "exception": "raise KeyError('mine')"}
    body = f"""
    async def main():
        {"async with device(close_timeout_s=0.2) as dev:" if is_left else "if True:"}
            {"" if is_left else "dev = await device().__aenter__()"}
            await leave_things(dev)
            {end[ending]}

    try:
        run(main)
    except TimeoutError as error:  # what leaving a stalled device normally raises
        assert "close_timeout_s" in str(error), error
    """
    code = {"normally": 0, "exit": 3, "exception": 1}[ending]
    _, err = program.run(
        textwrap.dedent(LEFT) + textwrap.dedent(body),
        code=code,
        stderr=None if ending == "exception" else "",
    )
    if ending == "exception":
        assert err.startswith("Traceback (most recent call last):")
        assert "\nKeyError: 'mine'\n" in err  # then notes of ours
        assert err.count("Traceback") == 1
        assert "Exception ignored" not in err


def test_c45_sys_exit_in_another_task(program: Program) -> None:
    if program.loop == "trio":
        start = "async with trio.open_nursery() as group: group.start_soon(leave); await ops[0]"
    else:
        start = "kept.append(asyncio.ensure_future(leave())); await ops[0]"
    body = f"""
    {"import trio" if program.loop == "trio" else ""}

    async def leave():
        sys.exit(3)

    async def main():
        async with device(close_timeout_s=0.2) as dev:
            ops = await leave_things(dev)
            {start}

    try:
        run(main)
    except BaseExceptionGroup as group:  # trio's own way
        (error,) = group.exceptions
        sys.exit(error.code)
    """
    _, err = program.run(textwrap.dedent(LEFT) + textwrap.dedent(body), code=3, stderr=None)
    # asyncio logs a SystemExit that nobody awaited; nothing of ours may be there.
    assert "streamflow" not in err
    assert "Exception ignored" not in err


@pytest.mark.parametrize("is_left", [True, False], ids=["left", "open"])
@pytest.mark.parametrize("awaited", [0, 2], ids=["launch", "parked"])
def test_c45_one_ctrl_c_ends_an_await(program: Program, is_left: bool, awaited: int) -> None:
    body = f"""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored

    async def main():
        {"async with device(close_timeout_s=0.2) as dev:" if is_left else "if True:"}
            {"" if is_left else "dev = await device().__aenter__()"}
            ops = await leave_things(dev)
            print("waiting", flush=True)
            await ops[{awaited}]

    try:
        run(main)
    except KeyboardInterrupt:
        sys.exit(130)
    """
    process = program.start(textwrap.dedent(LEFT) + textwrap.dedent(body))
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGINT)
    program.finish(process, code=130)


def test_c45_a_thread_with_a_loop_of_its_own_is_cut_off(program: Program) -> None:
    """A daemon thread is in the middle of its work when the process ends."""
    program.run(
        """
        async def main():
            async with device() as dev:
                while True:
                    x = dev.put(BIG)
                    dev.launch(ADD, x, grid=1, block=64)
                    results.append(await dev.get(x))
                    begun.set()

        begun, results = threading.Event(), []
        threading.Thread(target=run, args=(main,), daemon=True).start()
        assert begun.wait(30)
        """
    )


def test_c45_a_loop_in_a_daemon_thread_stands_still_before_the_end(
    loop: str, tmp_path: Path
) -> None:
    """Cut off inside a driver's call it may take the process with it."""
    out, _ = Program(loop, "sim", "wall", tmp_path).run(
        """
        import anyio.lowlevel

        async def main():
            async with device() as dev:
                while True:  # awaits nothing of the device's
                    dev.zeros(64, np.float32)
                    results.append(None)
                    begun.set()
                    await anyio.lowlevel.checkpoint()

        def look():
            before = len(results)
            time.sleep(0.2)
            print(len(results) - before)

        last.append(look)
        begun, results = threading.Event(), []
        threading.Thread(target=run, args=(main,), daemon=True).start()
        assert begun.wait(30)
        """
    )
    assert out == "0\n"


def test_c45_nothing_of_a_device_is_finalised_at_the_end(loop: str, tmp_path: Path) -> None:
    """A driver would be called by what is; and threads have ended before it could be."""
    out, _ = Program(loop, "sim", "virtual", tmp_path).run(
        """
        from streamflow.backends.sim.device import SimDevice
        from streamflow.backends.sim.stream import SimStream
        from streamflow.backends.sim.worlds import _worlds
        from streamflow.runtime import registry

        def finalised(self, write=os.write):
            write(2, b"finalised")

        def left():
            names = [thread.name for thread in threading.enumerate()]
            print([name for name in names if name.startswith("streamflow")])
            SimDevice.__del__ = SimStream.__del__ = finalised
            registry._open.clear()  # as the end of the interpreter does, in some order
            _worlds.clear()
            kept.clear()
            gc.collect()

        async def main():
            dev = await device().__aenter__()
            x = dev.put(BIG)
            kept.extend([dev, x, dev.stream(), await dev.get(x)])

        kept = []
        run(main)
        last.append(left)
        """
    )
    assert out == "[]\n"
