"""Kernels: arguments of every type, order, and launches that must be refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from streamflow.backends.base import Access, KernelSpec, Parameter
from streamflow.errors import DeviceLost, LaunchFailed
from streamflow.testing.contract.harness import Harness, Rig, drain, fidelity, settle

__all__ = ["KernelContract"]

_F32 = np.dtype(np.float32)
_I32 = np.dtype(np.int32)


def _pointer(name: str, ctype: str, dtype: np.dtype[Any], access: Access) -> Parameter:
    return Parameter(name, ctype, dtype, access)


def _axpy(y: Any, a: Any, x: Any, n: Any) -> None:
    y[:n] += a * x[:n]


AXPY = KernelSpec(
    name="axpy",
    parameters=(
        _pointer("y", "float*", _F32, Access.READ_WRITE),
        Parameter("a", "float", _F32, None),
        _pointer("x", "const float*", _F32, Access.READ),
        Parameter("n", "int", np.dtype(np.int32), None),
    ),
    source="""
extern "C" __global__ void axpy(float* y, float a, const float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += a * x[i];
}
""",
    body=_axpy,
)


def _store(out: Any, value: Any) -> None:
    out[0] = value


def store(ctype: str, dtype: np.dtype[Any]) -> KernelSpec:
    """A kernel that writes its scalar argument to memory."""
    return KernelSpec(
        name="store",
        parameters=(
            _pointer("out", f"{ctype}*", dtype, Access.WRITE),
            Parameter("value", ctype, dtype, None),
        ),
        source=(
            f'extern "C" __global__ void store({ctype}* out, {ctype} value) '
            "{ if (threadIdx.x == 0 && blockIdx.x == 0) *out = value; }"
        ),
        body=_store,
    )


def _mixed(c: Any, d: Any, i: Any, f: Any, out: Any, b: Any, u: Any) -> None:
    out[:] = [c, d, i, f, b, u]


MIXED = KernelSpec(
    name="mixed",
    parameters=(
        Parameter("c", "char", np.dtype(np.int8), None),
        Parameter("d", "double", np.dtype(np.float64), None),
        Parameter("i", "int", np.dtype(np.int32), None),
        Parameter("f", "float", _F32, None),
        _pointer("out", "double*", np.dtype(np.float64), Access.WRITE),
        Parameter("b", "bool", np.dtype(np.bool_), None),
        Parameter("u", "unsigned short", np.dtype(np.uint16), None),
    ),
    source="""
extern "C" __global__ void mixed(
        char c, double d, int i, float f, double* out, bool b, unsigned short u) {
    out[0] = c; out[1] = d; out[2] = i; out[3] = f; out[4] = b; out[5] = u;
}
""",
    body=_mixed,
)

# (C type, dtype, what the runtime hands to launch for it)
_SCALARS = [
    ("int", np.int32, -5),
    ("int", np.int32, 2**31 - 1),
    ("unsigned int", np.uint32, 2**32 - 1),
    ("short", np.int16, -(2**15)),
    ("unsigned short", np.uint16, 2**16 - 1),
    ("char", np.int8, -7),
    ("unsigned char", np.uint8, 200),
    ("long long", np.int64, -(2**62) - 1),
    ("unsigned long long", np.uint64, 2**63 - 1),
    ("unsigned long long", np.uint64, np.uint64(2**64 - 1)),
    ("bool", np.bool_, np.True_),
    ("bool", np.bool_, np.False_),
    ("float", np.float32, np.float32(1.1)),
    ("double", np.float64, 1 / 3),
]


class KernelContract(Harness):
    """Loading and launching on one device."""

    def load(self, rig: Rig, spec: KernelSpec) -> Any:
        """The kernel of ``spec``, however long it takes."""
        return rig.backend.load_kernel(spec) or rig.backend.load_kernel_blocking(spec)

    def launch_axpy(self, rig: Rig, y: int, a: float, x: int, n: int, stream: Any = None) -> None:
        """``y += a * x`` over ``n`` floats."""
        backend = rig.backend
        config = backend.launch_config((-(-n // 128), 1, 1), (128, 1, 1), 0)
        backend.launch(
            rig.stream if stream is None else stream,
            config,
            self.load(rig, AXPY),
            backend.array_argument(y, (n,), _F32),
            np.float32(a),
            backend.array_argument(x, (n,), _F32),
            n,
        )

    def test_a_loaded_kernel_is_found_at_once(self, rig: Rig) -> None:
        assert rig.backend.load_kernel_blocking(AXPY) is not None
        assert rig.backend.load_kernel(AXPY) is not None

    @pytest.mark.parametrize(
        ("ctype", "dtype", "value"),
        _SCALARS,
        ids=lambda value: str(getattr(value, "__name__", value)),
    )
    def test_scalars_arrive_as_they_were_given(
        self, rig: Rig, ctype: str, dtype: type[Any], value: Any
    ) -> None:
        backend = rig.backend
        kind = np.dtype(dtype)
        address = rig.put(np.full(kind.itemsize, 0x55, np.uint8))
        backend.launch(
            rig.stream,
            backend.launch_config((1, 1, 1), (32, 1, 1), 0),
            self.load(rig, store(ctype, kind)),
            backend.array_argument(address, (1,), kind),
            value,
        )
        assert rig.get(address, kind.itemsize).view(kind)[0] == dtype(value)

    def test_arguments_of_many_types_keep_their_places(self, rig: Rig) -> None:
        backend = rig.backend
        address = rig.put(np.zeros(48, np.uint8))
        backend.launch(
            rig.stream,
            backend.launch_config((1, 1, 1), (1, 1, 1), 0),
            self.load(rig, MIXED),
            -3,
            0.1,
            -70000,
            np.float32(0.5),
            backend.array_argument(address, (6,), np.dtype(np.float64)),
            np.True_,
            65535,
        )
        found = rig.get(address, 48).view(np.float64)
        np.testing.assert_array_equal(found, [-3.0, 0.1, -70000.0, 0.5, 1.0, 65535.0])

    @pytest.mark.parametrize("n", [1, 127, 129, 100_000])
    def test_arrays_are_read_and_written_in_place(self, rig: Rig, n: int) -> None:
        x = np.arange(n, dtype=np.float32)
        y = np.full(n + 8, 2, np.float32)
        at_x, at_y = rig.put(x.view(np.uint8)), rig.put(y.view(np.uint8))
        self.launch_axpy(rig, at_y, 3.0, at_x, n)
        y[:n] += np.float32(3) * x
        np.testing.assert_array_equal(rig.get(at_y, y.nbytes).view(np.float32), y)

    def test_arrays_may_begin_inside_an_allocation(self, rig: Rig) -> None:
        y = np.zeros(64, np.float32)
        at_x, at_y = rig.put(np.ones(64, np.float32).view(np.uint8)), rig.put(y.view(np.uint8))
        self.launch_axpy(rig, at_y + 4 * 10, 5.0, at_x + 4 * 3, 20)
        y[10:30] = 5
        np.testing.assert_array_equal(rig.get(at_y, y.nbytes).view(np.float32), y)

    @fidelity
    def test_launches_on_one_stream_run_in_order(self, rig: Rig) -> None:
        """Launches on one stream run one after the other."""
        y = np.ones(1000, np.float32)
        at_y = rig.put(y.view(np.uint8))
        for _ in range(10):
            self.launch_axpy(rig, at_y, 1.0, at_y, 1000)  # doubles
        assert (rig.get(at_y, y.nbytes).view(np.float32) == 1024).all()

    def test_an_event_orders_kernels_of_two_streams(self, rig: Rig) -> None:
        n = 1 << 16
        other = rig.backend.create_stream()
        at_x = rig.put(np.ones(n, np.float32).view(np.uint8))
        at_y = rig.put(np.zeros(n, np.float32).view(np.uint8))
        self.load(rig, AXPY)  # a module must not have to load behind the stall
        with self.stall(rig, rig.stream):
            self.launch_axpy(rig, at_x, 1.0, at_x, n)
            other.wait(rig.mark(rig.stream))
            self.launch_axpy(rig, at_y, 1.0, at_x, n, stream=other)
            done = rig.mark(other)
            settle(rig.backend)
            assert not done.is_done
        drain(rig.backend, done)
        assert (rig.get(at_y, 4 * n).view(np.float32) == 2).all()
        other.close()

    def test_a_launch_may_ask_for_all_of_shared_memory(self, rig: Rig) -> None:
        backend = rig.backend
        most = backend.properties.max_shared_memory_per_block_nbytes
        address = rig.put(np.zeros(4, np.uint8))
        backend.launch(
            rig.stream,
            backend.launch_config((1, 1, 1), (32, 1, 1), most),
            self.load(rig, store("int", np.dtype(np.int32))),
            backend.array_argument(address, (1,), np.dtype(np.int32)),
            11,
        )
        assert rig.get(address, 4).view(np.int32)[0] == 11

    @fidelity
    @pytest.mark.parametrize(
        "wrong",
        ["block too large", "block too deep", "no blocks", "grid too high", "too much shared"],
    )
    def test_c22_a_bad_shape_is_refused_and_not_sticky(self, rig: Rig, wrong: str) -> None:
        """A launch of an impossible shape is refused, and the device stays usable."""
        backend = rig.backend
        limits = backend.properties
        grid, block, shared_nbytes = {
            "block too large": ((1, 1, 1), (limits.max_threads_per_block * 2, 1, 1), 0),
            "block too deep": ((1, 1, 1), (1, 1, limits.max_block_dim[2] + 1), 0),
            "no blocks": ((0, 1, 1), (32, 1, 1), 0),
            "grid too high": ((1, limits.max_grid_dim[1] + 1, 1), (32, 1, 1), 0),
            "too much shared": (
                (1, 1, 1),
                (32, 1, 1),
                limits.max_shared_memory_per_block_nbytes + 1024,
            ),
        }[wrong]
        kernel = self.load(rig, store("int", np.dtype(np.int32)))
        address = rig.put(np.zeros(4, np.uint8))
        argument = backend.array_argument(address, (1,), np.dtype(np.int32))

        def launch_wrongly() -> None:
            # Where it is refused, when the shape is made or launched, is the backend's choice.
            config = backend.launch_config(grid, block, shared_nbytes)
            backend.launch(rig.stream, config, kernel, argument, 1)

        with pytest.raises(Exception) as caught:  # noqa: PT011 - each backend raises its own
            launch_wrongly()
        translated = backend.translate(caught.value, "launching store")
        assert isinstance(translated, LaunchFailed)
        assert not isinstance(translated, DeviceLost)
        assert "store" in str(translated) or translated is caught.value
        config = backend.launch_config((1, 1, 1), (32, 1, 1), 0)
        backend.launch(rig.stream, config, kernel, argument, 2)
        assert rig.get(address, 4).view(np.int32)[0] == 2

    # -- foreign code --------------------------------------------------------------------

    def call(self, rig: Rig, address: int, n: int, value: int, stream: Any) -> list[Any]:
        """Have foreign code set ``n`` ints; returns what it was called with, once it was."""
        backend, seen = rig.backend, []
        argument = None if backend.is_cuda else backend.array_argument(address, (n,), _I32)

        def body(array: Any, word: str) -> None:
            seen.append(word)
            if backend.is_cuda:
                backend.fill(address, value.to_bytes(4, "little"), n, stream)
            else:
                array[:] = value

        backend.call(stream, "foreign", body, (Access.READ_WRITE, None), argument, "word")
        return seen

    def test_foreign_code_runs_once_with_its_arguments(self, rig: Rig) -> None:
        address = rig.put(np.zeros(400, np.uint8))
        seen = self.call(rig, address, 100, 7, rig.stream)
        assert (rig.get(address, 400).view(np.int32) == 7).all()
        assert seen == ["word"]

    def test_foreign_code_keeps_its_place_in_the_stream(self, rig: Rig) -> None:
        address = rig.put(np.zeros(400, np.uint8))
        with self.stall(rig, rig.stream):
            rig.backend.fill(address, b"\x01", 400, rig.stream)
            self.call(rig, address, 100, 2, rig.stream)
            done = rig.mark(rig.stream)
            settle(rig.backend)
            assert not done.is_done
        drain(rig.backend, done)
        assert (rig.get(address, 400).view(np.int32) == 2).all()

    def test_foreign_code_that_only_reads_is_told_what_is_there(self, rig: Rig) -> None:
        backend, seen = rig.backend, []
        address = rig.put(np.arange(100, dtype=np.int32).view(np.uint8))
        argument = backend.array_argument(address, (100,), _I32)

        def body(array: Any) -> None:
            if backend.is_cuda:  # it gets what the caller hands over
                seen.append(array)
            else:
                seen.append((int(array.sum()), array.flags.writeable))

        backend.call(rig.stream, "foreign", body, (Access.READ,), argument)
        rig.finish()
        assert seen == ([argument] if backend.is_cuda else [(4950, False)])
