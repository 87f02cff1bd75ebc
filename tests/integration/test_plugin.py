"""The plugin's fixtures, under each plugin that runs async tests."""

from __future__ import annotations

import subprocess
import sys

import pytest
from plugin_runs import IS_INSTALLED, NAME, Runs

pytest_plugins = ["pytester"]


@pytest.fixture
def runs(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(pytester, monkeypatch)


USES = """
    {mark}
    async def test_one(sim_device):
        assert sim_device.backend == "sim" and sim_device.sim.clock.is_virtual
        assert (await sim_device.get(sim_device.full(3, 7))).tolist() == [7, 7, 7]

    {mark}
    async def test_two(sim_devices, sim_device):
        one, two = sim_devices
        assert one is sim_device and (one.index, two.index) == (0, 1)
        x = one.full(3, 7)
        y = two.empty(3)
        two.copy(y, x)
        assert (await two.get(y)).tolist() == [7, 7, 7]

    {mark}
    async def test_chosen(device, sim_device):
        assert device is sim_device

    {fixture}
    async def sevens(sim_device):
        x = sim_device.full(3, 7)
        await x
        yield x
        assert (await sim_device.get(x)).tolist() == [8, 8, 8]

    {mark}
    async def test_a_fixture_on_top(sim_device, sevens):
        await sim_device.fill(sevens, 8)
"""


def uses(mark: str, fixture: str = "@pytest.fixture") -> str:
    return USES.format(mark=mark, fixture=fixture)


def test_under_pytest_asyncio_in_strict_mode(runs: Runs) -> None:
    source = uses("@pytest.mark.asyncio", "@__import__('pytest_asyncio').fixture")
    runs(source).assert_outcomes(passed=4)


def test_under_pytest_asyncio_in_auto_mode(runs: Runs) -> None:
    runs(uses(""), "--asyncio-mode=auto").assert_outcomes(passed=4)


def test_under_anyio_on_asyncio_and_on_trio(runs: Runs) -> None:
    runs(uses("@pytest.mark.anyio")).assert_outcomes(passed=8)


def test_under_anyio_alone(runs: Runs) -> None:
    runs.ini = "[pytest]\nfilterwarnings = error\n"
    runs(uses("@pytest.mark.anyio"), "-p", "no:asyncio").assert_outcomes(passed=8)


def test_under_anyio_in_auto_mode(runs: Runs) -> None:
    runs(uses(""), "--anyio-mode=auto").assert_outcomes(passed=8)


def test_under_pytest_asyncio_alone(runs: Runs) -> None:
    runs(uses(""), "--asyncio-mode=auto", "-p", "no:anyio").assert_outcomes(passed=4)


@pytest.mark.parametrize("scope", ["class", "module", "package", "session"])
def test_the_device_lives_on_the_loop_of_its_test(runs: Runs, scope: str) -> None:
    source = f"""
        class TestIt:
            @pytest.mark.asyncio(loop_scope="{scope}")
            async def test_there(self, sim_device):
                assert (await sim_device.get(sim_device.full(3, 7))).sum() == 21
    """
    runs(source).assert_outcomes(passed=1)
    loop = f"asyncio_default_test_loop_scope={scope}"
    runs(uses(""), "--asyncio-mode=auto", "-o", loop, "-k", "one").assert_outcomes(passed=1)


@pytest.mark.parametrize(("mark", "num"), [("asyncio", 1), ("anyio", 2)])
def test_with_hypothesis(runs: Runs, mark: str, num: int) -> None:
    source = f"""
        from hypothesis import HealthCheck, given, settings, strategies as st

        SHARED = settings(
            max_examples=5,
            database=None,
            suppress_health_check=[HealthCheck.function_scoped_fixture],
        )

        @pytest.mark.{mark}
        @SHARED
        @given(n=st.integers(1, 300))
        async def test_sizes(sim_device, n):
            assert (await sim_device.get(sim_device.full(n, 7))).sum() == 7 * n
    """
    runs(source).assert_outcomes(passed=num)


def test_a_plain_test_is_told_to_be_async(runs: Runs) -> None:
    result = runs("def test_plain(sim_device): pass")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["test_plain is not async: *Write `async def`"])


def test_a_doctest_is_told_the_same(runs: Runs) -> None:
    source = """
        def documented():
            \'\'\'
            >>> getfixture("sim_device")
            \'\'\'
    """
    result = runs(source, "--doctest-modules")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*test_it.documented is not async: *"])


@pytest.mark.parametrize("mark", ["asyncio", "anyio"])
def test_a_test_case_of_unittest_is_refused(runs: Runs, mark: str) -> None:
    source = f"""
        import unittest

        @pytest.mark.{mark}
        class TestCase(unittest.IsolatedAsyncioTestCase):
            @pytest.fixture(autouse=True)
            def keep(self, sim_device):
                self.dev = sim_device

            async def test_it(self):
                pass
    """
    result = runs(source)
    result.assert_outcomes(errors=1 if mark == "asyncio" else 2)
    result.stdout.fnmatch_lines(["test_it* is a test of a unittest.TestCase, *"])


def test_an_unmarked_test_is_told_of_the_marks(runs: Runs) -> None:
    result = runs("async def test_bare(sim_device): pass")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["nothing runs test_bare on an event loop: *pytest.mark.anyio*"])


def test_two_plugins_for_one_test_are_told_apart(runs: Runs) -> None:
    result = runs(uses("@pytest.mark.anyio"), "--asyncio-mode=auto", "-k", "one")
    result.assert_outcomes(errors=2)
    result.stdout.fnmatch_lines(["both pytest-asyncio and anyio's plugin would run test_one*"])


def test_settings_are_a_fixture_to_override(runs: Runs) -> None:
    source = """
        from dataclasses import replace

        @pytest.fixture
        def streamflow_settings(streamflow_settings):
            return replace(streamflow_settings, window=7)

        @pytest.mark.anyio
        async def test_changed(sim_devices, device):
            for dev in (*sim_devices, device):
                assert dev.settings.window == 7
                assert dev.settings.sim.seed == 3

        class TestAnew:
            @pytest.fixture
            def streamflow_settings(self):
                return sf.Settings(sim=sf.SimOptions(devices=5))

            @pytest.mark.anyio
            async def test_clock_and_seed_stay(self, sim_device):
                assert sim_device.settings.sim == sf.SimOptions(devices=5, clock="virtual", seed=3)
    """
    runs(source, "--streamflow-seed=3").assert_outcomes(passed=4)


def test_the_environment_decides_about_the_rest(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMFLOW_WINDOW", "9")
    monkeypatch.setenv("STREAMFLOW_SIM_DEVICES", "3")
    source = """
        @pytest.mark.anyio
        async def test_read(sim_device):
            assert sim_device.settings.window == 9
            assert sim_device.settings.sim.devices == 3
    """
    runs(source).assert_outcomes(passed=2)


HIDE_GPU = """
    import streamflow.backends
    import streamflow.backends.cuda.probe

    @pytest.fixture(autouse=True)
    def no_gpu(monkeypatch):
        def refuse(*_):
            raise sf.BackendUnavailable("no CUDA driver here")

        probe = streamflow.backends.cuda.probe
        monkeypatch.setattr(probe, "why_unavailable", lambda: "no CUDA driver here")
        monkeypatch.setitem(streamflow.backends._OPENERS, "cuda", refuse)

    @pytest.mark.anyio
    async def test_chosen(device):
        assert device.backend == "sim"

    @pytest.mark.anyio
    async def test_simulated(sim_device):
        assert sim_device.backend == "sim"
"""


def test_cuda_without_a_gpu_is_a_failure_in_words(runs: Runs) -> None:
    result = runs(HIDE_GPU, "--streamflow-backend=cuda")
    result.assert_outcomes(passed=2, errors=2)  # sim_device needs no GPU
    result.stdout.fnmatch_lines(["--streamflow-backend=cuda: no CUDA driver here"])
    result.stdout.no_fnmatch_line("*Traceback*")
    result.stdout.fnmatch_lines(["replay with: *--streamflow-backend=cuda"])


def test_auto_without_a_gpu_is_the_simulator_without_a_warning(runs: Runs) -> None:
    runs(HIDE_GPU, "--streamflow-backend=auto").assert_outcomes(passed=4)


@pytest.mark.gpu
def test_cuda_with_a_gpu(runs: Runs) -> None:
    source = """
        @pytest.mark.anyio
        async def test_there(device):
            assert device.backend == "cuda"
            assert (await device.get(device.full(3, 7))).tolist() == [7, 7, 7]
    """
    runs(source, "--streamflow-backend=cuda").assert_outcomes(passed=2)
    runs(source, "--streamflow-backend=auto").assert_outcomes(passed=2)


def test_it_can_be_switched_off(runs: Runs) -> None:
    runs.loads = ["-p", f"no:{NAME}"]
    result = runs(uses("@pytest.mark.anyio"), "-k", "one")
    result.assert_outcomes(errors=2)
    result.stdout.fnmatch_lines(["*fixture 'sim_device' not found"])


def test_a_run_that_does_not_use_it_imports_nothing(runs: Runs) -> None:
    source = """
        import sys

        def test_other():
            loaded = {name.partition(".")[0] for name in sys.modules}
            assert "pytest_streamflow" in loaded
            assert not {"streamflow", "numpy"} & loaded
    """
    runs(source, in_process=False, opening="").assert_outcomes(passed=1)


@pytest.mark.skipif(not IS_INSTALLED, reason="run from a checkout: nothing is registered")
def test_installing_it_is_enough() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "--fixtures"], capture_output=True, text=True, timeout=60
    )
    assert "sim_devices" in result.stdout
