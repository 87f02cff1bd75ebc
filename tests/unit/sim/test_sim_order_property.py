"""Random programs over streams, events and memory mean the same as run one after the other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from streamflow.backends.base import Access, KernelSpec, Parameter
from streamflow.backends.sim import host_memory, open_device
from streamflow.config import Settings, SimOptions

NUM_STREAMS = 4
NUM_BUFFERS = 4
SIZE = 8


@dataclass(frozen=True)
class Step:
    """``dst = 3 * dst + src + i`` on a stream, through a scratch array if ``scratch``."""

    stream: int
    src: int
    dst: int
    cost: int
    scratch: bool
    num_advances: int


steps = st.lists(
    st.builds(
        Step,
        stream=st.integers(0, NUM_STREAMS - 1),
        src=st.integers(0, NUM_BUFFERS - 1),
        dst=st.integers(0, NUM_BUFFERS - 1),
        cost=st.integers(0, 5),
        scratch=st.booleans(),
        num_advances=st.integers(0, 3),
    ),
    max_size=30,
)


def run_serially(program):
    buffers = np.zeros((NUM_BUFFERS, SIZE), np.int64)
    for i, step in enumerate(program):
        buffers[step.dst] = 3 * buffers[step.dst] + buffers[step.src] + i
    return buffers


def run_simulated(program, seed):
    """Wait for data hazards only. Returns the buffers, the order bodies ran in, the edges."""
    device = open_device(0, Settings(sim=SimOptions(clock="virtual", seed=seed)), object())
    order: list[int] = []
    edges: list[tuple[int, int]] = []

    def body(dst, src, i, cost):
        order.append(i)
        dst[:] = 3 * dst + src + i

    def move(dst, src):
        dst[:] = src

    int64 = np.dtype(np.int64)
    parameters = (
        Parameter("dst", "long*", int64, Access.READ_WRITE),
        Parameter("src", "const long*", int64, Access.READ),
        Parameter("i", "int", int64, None),
        Parameter("cost", "int", int64, None),
    )
    kernel = device.load_kernel(
        KernelSpec(
            "body",
            parameters,
            source="",
            body=body,
            cost_s=lambda dst, src, i, cost: float(cost),
        )
    )
    mover = device.load_kernel(KernelSpec("move", parameters[:2], source="", body=move))
    config = device.launch_config((1, 1, 1), (1, 1, 1), 0)
    pool = device.create_pool(release_threshold_nbytes=0)
    streams = [device.create_stream() for _ in range(NUM_STREAMS)]
    home = streams[0]
    nbytes = SIZE * 8
    addresses = [device.allocate(pool, nbytes, home) for _ in range(NUM_BUFFERS)]
    for address in addresses:
        device.fill(address, b"\0", nbytes, home)
    ready = home.record(device.create_event())
    for stream in streams[1:]:
        stream.wait(ready)

    def view(address):
        return device.array_argument(address, (SIZE,), int64)

    # (op, event) of the last write, and of reads since, per buffer
    last_write: list[tuple[int, object] | None] = [None] * NUM_BUFFERS
    reads: list[list[tuple[int, object]]] = [[] for _ in range(NUM_BUFFERS)]
    for i, step in enumerate(program):
        stream = streams[step.stream]
        needs = [last_write[step.src], last_write[step.dst], *reads[step.dst]]
        for need in needs:
            if need is not None:
                stream.wait(need[1])
                edges.append((need[0], i))
        src = view(addresses[step.src])
        scratch = 0
        if step.scratch:
            scratch = device.allocate(pool, nbytes, stream)
            device.launch(stream, config, mover, view(scratch), src)
            src = view(scratch)
        device.launch(stream, config, kernel, view(addresses[step.dst]), src, i, step.cost)
        if step.scratch:
            device.deallocate(scratch, stream)
        event = stream.record(device.create_event())
        last_write[step.dst] = (i, event)
        reads[step.dst] = []
        if step.src != step.dst:
            reads[step.src].append((i, event))
        for _ in range(step.num_advances):
            device.advance(0)
    host = device.allocate_pinned_blocking(NUM_BUFFERS * nbytes)
    try:
        device.synchronize_blocking()
        for k, address in enumerate(addresses):
            device.copy_d2h(host + k * nbytes, address, nbytes, home)
        home.sync()
        block = host_memory.hold(host, NUM_BUFFERS * nbytes)
        result = block.backing.view(np.int64).reshape(NUM_BUFFERS, SIZE).copy()
        block.drop()
        info = device.pool_info(pool)
        assert info.used_nbytes == NUM_BUFFERS * 512
    finally:
        device.close()
        device.free_pinned_blocking(host)
    return result, order, edges


@settings(deadline=None, max_examples=150)
@given(program=steps, seed=st.integers(0, 5))
def test_random_programs_equal_the_serial_model(program, seed):
    result, order, edges = run_simulated(program, seed)
    np.testing.assert_array_equal(result, run_serially(program))
    place = {op: k for k, op in enumerate(order)}
    assert sorted(order) == list(range(len(program)))
    for before, after in edges:
        assert place[before] < place[after]
    for stream in range(NUM_STREAMS):
        mine = [i for i in order if program[i].stream == stream]
        assert mine == sorted(mine)


@settings(deadline=None, max_examples=30)
@given(program=steps, seed=st.integers(0, 5))
def test_the_same_seed_gives_the_same_schedule(program, seed):
    assert run_simulated(program, seed)[1] == run_simulated(program, seed)[1]
