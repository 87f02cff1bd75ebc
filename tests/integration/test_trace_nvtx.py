"""While a trace is taken, a profiler that listens gets a range around the calls of each op."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from support import SPIN, error_of, virtual

import streamflow as sf

N = 1 << 12


class Domain:
    """What ``nvtx.get_domain`` returns, as far as it is used; remembers the ranges."""

    def __init__(self):
        self.open = []
        self.closed = []

    def get_event_attributes(self, message, color, category, payload):
        return SimpleNamespace(message=message, color=color, category=category, payload=payload)

    def push_range(self, attributes):
        self.open.append(attributes)

    def pop_range(self):
        self.closed.append((len(self.open), self.open.pop()))


class DummyDomain(Domain):
    """What it returns where no profiler listens."""


@pytest.fixture
def domain(monkeypatch):
    made = Domain()
    names = []

    def get_domain(name):
        names.append(name)
        return made

    monkeypatch.setitem(sys.modules, "nvtx", SimpleNamespace(get_domain=get_domain))
    yield made
    assert set(names) <= {"streamflow"}
    assert made.open == []


def ranges(domain):
    return [(each.message, each.category) for _, each in domain.closed]


def test_each_op_has_a_range_by_its_name_and_scope(run, domain):
    async def main():
        async with virtual() as dev:
            dev.launch(SPIN, 1e-3, grid=1, block=1, name="before")
            with dev.trace() as trace:
                x = dev.zeros(N, np.float32)
                async with dev.scope(name="epoch"):
                    dev.launch(SPIN, 1e-3, grid=1, block=1, name="step")
                await dev.get(x)
            dev.launch(SPIN, 1e-3, grid=1, block=1, name="after")
            await dev.synchronize()
            return trace

    trace = run(main)
    assert ranges(domain) == [("empty", None), ("fill", None), ("step", "epoch"), ("get", None)]
    assert [each.payload for _, each in domain.closed] == [op.id for op in trace.ops]
    assert {depth for depth, _ in domain.closed} == {1}
    assert len({each.color for _, each in domain.closed}) == 3  # one look per engine


def test_a_range_ends_where_the_calls_fail(run, domain):
    async def main():
        async with virtual() as dev:
            dev.sim.fail(kind="launch", name="broken", sticky=False)
            with dev.trace():
                bad = dev.launch(SPIN, 1e-3, grid=1, block=1, name="broken")
                assert domain.open == []
                assert await error_of(bad) is not None
                await dev.launch(SPIN, 1e-3, grid=1, block=1, name="next")

    run(main)
    assert ranges(domain) == [("broken", None), ("next", None)]
    assert {depth for depth, _ in domain.closed} == {1}


@pytest.mark.parametrize("nvtx", [None, SimpleNamespace(get_domain=lambda _: DummyDomain())])
def test_nothing_is_called_where_nobody_listens(run, monkeypatch, nvtx):
    def never(*_):
        raise AssertionError("a range, where no profiler listens")

    monkeypatch.setattr(DummyDomain, "get_event_attributes", never)
    monkeypatch.setitem(sys.modules, "nvtx", nvtx)

    async def main():
        async with virtual() as dev:
            with dev.trace() as trace:
                await dev.launch(SPIN, 1e-3, grid=1, block=1)
            return trace

    assert len(run(main).ops) == 1


def test_the_real_package(run):
    pytest.importorskip("nvtx")

    async def main():
        async with virtual() as dev:
            with dev.trace() as trace:
                await dev.launch(SPIN, 1e-3, grid=1, block=1)
            return trace

    assert isinstance(run(main), sf.Trace)
