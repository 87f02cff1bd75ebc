"""Items that the consumer has got are its own: leaving the pipeline takes nothing from them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from pipelines import add_one_to, batches_of
from support import Opener

import streamflow as sf

SIZE = 1 << 20  # 4 MiB: its staging takes longer than the way to the consumer
Run = Callable[[Callable[[], Awaitable[Any]]], Any]


@pytest.mark.parametrize("num_taken", [1, 3])
def test_c28_what_was_submitted_on_the_last_item_runs_though_the_loop_is_left(
    run: Run, open_device: Opener, saxpy: sf.Kernel, num_taken: int
) -> None:
    async def main() -> None:
        async with open_device() as dev:
            total = dev.zeros(SIZE, np.float32)
            num = 0
            async with dev.pipeline(batches_of(3, SIZE)).map(add_one_to).on_device() as items:
                async for x in items:
                    dev.launch(saxpy, 1.0, x, total, SIZE)
                    num += 1
                    if num == num_taken:
                        break
            assert set(await dev.get(total)) == {[1.0, 6.0][num_taken // 2]}

    run(main)


def test_c28_what_was_submitted_on_the_last_item_runs_when_the_source_has_ended(
    run: Run, open_device: Opener, saxpy: sf.Kernel
) -> None:
    async def main() -> None:
        async with open_device() as dev:
            total = dev.zeros(SIZE, np.float32)
            async for x in dev.pipeline(batches_of(3, SIZE), depth=3).on_device():
                dev.launch(saxpy, 1.0, x, total, SIZE)
            assert set(await dev.get(total)) == {3.0}

    run(main)
