"""What every verb of a simulated device stands on: its state, and the checks of a call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from streamflow.errors import Closed, DeviceError, StreamflowError

if TYPE_CHECKING:
    from streamflow.backends.sim.controls import Controls
    from streamflow.backends.sim.machine import Gpu, World
    from streamflow.backends.sim.stream import SimStream

__all__ = ["NUM_QUEUED_MAX", "Checks"]

NUM_QUEUED_MAX = 1022
"""Launches and copies that one stream takes."""


class Checks:
    """The state that verbs share; see :class:`~streamflow.backends.sim.device.SimDevice`."""

    index: int
    gpu: Gpu
    world: World
    counts: Counter[str]
    stop: Callable[[], StreamflowError] | None
    _controls: Controls

    def _check(self) -> None:
        if self.stop is not None:
            raise self.stop()

    def _check_stream(self, stream: SimStream) -> None:
        if self.stop is not None:
            raise self.stop()
        if stream.is_closed:
            raise Closed(f"stream {stream.id} is closed")
        if stream.device is not self:
            raise ValueError(f"stream {stream.id} belongs to another device than {self.index}")

    def _full(self, stream: SimStream, num_more: int = 1) -> DeviceError:
        self.counts["would_block"] += 1
        what = "" if num_more == 1 else f", and a graph needs {num_more} places more"
        return DeviceError(
            f"the driver would block here: {stream.num_work} launches and copies are "
            f"outstanding on stream {stream.id}{what} (rule R7)"
        )

    def _check_index(self, device_index: int) -> None:
        num_devices = self.gpu.options.devices
        if not 0 <= device_index < num_devices:
            raise DeviceError(f"no simulated device {device_index}: there are {num_devices}")

    def _consult_rules(self, kind: str, label: str) -> BaseException | None:
        return self._controls.on_submit(kind, label) if self._controls.rules else None
