"""Arrays from every resource: chosen, used, freed in order, and back when the device closes."""

from __future__ import annotations

import gc
import threading

import anyio
import numpy as np
import pytest
from support import turns, until, virtual

import streamflow as sf
from streamflow import memory as mr

MIB = 1 << 20


def _pool(**options):
    return mr.PoolMemoryResource(mr.CudaMemoryResource(), initial_pool_size="4MiB", **options)


def _binning():
    binning = mr.BinningMemoryResource(_pool(), 12, 16)
    binning.add_bin(1 << 20)
    return binning


RESOURCES = {
    "cuda": mr.CudaMemoryResource,
    "async": mr.CudaAsyncMemoryResource,
    "managed pool": mr.CudaAsyncManagedMemoryResource,
    "managed": mr.ManagedMemoryResource,
    "pinned": mr.PinnedHostMemoryResource,
    "system": mr.SystemMemoryResource,
    "headroom": lambda: mr.SamHeadroomMemoryResource(0),
    "pool": _pool,
    "arena": lambda: mr.ArenaMemoryResource(mr.CudaMemoryResource(), "16MiB"),
    "fixed size": lambda: mr.FixedSizeMemoryResource(mr.CudaMemoryResource(), 1 << 20, 4),
    "binning": _binning,
    "limiting": lambda: mr.LimitingResourceAdaptor(_pool(), 64 * MIB),
    "statistics": lambda: mr.StatisticsResourceAdaptor(_pool()),
    "tracking": lambda: mr.TrackingResourceAdaptor(_pool()),
    "retry": lambda: mr.FailureCallbackResourceAdaptor(_pool(), lambda nbytes: False),
    "aligned": lambda: mr.AlignedResourceAdaptor(_pool(), 4096, 0),
    "nested": lambda: mr.StatisticsResourceAdaptor(
        mr.TrackingResourceAdaptor(mr.LimitingResourceAdaptor(_binning(), 64 * MIB))
    ),
}


@pytest.fixture(params=RESOURCES)
def make(request):
    return RESOURCES[request.param]


def _supports(dev, resource):
    """Whether the device has this memory; if not, using it says so."""
    support = mr.memory_support(dev)
    if isinstance(resource, (mr.SystemMemoryResource, mr.SamHeadroomMemoryResource)):
        return support.has_pageable_access
    if isinstance(resource, mr.CudaAsyncManagedMemoryResource):
        return support.has_managed_pools
    return True


def test_arrays_are_used_and_freed_in_order(run, open_device, make, add_one):
    async def main():
        resource = make()
        async with open_device(memory=resource) as dev:
            if not _supports(dev, resource):
                with pytest.raises(sf.DeviceError, match=r"support|access|pool"):
                    dev.empty(4)
                return
            streams = [dev.stream(), dev.stream(), None]
            results = []
            for n in range(24):
                x = dev.full(1 + n * 1000, n, np.float32, stream=streams[n % 3])
                y = dev.put(np.arange(x.size, dtype=np.float32))
                dev.launch(add_one, x, x.size, stream=streams[(n + 1) % 3])
                dev.copy(y[:1], x[:1])
                results.append((n, dev.get(x), dev.get(y)))
                del x, y
            for n, x, y in results:
                assert (await x == n + 1).all()
                assert (await y)[0] == n + 1
            await dev.synchronize()
            assert not dev.live().get("array")
            assert dev.memory.used_nbytes == 0  # none came from the device's own pool

    run(main)


def test_c6_memory_read_elsewhere_is_not_handed_on_before(run, open_device, make):
    async def main():
        resource = make()
        async with open_device(memory=resource) as dev:
            if not _supports(dev, resource):
                return
            a, b = dev.stream(), dev.stream()
            x = dev.put(np.full(1 << 17, 7, np.int32), stream=a)
            await x
            stall = open_device.stall(dev, b)
            read = dev.get(x, stream=b)
            del x
            fresh = dev.full(1 << 17, -1, np.int32, stream=a)
            stall.release()
            assert (await read == 7).all()
            assert (await dev.get(fresh) == -1).all()

    run(main)


@pytest.mark.parametrize("how", ["drop", "a cycle on another thread", "after its stream"])
def test_c16_a_dropped_array_is_freed_behind_its_uses(run, open_device, make, how, add_one):
    async def main():
        resource = make()
        async with open_device(memory=resource) as dev:
            if not _supports(dev, resource):
                return
            stream = dev.stream()
            x = dev.zeros(1 << 16, np.float32, stream=stream)
            await x
            stall = open_device.stall(dev, stream)
            dev.launch(add_one, x, x.size, stream=stream)
            read = dev.get(x, stream=stream)
            if how == "a cycle on another thread":
                cycle = [x]
                cycle.append(cycle)
                del x, cycle
                thread = threading.Thread(target=gc.collect)
                thread.start()
                thread.join()
            elif how == "after its stream":
                stream.close()
                del stream, x
            else:
                del x
            dev.empty(4).free()
            stall.release()
            assert (await read == 1).all()
            await dev.synchronize()
            assert not dev.live().get("array")

    run(main)


def test_closing_gives_everything_back_and_the_resource_goes_on(run, make):
    async def main():
        resource = make()
        async with virtual(devices=1) as keeper:
            before = keeper._core.backend.memory_info()[0]
            for _ in range(2):
                async with sf.Device(
                    0, backend="sim", memory=resource, settings=keeper.settings
                ) as dev:
                    kept = dev.full(1000, 3, np.float32)
                    assert (await dev.get(kept) == 3).all()
                    del kept
            del dev
            if hasattr(resource, "close"):
                resource.close()
            await keeper.synchronize()
            # The second device of that GPU is open still: the resource may keep its memory there.
            assert before - keeper._core.backend.memory_info()[0] <= 128 * MIB
        with pytest.raises(sf.Closed):
            async with virtual(memory=resource) as dev:
                dev.empty(4)

    run(main)


@pytest.mark.filterwarnings("ignore:device 0 was closed with 1 array:ResourceWarning")
def test_c17_only_the_array_is_left_of_resource_and_stream(run, make):
    async def main():
        def build(dev):
            return dev.full(5000, 5, np.float32, memory=make(), stream=dev.stream())

        async with virtual() as dev:
            x = build(dev)
            gc.collect()
            assert (await dev.get(x) == 5).all()
            del x
            gc.collect()
            await dev.synchronize()
            dev.empty(4).free()
            kept = build(dev)
        assert kept.nbytes == 20000
        with pytest.raises(sf.Closed):
            dev.get(kept)
        del kept, dev
        gc.collect()
        async with virtual() as dev:
            assert (await dev.get(dev.zeros(4)) == 0).all()

    run(main)


def test_where_arrays_come_from(run):
    async def main():
        explicit, used, own, registered = (
            mr.StatisticsResourceAdaptor(mr.CudaMemoryResource()) for _ in range(4)
        )
        async with virtual(memory=own) as dev:

            def counts():
                return [
                    resource.allocation_counts.total_count
                    for resource in (explicit, used, own, registered)
                ]

            previous = mr.set_per_device_resource(0, registered)
            try:
                dev.empty(4).free()
                assert counts() == [0, 0, 1, 0]
                with mr.using(used):
                    dev.zeros(4).free()
                    dev.put(np.ones(4)).free()
                    assert counts() == [0, 2, 1, 0]
                    dev.empty(4, memory=explicit).free()
                    (await dev.alloc(4, memory=explicit)).free()
                assert counts() == [2, 2, 1, 0]
                (await dev.alloc(4)).free()
                assert counts() == [2, 2, 2, 0]
                async with virtual() as plain:
                    plain.empty(4).free()
                    assert counts() == [2, 2, 2, 1]
            finally:
                mr.reset_per_device_resource(0)
            assert isinstance(previous, mr.CudaMemoryResource)
            async with virtual() as plain:
                x = plain.empty(4)
                assert plain.memory.used_nbytes
                assert counts() == [2, 2, 2, 1]
                del x

    run(main)


def test_resetting_the_registry_leaves_live_arrays_alone(run):
    async def main():
        pool = _pool()
        mr.set_per_device_resource(0, pool)
        try:
            async with virtual() as dev:
                x = dev.full(1000, 4, np.float32)
                mr.reset_per_device_resource(0)
                y = dev.full(1000, 5, np.float32)
                assert dev.memory.used_nbytes
                assert (await dev.get(x) == 4).all()
                assert (await dev.get(y) == 5).all()
                del x
                await dev.synchronize()
                dev.empty(4).free()
                assert pool.info().live_nbytes == 0
        finally:
            mr.reset_per_device_resource(0)

    run(main)


def test_bad_resources_are_refused_before_anything_is_submitted(run):
    async def main():
        with pytest.raises(TypeError, match="memory resource"):
            virtual(memory="pool")
        with pytest.raises(ValueError, match="device 1"):
            virtual(memory=mr.CudaMemoryResource(device=1))
        async with virtual() as dev:
            num = dev.stats().num_submitted
            with pytest.raises(TypeError, match="memory resource"):
                dev.empty(4, memory="pool")
            with pytest.raises(ValueError, match="device 1"):
                dev.zeros(4, memory=mr.CudaMemoryResource(device=1))
            closed = _pool()
            closed.close()
            with pytest.raises(sf.Closed):
                dev.empty(4, memory=closed)
            assert dev.stats().num_submitted == num

    run(main)


def test_a_limit_raises_with_a_report_and_is_waited_for(run, open_device):
    async def main():
        limited = mr.LimitingResourceAdaptor(mr.CudaAsyncMemoryResource(), 4 * MIB)
        async with open_device(memory=limited) as dev:
            box = [dev.empty(3 * MIB, np.uint8)]
            with pytest.raises(sf.OutOfDeviceMemory) as caught:
                dev.empty(2 * MIB, np.uint8)
            assert caught.value.report.requested_nbytes == 2 * MIB
            assert "limit" in str(caught.value)
            got = []

            async def want():
                got.append(await dev.alloc(2 * MIB, np.uint8))

            async with anyio.create_task_group() as group:
                group.start_soon(want)
                await turns(20)
                assert not got
                box.clear()
                await until(lambda: got)
            dev.fill(got[0], 1)
            assert (await dev.get(got[0]) == 1).all()

    run(main)


def test_what_a_function_of_the_users_raises_reaches_the_caller(run):
    async def main():
        class Boom(Exception):
            pass

        def refuse(stream, nbytes, alignment, arg):
            raise Boom(nbytes)

        resource = mr.CallbackMemoryResource(refuse, lambda *args: None)
        async with virtual() as dev:
            with pytest.raises(Boom):
                dev.empty(4, np.uint8, memory=resource)
            assert (await dev.get(dev.zeros(4)) == 0).all()

    run(main)


def test_tracing_shows_whose_memory_an_array_was_given(run):
    async def main():
        async with virtual(memory=_pool(maximum_pool_size="4MiB")) as dev:
            a, b = dev.stream("a"), dev.stream("b")
            with dev.trace() as trace:
                x = dev.full(1 << 20, 1, np.uint8, stream=a)
                gate = dev.sim.gate(a)
                dev.fill(x, 2, stream=a)
                freed = x.free()
                del x
                rest = dev.empty(3 * MIB, np.uint8, stream=b)  # the rest of the pool
                y = dev.full(1 << 20, 3, np.uint8, stream=b)
                gate.release()
                assert (await dev.get(y) == 3).all()
                del rest
            edges = {
                (edge.src, edge.dst, edge.issued)
                for edge in trace.edges
                if edge.reason is sf.EdgeReason.ALLOCATION
            }
            made = max(op.id for op in trace.ops if op.kind == "empty")
            assert (freed.ticket.seq, made, True) in edges

    run(main)


def test_a_device_without_pools_cuts_up_linear_memory(run, monkeypatch, add_one):
    from dataclasses import replace

    from streamflow.backends.sim.device import SimDevice
    from streamflow.memory import default

    support = SimDevice.memory_support
    monkeypatch.setattr(
        SimDevice, "memory_support", lambda self: replace(support(self), has_pools=False)
    )
    monkeypatch.setattr(default, "_warned", set())

    async def main():
        with pytest.warns(RuntimeWarning, match="no stream-ordered memory pools"):
            dev = await virtual().__aenter__()
        x = dev.zeros(1000, np.float32)
        dev.launch(add_one, x, x.size)
        assert (await dev.get(x) == 1).all()
        assert dev.sim.counters["allocate_linear_blocking"] == 1
        assert dev.stats().memory == sf.PoolInfo(0, 0, 0, 0, 0)
        with pytest.raises(sf.DeviceError, match="no stream-ordered"):
            dev.memory  # noqa: B018
        with pytest.raises(sf.OutOfDeviceMemory):
            dev.empty(1 << 40, np.uint8)
        del x
        await dev.__aexit__(None, None, None)

    run(main)


def test_what_a_resource_refuses_to_take_back_is_offered_again(run):
    class Refusing(mr.DeviceMemoryResource):
        def __init__(self):
            super().__init__()
            self.num_refusals, self.back = 1, []

        def _take(self, nbytes, alignment, place):
            address = place.backend.allocate_linear_blocking(nbytes)
            return mr.Piece(self, address, nbytes, alignment)

        def _give(self, piece, place):
            if self.num_refusals:
                self.num_refusals -= 1
                raise RuntimeError("not now")
            self.back.append(piece.nbytes)
            place.backend.deallocate(piece.address, place.stream)

    async def main():
        resource = Refusing()
        async with virtual(memory=resource) as dev:
            before = dev._core.backend.memory_info()[0]
            with pytest.raises(sf.DeviceError, match="not now"):
                await dev.empty(1000, np.uint8).free()
            assert resource.back == []
            dev.empty(500, np.uint8).free()
            assert resource.back == [1000, 500]
            await dev.synchronize()
            assert dev._core.backend.memory_info()[0] == before
            assert not dev._core.space.is_shared

    run(main)
