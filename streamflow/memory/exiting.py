"""Whether the interpreter has begun to exit: asked by whoever would give memory back."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["process_is_exiting"]


def _asker(known: dict[str, object]) -> Callable[[], bool]:
    # A closure: in teardown modules lose their names, this one too.
    def process_is_exiting() -> bool:
        """Whether the interpreter has begun to exit.

        True in every handler of :mod:`atexit`, whichever order they were registered in, in
        threads that still run then, and through teardown. Reads one flag; never calls the
        driver. A running child of a fork is another matter (rule R12): it isn't exiting, unless
        its parent was.

        Returns
        -------
        bool
        """
        return known["_SHUTTING_DOWN"] is not False  # teardown leaves None there

    process_is_exiting.__qualname__ = "process_is_exiting"
    return process_is_exiting


# The end begins in the threading module, before threads are joined and before any handler of
# atexit runs. A handler of our own would come too late for those that were registered after it.
process_is_exiting = _asker(vars(threading))
