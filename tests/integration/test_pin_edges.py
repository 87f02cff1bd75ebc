"""Pins that are dropped, cancelled, failed, or left behind by their device, loop or process."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import anyio
import numpy as np
import pytest
from direct_copies import copy_in, copy_out, is_direct
from programs import Program
from support import error_of, native, turns, until, virtual

import streamflow as sf
from streamflow.memory.page_locked import Staged, find
from streamflow.memory.registered import num_registered
from streamflow.runtime.op import Op

NUM = 1 << 18


@pytest.fixture(autouse=True)
def no_pin_is_left() -> Any:
    before = num_registered()
    yield
    gc.collect()
    assert num_registered() == before


def floats() -> Any:
    return np.arange(NUM, dtype=np.float32)


# -- dropped --------------------------------------------------------------------------------------


def test_r12_a_dropped_pin_is_undone_by_the_loop_and_warns(run, open_device) -> None:
    async def main() -> None:
        x = floats()
        kept = weakref.ref(x)
        async with open_device() as dev:
            stream = dev.stream()
            pin = await dev.pin(x)
            held = open_device.stall(dev, stream)
            y, copied = copy_in(dev, x, stream)
            with pytest.warns(
                ResourceWarning, match=r"never unpinned, made at test_pin_edges\.py:"
            ):
                del pin
            del x
            gc.collect()
            assert kept() is not None  # nothing is unpinned by a finaliser
            await dev.get(dev.zeros(1))  # any call drains what was left
            assert copied.done() or kept() is not None
            held.release()
            await dev.synchronize()
            await until(lambda: num_registered() == 0)
            gc.collect()
            assert kept() is None
            np.testing.assert_array_equal(await dev.get(y), floats())

    run(main)


def test_a_pin_dropped_before_it_is_one_is_undone(run) -> None:
    async def main() -> None:
        x = floats()
        async with virtual() as dev:
            with pytest.warns(ResourceWarning, match="never unpinned"):
                dev.pin(x)
            await dev.synchronize()
            await until(lambda: not dev._core.pins._holds)
            assert num_registered() == 0
            assert dev.sim.counters["unregister_host_blocking"] == 1

    run(main)


@pytest.mark.parametrize("kind", ["empty", "failed", "page-locked already", "unpinned"])
def test_a_pin_with_nothing_to_undo_is_dropped_silently(run, kind: str) -> None:
    async def main() -> None:
        async with virtual() as dev:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                if kind == "failed":
                    dev.sim.fail("register", sticky=False)
                    await error_of(dev.pin(floats()))
                elif kind == "unpinned":
                    await (await dev.pin(floats())).unpin()
                elif kind == "empty":
                    await dev.pin(np.zeros(0))
                else:
                    await dev.pin(await dev.get(dev.put(floats())))
                gc.collect()

    run(main)


def test_a_device_closed_with_pins_unpins_and_warns(run, open_device) -> None:
    async def main() -> None:
        x, back = floats(), np.zeros(NUM, np.float32)
        with pytest.warns(ResourceWarning, match=r"still pinned, at test_pin_edges\.py:"):  # noqa: PT031
            async with open_device() as dev:
                pin, other = await dev.pin(x), await dev.pin(back)
                y, _ = copy_in(dev, x)
                copy_out(dev, y, back)
                del y
        assert num_registered() == 0
        np.testing.assert_array_equal(back, x)
        assert not pin.is_pinned
        for each in (pin, other):
            with pytest.raises(sf.Closed):
                each.unpin()

    run(main)


def test_a_block_may_be_left_after_its_device(run) -> None:
    async def main() -> None:
        x = floats()
        dev = virtual()
        await dev.__aenter__()
        pin = dev.pin(x)
        await pin.__aenter__()
        with pytest.warns(ResourceWarning, match="still pinned"):
            await dev.__aexit__(None, None, None)
        await pin.__aexit__(None, None, None)
        assert num_registered() == 0

    run(main)


def test_nothing_is_pinned_on_a_closed_device(run) -> None:
    async def main() -> None:
        async with virtual() as dev:
            pass
        with pytest.raises(sf.Closed):
            dev.pin(floats())
        with pytest.raises(sf.Closed, match="enter the device"):
            virtual().pin(floats())

    run(main)


def test_a_device_left_by_an_error_unpins(run) -> None:
    async def main() -> None:
        x = floats()
        with pytest.raises(ZeroDivisionError):
            async with virtual() as dev:
                pin = await dev.pin(x)
                copy_in(dev, x)
                pin.unpin()
                raise ZeroDivisionError
        assert num_registered() == 0

    run(main)


def test_c12_the_pins_of_a_loop_that_ended_are_undone_by_the_next_device(run) -> None:
    x = floats()

    async def first() -> None:
        dev = virtual()
        await dev.__aenter__()
        kept.append(dev)
        kept.append(await dev.pin(x))

    async def second() -> None:
        assert num_registered() == 1
        async with virtual():
            assert num_registered() == 0

    kept: list[Any] = []
    run(first)
    run(second)
    kept.clear()


# -- lost -----------------------------------------------------------------------------------------


def test_a_pin_of_a_lost_device_leaks(run) -> None:
    """The driver would refuse, and work may be running: the memory is kept for good."""

    async def main() -> None:
        x = floats()
        kept = weakref.ref(x)
        async with virtual() as dev, dev.pin(x):
            dev.sim.fail("copy_h2d", sticky=True)
            _, copied = copy_in(dev, x)
            assert isinstance(await error_of(copied), sf.DeviceLost)
        del x
        gc.collect()
        assert kept() is not None
        assert num_registered() == 1

    run(main)
    _forget_leaked()


def test_unpinning_on_a_lost_device_says_so(run) -> None:
    async def main() -> None:
        x = floats()
        async with virtual() as dev:
            pin = await dev.pin(x)
            stream = dev.stream()
            with dev.sim.gate(stream):
                copy_in(dev, x, stream)
                late = await dev.pin(x)
                unpinned = late.unpin()
                dev.sim.fail("fill", sticky=True)
                assert isinstance(await error_of(dev.full(3, 1.0).ready), sf.DeviceLost)
                assert isinstance(await error_of(unpinned), sf.DeviceLost)
                with pytest.raises(sf.DeviceLost):
                    pin.unpin()
                with pytest.raises(sf.DeviceLost):
                    dev.pin(x)
            assert num_registered() == 1

    run(main)
    _forget_leaked()


def _forget_leaked() -> None:
    """The test's process goes on: give back what a real one would have kept."""
    from streamflow.backends.sim import host_memory
    from streamflow.memory import page_locked, registered

    table = registered._table
    for known in table.registrations:
        page_locked.remove_range(known.start)
        block = host_memory.find(known.start)
        assert block is not None
        block.num_uses = 0
        host_memory.free(known.start, host_memory.HostKind.REGISTERED)
    table.registrations.clear()
    table.starts.clear()


# -- cancelled ------------------------------------------------------------------------------------


def test_a_cancelled_await_undoes_the_pin(run, open_device) -> None:
    async def main() -> None:
        x = floats()
        async with open_device() as dev:
            with anyio.CancelScope() as scope:
                scope.cancel()
                await dev.pin(x)
            assert scope.cancelled_caught
            await dev.synchronize()
            assert num_registered() == 0
            with anyio.CancelScope() as scope:
                scope.cancel()
                async with dev.pin(x):
                    pytest.fail("entered")
            await dev.synchronize()
            assert num_registered() == 0
            async with dev.pin(x):
                assert is_direct(x)

    run(main)


@pytest.mark.parametrize("num_turns", range(6))
def test_a_pin_cancelled_at_any_turn_leaves_nothing(run, num_turns: int) -> None:
    async def main() -> None:
        x = floats()

        async def pin() -> None:
            async with dev.pin(x):
                await anyio.sleep_forever()

        async with virtual() as dev:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(pin)
                await turns(num_turns)
                tasks.cancel_scope.cancel()
            await dev.synchronize()
            await until(lambda: num_registered() == 0)
            assert not dev.live().get("pin")

    run(main)


@native
def test_a_natively_cancelled_await_undoes_the_pin(run) -> None:
    import asyncio

    async def main() -> None:
        x = floats()

        async def pin() -> None:
            await dev.pin(x)

        async with virtual() as dev:
            task = asyncio.get_running_loop().create_task(pin())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await dev.synchronize()
            assert num_registered() == 0

    run(main)


@pytest.mark.parametrize("num_awaiting", [1, 2])
def test_a_cancelled_await_leaves_the_pin_to_others_that_await_it(run, num_awaiting: int) -> None:
    async def main() -> None:
        async with virtual() as dev:
            pin = dev.pin(floats())
            awaiting = [pin.__await__() for _ in range(num_awaiting)]
            for each in awaiting:
                next(each)
            with pytest.raises(KeyboardInterrupt):
                awaiting.pop().throw(KeyboardInterrupt())
            kinds = [op.kind for op in dev._core.pending_ops()]
            assert kinds == (["pin", "unpin"] if num_awaiting == 1 else ["pin"])
            for each in awaiting:
                each.close()
            await pin
            if num_awaiting == 2:
                await pin.unpin()

    run(main)


def test_r12_an_await_that_is_dropped_submits_nothing(run) -> None:
    """It may be the garbage collector's doing, in the middle of a submission."""

    async def main() -> None:
        async with virtual() as dev:
            pin = dev.pin(floats())
            waiting = pin.__await__()
            next(waiting)
            waiting.close()
            assert [op.kind for op in dev._core.pending_ops()] == ["pin"]
            await (await pin).unpin()

    run(main)


def test_an_unpin_can_not_be_cancelled(run) -> None:
    async def main() -> None:
        x = floats()
        async with virtual() as dev:
            stream = dev.stream()
            pin = await dev.pin(x)
            with dev.sim.gate(stream):
                copy_in(dev, x, stream)
                unpinned = pin.unpin()
                assert not unpinned.cancel()
                with anyio.CancelScope() as scope:
                    scope.cancel()
                    await unpinned
                assert not unpinned.done()
            await unpinned
            assert num_registered() == 0

    run(main)


def test_a_cancelled_scope_drops_no_unpin(run) -> None:
    async def main() -> None:
        x = floats()
        async with virtual() as dev:
            stream = dev.stream()
            pin = await dev.pin(x)
            gate = dev.sim.gate(stream)
            _, copied = copy_in(dev, x, stream)
            with anyio.CancelScope() as cancelled:
                async with dev.scope():
                    unpinned = pin.unpin()
                    cancelled.cancel()
                    await anyio.sleep_forever()
            assert not unpinned.done()
            gate.release()
            await unpinned
            assert copied.done()
            assert num_registered() == 0

    run(main)


# -- failed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_pin_that_fails_leaves_nothing(run, nth: int) -> None:
    async def main() -> None:
        arrays = [floats() for _ in range(3)]
        async with virtual() as dev:
            dev.sim.fail("register", nth=nth, error=sf.OutOfDeviceMemory("no more"), sticky=False)
            pins = [dev.pin(array) for array in arrays]
            errors = [await error_of(pin) for pin in pins]
            assert [error is not None for error in errors].count(True) == 1
            (error,) = (error for error in errors if error is not None)
            assert isinstance(error, sf.OutOfDeviceMemory)
            assert f"pinning {4 * NUM} bytes" in str(error)
            assert num_registered() == 2
            for pin in pins:
                await pin.unpin()  # of one that failed, it does nothing
            for array in arrays:
                async with dev.pin(array):
                    assert is_direct(array)

    run(main)


def test_r9_a_failed_pin_that_nobody_awaits_surfaces(run) -> None:
    async def main() -> None:
        async with virtual() as dev:
            dev.sim.fail("register", sticky=False)
            pin = dev.pin(floats())
            await until(pin._hold.op.done)
            with pytest.raises(ExceptionGroup, match="1 op failed"):
                await dev.synchronize()

    run(main)


def test_an_unpin_that_fails_keeps_the_memory_and_may_be_tried_again(run) -> None:
    async def main() -> None:
        x = floats()
        async with virtual() as dev:
            pin = await dev.pin(x)
            rule = dev.sim.fail("unregister", sticky=False)
            error = await error_of(pin.unpin())
            assert isinstance(error, sf.DeviceError)
            assert "unpinning" in str(error)
            assert rule.num_fired == 1
            assert num_registered() == 1
            assert not is_direct(x)
            async with dev.pin(x):  # registered it still is
                assert dev.sim.counters["register_host_blocking"] == 1
                y, _ = copy_in(dev, x)
                await y
            assert num_registered() == 0

    run(main)


def test_closing_reports_what_it_could_not_unpin(run) -> None:
    async def main() -> None:
        x, y = floats(), floats()
        with (
            pytest.raises(ExceptionGroup, match="1 op failed"),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore", ResourceWarning)
            async with virtual() as dev:
                pins = [await dev.pin(x), await dev.pin(y)]
                dev.sim.fail("unregister", sticky=False)
        assert num_registered() == 1
        assert not any(pin.is_pinned for pin in pins)

    run(main)
    _forget_leaked()


def test_a_failed_op_on_the_memory_does_not_keep_it_pinned(run) -> None:
    async def main() -> None:
        x = floats()
        async with virtual() as dev:
            pin = await dev.pin(x)
            dev.sim.fail("copy_h2d", sticky=False)
            _, copied = copy_in(dev, x)
            await pin.unpin()
            assert isinstance(await error_of(copied), sf.DeviceError)
            assert num_registered() == 0

    run(main)


def test_r15_pins_come_in_the_same_order_each_time(run) -> None:
    async def main() -> list[str]:
        ended: list[str] = []

        def note(op: Op[None]) -> None:
            ended.append(op.name.partition("#")[0])

        async with virtual() as dev:
            arrays = [floats() for _ in range(5)]
            pins = [dev.pin(array) for array in arrays]
            for pin in pins:
                pin._hold.op.add_done_callback(note)
                pin.unpin().add_done_callback(note)
            await dev.synchronize()
            await turns()
        return ended

    assert run(main) == run(main)


@pytest.mark.parametrize("verb", ["register_host_blocking", "unregister_host_blocking"])
def test_r6_copies_are_staged_while_the_driver_is_at_it(
    run, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """It may say that the memory is page-locked, before or after it can be relied on."""

    async def main() -> None:
        x, seen = floats(), []
        async with virtual() as dev:
            backend = dev._core.backend
            call = getattr(backend, verb)

            def called(*args: Any) -> None:
                seen.append(find(x))
                call(*args)
                seen.append(find(x))

            monkeypatch.setattr(backend, verb, called)
            async with dev.pin(x):
                pass
            assert len(seen) == 2
            assert all(isinstance(usable, Staged) for usable in seen)
            assert find(x) is None

    run(main)


# -- processes ------------------------------------------------------------------------------------


@pytest.mark.timeout(120)
def test_c44_a_pin_in_a_fork_says_spawn_and_its_end_does_nothing(program: Program) -> None:
    out, err = program.run(
        """
        async def main():
            async with device() as dev:
                held = [await dev.pin(BIG)]
                async with dev.pin(np.zeros(1 << 18)) as other:
                    def look():
                        try:
                            dev.pin(BIG)
                        except sf.ForkedProcess:
                            pass
                        else:
                            return "no error"
                        held.clear()
                        gc.collect()
                        return "spawn"

                    print(in_fork(look), held[0].is_pinned)
                await held[0].unpin()
        run(main)
        """
    )
    assert out.split() == ["spawn", "True"]
    assert "Warning" not in err


@pytest.mark.timeout(120)
def test_c45_a_process_ends_well_with_memory_pinned(program: Program) -> None:
    out, err = program.run(
        """
        kept = []
        async def main():
            dev = device()
            await dev.__aenter__()
            kept.extend([dev, await dev.pin(BIG), dev.put(BIG)])
            print("pinned")
        run(main)
        """,
        PYTHONWARNINGS="always::ResourceWarning",
    )
    assert out.split() == ["pinned"]
    assert "Error" not in err
