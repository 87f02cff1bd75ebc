"""``check_kernel``, where the GPU's part is played by other bodies, and on GPUs."""

from __future__ import annotations

import asyncio
import warnings
from dataclasses import replace

import numpy as np
import pytest

import streamflow as sf
import streamflow.backends
from streamflow.backends import open_backend
from streamflow.config import Settings
from streamflow.testing import (
    EDGE_SIZES,
    SIZE,
    KernelMismatch,
    KernelNotChecked,
    check_kernel,
    check_kernel_async,
)

HALVES = np.linspace(-4, 4, 33, dtype=np.float32)


@sf.kernel("""extern "C" __global__ void scale(const float* x, float* y, float c, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = c * x[i];
}""")
def scale(x, y, c, n):
    y[:n] = np.float32(c) * x[:n]


def kernel(source: str, body, **options) -> sf.Kernel:
    return sf.Kernel.from_source(source, body=body, **options)


def scale_to(body, **options) -> sf.Kernel:
    """The kernel ``scale`` with another reference body."""
    return kernel(scale.spec.source, body, name="scale", **options)


class Played:
    """The simulator with bodies of its own: what "the GPU" makes of a kernel."""

    name = "played"

    def __init__(self, inner, bodies):
        self._inner = inner
        self._bodies = bodies

    def __getattr__(self, verb):
        return getattr(self._inner, verb)

    def load_kernel(self, spec):
        return self._inner.load_kernel(replace(spec, body=self._bodies.get(spec.name, spec.body)))


@pytest.fixture
def play(monkeypatch):
    """``play(body)``: the backend "played" runs that body for the kernel ``scale``."""
    monkeypatch.setattr(streamflow.backends, "_OPENERS", dict(streamflow.backends._OPENERS))

    def register(body, name="scale"):
        def open_played(index, settings: Settings, loop_key):
            sim = replace(settings.sim, clock="virtual")
            return Played(
                open_backend("sim", index, replace(settings, sim=sim), loop_key), {name: body}
            )

        sf.register_backend("played", open_played)
        return "played"

    return register


@pytest.fixture
def no_compiler(monkeypatch):
    from streamflow.backends.cuda import compiler

    def absent():
        raise sf.BackendUnavailable("no NVRTC library found")

    monkeypatch.setattr(compiler, "_nvrtc", absent)


@pytest.fixture(autouse=True)
def _cache_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("STREAMFLOW_CACHE", str(tmp_path))


# -- comparing ---------------------------------------------------------------------------


def test_a_right_kernel_is_compared_at_every_size(play):
    backend = play(scale.spec.body)
    report = check_kernel(scale, HALVES, HALVES, 1.5, SIZE, backend=backend)
    assert report.compared
    assert report.backend == backend
    assert report.why_not == ""
    assert report.sizes[: len(EDGE_SIZES)] == EDGE_SIZES
    assert len(set(report.sizes)) == len(EDGE_SIZES) + 5
    assert all(1 <= size <= 200_000 for size in report.sizes)


def off_by_one(x, y, c, n):
    n -= n % 256 == 1  # as where the grid has been rounded down
    y[:n] = np.float32(c) * x[:n]


def test_the_first_element_that_differs_is_named(play):
    backend = play(off_by_one)
    with pytest.raises(KernelMismatch) as caught:
        check_kernel(
            scale, np.float32([1]), np.float32([0]), 1.5, SIZE, sizes=[256, 257], backend=backend
        )
    error = caught.value
    assert (error.kernel, error.argument, error.size) == ("scale", "y", 257)
    assert (error.index, error.num_different) == ((256,), 1)
    assert (error.expected, error.found) == (1.5, 0.0)
    text = str(error)
    assert "at size 257 y[256] is 0.0, and the reference body makes it 1.5" in text
    assert "1 of 257 elements" in text
    assert "check_kernel(scale, ..., sizes=[257], seed=0)" in text


def test_the_hint_repeats_the_failure(play):
    backend = play(off_by_one)
    failures = []
    for sizes in ([1000, 513, 33], [513]):
        with pytest.raises(KernelMismatch) as caught:
            check_kernel(scale, HALVES, HALVES, 1.5, SIZE, sizes=sizes, seed=9, backend=backend)
        failures.append(str(caught.value))
    assert failures[0] == failures[1]
    with pytest.raises(KernelMismatch) as caught:
        check_kernel(scale, HALVES, HALVES, 1.5, SIZE, sizes=[513], seed=10, backend=backend)
    assert str(caught.value) != failures[0]


def test_floats_may_differ_within_the_tolerance(play):
    def nearly(x, y, c, n):
        y[:n] = np.float32(c) * x[:n] * np.float32(1.001)

    args, options = (HALVES, HALVES, 1.5, SIZE), {"sizes": [100], "backend": play(nearly)}
    check_kernel(scale, *args, rtol=1e-2, **options)
    check_kernel(scale, *args, atol=0.1, **options)
    with pytest.raises(KernelMismatch, match="rtol=1e-05, atol=1e-06"):
        check_kernel(scale, *args, **options)


def test_nan_equals_nan_and_nothing_else(play):
    nan = np.float32([np.nan])
    backend = play(scale.spec.body)
    check_kernel(scale, nan, nan, 1.5, SIZE, sizes=[5], backend=backend)
    backend = play(lambda x, y, c, n: y.fill(0))
    with pytest.raises(KernelMismatch, match=r"is 0.0, and the reference body makes it nan"):
        check_kernel(scale, nan, nan, 1.5, SIZE, sizes=[5], backend=backend)


COUNT = """extern "C" __global__ void count(int* total, const unsigned char* seen, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n && seen[i]) atomicAdd(total, 1);
}"""


def count(total, seen, n):
    total[0] += np.count_nonzero(seen[:n])


def test_integers_have_to_be_equal(play):
    def one_more(total, seen, n):
        total[0] += np.count_nonzero(seen[:n]) + 1

    of_bytes = kernel(COUNT, count)
    args = (lambda n, rng: np.zeros(1, np.int32), np.uint8([0, 1]), SIZE)
    check_kernel(of_bytes, *args, backend=play(count, "count"))
    with pytest.raises(KernelMismatch, match=r"total\[0\] .*exactly"):
        check_kernel(of_bytes, *args, rtol=1.0, atol=5.0, backend=play(one_more, "count"))


@pytest.mark.parametrize("side", ["past its end", "before its begin"])
def test_a_write_outside_of_an_array_is_found(play, side):
    def outside(x, y, c, n):
        y[:n] = np.float32(c) * x[:n]
        beyond = np.lib.stride_tricks.as_strided(y, (n + 1,), y.strides)
        if side == "past its end":
            beyond[n] = 7
        else:
            base = np.ndarray((n + 1,), np.float32, y.base, 4096 - 4)
            base[0] = 7

    with pytest.raises(KernelMismatch, match=f"writes outside of y: . bytes {side}") as caught:
        check_kernel(scale, HALVES, HALVES, 1.5, SIZE, sizes=[33], backend=play(outside))
    assert caught.value.index == ((33,) if side == "past its end" else (-1,))
    assert caught.value.argument == "y"


def test_a_write_to_a_const_array_is_found(play):
    def writes_its_input(x, y, c, n):
        y[:n] = np.float32(c) * x[:n]
        x = np.ndarray(x.shape, x.dtype, x.base, 4096)
        x[n - 1] += np.float32(1e-7)

    one = np.float32([1])
    with pytest.raises(KernelMismatch, match=r"x\[32\] .*'x' is const"):
        check_kernel(scale, one, one, 1.5, SIZE, sizes=[33], backend=play(writes_its_input))


def test_a_promise_to_write_everything_is_checked(play):
    """Also where kernel and body leave the same elements alone."""

    def all_but_one(x, y, c, n):
        y[1:n] = np.float32(c) * x[1:n]

    args = (HALVES, np.zeros(1, np.float32), 1.5, SIZE)
    check_kernel(scale_to(all_but_one), *args, sizes=[9], backend=play(all_but_one))
    promised = scale_to(all_but_one, access={"y": "write"})
    with pytest.raises(KernelMismatch, match=r"y\[0\] .*promises that all of 'y' is written"):
        check_kernel(promised, *args, sizes=[9], backend=play(all_but_one))
    check_kernel(scale_to(scale.spec.body, access={"y": "write"}), *args, sizes=[9])


def test_arrays_of_any_shape_come_from_a_function(play):
    def transpose(a, b, rows, columns):
        b[:] = a.T

    def not_quite(a, b, rows, columns):
        b[:] = a.T
        b[-1, 2] = 0

    of_matrix = kernel(
        "__global__ void transpose(const double* a, double* b, int rows, int columns) {}",
        transpose,
    )
    args = (
        lambda n, rng: rng.normal(size=(n, n + 1)),
        lambda n, rng: np.zeros((n + 1, n)),
        SIZE,
        lambda n, rng: n + 1,
    )
    check_kernel(of_matrix, *args, sizes=[3, 50], backend=play(transpose, "transpose"))
    with pytest.raises(KernelMismatch, match=r"b\[50, 2\]") as caught:
        check_kernel(of_matrix, *args, sizes=[50], backend=play(not_quite, "transpose"))
    assert caught.value.index == (50, 2)


def test_the_geometry_goes_to_the_launch(play, monkeypatch):
    seen = []
    backend = play(scale.spec.body)
    launch_config = Played.__getattr__

    def spy(self, verb):
        found = launch_config(self, verb)
        if verb != "launch_config":
            return found
        return lambda *shape: seen.append(shape) or found(*shape)

    monkeypatch.setattr(Played, "__getattr__", spy)
    check_kernel(
        scale, HALVES, HALVES, 1.5, SIZE,
        sizes=[10, 20], grid=lambda n: (n, 2), block=64, shared_bytes=128, backend=backend,
    )  # fmt: skip
    assert seen == [((10, 2, 1), (64, 1, 1), 128), ((20, 2, 1), (64, 1, 1), 128)]


def test_a_fault_of_the_kernel_tells_the_size(play):
    def faulty(x, y, c, n):
        raise ZeroDivisionError("as a bad address would")

    with pytest.raises(sf.DeviceLost) as caught:
        check_kernel(scale, HALVES, HALVES, 1.5, SIZE, sizes=[7, 8], backend=play(faulty))
    assert any("sizes=[7], seed=0" in note for note in caught.value.__notes__)


# -- without a GPU -------------------------------------------------------------------------


def test_without_a_gpu_the_source_is_compiled_and_the_body_run():
    ran = []

    def body(x, y, c, n):
        ran.append(n)
        scale.spec.body(x, y, c, n)

    report = check_kernel(scale_to(body), HALVES, HALVES, 1.5, SIZE, sizes=[3, 4], backend="sim")
    assert (report.compiled, report.compared, report.backend) == (True, False, "sim")
    assert report.sizes == (3, 4)
    assert set(ran) == {3, 4}
    assert "not compared" in report.why_not
    assert "not compiled" not in report.why_not


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (scale.spec.source.replace("y[i] = c", "y[i] = d"), r"scale\.cu\(3\).*\"d\""),
        (scale.spec.source.replace("float* x", "flaot* x"), r"flaot"),
        (scale.spec.source.replace('extern "C" ', ""), "no kernel named 'scale'.*extern"),
    ],
    ids=["an unknown name", "an unknown type", "a mangled name"],
)
def test_errors_of_the_source_show_without_a_gpu(source, told):
    wrong = kernel(source, scale.spec.body)
    ran = []
    with pytest.raises(sf.CompileFailed, match=told):
        check_kernel(wrong, HALVES, HALVES, 1.5, lambda n, rng: ran.append(n) or n, backend="sim")
    assert not ran  # it didn't come that far


def test_a_source_without_the_kernel_is_refused_when_it_is_made():
    with pytest.raises(ValueError, match="no __global__ function named 'rescale'"):
        kernel(scale.spec.source, scale.spec.body, name="rescale")


def test_options_reach_the_compiler():
    defined = kernel(
        'extern "C" __global__ void scale(float* y) { y[0] = FACTOR; }',
        lambda y: y.__setitem__(0, 3),
        options=["-DFACTOR=3"],
    )
    assert check_kernel(defined, HALVES, sizes=[1], backend="sim").compiled


@pytest.mark.parametrize(
    ("body", "error", "told"),
    [
        (lambda x, y, c, n: y.__setitem__(n, 0), IndexError, "out of bounds"),
        (lambda x, y, c, n: y.__setitem__(slice(None), np.zeros(3)), ValueError, "broadcast"),
        (lambda x, y, c, n: x.__setitem__(0, 1), ValueError, "read-only"),
    ],
    ids=["index", "shape", "const"],
)
def test_errors_of_the_body_come_out_with_the_size(body, error, told):
    with pytest.raises(error, match=told) as caught:
        check_kernel(scale_to(body), HALVES, HALVES, 1.5, SIZE, sizes=[5], backend="sim")
    assert any("sizes=[5]" in note for note in caught.value.__notes__)


def test_a_launch_that_no_device_takes_is_refused_on_the_simulator():
    with pytest.raises(ValueError, match="the device takes 1024"):
        check_kernel(scale, HALVES, HALVES, 1.5, SIZE, sizes=[5], grid=1, block=2048, backend="sim")


def test_nothing_is_left_out_silently(no_compiler):
    args = (scale, HALVES, HALVES, 1.5, SIZE)
    with pytest.warns(KernelNotChecked, match="no NVRTC") as caught:
        report = check_kernel(*args, sizes=[5], backend="sim")
    assert caught[0].filename == __file__
    assert not report.compiled
    assert not report.compared
    assert "not compared" in report.why_not
    assert "not compiled" in report.why_not


def test_what_is_required_is_an_error_where_it_is_missing(no_compiler):
    args = (scale, HALVES, HALVES, 1.5, SIZE)
    with pytest.raises(sf.BackendUnavailable, match=r"has to be compiled.*NVRTC"):
        check_kernel(*args, backend="sim", require="compiler")
    with pytest.raises(sf.BackendUnavailable, match=r"has to be compared.*simulator"):
        check_kernel(*args, backend="sim", require="gpu")
    with pytest.raises(ValueError, match="'fpga'"):
        check_kernel(*args, require="fpga")


def test_what_is_required_is_no_error_where_it_was_done(play):
    args = (scale, HALVES, HALVES, 1.5, SIZE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_kernel(*args, sizes=[5], backend="sim", require="compiler")
        check_kernel(*args, sizes=[5], backend=play(scale.spec.body), require="compiler")
        check_kernel(*args, sizes=[5], backend=play(scale.spec.body), require="gpu")


def test_an_image_has_nothing_to_compile(play):
    of_image = sf.Kernel.from_module(
        b"\x7fELF", "scale", "const float* x, float* y, float c, int n", body=scale.spec.body
    )
    args = (of_image, HALVES, HALVES, 1.5, SIZE)
    with pytest.warns(KernelNotChecked, match="compiled image"):
        check_kernel(*args, sizes=[5], backend="sim")
    report = check_kernel(*args, sizes=[5], backend=play(scale.spec.body))
    assert (report.compared, report.compiled) == (True, False)
    assert "compiled image" in report.why_not


def test_the_backend_of_the_environment_is_taken(monkeypatch):
    monkeypatch.setenv("STREAMFLOW_BACKEND", "sim")
    assert check_kernel(scale, HALVES, HALVES, 1.5, SIZE, sizes=[5]).backend == "sim"


# -- arguments -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "error", "told"),
    [
        ((HALVES, HALVES, 1.5), TypeError, r"takes 4 arguments \(x, y, c, n\), found 3"),
        ((HALVES, 2.0, 1.5, SIZE), TypeError, "'y' is float.* takes an array; found float"),
        ((HALVES, HALVES, HALVES, SIZE), TypeError, "'c' is float and takes a scalar"),
        ((HALVES, HALVES.astype(int), 1.5, SIZE), TypeError, "'y' takes float32, found int64"),
        ((HALVES, HALVES, "much", SIZE), TypeError, "'c'"),
        ((HALVES, HALVES[:0], 1.5, SIZE), ValueError, "'y': an empty array"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(args, error, told):
    with pytest.raises(error, match=told):
        check_kernel(scale, *args, backend="sim")


def test_what_is_no_kernel_is_refused():
    with pytest.raises(TypeError, match="takes a streamflow Kernel"):
        check_kernel(scale.spec.body, HALVES, backend="sim")
    with pytest.raises(TypeError, match="no reference body"):
        check_kernel(sf.Kernel.from_source(scale.spec.source), HALVES, HALVES, 1.5, SIZE)
    for sizes in ([], [0], [5, -1]):
        with pytest.raises(ValueError, match="sizes are at least one"):
            check_kernel(scale, HALVES, HALVES, 1.5, SIZE, sizes=sizes)


def test_values_are_drawn_from_the_template():
    seen = []

    def body(x, y, c, n):
        seen.append(x.copy())
        y[:n] = np.float32(c) * x[:n]

    check_kernel(
        scale_to(body), np.float32([[1, 2], [3, 9]]), HALVES, 1.5, SIZE,
        sizes=[500], backend="sim",
    )  # fmt: skip
    assert seen[0].shape == (500,)
    assert set(seen[0]) == {1, 2, 3, 9}
    assert (seen[0] == seen[1]).all()  # the body here and on the simulator


def test_in_a_running_loop_it_is_awaited():
    async def main():
        with pytest.raises(RuntimeError, match="await check_kernel_async"):
            check_kernel(scale, HALVES, HALVES, 1.5, SIZE)
        return await check_kernel_async(scale, HALVES, HALVES, 1.5, SIZE, sizes=[5], backend="sim")

    assert asyncio.run(main()).compiled


def test_it_is_found_under_the_package():
    assert sf.testing.check_kernel is check_kernel
    assert repr(sf.testing.SIZE) == "SIZE"


# -- on a GPU --------------------------------------------------------------------------------


@pytest.mark.gpu
def test_on_a_gpu_a_right_kernel_passes():
    report = check_kernel(scale, HALVES, HALVES, 1.5, SIZE, backend="cuda", require="gpu")
    assert report.compared
    assert report.compiled
    assert report.why_not == ""
    of_bytes = kernel(COUNT, count)
    total = lambda n, rng: np.zeros(1, np.int32)  # noqa: E731
    assert check_kernel(of_bytes, total, np.uint8([0, 1]), SIZE, backend="cuda").compared


@pytest.mark.gpu
def test_on_a_gpu_the_first_element_that_differs_is_named():
    wrong = kernel(
        scale.spec.source.replace("if (i < n)", "if (i < n && i != 256)"), scale.spec.body
    )
    one, zero = np.float32([1]), np.float32([0])
    with pytest.raises(KernelMismatch) as caught:
        check_kernel(wrong, one, zero, 1.5, SIZE, backend="cuda")
    assert (caught.value.size, caught.value.index) == (257, (256,))
    assert (caught.value.expected, caught.value.found) == (1.5, 0.0)


@pytest.mark.gpu
def test_on_a_gpu_a_write_past_the_end_is_found():
    wrong = kernel(scale.spec.source.replace("i < n", "i <= n"), scale.spec.body)
    # At 1, 2, 31, .. a block of 256 has a thread for i == n.
    with pytest.raises(
        KernelMismatch, match=r"writes outside of y: . bytes past its end"
    ) as caught:
        check_kernel(wrong, HALVES, HALVES, 1.5, SIZE, backend="cuda", sizes=[33])
    assert caught.value.index == (33,)


@pytest.mark.gpu
def test_on_a_gpu_a_broken_promise_to_write_everything_is_found():
    def all_but_one(x, y, c, n):
        y[1:n] = np.float32(c) * x[1:n]

    wrong = kernel(
        scale.spec.source.replace("if (i < n)", "if (0 < i && i < n)"),
        all_but_one,
        name="scale",
        access={"y": "write"},
    )
    with pytest.raises(KernelMismatch, match=r"y\[0\] .*promises"):
        check_kernel(wrong, HALVES, HALVES, 1.5, SIZE, backend="cuda", sizes=[9])
