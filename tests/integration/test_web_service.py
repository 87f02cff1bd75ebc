"""The web service of the examples: many requests on one device, each in a scope of its own."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import numpy as np
import pytest
from support import native

import streamflow as sf

EXAMPLE = next(Path(__file__).parents[2].glob("examples/*_web_service.py"))
NUM_CLIENTS = 200
MAX_GAP_S = 0.020
NUM_ROUNDS = 5

wall_or_cuda = pytest.mark.parametrize(
    "open_device", ["wall", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("web_service", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Service:
    """The example's application on a device of the test's; what it held when it was shut down."""

    def __init__(self, example, open_device):
        self.example = example
        self.open_device = open_device
        self.app = example.make_app(self.lifespan)
        self.dev = self.held_at_the_end = None
        self.peak = 0

    @asynccontextmanager
    async def lifespan(self, app):
        async with self.open_device(close_timeout_s=10.0) as dev:
            self.dev = dev
            yield {"dev": dev}
            gc.collect()  # a request that failed: its error holds its frames, they its arrays
            await dev.synchronize()
            self.held_at_the_end = dev.live()

    @asynccontextmanager
    async def client(self):
        # The library looks at every idle connection at each request: it would hold the loop.
        unbounded = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with (
            self.example.serving(self.app) as url,
            httpx.AsyncClient(base_url=url, limits=unbounded, timeout=20, trust_env=False) as http,
        ):
            yield http

    def num_unfinished(self, name):
        return sum(row.name == name for row in self.dev.report().rows)


async def ask(http, values, **query):
    return await http.post("/deviations", content=values.tobytes(), params=query)


async def asked_right(http, values, **query):
    check(await ask(http, values, **query), values)


def check(answer, values):
    """Compare with NumPy."""
    assert answer.status_code == 200, answer.text
    result = np.frombuffer(answer.content, np.float32)
    np.testing.assert_allclose(result, (values - values.mean()) ** 2, atol=1e-5)


async def until(is_so):
    async with asyncio.timeout(15):
        while not is_so():
            await asyncio.sleep(0.001)


@asynccontextmanager
async def heartbeat(gaps):
    """Note for how long the loop kept a task waiting that wants to run every millisecond."""

    async def beat():
        before = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - before - 0.001)
            before = now

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@native
@wall_or_cuda
def test_two_hundred_clients_share_a_device_and_nobody_blocks_the_loop(run, open_device, example):
    """The best of up to five rounds counts: a busy machine may hold any one of them up.

    The gap is the longest of the round, not a percentile. Server, clients and their library share
    the loop, so clients come 6 ms apart, and a delay in each keeps all of them there at once.
    Garbage is not collected meanwhile: a full collection stops any program, here for 17 to 110 ms.
    """
    rng = np.random.default_rng(11)
    batches = [rng.random(1000 + 50 * n, dtype=np.float32) for n in range(NUM_CLIENTS)]
    impatient, wrong, poisoned = 50, 100, 150
    batches[poisoned][7] = np.nan
    longest, answers = [], {}

    async def visit(service, http, number):
        values = batches[number]
        if number % 20 == 19:
            service.peak = max(service.peak, service.dev.stats().num_pending)
        if number == impatient:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await ask(http, values, delay=15)
        elif number == wrong:
            answer = await ask(http, np.zeros(3, np.uint8))
            assert (answer.status_code, "3 bytes" in answer.text) == (400, True)
        elif number == poisoned:
            answer = await ask(http, values, delay=0.2)
            assert (answer.status_code, answer.text) == (422, "value 7 is not finite\n")
        else:
            answers[number] = await ask(http, values, delay=2.0)

    async def one_round():
        service, gaps = Service(example, open_device), []
        async with service.client() as http:
            await asked_right(http, np.ones(8, np.float32))  # kernels are compiled
            gc.collect()
            gc.disable()
            try:
                async with heartbeat(gaps), asyncio.TaskGroup() as visits:
                    for number in range(NUM_CLIENTS):
                        visits.create_task(visit(service, http, number))
                        await asyncio.sleep(0.006)
            finally:
                gc.enable()
            assert len(answers) == NUM_CLIENTS - 3
            for number, answer in answers.items():
                check(answer, batches[number])
            assert service.peak > 4 * NUM_CLIENTS / 2  # each request parks more than four ops
            await until(lambda: not service.num_unfinished("delay"))  # nobody waits 15 s
        assert service.held_at_the_end == {}
        longest.append(max(gaps))

    for _ in range(NUM_ROUNDS):
        answers.clear()
        run(one_round)
        if longest[-1] < MAX_GAP_S:
            break
    print("longest gap of each round:", *(f"{gap * 1e3:.1f} ms" for gap in longest))  # pytest -rP
    assert min(longest) < MAX_GAP_S, longest


class Hold:
    """Keeps the device busy with somebody else's work: what a request submits stays in flight."""

    def __init__(self, dev, spin):
        self.gate = dev.sim.gate("d2h") if dev.backend == "sim" else None
        self.ops = []
        if self.gate is None:  # on every compute lane
            self.ops = [dev.launch(spin, 0.4, grid=1, block=1) for _ in range(2 * len(dev.lanes))]

    async def begun(self):
        """The kernel was compiled: requests that come now are behind it."""
        await until(lambda: all(op.state is not sf.OpState.PARKED for op in self.ops))

    def release(self):
        if self.gate is not None:
            self.gate.release()


@native
@wall_or_cuda
def test_a_client_that_goes_away_cancels_its_own_scope_only(run, open_device, example, spin):
    async def main():
        service = Service(example, open_device)
        gone, stays = np.ones(100, np.float32), np.arange(5000, dtype=np.float32) / 5000
        async with service.client() as http:
            await asked_right(http, stays)
            dev = service.dev
            hold = Hold(dev, spin)
            await hold.begun()
            first = asyncio.create_task(ask(http, gone))
            await until(lambda: reads_on_the_device(dev))
            other = asyncio.create_task(asked_right(http, stays))
            later = asyncio.create_task(ask(http, gone, delay=15))
            await until(lambda: service.num_unfinished("delay") == 1)
            report = (await http.get("/report")).text
            assert "device 0, healthy" in report
            assert f"delay ({EXAMPLE.name}:" in report
            assert "num_submitted=" in report
            first.cancel()  # it closes the connection
            later.cancel()
            await until(lambda: service.num_unfinished("delay") == 0)  # dropped: not submitted yet
            if hold.gate is not None:
                assert reads_on_the_device(dev)  # submitted: that is waited for
                assert not other.done()
            hold.release()
            await other
            await asked_right(http, stays)
        assert service.held_at_the_end == {}

    run(main)


def reads_on_the_device(dev):
    return [row for row in dev.report().rows if (row.kind, row.state) == ("get", "submitted")]


@native
@wall_or_cuda
def test_a_lifespan_entered_in_one_task_is_left_in_another(run, open_device, example):
    async def main():
        service = Service(example, open_device)
        lifespan = service.app.router.lifespan_context(service.app)
        state = await asyncio.create_task(lifespan.__aenter__())

        async def request():
            dev = state["dev"]
            async with dev.scope(deadline=10.0):
                return await dev.get(dev.put(np.arange(4.0)))

        assert (await asyncio.create_task(request())).tolist() == [0, 1, 2, 3]
        await asyncio.create_task(lifespan.__aexit__(None, None, None))
        assert service.held_at_the_end == {}
        with pytest.raises(sf.Closed):
            state["dev"].zeros(4)

    run(main)
