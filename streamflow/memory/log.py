"""RMM's CSV log of allocations: writing one, and reading those of either library.

Source: RMM, ``logging_resource_adaptor`` and the ``log_parser`` of its benchmarks.
"""

from __future__ import annotations

import csv
import os
import re
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any

from streamflow.memory.adaptor import UpstreamResourceAdaptor
from streamflow.memory.blocks import Piece
from streamflow.memory.resource import DeviceMemoryResource
from streamflow.memory.space import Place

__all__ = ["LogAction", "LogRecord", "LoggingResourceAdaptor", "read_log"]

_COLUMNS = ("Thread", "Time", "Action", "Pointer", "Size", "Stream")
_NULL = "(nil)"
_HEX = re.compile(r"(0x)?[0-9a-fA-F]+", re.ASCII)


class LogAction(Enum):
    """What a line of a log tells of, with RMM's words."""

    ALLOCATE = "allocate"
    ALLOCATE_FAILURE = "allocate failure"
    FREE = "free"


@dataclass(frozen=True, slots=True)
class LogRecord:
    """One line of a log."""

    line: int
    """Its number in the file; the header is line 1."""
    thread: int
    """The system's id of the thread that called."""
    time_us: int
    """Microseconds since midnight."""
    action: LogAction
    address: int
    """0 where an allocation failed."""
    nbytes: int
    stream: int
    """The stream's handle, which may come again; 0 is the default stream."""


class LoggingResourceAdaptor(UpstreamResourceAdaptor):
    """Writes a line for every allocation, failed allocation and free, in RMM's format.

    Each line is handed to the system whole and at once: threads may write together, and what
    was written is there even if the process crashes. :func:`read_log` and RMM's own tools read
    it; ``streamflow replay`` runs it against other resources.

    Parameters
    ----------
    upstream_mr : DeviceMemoryResource
    log_file_name : path, optional
        Replaced if it exists. By default what the variable ``RMM_LOG_FILE`` says. RMM puts
        the device's number into the name; here the file is the one that is named.
    device : Device or int, optional
        By default the upstream's.

    Raises
    ------
    ValueError
        No file is named.
    OSError
        It can't be written.
    """

    def __init__(
        self,
        upstream_mr: DeviceMemoryResource,
        log_file_name: str | os.PathLike[str] | None = None,
        device: Any = None,
    ) -> None:
        super().__init__(upstream_mr, device)
        name = log_file_name if log_file_name is not None else os.environ.get("RMM_LOG_FILE")
        if not name:
            raise ValueError("name a file: log_file_name=, or the variable RMM_LOG_FILE")
        path = Path(name).absolute()
        # No buffer: nothing to lose in a crash, nor to write twice after a fork.
        self._file = path.open("wb", buffering=0)
        self._path = path
        self._live: set[Piece] = set()
        self._close_file = weakref.finalize(self, self._file.close)
        self._file.write(f"{','.join(_COLUMNS)}\n".encode())

    def get_file_name(self) -> str:
        """The file's absolute path."""
        return str(self._path)

    def flush(self) -> None:
        """Have the system write the file to its disk; readers see every line without it."""
        if not self._file.closed:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Refuse further allocations; the file is closed after the last free."""
        super().close()
        with self._lock:
            if not self._live:
                self._close_file()

    def _take(self, nbytes: int, alignment: int, place: Place) -> Piece:
        try:
            inner = self.upstream_mr.take(nbytes, alignment, place)
        except BaseException as error:
            try:
                self._write(LogAction.ALLOCATE_FAILURE, 0, nbytes, place)
            except OSError as unwritten:
                error.add_note(f"and {self._path} could not be written: {unwritten}")
            raise
        piece = self._wrap(inner, nbytes, alignment)
        try:
            self._write(LogAction.ALLOCATE, inner.address, nbytes, place)
        except BaseException:
            self.upstream_mr.give(inner, place)
            raise
        with self._lock:
            self._live.add(piece)
        return piece

    def _give(self, piece: Piece, place: Place) -> None:
        try:
            # First, as RMM does: who gets the address next writes after this. Once, where the
            # upstream takes it at the second time only.
            if piece in self._live:
                self._write(LogAction.FREE, piece.address, piece.nbytes, place)
                with self._lock:
                    self._live.discard(piece)
        except BaseException:
            super()._give(piece, place)
            piece.address = 0  # it is back, whatever this raises
            raise
        super()._give(piece, place)

    def _on_given(self, piece: Piece) -> None:
        with self._lock:
            self._live.discard(piece)
            if self._is_closed and not self._live:
                self._close_file()

    def _is_empty(self) -> bool:
        return not self._live

    def _forget(self) -> None:
        with self._lock:
            self._live.clear()
            if self._is_closed:
                self._close_file()

    def _write(self, action: LogAction, address: int, nbytes: int, place: Place) -> None:
        pointer = f"{address:#x}" if address else _NULL
        handle = int(place.stream.handle)
        stream = f"{handle:#x}" if handle else "0"
        time = datetime.now().strftime("%H:%M:%S.%f")
        line = f"{threading.get_native_id()},{time},{action.value},{pointer},{nbytes},{stream}\n"
        data = line.encode()
        with self._lock:  # of two threads, one after the other
            while data and not self._file.closed:  # the end of the process closes it early
                data = data[self._file.write(data) :]


def read_log(path: str | os.PathLike[str]) -> list[LogRecord]:
    """The records of a log that :class:`LoggingResourceAdaptor` wrote, or that RMM did.

    Parameters
    ----------
    path : path
        A CSV file with the columns Thread, Time, Action, Pointer, Size and Stream.

    Raises
    ------
    OSError
        It can't be read.
    ValueError
        It is no such log; names the file and the line.
    """
    with open(path, encoding="utf-8", newline="") as file:
        try:
            return list(_records(file, str(path)))
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"{path} is no log of allocations: {error}") from None


def _records(file: Any, path: str) -> Iterator[LogRecord]:
    rows = csv.reader(file)
    header = [name.strip() for name in next(rows, [])]
    if sorted(header) != sorted(_COLUMNS):
        found = ",".join(header)[:80] or "an empty line"  # it may be any file at all
        raise ValueError(f"{path}:1: a log begins with {','.join(_COLUMNS)}; found {found}")
    for row in rows:
        if not row:  # an empty line
            continue
        line = rows.line_num
        if len(row) != len(header):
            raise ValueError(
                f"{path}:{line}: {len(header)} fields are needed, found {len(row)}: "
                f"{','.join(row)!r}. Was the file cut off?"
            )
        field = {name: text.strip() for name, text in zip(header, row, strict=True)}
        try:
            yield LogRecord(
                line,
                _number(field, "Thread"),
                _time_us(field["Time"]),
                _action(field["Action"]),
                _pointer(field["Pointer"]),
                _number(field, "Size"),
                _stream(field["Stream"]),
            )
        except ValueError as error:
            raise ValueError(f"{path}:{line}: {error}") from None


def _number(field: dict[str, str], name: str) -> int:
    text = field[name]
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{name} is a number, found {text!r}")
    return int(text)


def _time_us(text: str) -> int:
    # Older versions of RMM put a colon before the microseconds.
    parts = text.replace(".", ":").split(":")
    if len(parts) != 4 or not all(part.isascii() and part.isdigit() for part in parts):
        raise ValueError(f"Time is hours:minutes:seconds.microseconds, found {text!r}")
    hours, minutes, seconds = (int(part) for part in parts[:3])
    if hours > 23 or minutes > 59 or seconds > 60:
        raise ValueError(f"Time lies outside of a day: {text!r}")
    return ((hours * 60 + minutes) * 60 + seconds) * 10**6 + int(parts[3].ljust(6, "0")[:6])


def _action(text: str) -> LogAction:
    # With an underscore, too: some tools rewrite the space.
    try:
        return LogAction(text.replace("_", " "))
    except ValueError:
        known = ", ".join(repr(action.value) for action in LogAction)
        raise ValueError(f"Action is one of {known}, found {text!r}") from None


def _pointer(text: str) -> int:
    if text == _NULL:
        return 0
    if not _HEX.fullmatch(text):
        raise ValueError(f"Pointer is a hexadecimal address, found {text!r}")
    return int(text, 16)


def _stream(text: str) -> int:
    if text == _NULL:
        return 0
    is_hex = text.startswith("0x")
    if not (_HEX.fullmatch(text) if is_hex else text.isascii() and text.isdigit()):
        raise ValueError(f"Stream is a handle such as 0 or 0x1f, found {text!r}")
    return int(text, 16 if is_hex else 10)
