"""What the plugin finds as a device is left, and how a failure is replayed."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from plugin_runs import NAME, Runs

pytest_plugins = ["pytester"]


@pytest.fixture
def runs(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(pytester, monkeypatch)


# -- leaks -----------------------------------------------------------------------------------

LEAKS = """
    KEPT = []

    @pytest.mark.anyio
    async def test_keeps(sim_device):
        x = sim_device.full(3, 7)
        KEPT.append(x)
        KEPT.append(sim_device.stream())
        KEPT.append(await sim_device.get(x))
        KEPT.append(sim_device.full(3, 7))

    @pytest.mark.anyio
    async def test_after_it(sim_device):
        KEPT.clear()
"""


def test_what_a_test_keeps_fails_it_with_the_lines(runs: Runs) -> None:
    result = runs(LEAKS)
    result.assert_outcomes(passed=4, errors=2)
    result.stdout.fnmatch_lines(
        [
            "the test is over, and of device 0 something still holds:",
            "  array made at test_it.py:13",
            "  array made at test_it.py:17",
            "  stream made at test_it.py:15",
            "  pinned block made at test_it.py:16",
            "ERROR test_it.py::test_keeps*",
        ]
    )


def test_what_is_found_is_told_without_the_frames_of_plugins(runs: Runs) -> None:
    result = runs(LEAKS)
    result.stdout.no_fnmatch_line("*site-packages*")
    runs(LEAKS, "--full-trace").stdout.fnmatch_lines(["*def pytest_runtest_teardown(*"])


def test_a_leak_is_told_once(runs: Runs) -> None:
    result = runs(LEAKS)  # a warning would be an error, and the device warns of arrays too
    result.stdout.no_fnmatch_line("*ResourceWarning*")


def test_a_reference_cycle_is_no_leak(runs: Runs) -> None:
    source = """
        @pytest.mark.anyio
        async def test_goes_round(sim_device):
            ring = [sim_device.full(3, 7)]
            ring.append(ring)
    """
    runs(source).assert_outcomes(passed=2)


def test_work_that_still_runs_is_no_leak(runs: Runs) -> None:
    source = """
        @pytest.mark.asyncio
        async def test_leaves_work(sim_device):
            begun = asyncio.Event()

            async def goes_on(values):
                begun.set()
                for _ in range(9):
                    await asyncio.sleep(0)

            sim_device.host(goes_on, sim_device.full(3, 7))
            await begun.wait()
    """
    runs(source).assert_outcomes(passed=1)


def test_a_fixture_that_hands_out_an_array_is_no_leak(runs: Runs) -> None:
    source = """
        @pytest.fixture
        async def sevens(sim_device):
            return sim_device.full(3, 7)

        @pytest.mark.anyio
        async def test_takes_it(sevens, sim_device):
            assert (await sim_device.get(sevens)).sum() == 21
    """
    runs(source).assert_outcomes(passed=2)


def test_what_other_fixtures_of_the_test_hold_is_no_leak(runs: Runs) -> None:
    source = """
        import logging

        @pytest.fixture
        def bag():
            held = []
            yield held

        @pytest.mark.anyio
        async def test_puts_it_in(bag, monkeypatch, caplog, sim_device):  # they are left last
            bag.append(sim_device.full(3, 7))
            bag.append(sim_device.stream())
            bag.append(await sim_device.get(bag[0]))
            monkeypatch.setattr(np, "kept", sim_device.full(3, 7), raising=False)
            logging.warning("%s", sim_device.full(3, 7))

        class TestOfAClass:
            def setup_method(self):
                self.kept = []

            @pytest.mark.anyio
            async def test_keeps_it(self, sim_device):
                self.kept.append(sim_device.full(3, 7))

            def teardown_method(self):
                assert len(self.kept) == 1

        class TestWithSlots:
            __slots__ = ()

            @pytest.mark.anyio
            async def test_keeps_nothing(self, sim_device, bag):
                bag.append(sim_device.full(3, 7))
    """
    # In this process the log would be kept by the run around it, too.
    runs(source, in_process=False).assert_outcomes(passed=6)


def test_a_fixture_of_a_wider_scope_may_leak(runs: Runs) -> None:
    source = """
        @pytest.fixture(scope="module")
        def bag():
            return []

        @pytest.mark.anyio
        async def test_puts_it_in(bag, sim_device):
            bag.append(sim_device.full(3, 7))

        def test_comes_after(bag):
            pass
    """
    runs(source).assert_outcomes(passed=3, errors=2)


def test_a_fixture_that_fails_as_it_is_left_is_all_that_is_told(runs: Runs) -> None:
    source = """
        @pytest.fixture
        async def breaks(sim_device):
            x = sim_device.full(3, 7)
            yield
            assert x is None

        @pytest.mark.anyio
        async def test_uses_it(breaks):
            pass
    """
    result = runs(source)
    result.assert_outcomes(passed=2, errors=2)
    result.stdout.no_fnmatch_line("*still holds*")


def test_a_test_that_failed_is_not_searched(runs: Runs) -> None:
    source = """
        @pytest.mark.anyio
        async def test_fails(sim_device):
            x = sim_device.full(3, 7)
            assert x.size == 4

        @pytest.mark.anyio
        async def test_stops(sim_device):
            x = sim_device.full(3, 7)
            pytest.skip("its traceback holds x as well")
    """
    runs(source).assert_outcomes(failed=2, skipped=2)


# -- failures --------------------------------------------------------------------------------


@pytest.mark.parametrize("mark", ["asyncio", "anyio"])
def test_a_failure_that_nobody_saw_fails_the_test(runs: Runs, mark: str) -> None:
    source = f"""
        opened = []

        @pytest.mark.{mark}
        async def test_looks_away(sim_devices):
            opened[:] = sim_devices
            for dev in sim_devices:
                dev.host(lambda: 1 / 0)

        @pytest.mark.{mark}
        async def test_that_all_was_closed():
            assert all("closed" in repr(dev) for dev in opened)
    """
    result = runs(source)
    num = 1 if mark == "asyncio" else 2
    result.assert_outcomes(passed=2 * num, errors=num)
    result.stdout.fnmatch_lines(["*ExceptionGroup: device 0: 1 op failed*"])
    result.stdout.fnmatch_lines(["*ZeroDivisionError*", "*<lambda> was submitted at test_it.py:*"])
    result.stdout.fnmatch_lines(["*ExceptionGroup: device 1: 1 op failed*"])
    result.stdout.fnmatch_lines(["replay with: *"])


def test_failures_are_told_without_the_frames_of_plugins(runs: Runs) -> None:
    source = """
        @pytest.mark.anyio
        async def test_looks_away(sim_device):
            sim_device.host(lambda: 1 / 0)
    """
    result = runs(source)
    result.assert_outcomes(passed=2, errors=2)
    result.stdout.fnmatch_lines(["*test_it.py*, in <lambda>", "*was submitted at test_it.py:*"])
    result.stdout.no_fnmatch_line("*site-packages*")


def test_a_failure_on_leaving_tells_of_the_leak_too(runs: Runs) -> None:
    source = """
        KEPT = []

        @pytest.mark.asyncio
        async def test_both(sim_device):
            KEPT.append(sim_device.full(3, 7))
            sim_device.host(lambda: 1 / 0)
    """
    result = runs(source)
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*array made at test_it.py:13"])


def test_a_lost_device_that_the_test_has_seen_passes(runs: Runs) -> None:
    source = """
        @pytest.mark.anyio
        async def test_loses_it(sim_device):
            x = sim_device.full(3, 7)
            sim_device.sim.fail(kind="copy_d2h")
            with pytest.raises(sf.DeviceLost):
                await sim_device.get(x)
    """
    runs(source).assert_outcomes(passed=2)


def test_a_gate_left_closed_is_told(runs: Runs) -> None:
    source = """
        from dataclasses import replace

        @pytest.fixture
        def streamflow_settings(streamflow_settings):
            assert streamflow_settings.close_timeout_s <= 5
            return replace(streamflow_settings, close_timeout_s=0.01)

        @pytest.mark.asyncio
        async def test_forgets(sim_device):
            x = sim_device.full(3, 7)
            sim_device.sim.gate("d2h")
            sim_device.get(x)
    """
    result = runs(source)
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(
        ["device 0 was closed with work that did not end within*", "ERROR *DeadlineExceeded: *"]
    )


# -- the seed --------------------------------------------------------------------------------

SHUFFLED = """
    ORDER = []

    @pytest.mark.{mark}
    async def test_order(sim_device):
        ORDER.clear()
        streams = [sim_device.stream(f"s{{n}}") for n in range(12)]
        with sim_device.sim.gate("h2d"):
            held = sim_device.put(np.zeros(1))
            for stream in streams:
                stream.wait_for(held.ready)
                sim_device.call(
                    lambda _, name: ORDER.append(name), stream.name, writes=[], reads=[],
                    stream=stream,
                )
        await sim_device.synchronize()
        for stream in streams:
            stream.close()
        print("order", *ORDER)
        assert not ORDER
"""


def orders(result: pytest.RunResult) -> list[str]:
    return re.findall(r"^order (.*)$", result.stdout.str(), re.MULTILINE)


def test_a_failure_is_replayed_by_the_line_it_prints(runs: Runs) -> None:
    result = runs(SHUFFLED.format(mark="asyncio"))
    result.assert_outcomes(failed=1)
    text = result.stdout.str()
    shown = re.search(r"^streamflow: seed (\d+), backend sim$", text, re.MULTILINE)
    line = re.search(r"^replay with: pytest (\S+) (--streamflow-seed=(\d+))$", text, re.MULTILINE)
    assert shown is not None
    assert line is not None
    assert line[1] == "test_it.py::test_order"
    assert line[3] == shown[1]
    again = runs(SHUFFLED.format(mark="asyncio"), line[2])
    assert orders(again) == orders(result)
    assert len(orders(again)) == 1


def test_the_line_fits_where_pytest_was_started(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs.pytester.mkdir("elsewhere"))
    result = runs(SHUFFLED.format(mark="asyncio"))
    result.stdout.fnmatch_lines(["replay with: pytest ../test_it.py::test_order *"])
    aside = runs.pytester.mkdir("aside")
    again = runs(SHUFFLED.format(mark="asyncio"), f"--rootdir={aside}")
    again.stdout.fnmatch_lines(["replay with: pytest ../test_it.py::test_order *"])


def test_runs_have_seeds_of_their_own(runs: Runs) -> None:
    first, second = (runs("def test_nothing(): pass").stdout.str() for _ in range(2))
    seeds = {re.search(r"streamflow: seed (\d+)", text)[1] for text in (first, second)}  # type: ignore[index]
    assert len(seeds) == 2


def test_another_seed_is_another_schedule(runs: Runs) -> None:
    source = SHUFFLED.format(mark="asyncio")
    found = {orders(runs(source, f"--streamflow-seed={seed}"))[0] for seed in range(4)}
    assert len(found) > 1


def test_a_failure_without_a_device_shows_no_seed(runs: Runs) -> None:
    runs("def test_fails(): assert False").stdout.no_fnmatch_line("replay with: *")


TASKS = """
    import anyio
    import anyio.lowlevel

    @pytest.mark.parametrize("anyio_backend", ["trio"])
    @pytest.mark.anyio
    async def test_tasks(sim_device):
        order = []

        async def task(number):
            for _ in range(3):
                await anyio.lowlevel.checkpoint()
                order.append(number)

        async with anyio.create_task_group() as group:
            for number in range(8):
                group.start_soon(task, number)
        print("order", *order)
        assert False
"""


def test_trio_follows_from_the_seed(runs: Runs) -> None:
    first, again, other = (
        orders(runs(TASKS, f"--streamflow-seed={seed}"))[0] for seed in (5, 5, 6)
    )
    assert first == again
    assert first != other


ON_ONE_LOOP = """
    import anyio
    import anyio.lowlevel

    @pytest.fixture(scope="module")
    def anyio_backend():
        return "trio"

    @pytest.fixture(scope="module")
    async def service():
        yield

    @pytest.mark.anyio
    @pytest.mark.parametrize("is_last", [False, True])
    async def test_tasks(service, sim_device, is_last):
        order = []

        async def task(number):
            await anyio.lowlevel.checkpoint()
            order.append(number)

        async with anyio.create_task_group() as group:
            for number in range(8):
                group.start_soon(task, number)
        print("order", *order)
        assert not is_last
"""


def test_trio_follows_from_the_seed_whatever_ran_before(runs: Runs) -> None:
    together = orders(runs(ON_ONE_LOOP, "--streamflow-seed=5"))
    alone = orders(runs(ON_ONE_LOOP, "--streamflow-seed=5", "-k", "True"))
    assert together == alone
    assert len(alone) == 1


def test_trio_is_as_it_was_afterwards(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    from trio._core import _run

    state = _run._r.getstate()
    monkeypatch.setattr(_run, "_ALLOW_DETERMINISTIC_SCHEDULING", False)  # Hypothesis allows it
    source = """
        from trio._core import _run

        @pytest.mark.asyncio
        async def test_seeded(sim_device):
            assert _run._ALLOW_DETERMINISTIC_SCHEDULING
            _run._r.random()
    """
    runs(source).assert_outcomes(passed=1)
    assert _run._r.getstate() == state
    assert not _run._ALLOW_DETERMINISTIC_SCHEDULING


def test_workers_of_xdist_are_given_the_seed(runs: Runs) -> None:
    runs.pytester.makeini(runs.ini)
    main = runs.pytester.parseconfigure(*runs.loads, "--streamflow-seed=11")
    node = SimpleNamespace(config=main, workerinput={})
    plugin = main.pluginmanager.get_plugin(NAME)
    plugin.pytest_configure_node(node)
    worker = runs.pytester.parseconfig(*runs.loads)
    worker.workerinput = node.workerinput  # type: ignore[attr-defined]
    worker._do_configure()
    assert plugin.pytest_report_header(worker) == "streamflow: seed 11, backend sim"
    worker._ensure_unconfigure()
