"""Kernels made launchable, once per source: compile or take the image, load, look up."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cuda.bindings import driver
from cuda.core import Device, Kernel, ObjectCode

from streamflow.backends.base import KernelSpec
from streamflow.backends.cuda.compiler import compile_cubin, open_cache
from streamflow.backends.cuda.errors import check, code_name
from streamflow.errors import CompileFailed, DeviceError

if TYPE_CHECKING:
    from cuda.core.utils import FileStreamProgramCache

__all__ = ["KernelLoader", "object_code"]

_ATTRIBUTE = driver.CUfunction_attribute

# Keyed by content, not by spec: a decorator run again and again (a kernel defined in
# a function) then loads one module, not one each time.
_Key = tuple[str, str | None, bytes | None, tuple[str, ...], str]


class KernelLoader:
    """The kernels loaded on one device. Thread-safe.

    Parameters
    ----------
    device : cuda.core.Device
        Current in the thread of every call.
    """

    __slots__ = ("_arch", "_cache", "_device", "_is_cache_open", "_kernels", "_loading", "_lock")

    def __init__(self, device: Device) -> None:
        self._device = device
        self._arch = f"sm_{device.arch}"
        self._kernels: dict[_Key, Kernel] = {}
        self._lock = threading.Lock()
        self._loading: dict[_Key, threading.Lock] = {}
        self._cache: FileStreamProgramCache | None = None
        self._is_cache_open = False

    def find(self, spec: KernelSpec) -> Kernel | None:
        """The kernel if it is loaded, at the cost of one dictionary look-up."""
        return self._kernels.get(_key(spec))

    def load_blocking(self, spec: KernelSpec) -> Kernel:
        """Compile or take the image, and load it now.

        Two threads that ask for one kernel compile it once; a failure is not
        remembered, so a second call tries again.

        Raises
        ------
        CompileFailed
            The source is wrong, or the image is not for this device.
        BackendUnavailable
            No compiler library.
        DeviceError
            The code has no kernel of that name.
        """
        key = _key(spec)
        with self._lock:
            turn = self._loading.setdefault(key, threading.Lock())
        try:
            with turn:
                kernel = self._kernels.get(key)
                if kernel is None:
                    kernel = self._load(spec)
                    self._kernels[key] = kernel
                return kernel
        finally:
            with self._lock:
                self._loading.pop(key, None)

    def clear(self) -> None:
        """Forget every kernel; modules unload as their last user goes."""
        self._kernels.clear()

    def _load(self, spec: KernelSpec) -> Kernel:
        if spec.source is not None:
            cubin = compile_cubin(
                spec.source,
                spec.filename,
                arch=self._arch,
                options=spec.options,
                cache=self._open_cache(),
            )
            code = ObjectCode.from_cubin(cubin, name=Path(spec.filename).name)
        elif spec.image is not None:
            code = object_code(spec.image, spec.name)
        else:
            raise DeviceError(
                f"kernel {spec.name} has neither CUDA C++ source nor an image: it runs on the "
                "simulator only"
            )
        try:
            kernel = code.get_kernel(spec.name)
        except Exception as error:
            if code_name(error) == "CUDA_ERROR_NOT_FOUND":
                raise DeviceError(
                    f"{spec.filename} has no kernel named {spec.name!r}: declare it "
                    f'extern "C" __global__ void {spec.name}(...)'
                ) from error
            raise
        self._prepare(kernel)
        return kernel

    def _prepare(self, kernel: Kernel) -> None:
        """Have the first launch find nothing left to do (rule R1)."""
        handle = kernel.handle
        # With lazy loading the first launch would load the module on the caller's
        # thread, and may wait for kernels that are running.
        check(driver.cuKernelGetFunction(handle), "cuKernelGetFunction")
        # Above 48 KiB dynamic shared memory has to be asked for. Only permits it: what a
        # launch reserves is what the launch says.
        index = self._device.device_id
        static_nbytes = check(
            driver.cuKernelGetAttribute(
                _ATTRIBUTE.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, handle, index
            ),
            "cuKernelGetAttribute",
        )
        most = self._device.properties.max_shared_memory_per_block_optin - static_nbytes
        check(
            driver.cuKernelSetAttribute(
                _ATTRIBUTE.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, most, handle, index
            ),
            "cuKernelSetAttribute",
        )

    def _open_cache(self) -> Any:
        # Not at open: making the directory is work that only compiling needs.
        with self._lock:
            if not self._is_cache_open:
                self._cache = open_cache()
                self._is_cache_open = True
            return self._cache


def object_code(image: bytes, name: str) -> ObjectCode:
    """Wrap a cubin, fatbin or PTX, told apart by how it begins.

    Raises
    ------
    CompileFailed
        None of the three.
    """
    if image.startswith(b"\x7fELF"):
        return ObjectCode.from_cubin(image, name=name)
    if image.startswith(b"\x50\xed\x55\xba"):
        return ObjectCode.from_fatbin(image, name=name)
    if b".version" in image and b".target" in image:
        # The driver's JIT reads PTX as a C string.
        return ObjectCode.from_ptx(image.rstrip(b"\0") + b"\0", name=name)
    raise CompileFailed(
        f"the image of kernel {name} is neither cubin, fatbin nor PTX; it begins with {image[:8]!r}"
    )


def _key(spec: KernelSpec) -> _Key:
    return (spec.name, spec.source, spec.image, spec.options, spec.filename)
