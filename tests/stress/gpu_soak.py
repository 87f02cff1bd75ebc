"""``python -m tests.stress.gpu_soak --seconds 450``: the soak with real kernels on a GPU.

Prints what was counted and one line of JSON. Exits with 1 where a result is wrong or
something is left, with 2 where nothing has moved for a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import streamflow as sf
from streamflow.runtime.report import make_report
from tests.stress.episodes import Soak
from tests.stress.soak import check_nothing_is_left, check_shares, refuse_launches, soak_settings

STUCK_S = 60.0
ROUND = 20_000  # ops between two looks at what is left


class Watchdog:
    """Ends the process when the soak stands still, with what each device was doing."""

    def __init__(self) -> None:
        self.soak: Soak | None = None
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def _watch(self) -> None:
        last, since = (0, 0), time.monotonic()
        while True:
            time.sleep(1.0)
            soak = self.soak
            now = (0, 0) if soak is None else (id(soak), sum(soak.counts.values()))
            if soak is None or now != last:
                last, since = now, time.monotonic()
            elif time.monotonic() - since > STUCK_S:
                self._bite(soak)

    def _bite(self, soak: Soak) -> None:
        print(f"nothing has moved for {STUCK_S:.0f} s", dict(soak.counts), flush=True)
        for dev in soak.devs:  # not dev.report(): this is not the loop's thread
            with contextlib.suppress(Exception):
                print(make_report(dev._core), flush=True)
        faulthandler.dump_traceback(all_threads=True)
        os._exit(2)


async def soak_gpu(
    seconds: float, seed: int, *, backend: str = "cuda", num_devices: int = 2
) -> Counter[str]:
    """Rounds of the soak until ``seconds`` have passed, each on devices freshly opened.

    The devices are two of one GPU, so that each has a pool and streams of its own.
    """
    counts: Counter[str] = Counter()
    watchdog, end_s = Watchdog(), time.monotonic() + seconds
    settings = soak_settings(seed)
    while time.monotonic() < end_s:
        async with contextlib.AsyncExitStack() as stack:
            devs = [
                await stack.enter_async_context(sf.Device(0, backend=backend, settings=settings))
                for _ in range(num_devices)
            ]
            if backend == "sim":
                for dev in devs:
                    refuse_launches(dev)
            watchdog.soak = soak = Soak(devs, Random(seed))
            try:
                await soak.run(ROUND, until_s=end_s)
            finally:
                soak.let_go()
            for dev in devs:
                check_nothing_is_left(dev)
                assert dev.is_healthy
        watchdog.soak = None
        counts += soak.counts
        counts["rounds"] += 1
        seed += 1
    return counts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stress.gpu_soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--backend", default="cuda")
    chosen = parser.parse_args(arguments)
    warnings.simplefilter("error")
    stray: list[str] = []
    threading.excepthook = lambda args: stray.append(repr(args.exc_value))
    sys.unraisablehook = lambda args: stray.append(repr(args.exc_value))
    started_s, counts, failure = time.monotonic(), Counter[str](), None
    try:
        counts = asyncio.run(
            soak_gpu(
                chosen.seconds, chosen.seed, backend=chosen.backend, num_devices=chosen.devices
            )
        )
        check_shares(counts, 1)
        assert not stray, stray
    except BaseException as error:
        traceback.print_exc()
        failure = repr(error)
    for what, num in counts.most_common():
        print(f"{num:>10}  {what}  {num / counts['ops']:.1%}")
    told: dict[str, Any] = {"ok": failure is None, "failure": failure, "seed": chosen.seed}
    told |= {"seconds": round(time.monotonic() - started_s, 1), **counts}
    print(json.dumps(told))
    return 0 if failure is None else 1


if __name__ == "__main__":
    sys.exit(main())
