"""What the driver knows of an address."""

from __future__ import annotations

from operator import index
from typing import Any

from streamflow.backends.memory import PointerAttributes
from streamflow.errors import Closed
from streamflow.memory.current import find_space
from streamflow.memory.space import Space, space_of

__all__ = ["pointer_attributes"]


def pointer_attributes(memory: Any, *, device: Any = None) -> PointerAttributes:
    """Where memory lies, and whose it is.

    Parameters
    ----------
    memory : Block, DeviceArray or int
        An address must be of memory that is allocated now: of what was freed, the driver says
        nothing reliable.
    device : Device or int, optional
        Which device to ask about an address; default: the task's current one.

    Returns
    -------
    PointerAttributes
        ``has_context`` is False for memory of a pool.

    Raises
    ------
    TypeError
        None of these.
    ValueError
        Memory of no bytes has no address.
    Closed
        It was freed, be the free itself still to run; or its device is closed.
    """
    if isinstance(memory, bool) or (
        not hasattr(memory, "__index__") and not hasattr(memory, "is_freed")
    ):
        raise TypeError(f"takes a Block, a DeviceArray or an address, found {memory!r}")
    if hasattr(memory, "is_freed"):
        if memory.is_freed:
            raise Closed(f"{memory!r} was freed")
        address, space = int(memory.address), _space_of(memory)
    else:
        address, space = index(memory), find_space(device)
    if address <= 0:
        raise ValueError(f"{memory!r} has no address: it is of no bytes")
    return space.backend.pointer_attributes(address)


def _space_of(memory: Any) -> Space:
    """Blocks know their space; arrays belong to the runtime, which has a backend."""
    space = getattr(memory, "_space", None)
    return space if isinstance(space, Space) else space_of(memory._core.backend)
