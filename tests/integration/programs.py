"""Programs that run in a process of their own, with one loop and one backend."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

PATIENCE_S = 60

PRELUDE = """
import asyncio, atexit, gc, os, signal, sys, threading, time
last = []
atexit.register(lambda: [each() for each in last])  # before the import: after its own hook
import numpy as np
import streamflow as sf

LOOP, BACKEND, CLOCK = {loop!r}, {backend!r}, {clock!r}
BIG = np.ones(1 << 18, np.float32)
SPIN = sf.Kernel.from_source(
    '''extern "C" __global__ void spin(double seconds) {{
        long long start, now;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
        do {{ asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); }}
        while (now - start < (long long)(seconds * 1e9));
    }}''', body=lambda seconds: None)
ADD = sf.Kernel.from_source(
    'extern "C" __global__ void add(float* y) {{ y[threadIdx.x] += 1.f; }}',
    body=lambda y: np.add(y, 1, out=y))

def device(index=0, **settings):
    if BACKEND == "sim":
        settings["sim"] = sf.SimOptions(clock=CLOCK)
    return sf.Device(index, backend=BACKEND, settings=sf.Settings(**settings))

def run(main):
    if LOOP == "asyncio":
        return asyncio.run(main())
    if LOOP == "uvloop":
        import uvloop
        return uvloop.run(main())
    import trio
    return trio.run(main)

def stall(dev, stream, seconds=0.5):
    if BACKEND == "sim":
        return dev.sim.gate(stream)
    return dev.launch(SPIN, seconds, grid=1, block=1, stream=stream)

def in_fork(look):
    '''What ``look`` returns in a fork, as text; a hang there ends by a signal.'''
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        code = 1
        try:
            try:
                said = str(look())
            except BaseException as error:
                said = type(error).__name__ + ": " + str(error)
            os.write(write, said.encode())
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == 0, (status, said)
    return said
"""


class Program:
    """Runs a script after :data:`PRELUDE`."""

    def __init__(self, loop: str, backend: str, clock: str, folder: Path) -> None:
        self.loop = loop
        self.backend = backend
        self.clock = clock
        self._prelude = PRELUDE.format(loop=loop, backend=backend, clock=clock)
        self.path = folder / "program.py"

    def start(self, text: str, **env: str) -> subprocess.Popen[str]:
        self.path.write_text(self._prelude + textwrap.dedent(text), encoding="utf-8")
        paths = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]
        paths += filter(None, [os.environ.get("PYTHONPATH")])
        return subprocess.Popen(
            # Newer Pythons warn of any fork in a process that has threads.
            [sys.executable, "-W", "ignore::DeprecationWarning", str(self.path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **env},
        )

    def run(
        self, text: str, *, code: int = 0, stderr: str | None = "", **env: str
    ) -> tuple[str, str]:
        """Run it to its end: ``(stdout, stderr)``, after checking both ends."""
        return self.finish(self.start(text, **env), code=code, stderr=stderr)

    def finish(
        self, process: subprocess.Popen[str], *, code: int = 0, stderr: str | None = ""
    ) -> tuple[str, str]:
        try:
            out, err = process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        if stderr is not None:
            assert err == stderr, err
        assert process.returncode == code, err
        return out, err
