"""Failures that nobody looked at: where they surface, how often, and what they say (R9)."""

from __future__ import annotations

import re

import anyio
import numpy as np
import pytest
from support import error_of, turns, until, virtual

import streamflow as sf


def fails(*_):
    raise ValueError("of the function")


async def fail_once(dev, add_one):
    """An op that fails, one that needs its result, and one that overwrites it."""
    x = dev.zeros(4, np.float32)
    root = dev.host(fails)
    writer = dev.launch(add_one, x, 4, after=[root])
    reader = dev.launch(add_one, x, 4)
    dev.fill(x, 0)
    async for _ in sf.as_completed([root, writer, reader]):  # which looks at none
        pass
    return root, reader


@pytest.mark.parametrize("where", ["scope", "synchronize", "exit"])
def test_a_failure_nobody_saw_surfaces_once_as_a_group(run, open_device, add_one, where):
    async def main():
        dev = open_device()
        await dev.__aenter__()
        if where == "scope":
            with pytest.raises(ExceptionGroup, match="scope 'work'") as caught:
                async with dev.scope(name="work"):
                    await fail_once(dev, add_one)
        else:
            await fail_once(dev, add_one)
        if where == "synchronize":
            with pytest.raises(ExceptionGroup, match="device 0") as caught:
                await dev.synchronize()
        if where == "exit":
            with pytest.raises(ExceptionGroup, match="device 0") as caught:
                await dev.__aexit__(None, None, None)
        else:
            await dev.synchronize()  # said once
            await dev.__aexit__(None, None, None)
        (error,) = caught.value.exceptions  # the root cause only
        assert type(error) is ValueError
        notes = "\n".join(error.__notes__)
        assert re.search(r"submitted at test_cases_unseen\.py:\d+", notes), notes

    run(main)


LOOKS = {
    "awaiting it": lambda root, reader: error_of(root),
    "awaiting its reader": lambda root, reader: error_of(reader),
    "gather": lambda root, reader: error_of(sf.gather(root)),
    "gather of its reader": lambda root, reader: error_of(sf.gather(reader)),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("through", ["device", "scope"])
def test_a_failure_that_was_seen_does_not_surface(run, add_one, look, through):
    """An UpstreamFailed that was seen counts for the cause that it names."""

    async def main():
        async with virtual() as dev:
            if through == "scope":
                async with dev.scope():
                    error = await LOOKS[look](*await fail_once(dev, add_one))
            else:
                error = await LOOKS[look](*await fail_once(dev, add_one))
            cause = error.__cause__ if isinstance(error, sf.UpstreamFailed) else error
            assert type(cause) is ValueError
            await dev.synchronize()

    run(main)


def test_asking_counts_as_looking_and_being_told_of_the_end_does_not(run, add_one):
    async def main():
        async with virtual() as dev:
            root, _ = await fail_once(dev, add_one)
            with pytest.raises(ValueError, match="of the function"):
                root.result()
            await dev.synchronize()
            root, reader = await fail_once(dev, add_one)
            assert isinstance(reader.exception(), sf.UpstreamFailed)
            await dev.synchronize()
            root, _ = await fail_once(dev, add_one)
            root.add_done_callback(lambda _: None)
            assert [op async for op in sf.as_completed([root])] == [root]
            assert root.state is sf.OpState.FAILED
            with pytest.raises(ExceptionGroup):
                await dev.synchronize()

    run(main)


def test_a_scope_tells_of_its_own_failures_and_leaves_others_to_theirs(run, add_one):
    async def main():
        async with virtual() as dev:
            outside = dev.host(fails)
            await until(outside.done)
            with pytest.raises(ExceptionGroup) as outer:
                async with dev.scope(name="outer"):
                    dev.host(fails)
                    with pytest.raises(ExceptionGroup) as inner:
                        async with dev.scope(name="inner"):
                            dev.host(fails)
                            dev.host(fails)
                    assert "scope 'inner': 2 ops" in str(inner.value)
            assert "scope 'outer': 1 op " in str(outer.value)
            with pytest.raises(ExceptionGroup, match="device 0: 1 op"):
                await dev.synchronize()

    run(main)


def test_a_cancelled_op_and_what_it_takes_along_do_not_surface(run, add_one):
    async def main():
        async with virtual() as dev:
            x = dev.zeros(4, np.float32)
            op = dev.launch(add_one, x, 4, after=anyio.Event())
            reader = dev.get(x)
            assert op.cancel()
            await turns()
            assert isinstance(reader.exception().__cause__, sf.OpCancelled)
            await dev.synchronize()

    run(main)


def test_a_failure_in_a_task_group_of_the_program_stays_whole(run, open_device):
    """What the device adds on leaving does not replace what the body raised."""

    async def main():
        with pytest.raises(ExceptionGroup) as caught:
            async with open_device() as dev:
                unseen = dev.host(fails)
                await until(unseen.done)
                async with anyio.create_task_group():
                    raise KeyError("mine")
        matched, rest = caught.value.split(KeyError)
        assert matched is not None
        assert rest is not None
        assert rest.subgroup(ValueError) is not None

    run(main)
