"""Find the Python in a page and run it, the way a reader would: from the top, in one go.

Blocks of one page share their names. A block may use ``await`` outside a function. A block
that defines ``async def main()`` and doesn't call it is completed by ``await main()``.

A page marks a block it can't run with a reason, ````python no-run: needs two GPUs````, and may
prepare names that a reader takes for granted in a comment that doesn't show::

    <!-- python-setup
    dev = await sf.Device(0).__aenter__()
    -->
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

__all__ = ["Block", "python_blocks", "run_page"]

_BLOCK = re.compile(
    r"^(?P<open>```+|<!-- )(?P<kind>python-setup|python)(?P<info>[^\n]*)\n"
    r"(?P<code>.*?)^(?:(?P=open)\s*$|-->)",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of code and where it stands; ``no_run`` is None for code that runs."""

    path: Path
    line: int
    code: str
    no_run: str | None


def python_blocks(path: Path) -> list[Block]:
    """Every block of the page, hidden ones too, in order."""
    text = path.read_text(encoding="utf-8")
    blocks = []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("code")) + 1
        info = match["info"].strip()
        reason = None
        if info:
            word, _, reason = info.partition(":")
            reason = reason.strip()
            if word != "no-run" or not reason:
                raise ValueError(f"{path}:{line - 1}: expected 'no-run: <reason>', found {info!r}")
        blocks.append(Block(path, line, match["code"], reason))
    return blocks


def run_page(blocks: list[Block]) -> None:
    """Run the blocks in order, in one namespace and on one loop."""
    names: dict[str, object] = {"__name__": "__main__"}
    with asyncio.Runner() as runner:
        for block in blocks:
            if block.no_run is not None:
                continue
            code = _compile(block)
            if code.co_flags & inspect.CO_COROUTINE:
                runner.run(eval(code, names))
            else:
                exec(code, names)  # outside any loop: the block may call asyncio.run itself


def _compile(block: Block) -> CodeType:
    # Blank lines in front make tracebacks point into the page.
    source = "\n" * (block.line - 1) + block.code
    tree = ast.parse(source)
    defines_main = any(isinstance(n, ast.AsyncFunctionDef) and n.name == "main" for n in tree.body)
    calls_main = any(
        isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "main"
        for n in ast.walk(tree)
    )
    if defines_main and not calls_main:
        source += "\nawait main()\n"
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    code: CodeType = compile(source, str(block.path), "exec", flags=flags)
    return code
