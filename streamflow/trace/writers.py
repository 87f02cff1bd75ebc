"""Which writer a file's ending chooses."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from streamflow.trace.trace import Trace

__all__ = ["write"]

_WRITERS = {
    # Longest ending first.
    ".chrome.json": "chrome:to_chrome",
    ".json": "store:to_json",
    ".html": "html:to_html",
    ".dot": "dot:to_dot",
    ".mmd": "mermaid:to_mermaid",
    ".svg": "svg:to_svg",
}
_PICTURES = (".dot", ".mmd", ".svg")  # these take the most ops to draw one by one


def write(trace: Trace, path: Path, max_ops: int) -> None:
    """Write ``trace`` in the format that the name of ``path`` asks for."""
    name = path.name.lower()
    ending = next((ending for ending in _WRITERS if name.endswith(ending)), None)
    if ending is None:
        raise ValueError(
            f"cannot tell the format of {path.name!r}: its name must end in one of "
            f"{', '.join(_WRITERS)}"
        )
    module, function = _WRITERS[ending].split(":")
    writer: Callable[..., str] = getattr(import_module(f"streamflow.trace.{module}"), function)
    text = writer(trace, max_ops=max_ops) if ending in _PICTURES else writer(trace)
    path.write_text(text, encoding="utf-8", newline="\n")
