"""C3: nothing in the package can hand a Python callable to a thread of the driver (R10)."""

from __future__ import annotations

import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "streamflow"
DOORS = re.compile(
    r"launch_?host_?func|stream_?add_?callback|graph_?add_?host_?node|host_?node_?params"
    r"|user_?object_?create|async_?notification|CFUNCTYPE|PYFUNCTYPE|WINFUNCTYPE"
    r"|\.callback\([^)]",
    re.IGNORECASE,
)
"""How a driver is given a function to call: by CUDA's names, cuda.core's and ctypes'."""


def test_c3_no_python_callable_is_given_to_a_host_function() -> None:
    sources = sorted(PACKAGE.rglob("*.py"))
    assert sources
    found = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in sources
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if DOORS.search(line)
    ]
    assert not found, "\n".join(found)


def test_c3_the_look_finds_every_way_there_is() -> None:
    for line in (
        "driver.cuLaunchHostFunc(stream, fn, None)",
        "runtime.cudaLaunchHostFunc(stream, fn, None)",
        "stream.launch_host_func(fn)",
        "driver.cuStreamAddCallback(stream, fn, None, 0)",
        "graph.callback(fn)",
        "driver.cuGraphAddHostNode(graph, None, 0, params)",
        "ctypes.CFUNCTYPE(None)(fn)",
        "driver.cuUserObjectCreate(None, fn, 1, 0)",
    ):
        assert DOORS.search(line), line
