import numpy as np
import pytest

from streamflow.backends.base import KernelSpec
from streamflow.errors import DeviceLost, LaunchFailed


def test_a_body_works_on_device_memory(lab):
    stream = lab.stream()
    x, y = lab.allocate(stream, 40), lab.allocate(stream, 40)
    lab.launch(stream, lambda x: np.copyto(x, np.arange(10)), "w", lab.view(x, 10))
    lab.launch(stream, lambda y: y.fill(1), "w", lab.view(y, 10))

    def saxpy(a, x, y, n):
        y[:n] += np.float32(a) * x[:n]

    lab.launch(stream, saxpy, "srxs", 2.0, lab.view(x, 10), lab.view(y, 10), 10)
    result = np.frombuffer(lab.read(y, 40, stream), np.float32)
    np.testing.assert_array_equal(result, 2 * np.arange(10) + 1)


def test_shapes_and_offsets_are_kept(lab):
    stream = lab.stream()
    address = lab.allocate(stream, 48)
    lab.device.fill(address, b"\0", 48, stream)
    lab.launch(stream, lambda m: m.__setitem__((1, 2), 5), "w", lab.view(address + 16, (2, 3)))
    result = np.frombuffer(lab.read(address, 48, stream), np.float32)
    assert np.flatnonzero(result).tolist() == [4 + 5]


def test_scalars_arrive_as_they_were_given(lab):
    seen = []
    lab.launch(lab.stream(), lambda *a: seen.extend(a), "sss", 3, 2.5, np.float32(1))
    lab.run()
    assert seen == [3, 2.5, np.float32(1)]
    assert [type(value) for value in seen] == [int, float, np.float32]


def test_an_empty_array_needs_no_memory(lab):
    shapes = []
    lab.launch(lab.stream(), lambda x: shapes.append(x.shape), "r", lab.view(0, (0, 4)))
    lab.run()
    assert shapes == [(0, 4)]


def test_what_a_kernel_only_reads_is_read_only_in_its_body(lab):
    stream = lab.stream()
    address = lab.allocate(stream, 16)
    flags = []
    lab.launch(
        stream,
        lambda r, w, x: flags.extend(a.flags.writeable for a in (r, w, x)),
        "rwx",
        *[lab.view(address, 4)] * 3,
    )
    lab.run()
    assert flags == [False, True, True]


def test_a_kernel_without_a_body_is_refused_at_loading(lab):
    with pytest.raises(LaunchFailed, match="'opaque' has no reference body"):
        lab.device.load_kernel(KernelSpec("opaque", (), source=""))


@pytest.mark.parametrize(
    ("grid", "block", "shared"),
    [
        ((0, 1, 1), (1, 1, 1), 0),
        ((2**31, 1, 1), (1, 1, 1), 0),
        ((1, 65536, 1), (1, 1, 1), 0),
        ((1, 1, 65536), (1, 1, 1), 0),
        ((1, 1, 1), (1025, 1, 1), 0),
        ((1, 1, 1), (32, 33, 1), 0),
        ((1, 1, 1), (1, 1, 65), 0),
        ((1, 1, 1), (1, 1, 1), (227 << 10) + 1),
        ((1, 1, 1), (1, 1, 1), -1),
        ((1, 1), (1, 1, 1), 0),
    ],
)
def test_a_bad_geometry_is_refused_at_the_launch_and_is_not_sticky(lab, grid, block, shared):
    stream = lab.stream()
    config = lab.device.launch_config(grid, block, shared)
    with pytest.raises(LaunchFailed, match="body"):
        lab.device.launch(stream, config, lab.kernel(lambda: None, name="body"))
    lab.mark(stream, "fine")
    lab.run()
    assert lab.log == ["fine"]


def test_the_largest_geometry_is_taken(lab):
    config = lab.device.launch_config((2**31 - 1, 65535, 65535), (32, 32, 1), 227 << 10)
    lab.device.launch(lab.stream(), config, lab.kernel(lambda: None))
    assert lab.run() == 1


def test_the_wrong_number_of_arguments_is_refused(lab):
    with pytest.raises(LaunchFailed, match="takes 1 arguments, found 2"):
        lab.launch(lab.stream(), lambda n: None, "s", 1, 2)


def test_the_bodys_exception_is_the_cause_of_the_fault(lab):
    def broken():
        raise ZeroDivisionError("by design")

    lab.launch(lab.stream(), broken)
    lab.run()
    with pytest.raises(DeviceLost, match="'broken'") as caught:
        lab.device.synchronize_blocking()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert caught.value.suspects == ("broken",)


def test_kernels_cost_what_their_arrays_weigh(lab):
    stream = lab.stream()
    cost = lab.device.gpu.cost
    nbytes = 256 << 20
    address = lab.allocate(stream, nbytes)
    lab.launch(stream, lambda x: None, "r", lab.view(address, nbytes // 4))
    lab.run()
    assert lab.device.clock_s() == pytest.approx(cost.kernel_s + nbytes / cost.memory_rate)


def test_cost_s_gets_the_bodys_arguments(lab):
    stream = lab.stream()
    address = lab.allocate(stream, 40)
    lab.launch(
        stream, lambda x, n: None, "rs", lab.view(address, 10), 3, cost_s=lambda x, n: x.size * n
    )
    lab.run()
    assert lab.device.clock_s() == 30.0


def test_an_estimate_that_fails_is_a_fault_of_its_kernel(lab):
    def cost_s():
        raise KeyError("no estimate")

    lab.launch(lab.stream(), lambda: None, name="estimated", cost_s=cost_s)
    lab.run()
    with pytest.raises(DeviceLost, match=r"'estimated'.*no estimate"):
        lab.device.synchronize_blocking()


def test_copies_cost_latency_and_rate_and_both_ways_overlap(lab):
    up, down = lab.stream(), lab.stream()
    nbytes = 55 << 20
    host_a, _ = lab.host(nbytes)
    host_b, _ = lab.host(nbytes)
    a, b = lab.allocate(up, nbytes), lab.allocate(down, nbytes)
    cost = lab.device.gpu.cost
    lab.device.copy_h2d(a, host_a, nbytes, up)
    lab.device.copy_d2h(host_b, b, nbytes, down)
    lab.run()
    assert lab.device.clock_s() == max(cost.h2d_s(nbytes), cost.d2h_s(nbytes))


def test_one_copy_runs_at_a_time_each_way(lab):
    cost = lab.device.gpu.cost
    for _ in range(3):
        stream = lab.stream()
        host, _ = lab.host(4096)
        lab.device.copy_h2d(lab.allocate(stream, 4096), host, 4096, stream)
    lab.run()
    assert lab.device.clock_s() == pytest.approx(3 * cost.h2d_s(4096))


@pytest.mark.filterwarnings("error")
def test_a_body_that_overflows_or_divides_by_zero_says_nothing_as_on_a_gpu(lab):
    found = []

    def body(zero):
        big = np.full(1, 3e38, np.float32)
        found.extend([*(big * 2), *(big / np.float32(zero)), *(big * np.float32(np.inf) * zero)])

    lab.launch(lab.stream(), body, "s", 0)
    lab.run()
    assert np.isinf(found[:2]).all()
    assert np.isnan(found[2])
