"""Failures: every op ends, what is in use is kept, the rest is given back (R6, R8, R9)."""

import gc
import threading
import weakref

import anyio
import numpy as np
import pytest
from support import error_of, virtual

import streamflow as sf
from streamflow.backends.sim.device import SimDevice
from streamflow.backends.sim.event import SimEvent
from streamflow.backends.sim.stream import SimStream
from streamflow.backends.sim.worlds import _worlds
from streamflow.memory.pinned import PinnedBlocks
from streamflow.scheduler.loops import current_shell

BIG = np.ones(1 << 18, np.float32)  # 1 MiB: staged
LOST = (sf.DeviceLost, sf.UpstreamFailed)


def has_world():
    """Whether a simulated device is open on this loop."""
    return current_shell().key in _worlds


def assert_closed(dev):
    assert dev._core.is_closed
    assert dev._core.backend._is_closed
    assert not has_world()
    live = dev.live()
    assert {"op", "pinned block"}.isdisjoint(live)
    assert "array" not in live or not dev.is_healthy  # a lost device frees nothing any more


async def assert_next_device_works():
    async with virtual() as dev:
        assert dev.is_healthy
        assert (await dev.get(dev.put(BIG)) == 1).all()
    assert_closed(dev)


# -- losing ----------------------------------------------------------------------------------


def test_c2_a_fault_with_staged_copies_parked_behind_it_ends_every_op(run, add_one):
    async def main():
        async with virtual() as dev:
            x, stream = dev.zeros(1 << 18, np.float32), dev.stream()
            await x
            gate = dev.sim.gate(stream)
            dev.sim.fail("launch")
            ops = [dev.launch(add_one, x, 4, stream=stream)]
            for _ in range(3):
                ops += [dev.copy(x, BIG), dev.get(x, out=np.empty_like(BIG)), dev.get(x)]
                ops += [dev.put(BIG, after=[x]).staged, dev.copy(BIG.copy(), BIG, after=[ops[-1]])]
                ops += [dev.launch(add_one, x, 4), dev.launch(add_one, x, 4, stream=stream)]
            assert {op.state for op in ops[1:]} <= {sf.OpState.PARKED, sf.OpState.STAGING}
            gate.release()
            errors = [await error_of(op) for op in ops]
            assert isinstance(errors[0], sf.DeviceLost)
            # Where nobody has begun to read a source, it may simply be changed again.
            for op, error in zip(ops, errors, strict=True):
                assert isinstance(error, LOST) or op.kind == "staged"
            assert not dev._core.pending_ops()
            assert not dev.is_healthy
        assert_closed(dev)

    run(main)


@pytest.mark.parametrize("how", ["staged", "window", "put"])
def test_c2_what_waits_on_another_device_for_a_lost_one_fails_as_a_dependant(run, add_one, how):
    async def main():
        async with virtual(1) as other, virtual(window=4) as dev:
            x, y, stream = dev.zeros(1 << 18, np.float32), other.zeros(4, np.float32), dev.stream()
            await sf.gather(x.ready, y.ready)
            gate = dev.sim.gate(stream)
            dev.sim.fail("launch")
            bad = dev.launch(add_one, x, 4, stream=stream)
            if how == "staged":
                parked = dev.copy(x, BIG)
            else:
                parked = [dev.launch(add_one, x, 4, stream=stream) for _ in range(6)][-1]
            assert parked.state is sf.OpState.PARKED
            if how == "put":  # a staged copy there, which starts when the op here has ended
                behind = other.put(BIG, after=[bad]).ready
            else:
                behind = other.launch(add_one, y, 4, after=[parked])
            then = other.launch(add_one, other.zeros(4, np.float32), 4, after=[behind])
            assert behind.state is then.state is sf.OpState.PARKED
            gate.release()
            assert isinstance(await error_of(parked), LOST)
            assert isinstance(await error_of(bad), sf.DeviceLost)
            assert isinstance(await error_of(behind), sf.UpstreamFailed)
            assert isinstance(await error_of(then), sf.UpstreamFailed)
            assert (dev.is_healthy, other.is_healthy) == (False, True)
            result = await other.get(other.full(3, 2.0))
        assert not has_world()
        return result

    assert run(main).tolist() == [2, 2, 2]


def test_c22_a_fault_names_its_op_and_closing_makes_way_for_a_healthy_device(run, add_one):
    async def main():
        async with virtual(window=4) as dev:
            x, stream = dev.zeros(1 << 18, np.float32), dev.stream()
            dev.sim.fail("launch", nth=3)
            names = [f"op{n}" for n in range(10)]
            ops = [dev.launch(add_one, x, 4, stream=stream, name=name) for name in names]
            staged = dev.copy(x, BIG)
            dev.sim.gate("compute0")
            stalled = dev.get(dev.zeros(4))
            assert await error_of(ops[0]) is None
            assert await error_of(ops[1]) is None
            lost = await error_of(ops[2])
            assert isinstance(lost, sf.DeviceLost)
            assert "add_one" in lost.suspects
            for op in (*ops[3:], staged, stalled):
                assert isinstance(await error_of(op), LOST)
            for submit in (lambda: dev.launch(add_one, x, 4), lambda: dev.put(BIG), x.free):
                with pytest.raises(sf.DeviceLost):
                    submit()
            assert not dev.is_healthy
        assert_closed(dev)
        await assert_next_device_works()

    run(main)


def test_c22_out_of_memory_and_a_bad_launch_shape_do_not_poison(run, add_one):
    async def main():
        async with virtual() as dev:
            x = dev.zeros(4, np.float32)
            with dev.sim.out_of_memory(), pytest.raises(sf.OutOfDeviceMemory):
                dev.zeros(1 << 18)
            with pytest.raises((sf.LaunchFailed, ValueError)):
                await dev.launch(add_one, x, 4, block=1 << 20)
            assert dev.is_healthy
            return await dev.get(x)

    assert run(main).tolist() == [0, 0, 0, 0]


def test_a_poll_that_raises_anything_at_all_loses_the_device(run, add_one, monkeypatch):
    def is_done(self):
        raise sf.DeviceError("error 999")

    async def main():
        async with virtual() as dev:
            x, stream = dev.zeros(4, np.float32), dev.stream()
            await x
            dev.sim.gate(stream)
            op = dev.launch(add_one, x, 4, stream=stream)
            with monkeypatch.context() as patch:
                patch.setattr(SimEvent, "is_done", property(is_done))
                assert isinstance(await error_of(op), sf.DeviceLost)
            assert isinstance(op.exception(), sf.DeviceLost)
            assert not dev.is_healthy
        assert_closed(dev)

    run(main)


@pytest.mark.parametrize("what", ["get", "put", "launch", "refused", "empty", "free"])
def test_an_op_whose_record_fails_loses_the_device_and_keeps_its_block(
    run, add_one, monkeypatch, what
):
    """The copy may be running, and nothing can tell when it ends: its block is nobody's."""

    def record(self, event):
        raise sf.DeviceError("out of host memory")

    async def main():
        async with virtual() as dev:
            x = dev.zeros(64, np.float32)
            await x
            submit = {
                "get": lambda: dev.get(x),
                "put": lambda: dev.copy(x, np.ones(64, np.float32)),
                "launch": lambda: dev.launch(add_one, x, 64),
                "refused": lambda: dev.get(x),
                "empty": lambda: dev.empty(4),
                "free": x.free,
            }[what]
            if what == "refused":
                dev.sim.fail("copy_d2h", sticky=False)
            with monkeypatch.context() as patch:
                patch.setattr(SimStream, "record", record)
                if what == "empty":
                    with pytest.raises(sf.DeviceLost, match="out of host memory"):
                        submit()
                else:
                    assert isinstance(await error_of(submit()), sf.DeviceLost)
            assert not dev.is_healthy
            with pytest.raises(sf.DeviceLost):
                await dev.synchronize()
        assert not has_world()
        return dev._core.pinned.num_live

    assert run(main) == (what in ("get", "put", "refused"))


# -- failures and memory -----------------------------------------------------------------------


def test_a_long_chain_behind_a_failure_names_its_root_and_stays_flat(run, add_one):
    async def main():
        async with virtual() as dev:
            x = dev.zeros(16, np.float32)
            dev.sim.fail("launch", sticky=False)
            root = dev.launch(add_one, x, 16, name="root")
            ops = [dev.launch(add_one, x, 16) for _ in range(500)]
            ops.append(dev.get(x))
            ops.append(dev.copy(np.empty(16), np.ones(16), after=[ops[-1]]))
            for op in ops:
                with pytest.raises(sf.UpstreamFailed) as caught:
                    await op
                assert len(str(caught.value)) < 300
                assert caught.value.__cause__ is root.exception()
            await dev.synchronize()  # all of it was seen

    run(main)


@pytest.mark.parametrize("kind", ["refused", "upstream", "cancelled", "staging", "memory", "group"])
def test_c23_kept_failures_keep_no_memory(run, add_one, kind):
    """20 times 10 MB; the ops and their exceptions are kept, the arrays are not."""

    async def one(dev, kept):
        x = dev.zeros(10_000_000, np.uint8)
        await x
        if kind == "staging":
            dev.sim.fail("copy_h2d", sticky=False)
            op = dev.copy(x, np.ones(10_000_000, np.uint8))
        elif kind == "cancelled":
            stream = dev.stream()
            with dev.sim.gate(stream):
                dev.fill(x, 1, stream=stream)
                op = dev.copy(x, np.ones(10_000_000, np.uint8))
                assert op.cancel()
        elif kind == "memory":
            op = x.ready
            with dev.sim.out_of_memory():
                try:
                    dev.put(x_source)
                except sf.OutOfDeviceMemory as error:
                    kept.append(error)
        else:
            dev.sim.fail("launch", sticky=False)
            op = dev.launch(add_one, x.view(np.float32), 4)
            if kind == "upstream":
                with pytest.raises(sf.LaunchFailed):
                    await op
                op = dev.get(x)
        alive = weakref.ref(x._memory)
        del x
        kept.append(op)
        try:
            await (dev.synchronize() if kind == "group" else op)
        except Exception as error:
            kept.append(error)
            kept.append(RuntimeError("chained"))
            kept[-1].__cause__ = error
        return alive

    x_source = np.ones(10_000_000, np.uint8)

    async def main():
        async with virtual() as dev:
            kept = []
            for _ in range(20):
                alive = await one(dev, kept)
                gc.collect()
                assert alive() is None
                await dev.synchronize()
                assert dev.memory.used_nbytes == 0
            return sum(isinstance(each, BaseException) for each in kept)

    assert run(main) >= 20


ITEM = 15 << 16  # not the size of a slab, nor of a staging chunk


class Pinned:
    """Counts the pinned bytes of results, as the backend sees them."""

    def __init__(self, monkeypatch):
        self.nbytes = self.most = 0
        sizes, lock = {}, threading.Lock()
        allocate, free = SimDevice.allocate_pinned_blocking, SimDevice.free_pinned_blocking

        def counting_allocate(device, nbytes):
            address = allocate(device, nbytes)
            if nbytes % ITEM == 0:
                with lock:
                    sizes[address] = nbytes
                    self.nbytes += nbytes
                    self.most = max(self.most, self.nbytes)
            return address

        def counting_free(device, address):
            with lock:
                self.nbytes -= sizes.pop(address, 0)
            free(device, address)

        monkeypatch.setattr(SimDevice, "allocate_pinned_blocking", counting_allocate)
        monkeypatch.setattr(SimDevice, "free_pinned_blocking", counting_free)


def test_concurrent_gets_never_exceed_the_pinned_budget(run, monkeypatch):
    pinned = Pinned(monkeypatch)

    async def main():
        async with virtual(pinned_budget_nbytes=8 * ITEM) as dev:
            x, y = dev.full(ITEM, 1, np.uint8), dev.full(3 * ITEM, 2, np.uint8)
            for _ in range(3):
                ops = [dev.get(x) for _ in range(20)] + [dev.get(y) for _ in range(5)]
                with anyio.fail_after(20):
                    results = await sf.gather(*ops)
                assert all((result == 1).all() for result in results[:20])
                assert all((result == 2).all() for result in results[20:])
                assert dev.stats().pinned_nbytes <= 8 * ITEM
                del results, ops
                with anyio.fail_after(20):  # larger ones: what is cached makes room
                    assert (await dev.get(y) == 2).all()
        assert dev._core.pinned.num_live == 0

    run(main)
    assert 0 < pinned.most <= 8 * ITEM
    assert pinned.nbytes == 0


def test_a_block_taken_from_the_cache_does_not_break_a_promise_of_budget(run, monkeypatch):
    """A reservation counts on unpinning cached blocks, which others take before a thread acts."""
    pinned, go_on = Pinned(monkeypatch), threading.Event()
    acquire = PinnedBlocks.acquire_reserved_blocking

    def acquire_late(pool, nbytes):
        go_on.wait(20)
        return acquire(pool, nbytes)

    async def main():
        async with virtual(pinned_budget_nbytes=8 * ITEM) as dev:
            x, y = dev.full(ITEM, 1, np.uint8), dev.full(4 * ITEM, 2, np.uint8)
            results = await sf.gather(*[dev.get(x) for _ in range(8)])
            del results
            monkeypatch.setattr(PinnedBlocks, "acquire_reserved_blocking", acquire_late)
            ops = [dev.get(y), *[dev.get(x) for _ in range(8)]]
            go_on.set()
            with anyio.fail_after(20):
                results = await sf.gather(*ops)
            assert (results[0] == 2).all()
            assert all((result == 1).all() for result in results[1:])

    run(main)
    assert pinned.most <= 8 * ITEM
