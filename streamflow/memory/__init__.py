"""Host and device memory between the scheduler and the runtime."""

from streamflow.memory.adaptor import UpstreamResourceAdaptor
from streamflow.memory.adaptors import (
    AlignedResourceAdaptor,
    FailureCallbackResourceAdaptor,
    LimitingResourceAdaptor,
    PrefetchResourceAdaptor,
)
from streamflow.memory.log import LogAction, LoggingResourceAdaptor, LogRecord, read_log
from streamflow.memory.statistics import Counters, Statistics, StatisticsResourceAdaptor
from streamflow.memory.tracking import OutstandingAllocation, TrackingResourceAdaptor

__all__ = [
    "AlignedResourceAdaptor",
    "Counters",
    "FailureCallbackResourceAdaptor",
    "LimitingResourceAdaptor",
    "LogAction",
    "LogRecord",
    "LoggingResourceAdaptor",
    "OutstandingAllocation",
    "PrefetchResourceAdaptor",
    "Statistics",
    "StatisticsResourceAdaptor",
    "TrackingResourceAdaptor",
    "UpstreamResourceAdaptor",
    "read_log",
]
