"""A web service: one device for all requests, a scope for each.

The application's lifespan enters the device, so it is there from the first request to the last.
Each request opens a scope, and everything it submits belongs to it:

- what takes too long is cut off by the scope's deadline;
- when the client goes away, the request is cancelled, and with it what it has not submitted yet;
- when something in it fails, this request says so, and the others don't notice.

Nothing blocks the loop: it serves other requests while the device works on this one.

Without arguments it serves on a free port, asks itself a few things and ends. ``--serve`` keeps it
running:  curl -s localhost:8000/report
"""

# needs: starlette
# needs: uvicorn
# needs: httpx

import argparse
import asyncio
import socket
from contextlib import asynccontextmanager

import anyio
import httpx
import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

import streamflow as sf

DEADLINE_S = 10.0


@sf.kernel("""extern "C" __global__
void centre(float* x, float mean, unsigned long long n) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i < n) x[i] -= mean;
}""")
def centre(x, mean, n):
    x[:n] -= np.float32(mean)


@sf.kernel("""extern "C" __global__
void square(float* x, unsigned long long n) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i < n) x[i] *= x[i];
}""")
def square(x, n):
    x[:n] *= x[:n]


def checked_mean(values):
    """Runs on a worker thread, in the middle of the graph."""
    if not np.isfinite(values).all():
        raise ValueError(f"value {int(np.argmin(np.isfinite(values)))} is not finite")
    return float(values.mean())


# -- the service -----------------------------------------------------------------------------


@asynccontextmanager
async def lifespan(app):
    async with sf.Device(0) as dev:
        yield {"dev": dev}  # what Starlette shows to each request as its state


async def deviations(request):
    """The squares of the distances of float32 values from their mean."""
    body = await request.body()
    if not body or len(body) % 4:
        return PlainTextResponse(f"expected float32 values, found {len(body)} bytes\n", 400)
    dev, values = request.state.dev, np.frombuffer(body, np.float32)
    delay_s = float(request.query_params.get("delay", 0))
    async with dev.scope(deadline=DEADLINE_S, name="deviations"):
        # A coroutine as an op. It stands for whatever else a request may have to wait for.
        first = dev.host(anyio.sleep, delay_s, name="delay") if delay_s else ()
        x = dev.put(values, after=first)
        mean = dev.host(checked_mean, x)
        dev.launch(centre, x, mean, x.size)  # a number that an op will bring
        dev.launch(square, x, x.size)
        result = await dev.get(x)
    return Response(result.tobytes(), media_type="application/octet-stream")


async def report(request):
    dev = request.state.dev
    return PlainTextResponse(f"{dev.report()}\n{dev.stats()}\n")


def answering(handler):
    """Tell the client in words and numbers what went wrong."""

    async def answer(request):
        try:
            return await handler(request)
        except sf.UpstreamFailed as error:  # the root cause says more than who suffered from it
            status = 422 if isinstance(error.__cause__, ValueError) else 500
            return PlainTextResponse(f"{error.__cause__}\n", status)
        except sf.DeadlineExceeded as error:
            print(error)  # with a report of what had not ended, for us and not for them
            return PlainTextResponse(f"this took longer than {DEADLINE_S:g} s\n", 504)
        except (sf.OutOfDeviceMemory, sf.DeviceLost) as error:
            return PlainTextResponse(f"try again later: {type(error).__name__}\n", 503)

    return answer


def while_connected(handler):
    """Cancel the handler when its client goes away. A server leaves that to the application."""

    async def attended(request):
        await request.body()  # all of it, so that what comes next is the end of the connection
        response = Response(status_code=499)  # nobody reads it
        async with anyio.create_task_group() as group:

            async def watch():
                while (await request.receive())["type"] != "http.disconnect":
                    pass
                group.cancel_scope.cancel()

            group.start_soon(watch)
            response = await handler(request)
            group.cancel_scope.cancel()
        return response

    return attended


def make_app(lifespan=lifespan):
    return Starlette(
        routes=[
            Route("/deviations", while_connected(answering(deviations)), methods=["POST"]),
            Route("/report", report),
        ],
        lifespan=lifespan,
    )


# -- driving itself ----------------------------------------------------------------------------


@asynccontextmanager
async def serving(app):
    """Serve on a free port of this machine, as a task of this loop; gives the address."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="on"))
        task = asyncio.create_task(server.serve(sockets=[listening]))
        while not (server.started or task.done()):
            await asyncio.sleep(0.005)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


async def main():
    rng = np.random.default_rng(0)
    async with serving(make_app()) as url, httpx.AsyncClient(base_url=url) as client:

        async def ask(values, **query):
            return await client.post("/deviations", content=values.tobytes(), params=query)

        batches = [rng.random(10_000 * n, dtype=np.float32) for n in range(1, 9)]
        answers = await asyncio.gather(*map(ask, batches))  # at the same time, on one device
        for values, answer in zip(batches, answers, strict=True):
            expected = (values - values.mean()) ** 2
            result = np.frombuffer(answer.content, np.float32)
            assert np.allclose(result, expected, atol=1e-5)
        print(len(answers), "right answers")

        bad = await ask(np.zeros(3, np.uint8))
        print(bad.status_code, bad.text, end="")
        assert bad.status_code == 400

        values = batches[0].copy()
        values[7] = np.nan
        bad = await ask(values)
        print(bad.status_code, bad.text, end="")
        assert bad.status_code == 422

        try:
            async with asyncio.timeout(0.2):
                await ask(batches[0], delay=5.0)
        except TimeoutError:
            print("one client went away")
        while "delay" in (text := (await client.get("/report")).text):
            await asyncio.sleep(0.01)  # its request is cancelled in a moment
        print(text, end="")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--serve", action="store_true", help="serve until interrupted")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    if options.serve:
        uvicorn.run(make_app(), port=options.port)
    else:
        asyncio.run(main())
