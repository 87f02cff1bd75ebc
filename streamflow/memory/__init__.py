"""Host and device memory between the scheduler and the runtime."""

from streamflow.memory.exiting import process_is_exiting
from streamflow.memory.references import (
    device_async_resource_ref,
    device_resource_ref,
    host_async_resource_ref,
    host_device_async_resource_ref,
    host_device_resource_ref,
    host_resource_ref,
    require,
)
from streamflow.memory.registry import (
    get_current_device_resource,
    get_per_device_resource,
    reset_current_device_resource,
    reset_per_device_resource,
    set_current_device_resource,
    set_per_device_resource,
    using,
)
from streamflow.memory.resource import Block, DeviceMemoryResource, Piece

__all__ = [
    "Block",
    "DeviceMemoryResource",
    "Piece",
    "device_async_resource_ref",
    "device_resource_ref",
    "get_current_device_resource",
    "get_per_device_resource",
    "host_async_resource_ref",
    "host_device_async_resource_ref",
    "host_device_resource_ref",
    "host_resource_ref",
    "process_is_exiting",
    "require",
    "reset_current_device_resource",
    "reset_per_device_resource",
    "set_current_device_resource",
    "set_per_device_resource",
    "using",
]
