"""Memory resources and pools: ``sf.memory``. See docs/reference/memory.md.

Each name is imported when it is first asked for: most programs use none of them, and importing
streamflow is to be quick (rule R13).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from streamflow.backends.memory import (
    Location,
    MemoryAdvice,
    MemoryKind,
    MemorySupport,
    PointerAttributes,
    PoolAccess,
)

if TYPE_CHECKING:
    from streamflow.memory.adaptor import UpstreamResourceAdaptor
    from streamflow.memory.adaptors import (
        AlignedResourceAdaptor,
        FailureCallbackResourceAdaptor,
        LimitingResourceAdaptor,
        PrefetchResourceAdaptor,
    )
    from streamflow.memory.allocators import (
        PolymorphicAllocator,
        StreamAllocatorAdaptor,
        TypedAllocator,
    )
    from streamflow.memory.arena import ArenaMemoryResource
    from streamflow.memory.async_pools import (
        CudaAsyncManagedMemoryResource,
        CudaAsyncMemoryResource,
        CudaAsyncViewMemoryResource,
    )
    from streamflow.memory.binning import BinningMemoryResource
    from streamflow.memory.blocks import Block, Piece
    from streamflow.memory.caching_host import CachingHostAllocator
    from streamflow.memory.callback import (
        AllocateCallback,
        CallbackMemoryResource,
        DeallocateCallback,
    )
    from streamflow.memory.cuda_core import CudaCoreMemoryResource, from_cuda_core, to_cuda_core
    from streamflow.memory.device_pools import (
        current_pool,
        default_pool,
        memory_support,
        set_current_pool,
    )
    from streamflow.memory.exiting import process_is_exiting
    from streamflow.memory.figures import SubAllocatorInfo
    from streamflow.memory.fixed_size import FixedSizeMemoryResource
    from streamflow.memory.host_blocks import HostBlock, HostBlockInfo, HostBytes
    from streamflow.memory.host_reachable import (
        ManagedMemoryResource,
        PinnedHostMemoryResource,
        SamHeadroomMemoryResource,
        SystemMemoryResource,
    )
    from streamflow.memory.leaves import CudaMemoryResource
    from streamflow.memory.log import LogAction, LoggingResourceAdaptor, LogRecord, read_log
    from streamflow.memory.mempool import MemoryPool
    from streamflow.memory.pointers import pointer_attributes
    from streamflow.memory.pool import PoolMemoryResource
    from streamflow.memory.pool_attributes import PoolAttributes
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
    from streamflow.memory.resource import DeviceMemoryResource
    from streamflow.memory.statistics import Counters, Statistics, StatisticsResourceAdaptor
    from streamflow.memory.tracking import OutstandingAllocation, TrackingResourceAdaptor

__all__ = [
    "AlignedResourceAdaptor",
    "AllocateCallback",
    "ArenaMemoryResource",
    "BinningMemoryResource",
    "Block",
    "CachingHostAllocator",
    "CallbackMemoryResource",
    "Counters",
    "CudaAsyncManagedMemoryResource",
    "CudaAsyncMemoryResource",
    "CudaAsyncViewMemoryResource",
    "CudaCoreMemoryResource",
    "CudaMemoryResource",
    "DeallocateCallback",
    "DeviceMemoryResource",
    "FailureCallbackResourceAdaptor",
    "FixedSizeMemoryResource",
    "HostBlock",
    "HostBlockInfo",
    "HostBytes",
    "LimitingResourceAdaptor",
    "Location",
    "LogAction",
    "LogRecord",
    "LoggingResourceAdaptor",
    "ManagedMemoryResource",
    "MemoryAdvice",
    "MemoryKind",
    "MemoryPool",
    "MemorySupport",
    "OutstandingAllocation",
    "Piece",
    "PinnedHostMemoryResource",
    "PointerAttributes",
    "PolymorphicAllocator",
    "PoolAccess",
    "PoolAttributes",
    "PoolMemoryResource",
    "PrefetchResourceAdaptor",
    "SamHeadroomMemoryResource",
    "Statistics",
    "StatisticsResourceAdaptor",
    "StreamAllocatorAdaptor",
    "SubAllocatorInfo",
    "SystemMemoryResource",
    "TrackingResourceAdaptor",
    "TypedAllocator",
    "UpstreamResourceAdaptor",
    "current_pool",
    "default_pool",
    "device_async_resource_ref",
    "device_resource_ref",
    "from_cuda_core",
    "get_current_device_resource",
    "get_per_device_resource",
    "host_async_resource_ref",
    "host_device_async_resource_ref",
    "host_device_resource_ref",
    "host_resource_ref",
    "memory_support",
    "pointer_attributes",
    "process_is_exiting",
    "read_log",
    "require",
    "reset_current_device_resource",
    "reset_per_device_resource",
    "set_current_device_resource",
    "set_current_pool",
    "set_per_device_resource",
    "to_cuda_core",
    "using",
]

_HOMES = {
    "adaptor": ("UpstreamResourceAdaptor",),
    "adaptors": (
        "AlignedResourceAdaptor",
        "FailureCallbackResourceAdaptor",
        "LimitingResourceAdaptor",
        "PrefetchResourceAdaptor",
    ),
    "allocators": (
        "PolymorphicAllocator",
        "StreamAllocatorAdaptor",
        "TypedAllocator",
    ),
    "arena": ("ArenaMemoryResource",),
    "async_pools": (
        "CudaAsyncManagedMemoryResource",
        "CudaAsyncMemoryResource",
        "CudaAsyncViewMemoryResource",
    ),
    "binning": ("BinningMemoryResource",),
    "caching_host": ("CachingHostAllocator",),
    "callback": (
        "AllocateCallback",
        "CallbackMemoryResource",
        "DeallocateCallback",
    ),
    "cuda_core": (
        "CudaCoreMemoryResource",
        "from_cuda_core",
        "to_cuda_core",
    ),
    "device_pools": (
        "current_pool",
        "default_pool",
        "memory_support",
        "set_current_pool",
    ),
    "exiting": ("process_is_exiting",),
    "figures": ("SubAllocatorInfo",),
    "fixed_size": ("FixedSizeMemoryResource",),
    "host_blocks": (
        "HostBlock",
        "HostBlockInfo",
        "HostBytes",
    ),
    "host_reachable": (
        "ManagedMemoryResource",
        "PinnedHostMemoryResource",
        "SamHeadroomMemoryResource",
        "SystemMemoryResource",
    ),
    "leaves": ("CudaMemoryResource",),
    "log": (
        "LogAction",
        "LogRecord",
        "LoggingResourceAdaptor",
        "read_log",
    ),
    "mempool": ("MemoryPool",),
    "pointers": ("pointer_attributes",),
    "pool": ("PoolMemoryResource",),
    "pool_attributes": ("PoolAttributes",),
    "references": (
        "device_async_resource_ref",
        "device_resource_ref",
        "host_async_resource_ref",
        "host_device_async_resource_ref",
        "host_device_resource_ref",
        "host_resource_ref",
        "require",
    ),
    "registry": (
        "get_current_device_resource",
        "get_per_device_resource",
        "reset_current_device_resource",
        "reset_per_device_resource",
        "set_current_device_resource",
        "set_per_device_resource",
        "using",
    ),
    "resource": (
        "Block",
        "DeviceMemoryResource",
        "Piece",
    ),
    "statistics": (
        "Counters",
        "Statistics",
        "StatisticsResourceAdaptor",
    ),
    "tracking": (
        "OutstandingAllocation",
        "TrackingResourceAdaptor",
    ),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
