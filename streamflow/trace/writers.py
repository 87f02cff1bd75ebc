"""Which writer a file's ending chooses."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from streamflow.trace.trace import Trace

__all__ = ["write"]

_WRITERS = {
    # Longest ending first. A writer takes the trace and the most ops to draw one by one.
    ".json": "store:to_json",
    ".html": "html:to_html",
    ".dot": "dot:to_dot",
    ".mmd": "mermaid:to_mermaid",
}
_WHOLE = (".json", ".html")  # these take any number


def write(trace: Trace, path: Path, max_ops: int) -> None:
    """Write ``trace`` in the format that the name of ``path`` asks for."""
    name = path.name.lower()
    ending = next((ending for ending in _WRITERS if name.endswith(ending)), None)
    if ending is None:
        raise ValueError(
            f"cannot tell the format of {path.name!r}: its name must end in one of "
            f"{', '.join(_WRITERS)}"
        )
    num_ops = len(trace.ops)
    if num_ops > max_ops and ending not in _WHOLE:
        raise ValueError(
            f"the trace has {num_ops} ops, more than max_ops={max_ops}: "
            "trace a shorter piece of the program, or pass a larger max_ops"
        )
    module, function = _WRITERS[ending].split(":")
    writer: Callable[[Trace], str] = getattr(import_module(f"streamflow.trace.{module}"), function)
    path.write_text(writer(trace), encoding="utf-8", newline="\n")
