"""P4 and P5: ``put`` and ``get`` against pinned and pageable copies, CuPy's and torch's own.

Three parts: the targets at 1 GiB; the same over chunk size and number of threads; and all sizes
from 4 bytes to 4 GiB beside what a program would write with CuPy or torch.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np

from tests.benchmarks.report import Options, Report, Sample, optional
from tests.benchmarks.rig import Bare, Case, device, interleaved, warm

_MIB = 1 << 20


def run(options: Options) -> Report:
    """Measure, print and compare."""
    report = Report("P4P5", "put and get of pageable arrays")
    asyncio.run(_targets(options, report))
    asyncio.run(_curve(options, report))
    asyncio.run(_sizes(options, report))
    return report


def _num_reps(options: Options) -> int:
    return options.sized(max(5, min(options.num_reps, 10)), 2)


# -- the targets -----------------------------------------------------------------------------


async def _targets(options: Options, report: Report) -> None:
    nbytes = options.sized(1 << 30 if options.is_cuda else 64 * _MIB, _MIB)
    source = np.arange(nbytes // 4, dtype=np.float32)
    result = np.zeros_like(source)  # touched
    async with device(options) as dev:
        await warm(dev)
        on_device = dev.put(source)
        await on_device
        cases: dict[str, Case] = {
            "put": lambda: _awaited(dev.put(source)),
            "put, out=": lambda: _awaited(dev.put(source, out=on_device)),
            "get, out=": lambda: _awaited(dev.get(on_device, out=result)),
            "get": lambda: _awaited(dev.get(on_device)),
        }
        with _peers(dev, options, source, result, on_device.address) as peers:
            found = await interleaved(_num_reps(options), cases | peers)
        if not np.array_equal(source, result):
            raise AssertionError("what came back is not what was sent")
    print(f"  {nbytes / _MIB:,.0f} MiB of float32")
    rates = {
        name: report.add(name, Sample(tuple(nbytes / each / 1e9 for each in taken), "GB/s"))
        for name, taken in found.items()
    }
    if options.is_cuda:
        put, get = rates["put"], rates["get, out="]
        report.target("P4: put over pinned", put / rates["pinned in"], "x", at_least=0.90)
        report.target("P4: put over pageable", put / rates["pageable in"], "x", at_least=3)
        report.target("P5: get over pinned", get / rates["pinned out"], "x", at_least=0.80)
        report.add(
            "put, out= over by hand", Sample((rates["put, out="] / rates["by hand in"],), "x")
        )
        report.add("get, out= over by hand", Sample((get / rates["by hand out"],), "x"))
        report.target("P5: get over pageable", get / rates["pageable out"], "x", at_least=5)
    else:
        report.note("no driver here: its pinned and pageable copies, and the targets, are left out")


async def _awaited(work: Any) -> Any:
    return await work


@contextmanager
def _peers(
    dev: Any, options: Options, source: Any, result: Any, address: int
) -> Iterator[dict[str, Case]]:
    """The driver's own copies between the same arrays, and from and to pinned memory."""
    if not options.is_cuda:
        yield {}
        return
    bare, nbytes = Bare(dev), source.nbytes
    driver, stream = bare.driver, bare.stream
    handle = stream.handle
    pinned = bare.check(driver.cuMemHostAlloc(nbytes, 0))
    ctypes.memset(int(pinned), 1, nbytes)
    there, back = source.ctypes.data, result.ctypes.data

    async def call(function: Any, *args: Any) -> None:
        bare.check(function(*args))
        stream.sync()

    by_hand = _ByHand(dev, bare, address, source, result)
    yield {
        "by hand in": by_hand.put,
        "by hand out": by_hand.get,
        "pinned in": lambda: call(driver.cuMemcpyHtoDAsync, address, pinned, nbytes, handle),
        "pinned out": lambda: call(driver.cuMemcpyDtoHAsync, pinned, address, nbytes, handle),
        "pageable in": lambda: call(driver.cuMemcpyHtoD, address, there, nbytes),
        "pageable out": lambda: call(driver.cuMemcpyDtoH, back, address, nbytes),
    }
    by_hand.close()
    bare.check(driver.cuMemFreeHost(pinned))


class _ByHand:
    """Double buffering as a program tuned for this machine has it: a thread, two chunks, a stream.

    The numbers of threads and the chunk size are the device's, so that only the code differs.
    """

    def __init__(self, dev: Any, bare: Bare, address: int, source: Any, result: Any) -> None:
        settings = dev._core.settings
        self._num, self._chunk = settings.staging_threads, settings.staging_in_nbytes
        self._bare, self._driver, self._address = bare, bare.driver, address
        self._ends = source.view(np.uint8), result.view(np.uint8)
        check, driver = bare.check, bare.driver
        context = check(driver.cuCtxGetCurrent())
        self._pool = ThreadPoolExecutor(
            self._num, initializer=driver.cuCtxSetCurrent, initargs=(context,)
        )
        self._lines = []
        for _ in range(self._num):
            halves = []
            for _ in range(2):
                chunk = int(check(driver.cuMemHostAlloc(self._chunk, 0)))
                memory = (ctypes.c_char * self._chunk).from_address(chunk)
                event = check(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
                halves.append((chunk, np.frombuffer(memory, np.uint8), event))
            self._lines.append((check(driver.cuStreamCreate(1)), halves))

    async def put(self) -> None:
        list(self._pool.map(self._fill, range(self._num)))

    async def get(self) -> None:
        list(self._pool.map(self._drain, range(self._num)))

    def _parts(self, number: int) -> Iterator[tuple[int, int, int]]:
        size = self._ends[0].nbytes
        for used, start in enumerate(range(number * self._chunk, size, self._num * self._chunk)):
            yield used, start, min(self._chunk, size - start)

    def _fill(self, number: int) -> None:
        check, driver = self._bare.check, self._driver
        stream, halves = self._lines[number]
        for used, start, nbytes in self._parts(number):
            chunk, array, event = halves[used % 2]
            if used >= 2:
                check(driver.cuEventSynchronize(event))
            np.copyto(array[:nbytes], self._ends[0][start : start + nbytes])
            check(driver.cuMemcpyHtoDAsync(self._address + start, chunk, nbytes, stream))
            check(driver.cuEventRecord(event, stream))
        check(driver.cuStreamSynchronize(stream))

    def _drain(self, number: int) -> None:
        check, driver = self._bare.check, self._driver
        stream, halves = self._lines[number]
        pending: list[tuple[int, int, int]] = []
        for part in (*self._parts(number), None, None):
            if len(pending) == 2 or (part is None and pending):
                used, start, nbytes = pending.pop(0)
                _, array, event = halves[used % 2]
                check(driver.cuEventSynchronize(event))
                np.copyto(self._ends[1][start : start + nbytes], array[:nbytes])
            if part is not None:
                used, start, nbytes = part
                chunk, _, event = halves[used % 2]
                check(driver.cuMemcpyDtoHAsync(chunk, self._address + start, nbytes, stream))
                check(driver.cuEventRecord(event, stream))
                pending.append(part)

    def close(self) -> None:
        self._pool.shutdown()
        for stream, halves in self._lines:
            self._bare.check(self._driver.cuStreamDestroy(stream))
            for chunk, _, event in halves:
                self._bare.check(self._driver.cuEventDestroy(event))
                self._bare.check(self._driver.cuMemFreeHost(chunk))


# -- chunks and threads ----------------------------------------------------------------------


async def _curve(options: Options, report: Report) -> None:
    nbytes = options.sized(1 << 30 if options.is_cuda else 32 * _MIB, 4 * _MIB)
    chunks = [1, 2, 4, 8, 16, 32] if not options.is_tiny else [1, 4]
    threads = [1, 2, 4, 8, 12, 16] if not options.is_tiny else [1, 2]
    source = np.arange(nbytes // 4, dtype=np.float32)
    result = np.zeros_like(source)
    rates: dict[str, dict[tuple[int, int], Sample]] = {"put, out=": {}, "get, out=": {}}
    for chunk in chunks:
        for num in threads:
            settings = {
                "staging_in_nbytes": chunk * _MIB,
                "staging_out_nbytes": chunk * _MIB,
                "staging_threads": num,
            }
            async with device(options, **settings) as dev:
                x = await dev.put(source)
                cases: dict[str, Case] = {
                    "put, out=": lambda x=x, dev=dev: _awaited(dev.put(source, out=x)),
                    "get, out=": lambda x=x, dev=dev: _awaited(dev.get(x, out=result)),
                }
                found = await interleaved(options.sized(5, 1), cases)
                for name, taken in found.items():
                    rate = tuple(nbytes / each / 1e9 for each in taken)
                    rates[name][chunk, num] = Sample(rate, "GB/s")
                del x
    for name, cells in rates.items():
        report.table(
            f"{name} of {nbytes // _MIB} MiB, GB/s, by chunk (MiB) and threads",
            [str(num) for num in threads],
            {str(chunk): [cells[chunk, num] for num in threads] for chunk in chunks},
        )


# -- sizes -----------------------------------------------------------------------------------


async def _sizes(options: Options, report: Report) -> None:
    largest = options.sized(1 << 32 if options.is_cuda else 1 << 24, 1 << 18)
    sizes = [4**power for power in range(1, 17) if 4**power <= largest]
    libraries = _libraries(options, report)
    columns = [f"{verb} by {who}" for verb in ("put", "get") for who in ("streamflow", *libraries)]
    rows: dict[str, list[Sample]] = {}
    async with device(options) as dev:
        await warm(dev)
        for nbytes in sizes:
            source = np.arange(nbytes // 4, dtype=np.float32)
            x = await dev.put(source)
            cases: dict[str, Case] = {
                "put by streamflow": lambda source=source: _awaited(dev.put(source)),
                "get by streamflow": lambda x=x: _awaited(dev.get(x)),
            }
            for who, (to_device, to_host) in libraries.items():
                theirs = to_device(source)
                cases[f"put by {who}"] = lambda to=to_device, source=source: _called(to, source)
                cases[f"get by {who}"] = lambda to=to_host, theirs=theirs: _called(to, theirs)
            num_reps = _num_reps(options) if nbytes >= _MIB else options.sized(50, 2)
            found = await interleaved(num_reps, cases)
            rows[_told(nbytes)] = [
                Sample(tuple(each * 1e6 for each in found[column]), "us") for column in columns
            ]
            del x, source, cases
    report.table("microseconds until it is there, a new array each time", columns, rows)


async def _called(function: Callable[[Any], Any], array: Any) -> Any:
    return function(array)


def _libraries(
    options: Options, report: Report
) -> dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]]:
    """To the device and back as programs write it, each until it is done."""
    found: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {}
    if not options.is_cuda:
        report.note("no GPU: CuPy and torch are left out")
        return found
    cupy, torch = optional("cupy"), optional("torch")
    if cupy is None:
        report.note("CuPy is not installed here: left out")
    else:

        def cupy_in(array: Any) -> Any:
            moved = cupy.asarray(array)
            cupy.cuda.get_current_stream().synchronize()
            return moved

        found["CuPy"] = (cupy_in, cupy.asnumpy)
    if torch is None or not torch.cuda.is_available():
        report.note("torch with CUDA is not installed here: left out")
    else:

        def torch_in(array: Any) -> Any:
            moved = torch.from_numpy(array).cuda()
            torch.cuda.synchronize()
            return moved

        found["torch"] = (torch_in, lambda tensor: tensor.cpu())
    return found


def _told(nbytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", _MIB), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} B"
