"""``dev.capture()``: the same code eager and captured, with the same bytes and order."""

from __future__ import annotations

import gc
from typing import Any

import anyio
import numpy as np
import pytest
from support import error_of, turns, virtual, wanted

import streamflow as sf
from streamflow import memory as mr
from streamflow.errors import CaptureRefused

N = 256

mul_kernel = sf.Kernel.from_source(
    """extern "C" __global__ void mul(const float* x, float* y, float a, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) y[i] = a * x[i];
    }""",
    body=lambda x, y, a, n: y.__setitem__(slice(0, n), x[:n] * np.float32(a)),
    access={"y": "write"},
)


class Tools:
    """What the programs below need: a device, kernels, arrays, pinned memory, streams."""

    def __init__(self, dev: sf.Device, add_one: Any, saxpy: Any, lease: Any, pinned: Any) -> None:
        self.dev, self.add_one, self.saxpy = dev, add_one, saxpy
        self.x = dev.put(np.arange(N, dtype=np.float32))
        self.y = dev.full(N, 2, np.float32)
        self.source = lease.array(N, np.float32)
        self.source[:] = np.arange(N)[::-1]
        self.target = pinned
        self.streams = dev.stream(), dev.stream()
        self.seen: list[float] = []


def chain(t: Tools) -> None:
    for _ in range(1000):
        t.dev.launch(t.add_one, t.x, N)


def diamond(t: Tools) -> None:
    left, right = t.dev.empty(N, np.float32), t.dev.empty(N, np.float32)
    t.dev.launch(t.add_one, t.x, N)
    t.dev.launch(mul_kernel, t.x, left, 3.0, N)
    t.dev.launch(mul_kernel, t.x, right, 5.0, N)
    t.dev.launch(t.saxpy, 1.0, left, right, N)
    t.dev.copy(t.y, right)


def fork_join(t: Tools) -> None:
    one, two = t.streams
    left, right = t.x.split(2)
    for _ in range(3):
        t.dev.launch(t.add_one, left, N // 2, stream=one)
        with two:
            t.dev.launch(t.saxpy, 0.5, t.y, right, N // 2)
    one.wait_for(two.record())
    t.dev.launch(t.saxpy, 1.0, t.x, t.y, N, stream=one)


def memory(t: Tools) -> None:
    scratch = t.dev.zeros(N, np.float32)
    t.dev.launch(t.saxpy, 1.0, t.x, scratch, N)
    more = t.dev.empty(N, np.float32)
    t.dev.copy(more, scratch)
    scratch.free()
    t.dev.fill(t.x[: N // 2], 7)
    t.dev.launch(t.saxpy, 1.0, more, t.y, N)
    more.free()


def host_copies(t: Tools) -> None:
    new = t.dev.put(t.source)
    t.dev.launch(t.saxpy, 2.0, new, t.x, N)
    t.dev.get(t.x, out=t.target)
    t.dev.copy(t.y, t.target)


def calls(t: Tools) -> None:
    if t.dev.backend == "sim":
        t.dev.call(lambda stream, x: x.__iadd__(10), t.x)
    else:
        backend = t.dev._core.backend
        call = backend.copy_d2d
        y, x, nbytes = t.y.address, t.x.address, t.x.nbytes
        t.dev.call(lambda stream: call(y, x, nbytes, stream.backend_stream), reads=t.x, writes=t.y)
    t.dev.launch(t.saxpy, 1.0, t.x, t.y, N)


def host_steps(t: Tools) -> None:
    t.dev.launch(t.add_one, t.x, N)
    first = t.dev.host(lambda x: float(x.sum()), t.x)
    t.dev.launch(t.add_one, t.x, N)
    t.dev.host(lambda total, x: t.seen.append(total + x[0]), first, t.x)
    t.dev.launch(t.saxpy, 1.0, t.x, t.y, N)


def fills(t: Tools) -> None:
    for dtype, value in ((np.uint8, 3), (np.int16, -7), (np.float32, 1.5), (np.float64, 2.25)):
        part = t.dev.full(64, value, dtype)
        t.dev.copy(t.y[:16].view(np.uint8), part.view(np.uint8).reshape(-1)[:64])
    t.dev.launch(t.add_one, t.y, N)


PROGRAMS = (chain, diamond, fork_join, memory, host_copies, calls, host_steps, fills)


async def outcome(open_device: Any, kernels: Any, program: Any, num: int, is_captured: bool) -> Any:
    async with open_device() as dev, dev.pinned.lease(4 * N) as lease:
        mine = np.zeros(N, np.float32)
        async with dev.pin(mine):
            t = Tools(dev, *kernels, lease, mine)
            if is_captured:
                with dev.capture() as graph:
                    program(t)
                for _ in range(num):
                    graph.launch()
            else:
                for _ in range(num):
                    program(t)
            x, y = await dev.get(t.x), await dev.get(t.y)
            await dev.synchronize()
            return [x.tobytes(), y.tobytes(), mine.tobytes(), t.seen]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_eager_and_captured_give_the_same_bytes(run, open_device, add_one, saxpy, program):
    async def main():
        kernels = add_one, saxpy
        eager = await outcome(open_device, kernels, program, 3, False)
        assert await outcome(open_device, kernels, program, 3, True) == eager

    run(main)


def test_nothing_runs_in_the_block_and_each_launch_runs_it_once(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            x = dev.zeros(N, np.float32)
            with dev.capture(name="step") as graph:
                op = dev.launch(add_one, x, N)
            assert (await dev.get(x))[0] == 0
            assert isinstance(await error_of(op), CaptureRefused)
            await graph.launch()
            assert (await dev.get(x))[0] == 1
            launches = [graph.launch() for _ in range(10)]  # several in flight
            assert (await dev.get(x))[0] == 11
            await sf.gather(*launches)
            assert "of 1 ops" in repr(graph)
            await graph.ready

    run(main)


def test_a_launch_is_an_op_with_hazards_before_and_after(run, open_device, add_one, saxpy):
    async def main():
        async with open_device() as dev:
            x, y = dev.zeros(N, np.float32), dev.zeros(N, np.float32)
            slow = dev.stream()
            with dev.capture() as graph:
                dev.launch(add_one, x, N)
                dev.launch(saxpy, 1.0, x, y, N)
            await graph.ready
            stall = open_device.stall(dev, slow)
            dev.fill(x, 5, stream=slow)
            launched = graph.launch()
            before = dev.get(y)
            dev.fill(x, 1)
            after = dev.get(x)
            again = graph.launch(after=after, name="again")
            assert again.name == "again"
            stall.release()
            assert (await before)[0] == 6
            assert (await after)[0] == 1
            assert (await dev.get(y))[0] == 8
            assert launched.done()

    run(main)


def test_a_launch_comes_after_what_it_is_told(run, add_one):
    async def main():
        async with virtual() as dev:
            x = dev.zeros(N, np.float32)
            other = dev.stream()
            with dev.capture() as graph:
                dev.launch(add_one, x, N)
            await graph.ready
            gate = dev.sim.gate(other)
            event = anyio.Event()
            launches = [graph.launch(after=[other.record()]), graph.launch(after=event)]
            wanted(*launches)
            await turns(50)
            assert not any(op.done() for op in launches)
            gate.release()
            await launches[0]
            assert not launches[1].done()
            event.set()
            await launches[1]

    run(main)


def test_a_launch_goes_on_the_stream_that_is_named(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            x = dev.zeros(N, np.float32)
            mine, other = dev.stream(name="mine"), dev.stream(name="other")
            with dev.capture() as graph:
                dev.launch(add_one, x, N)
            await graph.ready
            assert graph.launch(stream=mine).stream == "mine"
            with other:
                assert graph.launch().stream == "other"
            with pytest.raises(TypeError):
                graph.launch(stream=3)

    run(main)


def test_branches_of_a_graph_overlap_and_dependent_nodes_do_not(run, spin):
    async def main():
        async with virtual(compute_slots=4) as dev:
            with dev.capture() as fork:
                for _ in range(4):
                    dev.launch(spin, 1.0, grid=1, block=1)
            with dev.capture() as line:
                op = None
                for _ in range(4):
                    op = dev.launch(spin, 1.0, grid=1, block=1, after=op or ())
            took = []
            for graph in (fork, line):
                start_s = dev.sim.clock.now_s
                await graph.launch()
                took.append(dev.sim.clock.now_s - start_s)
            assert took[0] == pytest.approx(1, rel=0.1)
            assert took[1] == pytest.approx(4, rel=0.1)

    run(main)


def test_launches_of_graphs_with_host_steps_run_one_after_another(run, open_device):
    async def main():
        async with open_device() as dev, dev.pinned.lease(4 * N) as lease:
            source = lease.array(N, np.float32)
            x, sums = dev.zeros(N, np.float32), []
            number = iter(range(100))
            with dev.capture() as graph:
                dev.host(lambda: source.fill(next(number)))
                dev.put(source, out=x)
                dev.host(lambda values: sums.append(float(values[0])), x)
            assert graph.num_parts == 1
            await sf.gather(*[graph.launch() for _ in range(5)])
            assert sums == [0, 1, 2, 3, 4]

    run(main)


def test_a_host_step_is_the_result_of_the_launch_that_ends_with_it(run, open_device):
    async def main():
        async with open_device() as dev:
            x = dev.full(N, 3, np.float32)
            with dev.capture() as graph:
                dev.fill(x, 4)
                dev.host(lambda values: float(values.sum()), x)
            assert await graph.launch() == 4 * N
            with dev.capture() as empty:
                pass
            assert await empty.launch() is None
            assert (empty.nodes, empty.edges, empty.num_parts) == ((), (), 0)

    run(main)


def test_edges_are_those_of_data_after_and_explicit_streams(run, open_device, add_one, saxpy):
    async def main():
        async with open_device() as dev:
            x, y, z = (dev.zeros(N, np.float32) for _ in range(3))
            left, right = z.split(2)
            stream = dev.stream()
            with dev.capture() as graph:
                dev.launch(add_one, x, N, name="a")
                dev.launch(saxpy, 1.0, x, y, N, name="b")
                c = dev.launch(add_one, left, N // 2, name="c")
                dev.launch(add_one, right, N // 2, name="d", after=c)
                dev.fill(z, 0)
                dev.launch(add_one, x, N, name="f", stream=stream)
                dev.launch(add_one, left, N // 2, name="g", stream=stream)
                dev.launch(add_one, right, N // 2, name="h", after=x)
                dev.launch(add_one, z[3:9], 6, name="i")
            names = {node: node.name.partition("#")[0] for node in graph.nodes}
            assert {(names[one], names[other]) for one, other in graph.edges} == {
                *(("a", "b"), ("c", "d"), ("c", "fill"), ("d", "fill"), ("a", "f"), ("b", "f")),
                *(("fill", "g"), ("f", "g"), ("fill", "h"), ("f", "h")),
                *(("fill", "i"), ("g", "i"), ("h", "i")),
            }
            assert "test_capture.py" in graph.nodes[0].where
            assert graph.nodes[0].kind == "launch"
            await graph.launch()

    run(main)


def test_c40_memory_allocated_in_a_capture_stays_valid_over_replays(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            out = dev.zeros(N, np.float32)
            with dev.capture() as graph:
                inner = dev.zeros(N, np.float32)
                dev.launch(add_one, inner, N)
                kept = dev.full(N, 5, np.float32)
                dev.copy(out, inner)
            del inner
            gc.collect()
            for _ in range(3):
                others = [dev.full(N, 9, np.float32) for _ in range(20)]
                await graph.launch()
                del others
            assert (await dev.get(out) == 1).all()
            assert (await dev.get(kept) == 5).all()
            graph.close()
            assert (await dev.get(kept) == 5).all()  # the program's own reference

    run(main)


def test_regions_made_in_and_after_the_capture_are_ordered(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            x = dev.zeros(N, np.float32)
            slow = dev.stream()
            with dev.capture() as graph:
                dev.launch(add_one, x, N)
                left, right = x.split(2)
                dev.launch(add_one, left, N // 2)
            await graph.ready
            first, second = x.split(4)[:2]
            stall = open_device.stall(dev, slow)
            dev.fill(second, 10, stream=slow)
            graph.launch()
            dev.launch(add_one, second, N // 4)
            dev.launch(add_one, right, N // 2)
            stall.release()
            found = await dev.get(x)
            np.testing.assert_array_equal(found[:: N // 4], [2, 13, 2, 2])
            assert (await dev.get(first))[0] == 2

    run(main)


def test_an_update_runs_over_other_arguments_from_then_on(run, open_device, add_one, saxpy):
    async def main():
        async with open_device() as dev:
            x, y = dev.zeros(N, np.float32), dev.zeros(N, np.float32)
            slow = dev.stream()

            def step(target, a):
                dev.launch(add_one, target, N)
                dev.launch(saxpy, a, target, target, N)

            with dev.capture() as graph:
                step(x, 1.0)
            stall = open_device.stall(dev, slow)
            dev.fill(x, 1, stream=slow)
            graph.launch()  # parked until the graph is built, and updated before that
            with graph.update():
                step(y, 3.0)
            graph.launch()
            with graph.update():
                step(y, 9.0)
            graph.launch()
            stall.release()
            assert (await dev.get(x))[0] == 4
            assert (await dev.get(y))[0] == 50

    run(main)


def test_an_update_may_take_another_number_of_driver_calls(run, open_device):
    async def main():
        async with open_device() as dev:
            x = dev.zeros(N, np.float64)
            with dev.capture() as graph:
                dev.fill(x, 0)
            await graph.launch()
            for value in (1.5, 0.0, 2.5):
                with graph.update():
                    dev.fill(x, value)
                await graph.launch()
                assert (await dev.get(x) == value).all()

    run(main)


def test_an_update_of_another_shape_is_refused_and_changes_nothing(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            x = dev.zeros(N, np.float32)

            def no_ops():
                pass

            def other_kind():
                dev.fill(x, 0)
                dev.launch(add_one, x, N)

            def other_edges():
                dev.launch(add_one, x, N)
                dev.launch(add_one, dev.zeros(N, np.float32), N)

            def more():
                for _ in range(3):
                    dev.launch(add_one, x, N)

            def with_host():
                dev.launch(add_one, x, N)
                dev.host(print)
                dev.launch(add_one, x, N)

            with dev.capture() as graph:
                dev.launch(add_one, x, N)
                dev.launch(add_one, x, N)
            for body in (no_ops, other_kind, other_edges, more, with_host):
                with pytest.raises(CaptureRefused, match="was"), graph.update():
                    body()
            with pytest.raises(KeyError), graph.update():
                dev.launch(add_one, x, N)
                raise KeyError
            await graph.launch()
            assert (await dev.get(x))[0] == 2

    run(main)


def test_two_graphs_over_the_same_array_keep_their_order(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            x = dev.zeros(N, np.float32)
            with dev.capture() as adds:
                dev.launch(add_one, x, N)
            with dev.capture() as fills:
                dev.fill(x, 10)
            for _ in range(4):
                adds.launch()
                fills.launch()
                adds.launch()
            assert (await dev.get(x))[0] == 11

    run(main)


def test_a_mapped_array_may_be_used_in_a_graph(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            m = await dev.mapped(N, np.float32)
            m.host[:] = 1
            with dev.capture() as graph:
                dev.launch(add_one, m, N)
            graph.launch()
            graph.launch()
            await m.idle()
            assert m.host[0] == 3

    run(main)


def test_a_synced_array_is_captured_inside_its_block_and_gone_after_it(run, open_device, add_one):
    async def main():
        async with open_device() as dev:
            m = sf.SyncedArray(dev, N, np.float32)
            async with m.device(write="all") as d:
                with dev.capture() as graph:
                    dev.fill(d, 1)
                    dev.launch(add_one, d, N)
                await graph.launch()
            async with m.host() as a:
                assert a[0] == 2
            with pytest.raises(sf.Closed):
                graph.launch()

    run(main)


def test_pieces_of_a_memory_resource_are_the_graphs_until_it_is_closed(run, open_device, add_one):
    async def main():
        pool = mr.PoolMemoryResource(mr.CudaMemoryResource(), initial_pool_size="1MiB")
        counted = mr.StatisticsResourceAdaptor(pool)
        async with open_device() as dev:
            with dev.capture() as graph:
                x = dev.full(N, 1, np.float32, memory=counted)
                y = dev.empty(N, np.float32, memory=counted)
                dev.copy(y, x)
                x.free()
                dev.launch(add_one, y, N)
            for _ in range(3):
                await graph.launch()
            assert (await dev.get(y) == 2).all()
            assert counted.allocation_counts.current_count == 2
            graph.close()
            del y, x
            gc.collect()
            await dev.synchronize()  # which comes by what finalisers left
            assert counted.allocation_counts.current_count == 0

    run(main)
