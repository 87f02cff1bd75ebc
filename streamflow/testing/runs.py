"""One run of a program on an event loop of its own, under one schedule."""

from __future__ import annotations

import gc
import os
import sys
from asyncio import CancelledError
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from inspect import Parameter, iscoroutinefunction, signature
from typing import Any

import anyio

from streamflow.backends.sim.log import Logged
from streamflow.backends.sim.schedule import IMPOSED, Imposed, Plan
from streamflow.config import Settings
from streamflow.device import Device
from streamflow.errors import DeadlineExceeded
from streamflow.runtime.registry import open_on
from streamflow.runtime.report import make_report
from streamflow.scheduler.loops import current_shell
from streamflow.testing.trio_order import seeded_trio

__all__ = ["Run", "Runner"]

_LOOPS: dict[str, dict[str, Any]] = {
    "asyncio": {"backend": "asyncio"},
    "uvloop": {"backend": "asyncio", "backend_options": {"use_uvloop": True}},
    "trio": {"backend": "trio"},
}


@dataclass(slots=True)
class Run:
    """One run of the program, and how it ended."""

    imposed: Imposed
    error: BaseException | None = None
    is_hung: bool = False

    @property
    def log(self) -> list[Logged]:
        return [entry for schedule in self.imposed.schedules for entry in schedule.log]

    @property
    def order(self) -> int:
        """Equal for runs whose work has ended in the same order."""
        return hash(tuple((entry.device, entry.stream, entry.label) for entry in self.log))

    @property
    def kind(self) -> object:
        """Equal for runs that failed in the same way."""
        return self.is_hung, _kind(self.error)


def _kind(error: BaseException | None) -> object:
    if isinstance(error, BaseExceptionGroup):
        return type(error), *(_kind(each) for each in error.exceptions)
    return type(error)


class Runner:
    """Runs one program, again and again."""

    def __init__(
        self,
        fn: Callable[..., Awaitable[object]],
        settings: Settings | None,
        loop: str,
        timeout_s: float,
    ) -> None:
        if loop not in _LOOPS:
            raise ValueError(f"loop is one of {', '.join(_LOOPS)}; found {loop!r}")
        self._fn = fn
        self._loop = loop
        self._timeout_s = timeout_s
        self._num_devices = _count_devices(fn)
        self.name = getattr(fn, "__qualname__", None) or repr(fn)
        if settings is None:
            settings = Settings.from_environment({"STREAMFLOW_STAGING_THREADS": "2", **os.environ})
        if settings.sim.predict:
            raise ValueError(
                "explore() runs other schedules than the plain one, and predict=True tells the "
                "time of that: switch it off in the settings (STREAMFLOW_SIM_PREDICT)"
            )
        self._settings = replace(
            settings,
            close_timeout_s=min(settings.close_timeout_s, timeout_s),
            sim=replace(
                settings.sim,
                clock="virtual",
                schedule="",
                devices=max(settings.sim.devices, self._num_devices),
            ),
        )
        try:
            current_shell()
        except RuntimeError:
            return
        raise RuntimeError("explore() runs event loops of its own: call it from plain code")

    def run(self, plan: Plan) -> Run:
        """One run under ``plan``."""
        run = Run(Imposed(plan))
        token = IMPOSED.set(run.imposed)
        seeded = seeded_trio(0) if self._loop == "trio" else nullcontext()
        try:
            with seeded, _without_collections():
                anyio.run(self._main, run, **_LOOPS[self._loop])
        except Exception as error:
            run.error = error
        except BaseException as stop:
            if not _is_failure(stop):
                stop.add_note(f"explore: {self.name} was running under schedule {plan}")
                raise
            run.error = stop
        finally:
            IMPOSED.reset(token)
        return run

    async def _main(self, run: Run) -> None:
        shell = current_shell()
        reports: list[str] = []

        def time_is_up() -> None:
            run.is_hung = True
            scope.cancel()  # first: it has to end, whatever comes of the report
            reports.extend(str(make_report(core)) for core in open_on(shell.key))

        with anyio.CancelScope() as scope:
            stop = shell.call_later(self._timeout_s, time_is_up)
            try:
                async with AsyncExitStack() as stack:
                    devices = [
                        await stack.enter_async_context(
                            Device(index, backend="sim", settings=self._settings)
                        )
                        for index in range(self._num_devices)
                    ]
                    await self._fn(*devices)
            finally:
                stop()
        if scope.cancelled_caught:
            raise DeadlineExceeded(
                "\n".join([f"{self.name} had not ended after {self._timeout_s} s", *reports])
            )


def _count_devices(fn: Callable[..., Awaitable[object]]) -> int:
    if not iscoroutinefunction(fn):
        raise TypeError(f"explore takes a coroutine function, found {fn!r}")
    num = 0
    for parameter in signature(fn).parameters.values():
        if parameter.default is not Parameter.empty:
            continue
        if parameter.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD):
            num += 1
        elif parameter.kind is Parameter.KEYWORD_ONLY:
            raise TypeError(f"explore passes devices by position, but {parameter} is keyword-only")
    return num


def _is_failure(error: BaseException) -> bool:
    """Some of what is no ``Exception`` is a failure all the same, and so is a group of it."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_failure, error.exceptions))
    if isinstance(error, Exception | CancelledError):  # nobody outside has cancelled the run
        return True
    pytest = sys.modules.get("pytest")  # never imported for this; its fail() and raises()
    return pytest is not None and isinstance(error, pytest.fail.Exception)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Keep the garbage collector from dropping arrays at another moment of each run (R15)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
