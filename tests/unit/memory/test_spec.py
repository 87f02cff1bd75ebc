"""Stacks of resources as text."""

from __future__ import annotations

from typing import Any

import pytest

import streamflow.memory as memory
from streamflow.memory.spec import parse_resource


def test_a_stack_is_read_and_made_anew_each_time() -> None:
    spec = parse_resource(" limiting( pool(cuda, initial_pool_size=1GiB,), 2 ) ")
    one, other = spec.make(), spec.make()
    assert isinstance(one, memory.LimitingResourceAdaptor)
    assert one.get_allocation_limit() == 2
    assert isinstance(one.upstream_mr, memory.PoolMemoryResource)
    assert isinstance(one.upstream_mr.upstream_mr, memory.CudaMemoryResource)
    assert one.upstream_mr is not other.upstream_mr
    assert spec.text == "limiting( pool(cuda, initial_pool_size=1GiB,), 2 )"


@pytest.mark.parametrize(
    ("text", "class_name"),
    [
        ("cuda", "CudaMemoryResource"),
        ("cuda()", "CudaMemoryResource"),
        ("async", "CudaAsyncMemoryResource"),
        ("async(initial_pool_size=1MiB, enable_ipc=false)", "CudaAsyncMemoryResource"),
        ("async_managed", "CudaAsyncManagedMemoryResource"),
        ("managed", "ManagedMemoryResource"),
        ("pinned", "PinnedHostMemoryResource"),
        ("system", "SystemMemoryResource"),
        ("sam_headroom(headroom=1GiB)", "SamHeadroomMemoryResource"),
        ("pool(upstream_mr=async, initial_pool_size=none)", "PoolMemoryResource"),
        ("arena(cuda, 64MiB, dump_log_on_failure=true)", "ArenaMemoryResource"),
        ("fixed_size(cuda, 1MiB, 8)", "FixedSizeMemoryResource"),
        ("binning(pool(cuda), 10, 20)", "BinningMemoryResource"),
        ("binning(cuda, -1, -1)", "BinningMemoryResource"),
        ("statistics(tracking(prefetch(managed)))", "StatisticsResourceAdaptor"),
        ("aligned(cuda, 4096, 64KiB)", "AlignedResourceAdaptor"),
    ],
)
def test_every_name_makes_its_class(text: str, class_name: str) -> None:
    assert type(parse_resource(text).make()).__name__ == class_name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"'', at character 1: a resource's name is needed, found the end"),
        ("12", r"at character 1: a resource's name is needed, found '12'"),
        ("poool(cuda)", r"at character 1: no resource 'poool'; known: cuda, async, "),
        ("pool(coda)", r"at character 6: no resource 'coda'"),
        ("pool(cuda", r"at character 10: a comma or a parenthesis is needed, found the end"),
        ("pool(cuda 1GiB)", r"at character 11: a comma or a parenthesis .* found '1GiB'"),
        ("pool(cuda))", r"at character 11: nothing more is needed, found '\)'"),
        ("cuda, async", r"at character 5: nothing more is needed, found ','"),
        ("pool(,cuda)", r"at character 6: an argument is needed, found ','"),
        ("pool(cuda, initial_pool_size=)", r"an argument is needed, found '\)'"),
        ("pool(cuda, 1XiB)", r"at character 12: '1XiB' is neither a number nor a size"),
        ("pool(cuda, $)", r"at character 12: '\$' is no part of a resource"),
        ("pool()", r"at character 1: pool: missing .* 'upstream_mr'; it takes \(upstream_mr, "),
        ("pool(1GiB)", r"at character 1: pool: upstream_mr takes a resource"),
        ("pool(cuda, async)", r"pool: initial_pool_size takes no resource"),
        ("pool(cuda, size=1)", r"pool: got an unexpected keyword argument 'size'; it takes"),
        ("cuda(1, 2, 3)", r"cuda: too many positional arguments"),
        ("pool(cuda, maximum_pool_size=1, 2)", r"after maximum_pool_size= all need a keyword"),
        ("pool(upstream_mr=cuda, upstream_mr=cuda)", r"upstream_mr= is given twice"),
        ("limiting(pool(arena(nope)), 1)", r"at character 21: no resource 'nope'"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_resource(text)


def test_what_the_class_refuses_goes_to_the_caller() -> None:
    spec: Any = parse_resource("aligned(cuda, 3)")
    with pytest.raises(ValueError, match="power of two"):
        spec.make()
