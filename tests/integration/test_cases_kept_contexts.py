"""C23: an op that failed while its caller handled another error keeps nothing of that."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from support import turns, virtual

import streamflow as sf
import streamflow.backends
from streamflow.backends import register_backend
from streamflow.backends.sim.device import SimDevice


class AtOnce(SimDevice):
    """Foreign code runs at its submission, as on CUDA."""

    is_cuda = True

    def call(self, stream, name, body, accesses, /, *args):
        body(*args)


def fails(*args):
    raise ValueError("mine")


@pytest.mark.parametrize("what", ["refused launch", "failing call"])
def test_c23_a_failed_op_holds_no_frame_of_what_its_caller_was_handling(
    run, add_one, monkeypatch, what
):
    monkeypatch.setattr(streamflow.backends, "_OPENERS", dict(streamflow.backends._OPENERS))
    register_backend("sim", AtOnce)

    async def main():
        async with virtual() as dev:
            x = dev.zeros(4, np.float32)
            await x

            def submit():
                held = dev.zeros(1 << 10, np.float32)  # noqa: F841  (a local, as programs have)
                try:
                    raise KeyError("another")
                except KeyError:
                    if what == "failing call":
                        return dev.call(fails, x)
                    dev.sim.fail(kind="launch", sticky=False)
                    return dev.launch(add_one, x, 4)

            op = submit()
            await turns()
            error = op.exception()
            assert isinstance(error, (ValueError, sf.LaunchFailed))
            assert error.__context__ is None
            await dev.synchronize()
            gc.collect()
            await dev.synchronize()
            assert sum(dev.live()["array"].values()) == 1  # x

    run(main)
