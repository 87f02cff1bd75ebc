"""Every public call of a device, an op, an array and a stream, found by looking."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import streamflow as sf

PLAIN = {
    # Values that are fixed, or one flag that another thread may want to watch.
    sf.Device: {"backend", "is_healthy", "properties", "why_simulated"},
    sf.Op: {
        "called_s",
        "kind",
        "label",
        "name",
        "rare",
        "state",
        "story",
        "stream",
        "ticket",
        "where",
        "writes_host",
    },
    sf.DeviceArray: {
        "address",
        "allocation",
        "argument",
        "check_usable",
        "dtype",
        "is_freed",
        "is_whole_region",
        "nbytes",
        "shape",
        "size",
        "staged",
    },
    sf.Stream: {"is_closed", "name", "priority"},
}
"""What may be read anywhere. A public name that is not here has to check where it is called."""

SPECIAL = {
    sf.Device: ("__aexit__",),
    sf.Op: ("__await__",),
    sf.DeviceArray: ("__await__", "__getitem__"),
    sf.Stream: ("__enter__", "__aenter__", "__aexit__", "__cuda_stream__"),
}


@sf.kernel('extern "C" __global__ void nothing(float* x) {}')
def nothing(x: Any) -> None:
    pass


def public_calls(*objects: Any) -> Iterator[tuple[str, Callable[[], object]]]:
    """``("Op.done", call)`` for everything that is not :data:`PLAIN`."""
    array = next(each for each in objects if isinstance(each, sf.DeviceArray))
    known = {
        "kernel": nothing,
        "array": array,
        "dst": array,
        "src": array,
        "op": next(each for each in objects if isinstance(each, sf.Op)),
        "source": np.zeros(4),
        "callback": print,
        "shape": 4,
        "value": 0,
        "num_parts": 1,
        "key": 0,
    }
    for item in objects:
        kind = type(item)
        names = [name for name in dir(kind) if not name.startswith("_")]
        for name in (*names, *SPECIAL[kind]):
            if name not in PLAIN[kind]:
                yield f"{kind.__name__}.{name}", _call(item, name, known)


def _call(item: Any, name: str, known: dict[str, Any]) -> Callable[[], object]:
    def call() -> object:
        found = getattr(item, name)
        if not inspect.isroutine(found):
            return found
        args = [
            known.get(each.name)
            for each in inspect.signature(found).parameters.values()
            if each.default is each.empty and each.kind is not each.VAR_KEYWORD
        ]
        result: Any = found(*args)
        if inspect.iscoroutine(result) or inspect.isgenerator(result):
            try:
                result.send(None)
            finally:
                result.close()
        return result

    return call
