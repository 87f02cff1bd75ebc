"""Bad waits: for an op of a closed device or another loop, or for what is no op."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from public_calls import nothing

import streamflow as sf


def virtual(**settings):
    return sf.Settings(sim=sf.SimOptions(clock="virtual"), **settings)


def test_waiting_for_an_op_of_a_closed_device(run, saxpy):
    """What had ended tells its end; what had not fails; nothing waits."""

    async def main():
        dev = sf.Device(backend="sim", settings=virtual(close_timeout_s=0.05))
        with pytest.raises(TimeoutError):
            async with dev:
                x, stream = dev.full(4, 2.0), dev.stream()
                ended = dev.get(x)
                await ended
                dev.sim.gate(stream)
                stalled = dev.fill(x, 0, stream=stream)
        assert (await ended).tolist() == [2] * 4
        for wait in (stalled, sf.gather(stalled)):
            with pytest.raises(sf.Closed, match="device 0 was closed"):
                await wait
        for use in (
            dev.scope,
            lambda: dev.host(print),
            lambda: dev.call(print, x),
            lambda: dev.host(print, after=[stalled]),
            lambda: stream.wait_for(stalled),
        ):
            with pytest.raises(sf.Closed, match="device 0 is closed"):
                use()
        assert stalled.cancel() is False

    run(main)


def test_waiting_for_an_op_of_another_loop(run):
    async def main():
        async with sf.Device(0, backend="sim", settings=virtual()) as dev:
            stream = dev.stream()
            gate = dev.sim.gate(stream)
            op, failures = dev.fill(dev.zeros(4), 1, stream=stream), []

            async def all_of(ops):
                return [op async for op in sf.as_completed(ops)]

            async def inner():
                for wait in (op, sf.gather(op), all_of([op])):
                    with pytest.raises(sf.WrongThread, match="another thread or loop"):
                        await wait
                async with sf.Device(0, backend="sim", settings=virtual()) as own:
                    for use in (
                        lambda: own.host(print, after=[op]),
                        lambda: own.launch(nothing, own.zeros(1, np.float32), after=op),
                        lambda: own.stream().wait_for(op),
                    ):
                        with pytest.raises(ValueError, match="another event loop"):
                            use()
                    with pytest.raises(sf.WrongThread):
                        await sf.gather(own.host(int), op)
                    with pytest.raises(sf.WrongThread):
                        async with dev.scope():
                            pass

            def guarded():
                try:
                    asyncio.run(inner())
                except BaseException as error:
                    failures.append(error)

            thread = threading.Thread(target=guarded)
            thread.start()
            thread.join()
            gate.release()
            await op
            assert not failures, failures

    run(main)


def test_gather_and_as_completed_take_ops_only(run):
    async def main():
        async with sf.Device(backend="sim", settings=virtual()) as dev:
            x = dev.zeros(4)
            for bad in (x, 3, None, asyncio.sleep):
                with pytest.raises(TypeError, match="expected ops, found"):
                    await sf.gather(dev.host(int), bad)
            await dev.synchronize()

    run(main)
