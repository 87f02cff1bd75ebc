"""Which resource is meant where none is named: per device, and for a block of code."""

from __future__ import annotations

import threading
from contextvars import ContextVar
from types import TracebackType
from typing import Any

from streamflow.memory.current import checked_device, current_device
from streamflow.memory.resource import DeviceMemoryResource, checked_resource

__all__ = [
    "EVER_CHOSEN",
    "Using",
    "get_current_device_resource",
    "get_per_device_resource",
    "reset_current_device_resource",
    "reset_per_device_resource",
    "resource_in_use",
    "resource_set_for",
    "set_current_device_resource",
    "set_per_device_resource",
    "using",
]

_MAX_ORDINAL = 2**31 - 1
_lock = threading.Lock()
_initial: dict[int, DeviceMemoryResource] = {}
"""What each device starts with and resets to: made once, since live blocks may be of it."""
_set: dict[int, DeviceMemoryResource] = {}
"""What a program chose. Both keep their resources until the process ends."""
EVER_CHOSEN: list[bool] = []
"""Empty until a program has set or used any resource: every allocation asks this first."""
_used: ContextVar[tuple[Using, ...]] = ContextVar("streamflow_using_resources", default=())
"""Every ``with using(...):`` of this task that has not been left, outermost first."""


def get_per_device_resource(device: Any) -> DeviceMemoryResource:
    """The resource that is meant on ``device``.

    Parameters
    ----------
    device : Device or int
        It need not have been entered.

    Returns
    -------
    DeviceMemoryResource
        What was set, else a ``CudaMemoryResource``.

    Raises
    ------
    TypeError, ValueError
        Not a device, or a negative ordinal.
    """
    ordinal = _ordinal(device)
    with _lock:
        return _set[ordinal] if ordinal in _set else _initial_for(ordinal)


def set_per_device_resource(device: Any, resource: DeviceMemoryResource) -> DeviceMemoryResource:
    """Have ``resource`` be meant on ``device`` from now on.

    Arrays and blocks that are live stay with the resource they came from. The registry keeps
    ``resource`` until the process ends, or another one takes its place.

    Parameters
    ----------
    device : Device or int
    resource : DeviceMemoryResource
        Made for that device, or for none in particular.

    Returns
    -------
    DeviceMemoryResource
        The previous one.

    Raises
    ------
    TypeError
        Not a device, or not a resource; None is none.
    ValueError
        A negative ordinal, or a resource made for another device.
    """
    ordinal = _ordinal(device)
    checked = checked_resource(resource)
    made_for = checked.device
    if made_for is not None and made_for != ordinal:
        raise ValueError(
            f"{checked!r} was made for device {made_for} and can't be that of device {ordinal}"
        )
    with _lock:
        previous = _set[ordinal] if ordinal in _set else _initial_for(ordinal)
        _set[ordinal] = checked
    EVER_CHOSEN[:] = [True]
    return previous


def reset_per_device_resource(device: Any) -> DeviceMemoryResource:
    """Go back to what ``device`` started with.

    Parameters
    ----------
    device : Device or int

    Returns
    -------
    DeviceMemoryResource
        The one that was set until now.

    Raises
    ------
    TypeError, ValueError
        Not a device, or a negative ordinal.
    """
    ordinal = _ordinal(device)
    with _lock:
        return _set.pop(ordinal) if ordinal in _set else _initial_for(ordinal)


def get_current_device_resource() -> DeviceMemoryResource:
    """:func:`get_per_device_resource` of the task's current device: 0 where none is entered."""
    return get_per_device_resource(current_device())


def set_current_device_resource(resource: DeviceMemoryResource) -> DeviceMemoryResource:
    """:func:`set_per_device_resource` for the task's current device: 0 where none is entered.

    Parameters
    ----------
    resource : DeviceMemoryResource

    Returns
    -------
    DeviceMemoryResource
        The previous one.

    Raises
    ------
    TypeError
        Not a resource; None is none.
    ValueError
        A resource made for another device.
    """
    return set_per_device_resource(current_device(), resource)


def reset_current_device_resource() -> DeviceMemoryResource:
    """:func:`reset_per_device_resource` of the task's current device: 0 where none is entered."""
    return reset_per_device_resource(current_device())


def using(resource: DeviceMemoryResource) -> Using:
    """A context manager: inside, this task's arrays come from ``resource`` unless told otherwise.

    Tasks started inside inherit it. Blocks may be left in any order: each takes back its own
    entry only. Inside a suspended generator the block stays visible to the generator's task.
    Arrays of a device that ``resource`` wasn't made for come from where they came from before.

    Parameters
    ----------
    resource : DeviceMemoryResource

    Raises
    ------
    TypeError
        Not a resource; None is none.
    """
    return Using(checked_resource(resource))


class Using:
    """What :func:`using` returns. One may be entered several times, also inside itself."""

    __slots__ = ("resource",)

    def __init__(self, resource: DeviceMemoryResource) -> None:
        self.resource = resource

    def __enter__(self) -> DeviceMemoryResource:
        EVER_CHOSEN[:] = [True]
        _used.set((*_used.get(), self))
        return self.resource

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Our own entry wherever it stands; a generator may even be closed in a context that
        # never entered it.
        entered = _used.get()
        for place in reversed(range(len(entered))):
            if entered[place] is self:
                _used.set((*entered[:place], *entered[place + 1 :]))
                return

    def __repr__(self) -> str:
        return f"<using {self.resource!r}>"


def resource_in_use(ordinal: int | None = None) -> DeviceMemoryResource | None:
    """That of the task's innermost ``with using(...):``, if given the one that serves a device."""
    for each in reversed(_used.get()):
        if ordinal is None or each.resource.device in (None, ordinal):
            return each.resource
    return None


def resource_set_for(ordinal: int) -> DeviceMemoryResource | None:
    """What a program has set for a device; None where it is as it started."""
    return _set.get(ordinal)


def _initial_for(ordinal: int) -> DeviceMemoryResource:
    known = _initial.get(ordinal)
    if known is None:
        from streamflow.memory.leaves import CudaMemoryResource  # leaves may look up this registry

        known = _initial[ordinal] = CudaMemoryResource(device=ordinal)
    return known


def _ordinal(device: Any) -> int:
    if device is None:
        raise TypeError("device= takes a Device or an ordinal, found None")
    ordinal = checked_device(device)
    if ordinal > _MAX_ORDINAL:
        raise ValueError(f"a device's ordinal is a C int, found {ordinal}")
    return ordinal
