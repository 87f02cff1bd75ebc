"""Where in the user's program something was called, kept in two words per op."""

from __future__ import annotations

import sys
from contextvars import ContextVar
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType

__all__ = ["ON_BEHALF", "caller", "describe", "here", "origin_of", "user_instruction"]

ON_BEHALF: ContextVar[tuple[CodeType, int] | None] = ContextVar("streamflow_caller", default=None)
"""Where a call was made that is only carried out now, from the event loop."""

_PACKAGE = Path(__file__).parents[1]
_OWN = tuple(
    str(_PACKAGE / part)
    for part in ("runtime", "backends", "memory", "capture", "pipeline", "device.py")
)
_is_own: dict[str, bool] = {}


def caller(depth: int) -> FrameType:
    """The nearest frame, ``depth`` or more above, that is not our own."""
    frame = sys._getframe(depth)
    while True:
        filename = frame.f_code.co_filename
        is_own = _is_own.get(filename)
        if is_own is None:
            is_own = _is_own[filename] = filename.startswith(_OWN)
        if not is_own or frame.f_back is None:
            return frame
        frame = frame.f_back


def origin_of(frame: FrameType) -> tuple[CodeType, int]:
    """Where ``frame`` is, for :func:`describe`."""
    return frame.f_code, frame.f_lasti


def describe(code: CodeType, lasti: int) -> str:
    """File and line of an instruction. Frames hold locals, so no frame is kept (C23)."""
    positions = next(islice(code.co_positions(), lasti // 2, None), None)
    line = positions[0] if positions is not None else None
    return f"{Path(code.co_filename).name}:{line or code.co_firstlineno}"


def here() -> str:
    """File and line of the nearest call from the user's program."""
    frame = caller(2)
    return describe(frame.f_code, frame.f_lasti)


def user_instruction() -> tuple[CodeType, int]:
    """Code and instruction of the nearest call from the user's program, for :func:`describe`."""
    frame = sys._getframe(2)  # not by `caller`: leases and blocks ask each time
    if _is_own.get(frame.f_code.co_filename, True):
        frame = caller(3)
    return frame.f_code, frame.f_lasti
