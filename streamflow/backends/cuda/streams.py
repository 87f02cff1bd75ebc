"""The streams of one device: which are ours to destroy, and each one's handle, cached."""

from __future__ import annotations

import threading
from typing import Any

from cuda.bindings import driver
from cuda.core import Device, Stream, StreamOptions

from streamflow.errors import Closed

__all__ = ["StreamTable"]


class StreamTable:
    """Handles for cuda.bindings, by stream.

    ``Stream.handle`` makes a new object every time (about as dear as the driver's own
    work in an allocation), so each is made once. Keyed by the stream itself: it hashes
    and compares by handle, so an entry is right for any stream it matches, also after
    the driver handed a destroyed stream's handle out again.
    """

    __slots__ = ("_bound", "_handles", "_lock", "_owned")

    def __init__(self) -> None:
        self._handles: dict[Any, Any] = {}
        self._owned: list[Stream] = []
        self._bound = 64
        self._lock = threading.Lock()

    def create(self, device: Device, priority: int) -> Stream:
        """A non-blocking stream, destroyed at :meth:`close` unless closed before."""
        stream = device.create_stream(options=StreamOptions(nonblocking=True, priority=priority))
        with self._lock:
            self._prune()
            self._owned.append(stream)
            self._handles[stream] = stream.handle
        return stream

    def __getitem__(self, stream: Any) -> Any:
        """The ``CUstream`` of ``stream``.

        Raises
        ------
        Closed
            The stream was closed. Its handle reads as zero then, which the driver takes
            for the default stream: work must not go there unnoticed.
        """
        # Asked first, not on a miss only: a dict finds the very same object whatever its
        # hash has become, and would give a destroyed stream's handle.
        if stream.is_closed:
            raise Closed("the stream is closed")
        try:
            return self._handles[stream]
        except KeyError:
            pass
        with self._lock:
            self._prune()
            handle = self._handles[stream] = stream.handle
        return handle

    def are_idle(self) -> bool:
        """Whether no stream of :meth:`create` still runs anything."""
        with self._lock:
            open_streams = [stream for stream in self._owned if not stream.is_closed]
        return not any(driver.cuStreamQuery(stream.handle)[0] for stream in open_streams)

    def close(self) -> None:
        """Destroy the streams of :meth:`create`; what they still run goes on."""
        with self._lock:
            owned, self._owned = self._owned, []
            self._handles = {}
        for stream in owned:
            stream.close()

    def forget(self) -> None:
        """Let go without waiting for the driver's answers, for a lost device."""
        with self._lock:
            self._owned = []
            self._handles = {}

    def _prune(self) -> None:
        """Drop closed streams whenever the number held has doubled. Needs the lock."""
        if len(self._handles) + len(self._owned) < self._bound:
            return
        # New containers: other threads read the old ones without the lock.
        self._owned = [stream for stream in self._owned if not stream.is_closed]
        self._handles = {
            stream: handle for stream, handle in list(self._handles.items()) if not stream.is_closed
        }
        self._bound = max(64, 2 * (len(self._handles) + len(self._owned)))
