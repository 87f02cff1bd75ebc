"""The CUDA backend keeps the contract on real hardware, and what only hardware can show."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from streamflow.backends import open_backend
from streamflow.backends.base import Backend, KernelSpec
from streamflow.config import Settings
from streamflow.errors import CompileFailed, DeviceError
from streamflow.testing.contract import BackendContract, PeerContract, Rig

pytestmark = pytest.mark.gpu


class _OnCuda:
    def open(self, index: int = 0) -> Backend:
        return open_backend("cuda", index, Settings(), None)

    def apart(self, check: Callable[[Backend], None]) -> None:
        """In a process of its own: nothing works in it once the device is lost."""
        program = textwrap.dedent(f"""
            from streamflow.backends import open_backend
            from streamflow.config import Settings
            from {check.__module__} import {check.__name__}

            {check.__name__}(open_backend("cuda", 0, Settings(), None))
            print("as it should be")
        """)
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
        assert done.stdout == "as it should be\n", done.stderr
        assert done.returncode == 0


class TestCuda(_OnCuda, BackendContract):
    def test_source_that_does_not_compile(self, rig: Rig) -> None:
        spec = KernelSpec(
            name="broken",
            parameters=(),
            source='extern "C" __global__ void broken() {\n    nonesuch = 1;\n}',
            filename="/somewhere/broken.cu",
        )
        with pytest.raises(CompileFailed, match=r"broken\.cu\(2\)") as caught:
            rig.backend.load_kernel_blocking(spec)
        assert "nonesuch" in caught.value.log

    def test_a_name_that_the_source_lacks(self, rig: Rig) -> None:
        spec = KernelSpec(name="absent", parameters=(), source='extern "C" __global__ void a() {}')
        with pytest.raises(DeviceError, match="no kernel named 'absent'"):
            rig.backend.load_kernel_blocking(spec)

    @pytest.mark.parametrize("kind", ["cubin", "ptx"])
    def test_an_image_is_loaded_as_what_it_is(self, rig: Rig, kind: str) -> None:
        image = _image(kind, rig.backend.properties.compute_capability)
        spec = KernelSpec(name="seven", parameters=(), image=image)
        kernel = rig.backend.load_kernel_blocking(spec)
        address = rig.put(np.zeros(4, np.uint8))
        config = rig.backend.launch_config((1, 1, 1), (1, 1, 1), 0)
        rig.backend.launch(rig.stream, config, kernel, address)
        assert rig.get(address, 4).view(np.int32)[0] == 7

    def test_a_graph_is_made_again_after_another_thread_waited_for_the_device(
        self, rig: Rig
    ) -> None:
        from cuda.bindings import driver

        backend, answers = rig.backend, []
        address = rig.put(np.zeros(64, np.uint8))

        def wait() -> None:
            backend.set_current()
            answers.append(driver.cuCtxSynchronize()[0])

        def run(stream: Any) -> None:
            if not answers:  # as another library would, which knows nothing of captures
                thread = threading.Thread(target=wait)
                thread.start()
                thread.join()
            backend.fill(address, b"\7", 64, stream)

        graph = backend.create_graph()
        first = backend.add_graph_node(
            graph, lambda stream: backend.fill(address, b"\1", 64, stream), ()
        )
        backend.add_graph_node(graph, run, [first])
        executable = backend.instantiate_graph_blocking(graph)
        backend.launch_graph(executable, rig.stream)
        assert (rig.get(address, 64) == 7).all()
        for handle in (executable, graph):
            backend.close_graph(handle)

    def test_c42_the_default_pool_keeps_its_attributes(self) -> None:
        before = _default_threshold()
        rig = Rig(self.open())
        rig.put(np.zeros(1 << 20, np.uint8))
        rig.close()
        assert _default_threshold() == before


class TestCudaPeers(_OnCuda, PeerContract):
    @pytest.fixture(autouse=True)
    def _two_devices(self) -> None:
        from cuda.bindings import driver

        driver.cuInit(0)
        _, count = driver.cuDeviceGetCount()
        if count < 2:
            pytest.skip(f"peer copies need two GPUs, found {count}")


def _image(kind: str, capability: tuple[int, int]) -> bytes:
    from cuda.core import Program, ProgramOptions

    # PTX for an older virtual architecture: the driver may be older than the compiler.
    arch = f"sm_{capability[0]}{capability[1]}" if kind == "cubin" else "compute_80"
    source = 'extern "C" __global__ void seven(int* p) { *p = 7; }'
    return bytes(Program(source, "c++", ProgramOptions(arch=arch)).compile(kind).code)


def _default_threshold() -> int:
    from cuda.bindings import driver

    driver.cuInit(0)
    _, pool = driver.cuDeviceGetDefaultMemPool(0)
    attribute = driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
    _, threshold = driver.cuMemPoolGetAttribute(pool, attribute)
    return int(threshold)
