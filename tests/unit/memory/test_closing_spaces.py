"""Which resources are told that their device closes, in which order; which streams are known."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from upstreams import Upstream, simulated

from streamflow.errors import Closed
from streamflow.memory.resource import DeviceMemoryResource


class Told(Upstream):
    """Writes down when it is told; all are equal."""

    def __init__(self, log: list[int], depth: int, device: Any = None) -> None:
        super().__init__(device=device)
        self.log = log
        self.depth = depth

    @property
    def _depth(self) -> int:
        return self.depth

    def is_equal(self, other: DeviceMemoryResource) -> bool:
        return isinstance(other, Told)

    def _forget(self) -> None:
        if self._space is not None:
            self.log.append(self.depth)


def test_equal_ones_are_each_told_and_the_outer_ones_first() -> None:
    log: list[int] = []
    several = [Told(log, depth, device=0) for depth in (2, 0, 3, 1, 0)]
    with simulated() as ground:
        for each in several:
            each.allocate(64, stream=ground.stream())
        log.clear()
    assert log == [3, 2, 1, 0, 0]


def test_one_made_for_an_open_device_is_told() -> None:
    log: list[int] = []
    with simulated() as ground:
        dev = SimpleNamespace(index=0, _core=SimpleNamespace(backend=ground.backend))
        one = Told(log, 0, device=dev)
    assert log == [0]
    del one


def test_one_that_fails_to_give_back_is_no_matter_to_the_next_device() -> None:
    class Failing(Told):
        def _on_space_closing(self) -> None:
            if not self.log:
                raise LookupError("as told")

    one = Failing([], 0, device=0)
    with pytest.raises(LookupError, match="as told"), simulated() as ground:
        space = ground.space
        block = one.allocate(64, stream=ground.stream())
    assert not space.is_open
    with simulated() as ground:
        with pytest.raises(Closed, match="which gave it back"):
            one.deallocate(block, stream=ground.stream())
        one.allocate(64, stream=ground.stream())
        assert ground.space.tenants[id(one)] is one
        one.log.append(0)  # it may


def test_the_default_stream_of_each_thread_is_asked_for_its_id_every_time() -> None:
    with simulated() as ground:
        backend: Any = ground.backend
        own = ground.stream()
        uid = ground.space.place(own).line.uid
        assert ground.space.place(own).line.uid == uid
        ids = count(1000)
        backend.is_cuda, backend.stream_id = True, lambda stream: next(ids)
        per_thread = SimpleNamespace(record=None, wait=None, sync=None, handle=2)
        assert [ground.space.place(per_thread).line.uid for _ in range(2)] == [1000, 1001]
        other = SimpleNamespace(record=None, wait=None, sync=None, handle=3)
        assert [ground.space.place(other).line.uid for _ in range(2)] == [1002, 1002]
