"""Our resources in cuda.core's clothes, as far as no driver is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cuda.core", reason="no cuda.core on this platform")

from streamflow.backends.cuda.resources import ResourceForCudaCore


class Lender:
    is_device_accessible = True
    is_host_accessible = False

    def __init__(self) -> None:
        self.block = SimpleNamespace(address=0x1000)
        self.freed: list[Any] = []

    def allocate(self, nbytes: int, *, stream: Any) -> Any:
        return self.block

    def deallocate_later(self, block: Any, *, stream: Any) -> None:
        self.freed.append(block)


def test_what_no_buffer_can_be_made_of_goes_back() -> None:
    lender = Lender()
    resource = ResourceForCudaCore(lender, 0)
    with pytest.raises(TypeError, match="Stream"):
        resource.allocate(64, stream=object())
    assert lender.freed == [lender.block]


def test_memory_that_was_not_lent_is_not_taken_back() -> None:
    with pytest.raises(ValueError, match="0x2000"):
        ResourceForCudaCore(Lender(), 0).deallocate(0x2000, 64, stream=object())
