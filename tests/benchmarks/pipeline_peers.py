"""P6's peers: the same 32 batches through the same kernel, as programs write it without us."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, TypeAlias

import numpy as np

from streamflow.backends.base import KernelSpec
from tests.benchmarks.report import Report, optional
from tests.benchmarks.rig import Bare

__all__ = ["Consume", "Peers"]

Consume: TypeAlias = Callable[[int, "np.ndarray[Any, Any]"], None]
"""Told the number of a batch and its result."""

_BLOCK = 256


class Peers:
    """Runs by name; each takes a :data:`Consume` and returns when all results were consumed.

    Parameters
    ----------
    bare : Bare
    spec : KernelSpec
        Of a kernel of an array, a number of steps, and the array's size.
    batches : sequence of ndarray
        Of one shape, pageable.
    depth : int
        Batches on their way at once.
    report : Report
        Told what is not installed here.
    """

    def __init__(
        self,
        bare: Bare,
        spec: KernelSpec,
        kernel: Any,
        batches: Sequence[np.ndarray[Any, Any]],
        depth: int,
        report: Report,
    ) -> None:
        from cuda.core import LaunchConfig, StreamOptions

        self.bare, self.spec, self.kernel = bare, spec, kernel
        self.batches, self.depth, self.report = batches, depth, report
        self.steps = 1
        self._size, self._nbytes = batches[0].size, batches[0].nbytes
        self._config = LaunchConfig(grid=-(-self._size // _BLOCK), block=_BLOCK)
        self._options = StreamOptions(nonblocking=True)
        check, driver = bare.check, bare.driver
        self._device = [int(check(driver.cuMemAlloc(self._nbytes))) for _ in range(depth)]
        self._pinned = [self._pin() for _ in range(2)]
        for number, batch in enumerate(batches):
            np.copyto(self._pinned[0][number], batch)

    def _pin(self) -> np.ndarray[Any, Any]:
        nbytes = self._nbytes * len(self.batches)
        address = int(self.bare.check(self.bare.driver.cuMemHostAlloc(nbytes, 0)))
        memory = (ctypes.c_char * nbytes).from_address(address)
        array = np.frombuffer(memory, np.float32).reshape(len(self.batches), self._size)
        array[:] = 0  # touched
        return array

    def close(self) -> None:
        """Give back what is pinned and what is on the device."""
        for array in self._pinned:
            self.bare.check(self.bare.driver.cuMemFreeHost(array.ctypes.data))
        for address in self._device:
            self.bare.check(self.bare.driver.cuMemFree(address))

    def calibrate(self, wanted_s: float) -> float:
        """Choose the number of steps for a kernel of that length; returns how long it is."""
        from cuda.core import EventOptions

        timing = EventOptions(timing_enabled=True)
        start, end = (self.bare.device.create_event(timing) for _ in range(2))
        stream = self.bare.stream

        def taken_s(steps: int) -> float:
            stream.record(start)
            self._launch(stream, self._device[0], steps)
            stream.record(end)
            end.sync()
            return float(end - start) / 1e3

        taken_s(1)
        per_step_s = median(taken_s(4000) for _ in range(5)) / 4000
        self.steps = max(1, round(wanted_s / per_step_s))
        return median(taken_s(self.steps) for _ in range(5))

    def cases(self) -> dict[str, Callable[[Consume], None]]:
        """What can run here; the first one is the floor."""
        found = {"pinned on three streams": self.pinned}
        self._cupy, self._torch = optional("cupy"), optional("torch")
        if self._torch is None or not self._torch.cuda.is_available():
            self.report.note("torch with CUDA is not installed here: left out")
        else:
            found["torch, pin_memory and side streams"] = self.torch
        if self._cupy is None:
            self.report.note("CuPy is not installed here: left out")
        else:
            self._raw = self._cupy.RawKernel(self.spec.source, self.spec.name)
            found["CuPy, double buffering by hand"] = self.cupy_by_hand
            found["CuPy, one batch after the other"] = self.cupy_naive
        return found

    def _launch(self, stream: Any, address: int, steps: int) -> None:
        self.bare.launch(
            stream, self._config, self.kernel, address, np.int32(steps), np.uint64(self._size)
        )

    # -- each of them --------------------------------------------------------------------

    def pinned(self, consume: Consume) -> None:
        """The floor: everything lies in pinned memory, and goes back there."""
        bare, driver, check = self.bare, self.bare.driver, self.bare.check
        copy_in, copy_out = driver.cuMemcpyHtoDAsync, driver.cuMemcpyDtoHAsync
        h2d, compute, d2h = (bare.device.create_stream(options=self._options) for _ in range(3))
        there, back = (array.ctypes.data for array in self._pinned)
        come, ran, gone = (
            [bare.device.create_event() for _ in range(self.depth)] for _ in range(3)
        )
        for number in range(len(self.batches)):
            slot, offset = number % self.depth, number * self._nbytes
            address = self._device[slot]
            if number >= self.depth:
                h2d.wait(gone[slot])
            check(copy_in(address, there + offset, self._nbytes, h2d.handle))
            h2d.record(come[slot])
            compute.wait(come[slot])
            self._launch(compute, address, self.steps)
            compute.record(ran[slot])
            d2h.wait(ran[slot])
            check(copy_out(back + offset, address, self._nbytes, d2h.handle))
            d2h.record(gone[slot])
        d2h.sync()
        for number, result in enumerate(self._pinned[1]):
            consume(number, result)

    def torch(self, consume: Consume) -> None:
        """Pinned on the way in by ``pin_memory``, results in pinned tensors."""
        from cuda.core import Stream

        torch = self._torch
        h2d, compute, d2h = (torch.cuda.Stream() for _ in range(3))
        launching = Stream.from_handle(compute.cuda_stream)
        window: deque[tuple[int, Any, Any]] = deque()

        def collect() -> None:
            number, event, tensor = window.popleft()
            event.synchronize()
            consume(number, tensor.numpy())

        for number, batch in enumerate(self.batches):
            if len(window) == self.depth:
                collect()
            source = torch.from_numpy(batch).pin_memory()
            with torch.cuda.stream(h2d):
                x = source.to("cuda", non_blocking=True)
            compute.wait_stream(h2d)
            x.record_stream(compute)
            self._launch(launching, x.data_ptr(), self.steps)
            d2h.wait_stream(compute)
            x.record_stream(d2h)
            result = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            with torch.cuda.stream(d2h):
                result.copy_(x, non_blocking=True)
                event = torch.cuda.Event()
                event.record(d2h)
            window.append((number, event, result))
            del source, x, result
        while window:
            collect()

    def cupy_by_hand(self, consume: Consume) -> None:
        """Two arrays and two streams in turn, from and to pageable memory."""
        cupy = self._cupy
        streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
        arrays = [cupy.empty(self._size, cupy.float32) for _ in range(2)]
        cupy.cuda.get_current_stream().synchronize()
        for number, batch in enumerate(self.batches):
            mine = number % 2
            arrays[mine].set(batch, stream=streams[mine])
            with streams[mine]:
                self._run_raw(arrays[mine])
            if number:
                consume(number - 1, arrays[1 - mine].get(stream=streams[1 - mine]))
        consume(number, arrays[mine].get(stream=streams[mine]))

    def cupy_naive(self, consume: Consume) -> None:
        """In, run, out."""
        cupy = self._cupy
        for number, batch in enumerate(self.batches):
            x = cupy.asarray(batch)
            self._run_raw(x)
            consume(number, cupy.asnumpy(x))

    def _run_raw(self, array: Any) -> None:
        args = (array, np.int32(self.steps), np.uint64(self._size))
        self._raw((-(-self._size // _BLOCK),), (_BLOCK,), args)
