"""What brings data to the host side of a SyncedArray: jobs that everybody who wants them shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streamflow.runtime.op import Op

__all__ = ["HostJob"]


class HostJob:
    """Memory, zeros or a copy for the host side, under way; ended once, well or with an error.

    Attributes
    ----------
    is_pull : bool
        It is a copy.
    version : int
        Of the data it is for.
    op : Op or None
        The copy, once it has been submitted.
    """

    __slots__ = (
        "_listeners",
        "_on_submitted",
        "error",
        "is_ended",
        "is_pull",
        "op",
        "version",
    )

    def __init__(self, version: int, *, is_pull: bool) -> None:
        self.version = version
        self.is_pull = is_pull
        self._listeners: list[Callable[[], None]] = []
        self._on_submitted: list[Callable[[], None]] = []
        self.op: Op[Any] | None = None
        self.error: BaseException | None = None
        self.is_ended = False

    def submitted(self, op: Op[Any]) -> None:
        """The copy has its place in the order."""
        self.op = op
        listeners, self._on_submitted = self._on_submitted, []
        for listener in listeners:
            listener()

    def when_submitted(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` once there is a copy, or never will be."""
        if self.op is not None or self.is_ended:
            listener()
        else:
            self._on_submitted.append(listener)

    def end(self, error: BaseException | None) -> None:
        """Tell everybody; the first end counts."""
        if self.is_ended:
            return
        self.is_ended, self.error = True, error
        listeners = [*self._on_submitted, *self._listeners]
        self._on_submitted, self._listeners = [], []
        for listener in listeners:
            listener()

    def when_ended(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` once it has ended."""
        if self.is_ended:
            listener()
        else:
            self._listeners.append(listener)

    def forget(self, listener: Callable[[], None]) -> None:
        """Don't call it any more: the job goes on for the others."""
        self._listeners = [other for other in self._listeners if other is not listener]

    def silence(self) -> None:
        """Call nobody any more: the loop has ended (C12)."""
        self._listeners, self._on_submitted = [], []
