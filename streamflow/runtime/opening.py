"""Opening a device off the loop, so that whoever waits may be cancelled."""

from __future__ import annotations

import threading

from streamflow.backends import open_backend
from streamflow.config import Settings
from streamflow.errors import Closed
from streamflow.memory.space import leave_space
from streamflow.runtime.core import Core
from streamflow.runtime.reclaim import reclaim_blocking
from streamflow.scheduler.loops import Shell
from streamflow.scheduler.reaper import run_orphans_blocking

__all__ = ["Opening"]


class Opening:
    """Opens a device on a thread, and closes it again if nobody waits for it any more."""

    def __init__(self, name: str, index: int, settings: Settings, shell: Shell) -> None:
        self._name = name
        self._index = index
        self._settings = settings
        self._shell = shell
        self._lock = threading.Lock()
        self._is_abandoned = False
        self._core: Core | None = None

    def run_blocking(self) -> Core:
        reclaim_blocking()
        run_orphans_blocking()
        backend = open_backend(self._name, self._index, self._settings, self._shell.key)
        core = None
        try:
            backend.set_current()
            core = Core(backend, self._shell, self._settings)
            core.pinned.prepare_blocking()  # so that small copies need not wait for pinning
        except BaseException:
            if core is None:
                backend.close()
            else:
                _close_unused_blocking(core)
            raise
        with self._lock:
            if not self._is_abandoned:
                self._core = core
                return core
        _close_unused_blocking(core)
        raise Closed("entering the device was cancelled")

    def abandon(self) -> None:
        with self._lock:
            self._is_abandoned = True
            core = self._core
        if core is not None:
            threading.Thread(target=_close_unused_blocking, args=(core,), daemon=True).start()


def _close_unused_blocking(core: Core) -> None:
    core.backend.set_current()
    core.staging.close_blocking()
    core.pinned.close_blocking()
    leave_space(core.space, core.backend)
    core.memory.close()
    core.backend.close()
