"""What one device takes for single calls: medians over raw backend verbs.

Device times lie between two timing events. Everything timed is submitted behind a kernel
that keeps the stream busy meanwhile, so that the host's speed is not in them. Host times are
read from the backend's own clock, which on the simulator says what its model charges.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from streamflow.backends.base import Access, Backend, KernelSpec, Parameter

__all__ = ["EMPTY", "NOOP", "SCALE", "SPIN", "STALL_S_PER_CALL", "Bench", "Sizes", "Times"]

_FLOATS = np.dtype(np.float32)
STALL_S_PER_CALL = 12e-6
"""Longer than a host takes for any call that is submitted behind a stall."""

EMPTY = KernelSpec(
    name="streamflow_empty",
    parameters=(),
    source='extern "C" __global__ void streamflow_empty() {}',
    body=lambda: None,
)
NOOP = KernelSpec(
    name="streamflow_noop",
    parameters=(
        Parameter("x", "const float*", _FLOATS, Access.READ),
        Parameter("y", "float*", _FLOATS, Access.READ_WRITE),
        Parameter("n", "int", np.dtype(np.int32), None),
    ),
    source='extern "C" __global__ void streamflow_noop(const float* x, float* y, int n) {}',
    body=lambda x, y, n: None,
)
SPIN = KernelSpec(
    name="streamflow_spin",
    parameters=(Parameter("ns", "long long", np.dtype(np.int64), None),),
    source="""extern "C" __global__ void streamflow_spin(long long ns) {
    long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - start < ns);
}""",
    body=lambda ns: None,
    cost_s=lambda ns: ns * 1e-9,
)
SCALE = KernelSpec(
    name="streamflow_scale",
    parameters=(
        Parameter("x", "const float*", _FLOATS, Access.READ),
        Parameter("y", "float*", _FLOATS, Access.WRITE),
        Parameter("n", "unsigned long long", np.dtype(np.uint64), None),
    ),
    source="""extern "C" __global__ void streamflow_scale(
    const float* x, float* y, unsigned long long n) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i < n / 4) {
        float4 v = reinterpret_cast<const float4*>(x)[i];
        v.x *= 1.5f; v.y *= 1.5f; v.z *= 1.5f; v.w *= 1.5f;
        reinterpret_cast<float4*>(y)[i] = v;
    }
}""",
    body=lambda x, y, n: None,  # its time counts here, not what it computes
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is measured. The defaults are for a GPU; tests take less.

    Attributes
    ----------
    copies_nbytes : tuple of int
        Pinned copies, ascending.
    duplex_nbytes : tuple of int
        Copies that run in both directions at once.
    device_nbytes : tuple of int
        Copies and fills within the device, and between two.
    arrays_nbytes : tuple of int
        Each of the two arrays of a streaming kernel.
    staged_nbytes : int
        A pageable array that is put and got.
    num_calls : int
        Calls in a row where one is too short to be timed; below a stream's limit of 1022.
    num_reps : int
        Repetitions, after one that warms up.
    """

    copies_nbytes: tuple[int, ...] = tuple(1 << n for n in (12, 16, 18, 20, 22, 24, 26, 28))
    duplex_nbytes: tuple[int, ...] = (1 << 22, 1 << 24, 1 << 26)
    device_nbytes: tuple[int, ...] = (1 << 26, 1 << 28, 1 << 30)
    arrays_nbytes: tuple[int, ...] = (1 << 24, 1 << 26, 1 << 27, 1 << 28)
    staged_nbytes: int = 1 << 28
    num_calls: int = 200
    num_reps: int = 7


@dataclass(frozen=True, slots=True)
class Times:
    """Repetitions of one measurement, in seconds for one call."""

    values_s: tuple[float, ...]
    nbytes: int = 0
    median_s: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "median_s", statistics.median(self.values_s))

    def as_dict(self) -> dict[str, Any]:
        """What a profile keeps of it."""
        found: dict[str, Any] = {"median_s": self.median_s, "values_s": list(self.values_s)}
        return {"nbytes": self.nbytes, **found} if self.nbytes else found


class _Kernels(dict[KernelSpec, Any]):
    """Loaded when first launched: copies are measured where there is no compiler, too."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __missing__(self, spec: KernelSpec) -> Any:
        kernel = self[spec] = self._backend.load_kernel_blocking(spec)
        return kernel


class Bench:
    """One open device with four streams, and what measurements on it stand on.

    Usable in ``with``, which gives everything back.

    Parameters
    ----------
    backend : Backend
        Open; stays the caller's.
    sizes : Sizes
        How much is measured.
    """

    def __init__(self, backend: Backend, sizes: Sizes) -> None:
        self.backend = backend
        self.sizes = sizes
        self.streams = [backend.create_stream() for _ in range(4)]
        self.pool = backend.create_pool(release_threshold_nbytes=2**64 - 1)
        self.one = backend.launch_config((1, 1, 1), (1, 1, 1), 0)
        self._kernels = _Kernels(backend)
        self._timing = [backend.create_event(timing=True) for _ in range(4)]
        self.event = backend.create_event()
        self._pinned: list[int] = []
        self._allocated: list[int] = []

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.close()
        except Exception as also:  # an interrupt may have left a call half done
            if error is None:
                raise
            error.add_note(f"giving back what was measured with failed too: {also}")

    def close(self) -> None:
        """Give everything back."""
        self.backend.synchronize_blocking()
        for address in self._pinned:
            self.backend.free_pinned_blocking(address)
        for address in self._allocated:
            self.backend.deallocate(address, self.streams[0])
        self.streams[0].sync()
        for event in (*self._timing, self.event):
            event.close()
        self.backend.destroy_pool(self.pool)
        for stream in self.streams:
            stream.close()

    def warm_up(self) -> None:
        """Keep the device busy for a while: an idle one runs at lower clocks."""
        for _ in range(30):
            self.spin(self.streams[0], 10e-3)
            self.streams[0].sync()

    # -- what measurements stand on ----------------------------------------------------

    def pinned(self, nbytes: int) -> int:
        """Pinned memory until the end."""
        address = self.backend.allocate_pinned_blocking(nbytes)
        self._pinned.append(address)
        return address

    def allocate(self, nbytes: int, stream: Any) -> int:
        """Device memory until the end."""
        address = self.backend.allocate(self.pool, nbytes, stream)
        self._allocated.append(address)
        return address

    @contextmanager
    def device_memory(self, *sizes: int) -> Iterator[list[int]]:
        """Device memory for the block, usable on every stream."""
        backend, first = self.backend, self.streams[0]
        addresses = [backend.allocate(self.pool, nbytes, first) for nbytes in sizes]
        first.sync()
        yield addresses
        backend.synchronize_blocking()
        for address in addresses:
            backend.deallocate(address, first)
        first.sync()

    def launch(self, spec: KernelSpec, stream: Any, *args: Any) -> None:
        """One block of one thread."""
        self.backend.launch(stream, self.one, self._kernels[spec], *args)

    def launch_call(self, spec: KernelSpec, stream: Any, *args: Any) -> Callable[[], None]:
        """What launches it, with as little Python as can be."""
        return partial(self.backend.launch, stream, self.one, self._kernels[spec], *args)

    def spin(self, stream: Any, seconds: float) -> None:
        """Keep a stream busy."""
        self.launch(SPIN, stream, int(seconds * 1e9))

    def scale_call(self, stream: Any, src: int, dst: int, nbytes: int) -> Callable[[], None]:
        """What launches one streaming kernel: reads ``nbytes`` and writes as many."""
        backend, num = self.backend, nbytes // 4
        args = (
            backend.array_argument(src, (num,), _FLOATS),
            backend.array_argument(dst, (num,), _FLOATS),
            num,
        )
        config = backend.launch_config((-(-num // 4 // 256) or 1, 1, 1), (256, 1, 1), 0)
        return partial(backend.launch, stream, config, self._kernels[SCALE], *args)

    def device_times(
        self, num: int, submit: Callable[[], object], streams: Sequence[Any] = (), nbytes: int = 0
    ) -> Times:
        """Device seconds of one of the ``num`` calls that ``submit`` makes.

        Starts after a stall of the first stream, which ``submit`` is called behind; ends
        when all of ``streams`` have ended.
        """
        first = self.streams[0]
        start, end = self._timing[:2]
        found = []
        for _ in range(self.sizes.num_reps + 1):
            self.spin(first, 50e-6 + STALL_S_PER_CALL * num)
            first.record(start)
            for other in streams:
                if other is not first:
                    other.wait(start)
            submit()
            for other in streams:
                if other is not first:
                    other.record(self.event)
                    first.wait(self.event)
            first.record(end)
            end.sync()
            found.append(self.backend.elapsed_ms(start, end) * 1e-3 / num)
        return Times(tuple(found[1:]), nbytes)

    def duplex_times(
        self, num: int, submit: Sequence[Callable[[], object]], nbytes: int
    ) -> tuple[Times, Times]:
        """Device seconds of one call of each of two loops of ``num`` that run side by side."""
        one, two = self.streams[:2]
        starts, ends = self._timing[:2], self._timing[2:]
        found: tuple[list[float], list[float]] = ([], [])
        for _ in range(self.sizes.num_reps + 1):
            self.spin(one, 50e-6 + 2 * STALL_S_PER_CALL * num)
            one.record(self.event)
            two.wait(self.event)
            one.record(starts[0])
            two.record(starts[1])
            for _ in range(num):
                submit[0]()
                submit[1]()
            one.record(ends[0])
            two.record(ends[1])
            for end in ends:
                end.sync()
            for times, start, end in zip(found, starts, ends, strict=True):
                times.append(self.backend.elapsed_ms(start, end) * 1e-3 / num)
        return Times(tuple(found[0][1:]), nbytes), Times(tuple(found[1][1:]), nbytes)

    def host_times(
        self,
        call: Callable[[], object],
        *,
        before: Callable[[], object] = lambda: None,
        after: Callable[[], object] = lambda: None,
    ) -> Times:
        """Host seconds of one call, over ``num_calls`` in a row."""
        clock_s, num = self.backend.clock_s, self.sizes.num_calls
        calls = range(num)
        found = []
        was_enabled = gc.isenabled()
        for _ in range(self.sizes.num_reps + 1):
            self.backend.synchronize_blocking()
            before()
            gc.disable()
            try:
                start_s = clock_s()
                for _ in calls:
                    call()
                found.append((clock_s() - start_s) / num)
            finally:
                if was_enabled:
                    gc.enable()
            after()
        return Times(tuple(found[1:]))
