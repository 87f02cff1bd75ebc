"""``process_is_exiting``, asked in child processes at every moment of their end."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from streamflow.memory.exiting import process_is_exiting

BEGIN = "import atexit, os, sys, threading\n"
IMPORT = "from streamflow.memory.exiting import process_is_exiting as ask\n"
TELL = "def tell(where):\n    os.write(1, f'{where} {ask()}\\n'.encode())\n"


def told_by(program: str, *, returncode: int = 0) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == returncode, result.stderr
    return result.stdout.splitlines()


def test_a_running_process_does_not_exit() -> None:
    assert process_is_exiting() is False


def test_it_is_true_in_every_atexit_handler_whichever_came_first() -> None:
    told = told_by(
        f"{BEGIN}atexit.register(lambda: tell('before'))\n{IMPORT}{TELL}"
        "atexit.register(lambda: tell('after'))\ntell('running')"
    )
    assert told == ["running False", "after True", "before True"]


def test_it_is_true_in_what_the_threading_module_calls_before_it_joins_threads() -> None:
    told = told_by(
        f"{BEGIN}threading._register_atexit(lambda: tell('before'))\n{IMPORT}{TELL}"
        "threading._register_atexit(lambda: tell('after'))"
    )
    assert told == ["after True", "before True"]


def test_it_is_true_in_a_thread_that_the_exit_waits_for() -> None:
    told = told_by(
        f"{BEGIN}{IMPORT}{TELL}"
        "ended = threading.main_thread().join\n"
        "def run():\n    tell('early')\n    begun.set()\n    ended()\n    tell('late')\n"
        "begun = threading.Event()\nthreading.Thread(target=run).start()\nbegun.wait()"
    )
    assert told == ["early False", "late True"]


def test_it_is_true_in_a_pool_thread_that_the_exit_waits_for() -> None:
    """Executors join their threads before any handler of atexit runs."""
    told = told_by(
        f"{BEGIN}{IMPORT}{TELL}"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "leave = threading.Event()\n"
        "threading._register_atexit(leave.set)\n"
        "pool = ThreadPoolExecutor(1)\n"
        "pool.submit(lambda: (leave.wait(), tell('late')))"
    )
    assert told == ["late True"]


def test_it_is_true_in_finalisers_of_the_teardown() -> None:
    told = told_by(
        f"{BEGIN}{IMPORT}"
        "import types\n"
        "class Late:\n"
        "    def __init__(self, name): self.name = name\n"
        "    def __del__(self, ask=ask, write=os.write): write(1, f'{self.name} {ask()}\\n'"
        ".encode())\n"
        "main = Late('main')\n"
        "room = sys.modules['room'] = types.ModuleType('room')\n"
        "room.late = Late('room')\n"
        "sys.modules['threading'].late = Late('threading')\n"
        "sys.late = Late('sys')\n"
        "now = Late('now')\ndel now"
    )
    assert told[0] == "now False"
    assert sorted(told[1:]) == ["main True", "room True", "sys True", "threading True"]


@pytest.mark.parametrize("how", ["sys.exit(3)", "raise SystemExit(3)", "os.write(2, b''); exit(3)"])
def test_leaving_by_an_exception_is_an_exit_once_it_has_got_through(how: str) -> None:
    told = told_by(
        f"{BEGIN}{IMPORT}{TELL}atexit.register(tell, 'handler')\n"
        f"try:\n    {how}\nfinally:\n    tell('on its way')",
        returncode=3,
    )
    assert told == ["on its way False", "handler True"]


def test_handlers_called_by_hand_are_no_exit() -> None:
    told = told_by(
        f"{BEGIN}{IMPORT}{TELL}atexit.register(tell, 'handler')\natexit._run_exitfuncs()"
    )
    assert told == ["handler False"]


def test_it_can_first_be_imported_while_exiting() -> None:
    told = told_by(
        f"{BEGIN}import streamflow\n"
        f"def last():\n    from streamflow.memory.exiting import process_is_exiting\n"
        "    os.write(1, f'{process_is_exiting()}'.encode())\natexit.register(last)"
    )
    assert told == ["True"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_a_running_forked_child_does_not_exit() -> None:
    told = told_by(
        f"{BEGIN}{IMPORT}{TELL}"
        "pid = os.fork()\n"
        "if not pid:\n    tell('child')\n    os._exit(0)\n"
        "os.waitpid(pid, 0)\natexit.register(tell, 'parent')"
    )
    assert told == ["child False", "parent True"]


def test_it_loads_no_driver() -> None:
    told = told_by(
        f"{BEGIN}{IMPORT}"
        "def last(ask=ask):\n    ask()\n"
        "    os.write(1, str([m for m in sys.modules if m.split('.')[0] == 'cuda']).encode())\n"
        "atexit.register(last)"
    )
    assert told == ["[]"]
