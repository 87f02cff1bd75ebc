"""The pytest plugin: devices as fixtures, checked as they are left, and one seed to replay by.

A module of its own, beside the package: pytest imports every plugin that is installed in every
run, and importing anything of the package imports NumPy. Here that waits for a fixture's use.
"""

from __future__ import annotations

import inspect
import os
import random
import shlex
import sys
import types
import unittest
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from streamflow import Device, Settings
    from streamflow.runtime.live import Held

__all__ = ["device", "sim_device", "sim_devices", "streamflow_settings"]

_SEED = pytest.StashKey[int]()
_USES_DEVICE = pytest.StashKey[bool]()
_HAS_RAISED = pytest.StashKey[bool]()
_WANTED = pytest.StashKey[str]()
_FOUND_LEAVING = pytest.StashKey[Exception | None]()
_HELD = pytest.StashKey[list["Held"]]()

_LOOP_SCOPES = ("function", "class", "module", "package", "session")  # of pytest-asyncio's loops


# -- options and the seed --------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("streamflow")
    group.addoption(
        "--streamflow-backend",
        choices=("sim", "cuda", "auto"),
        default="sim",
        help="what the fixture `device` opens; default: sim",
    )
    group.addoption(
        "--streamflow-seed",
        type=int,
        metavar="N",
        help="seed of the simulator's schedules; default: another one in each run, which is shown",
    )


def pytest_configure(config: pytest.Config) -> None:
    seed = config.getoption("--streamflow-seed")
    if seed is None:
        seed = getattr(config, "workerinput", {}).get("streamflow_seed")
    if seed is None:
        seed = random.SystemRandom().randrange(1, 1 << 31)
    config.stash[_SEED] = seed
    if config.pluginmanager.has_plugin("asyncio"):
        config.pluginmanager.register(_asyncio_fixtures(), "streamflow-asyncio")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Hand the seed to a worker of pytest-xdist."""
    node.workerinput["streamflow_seed"] = node.config.stash[_SEED]


def pytest_report_header(config: pytest.Config) -> str:
    backend = config.getoption("--streamflow-backend")
    return f"streamflow: seed {config.stash[_SEED]}, backend {backend}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember what holds frames, and add to a failure the line that replays it."""
    report = yield
    if call.excinfo is not None:
        item.stash[_HAS_RAISED] = True
    found, item.stash[_FOUND_LEAVING] = item.stash.get(_FOUND_LEAVING, None), None
    if call.excinfo is not None and call.excinfo.value is found and not _is_full(item.config):
        # It names the lines of the test itself; the frames are those of plugins and of ours. Of
        # a group pytest shows those in any style. A debugger is to have them.
        frames, found.__traceback__ = found.__traceback__, None
        report.longrepr = call.excinfo.getrepr(style="value")
        found.__traceback__ = frames
    if report.failed and item.stash.get(_USES_DEVICE, False):
        line = shlex.join(["pytest", _where(item), *_options(item.config)])
        report.sections.append(("streamflow", f"replay with: {line}"))
    return report


def _where(item: pytest.Item) -> str:
    """The test as it is named to pytest, in the folder where this run was started."""
    path = str(item.path)
    with suppress(ValueError):  # on another drive of Windows
        path = os.path.relpath(path, item.config.invocation_params.dir)
    return "::".join([path, *item.nodeid.split("::")[1:]])


def _options(config: pytest.Config) -> list[str]:
    backend = config.getoption("--streamflow-backend")
    options = [f"--streamflow-seed={config.stash[_SEED]}"]
    return options if backend == "sim" else [*options, f"--streamflow-backend={backend}"]


def _is_full(config: pytest.Config) -> bool:
    is_full: bool = config.getoption("fulltrace")
    return is_full


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Seed trio for the test itself: how often a fixture's threads wake it is not in our hands."""
    if not (item.stash.get(_USES_DEVICE, False) and "trio" in sys.modules):
        return (yield)
    from streamflow.testing.trio_order import seeded_trio

    with seeded_trio(item.config.stash[_SEED]):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Look for leaks when every fixture of the test has been left, and the log is let go."""
    try:
        result = yield
    except Exception as error:
        # The traceback of any other error holds frames of the test's fixtures.
        if error is not item.stash.get(_FOUND_LEAVING, None):
            item.stash[_HELD] = []
        if leaks := _leaks(item):
            from streamflow.runtime.failures import add_note

            add_note(error, leaks)
        raise
    if leaks := _leaks(item):
        found = item.stash[_FOUND_LEAVING] = AssertionError(leaks)
        raise found
    return result


def _leaks(item: pytest.Item) -> str:
    """What still holds something of the test's devices, but for the test itself."""
    held = item.stash.get(_HELD, [])
    item.stash[_HELD] = []
    if not held or item.stash[_HAS_RAISED]:  # its traceback holds frames, and they hold arrays
        return ""
    from streamflow.testing.fixtures import find_leaks

    assert isinstance(item, pytest.Function)
    item.funcargs.clear()
    if item.cls is not None:
        getattr(item.instance, "__dict__", {}).clear()
    return find_leaks(held)


# -- the fixtures ----------------------------------------------------------------------------


@pytest.fixture
def streamflow_settings(request: pytest.FixtureRequest) -> Settings:
    """Settings of the devices that the plugin opens; override it to change them.

    A simulated device gets the virtual clock and the run's seed, whatever this returns.
    """
    from streamflow.testing.fixtures import default_settings

    return default_settings(request.config.stash[_SEED])


@pytest.fixture
def sim_device(request: pytest.FixtureRequest) -> Device:
    """An entered ``Device(0)`` on the simulator, by the virtual clock."""
    return _device(request, "sim0")


@pytest.fixture
def sim_devices(request: pytest.FixtureRequest, sim_device: Device) -> tuple[Device, Device]:
    """Two simulated devices on one loop; the first is ``sim_device``."""
    return sim_device, _device(request, "sim1")


@pytest.fixture
def device(request: pytest.FixtureRequest, streamflow_settings: Settings) -> Device:
    """An entered ``Device(0)`` on the backend that ``--streamflow-backend`` names."""
    from streamflow.backends import choose_backend
    from streamflow.errors import BackendUnavailable

    wanted: str = request.config.getoption("--streamflow-backend")
    if wanted == "auto":
        wanted, _ = choose_backend(streamflow_settings.backend)
    if wanted == "sim":
        found: Device = request.getfixturevalue("sim_device")
        return found
    request.node.stash[_WANTED] = wanted
    try:
        return _device(request, "wanted")
    except BackendUnavailable as error:
        reason = f"--streamflow-backend={wanted}: {error}"
    pytest.fail(reason, pytrace=False)


def _device(request: pytest.FixtureRequest, which: str) -> Device:
    """Have the test's own runner set up the async fixture behind a plain one."""
    item = request.node
    runner = _runner_of(item)
    item.stash[_USES_DEVICE] = True
    item.stash[_HAS_RAISED] = False  # it may be run again
    item.stash.setdefault(_HELD, [])
    found: Device = request.getfixturevalue(f"_streamflow_{which}_{runner}")
    return found


def _runner_of(item: pytest.Function) -> str:
    """Which plugin runs the test, and with pytest-asyncio on the loop of which scope."""
    function = getattr(item, "function", None)  # a doctest has none
    if (hypothesis := getattr(function, "hypothesis", None)) is not None:
        function = hypothesis.inner_test
        function = getattr(function, "_anyio_original_func", function)
    if not inspect.iscoroutinefunction(function):
        pytest.fail(
            f"{item.name} is not async: what it asks for is a device that lives on an event "
            "loop. Write `async def`",
            pytrace=False,
        )
    if issubclass(item.cls or object, unittest.TestCase):
        pytest.fail(
            f"{item.name} is a test of a unittest.TestCase, which brings an event loop of its own "
            "or none: take it out of that class, or open a Device in it",
            pytrace=False,
        )
    manager = item.config.pluginmanager
    marker = item.get_closest_marker("asyncio")  # in its auto mode each test has one
    is_asyncio = marker is not None and manager.has_plugin("streamflow-asyncio")
    is_anyio = "anyio_backend" in item.fixturenames and manager.has_plugin("anyio")
    if is_asyncio and is_anyio:  # the one would run the test, the other its fixtures
        pytest.fail(
            f"both pytest-asyncio and anyio's plugin would run {item.name}: take one of the "
            "markers off, or set asyncio_mode = strict",
            pytrace=False,
        )
    if is_anyio:
        return "anyio"
    if is_asyncio and marker is not None:
        scope = marker.kwargs.get("loop_scope") or marker.kwargs.get("scope")
        return f"asyncio_{scope or item.config.getini('asyncio_default_test_loop_scope')}"
    pytest.fail(
        f"nothing runs {item.name} on an event loop: mark it with pytest.mark.anyio, or with "
        "pytest.mark.asyncio where pytest-asyncio is installed",
        pytrace=False,
    )


_Opener = Callable[..., AsyncIterator["Device"]]


def _opener(index: int, backend: str | None) -> _Opener:
    """An async generator for a fixture: opens a device, and checks it as it is left."""

    async def opened(
        request: pytest.FixtureRequest, streamflow_settings: Settings
    ) -> AsyncIterator[Device]:
        from streamflow.testing.fixtures import checked_device

        item = request.node
        try:
            async with checked_device(
                index,
                backend or item.stash[_WANTED],
                streamflow_settings,
                seed=item.config.stash[_SEED],
                note=item.stash[_HELD].append,
            ) as dev:
                yield dev
        except Exception as error:
            item.stash[_FOUND_LEAVING] = error
            raise

    return opened


_OPENERS: dict[str, tuple[int, str | None]] = {
    "sim0": (0, "sim"),
    "sim1": (1, "sim"),
    "wanted": (0, None),
}


def _anyio_fixture(which: str) -> Any:
    opened = _opener(*_OPENERS[which])

    async def opened_by_anyio(
        request: pytest.FixtureRequest,
        streamflow_settings: Settings,
        anyio_backend: object,  # by which anyio's plugin knows that it is to run this
    ) -> AsyncIterator[Device]:
        async for dev in opened(request, streamflow_settings):
            yield dev

    return pytest.fixture(opened_by_anyio, name=f"_streamflow_{which}_anyio")


_sim0_anyio = _anyio_fixture("sim0")
_sim1_anyio = _anyio_fixture("sim1")
_wanted_anyio = _anyio_fixture("wanted")


def _asyncio_fixtures() -> types.ModuleType:
    """The same for pytest-asyncio, which wants its own decorator, and a fixture for each loop."""
    import pytest_asyncio

    decorate: Any = pytest_asyncio.fixture
    fixtures = types.ModuleType("streamflow_asyncio")  # pytest looks at no other kind of object
    for which, arguments in _OPENERS.items():
        for scope in _LOOP_SCOPES:
            name = f"_streamflow_{which}_asyncio_{scope}"
            setattr(fixtures, name, decorate(_opener(*arguments), loop_scope=scope, name=name))
    return fixtures
