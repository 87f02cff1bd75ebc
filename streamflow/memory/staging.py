"""Pageable arrays to and from the device through pinned chunks, filled by worker threads.

A job starts once everything it depends on has completed, so a worker only ever waits for
copies of its own and one stalled kernel cannot hold up another array's staging. Each
worker of a job has a channel to itself: a private stream and two chunks.
"""

from __future__ import annotations

import ctypes
import threading
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import isqrt
from operator import attrgetter, length_hint
from typing import Any

import numpy as np

from streamflow.backends.base import Backend, Doing
from streamflow.errors import OpCancelled
from streamflow.memory.layout import Pieces
from streamflow.scheduler.fair import FairQueue
from streamflow.scheduler.workers import Workers

__all__ = ["Staging", "StagingJob"]

Array = np.ndarray[Any, Any]

_MIN_PIECE_NBYTES = 1 << 20
_SQUARE_NBYTES = 64 << 10
"""A copy costs the link about 8.7 us besides its bytes; a piece costs the time in which threads
fill the first ones and the link idles. Their sum is least at pieces of about sqrt(size x 8.7 us x
the bytes that one thread copies in a second, 5 to 12 GB)."""


class _Chunk:
    """A pinned chunk; ``event`` marks the end of the copy that last used it."""

    __slots__ = ("address", "event", "memory")

    def __init__(self, backend: Backend, nbytes: int) -> None:
        self.address = backend.allocate_pinned_blocking(nbytes)
        self.memory = memoryview((ctypes.c_char * nbytes).from_address(self.address)).cast("B")
        self.event: Any = None

    def like(self, piece: Array) -> Array:
        """The start of the chunk, with the shape and dtype of ``piece`` in C order."""
        flat: Array = np.frombuffer(self.memory, piece.dtype, piece.size)
        return flat.reshape(piece.shape)


class _Channel:
    """A private stream and two chunks, used by one worker task at a time."""

    def __init__(self, backend: Backend, chunk_nbytes: int, number: int) -> None:
        self.number = number
        self._backend = backend
        self._chunk_nbytes = chunk_nbytes
        self.stream = backend.create_stream()
        self.chunks: list[_Chunk] = []

    def chunk(self, index: int) -> _Chunk:
        """The chunk for the ``index``-th piece, free to be written. Worker threads only."""
        if index < 2 and len(self.chunks) <= index:
            self.chunks.append(_Chunk(self._backend, self._chunk_nbytes))
        chunk = self.chunks[index % 2]
        if chunk.event is not None:
            chunk.event.sync()
        return chunk

    def close_blocking(self) -> None:
        if self.chunks:
            self.stream.sync()
        for chunk in self.chunks:
            self._backend.free_pinned_blocking(chunk.address)
        self.stream.close()


@dataclass(slots=True, eq=False)
class StagingJob:
    """One array on its way. ``done(job)`` runs on the loop when all workers have ended.

    ``key`` is who takes turns with others: a scope, or None. ``told`` names its op. ``ends`` are
    events that follow every copy the job submitted: whoever uses the memory on the device next
    waits for them.
    Where ``error`` is set, the copies have ended.
    """

    seq: int
    array: Array
    address: int
    is_in: bool
    done: Callable[[StagingJob], None]
    key: object = None
    told: Doing | None = None
    is_timed: bool = False
    is_started: bool = False
    is_stopped: bool = False
    error: BaseException | None = None
    starts: list[Any] = field(default_factory=list)
    ends: list[Any] = field(default_factory=list)
    num_running: int = 0
    pieces: Pieces = field(init=False)
    numbers: Iterator[int] = field(init=False)  # of the pieces that no thread has taken yet


class Staging:
    """Jobs over channels and worker threads; loop thread only but for the tasks themselves."""

    def __init__(
        self, backend: Backend, workers: Workers, *, in_nbytes: int, out_nbytes: int, num: int
    ) -> None:
        self._backend = backend
        self._workers = workers
        self._nbytes = {True: in_nbytes, False: out_nbytes}
        self._num = num
        self._idle = {
            is_in: [_Channel(backend, self._nbytes[is_in], n) for n in range(num)]
            for is_in in (True, False)
        }
        # Taking turns, so that one scope's many jobs don't hold up another's one.
        self._waiting: dict[bool, FairQueue[StagingJob]] = {
            is_in: FairQueue("staging") for is_in in (True, False)
        }
        self._active: dict[bool, dict[StagingJob, None]] = {True: {}, False: {}}  # in order
        self._lock = threading.Lock()

    def start(self, job: StagingJob) -> None:
        """Begin ``job`` now, or when a channel is free; first come first served for each key."""
        job.is_started = True
        job.pieces = self._pieces(job)
        job.numbers = iter(range(job.pieces.num))
        self._waiting[job.is_in].push(job.key, job)
        self._start_waiting(job.is_in)

    def _pieces(self, job: StagingJob) -> Pieces:
        """Whole chunks; finer for an array that isn't large and is alone: all threads share it.

        Where jobs come together they keep the threads busy as they are, and the link too.
        """
        is_in, chunk_nbytes = job.is_in, self._nbytes[job.is_in]
        if self._waiting[is_in] or len(self._idle[is_in]) < self._num:
            return Pieces(job.array, chunk_nbytes, keeps_gaps=not is_in)
        best = isqrt(job.array.nbytes * _SQUARE_NBYTES)
        nbytes = min(chunk_nbytes, max(_MIN_PIECE_NBYTES, best))
        if is_in:
            return Pieces(job.array, nbytes, num_rising=self._num)
        return Pieces(job.array, nbytes, keeps_gaps=True)

    def stop(self, job: StagingJob) -> None:
        """Have ``job`` end after the chunk it is at, or at once if none has begun (rule R8)."""
        job.is_stopped = True
        if job.num_running == 0 and job not in self._active[job.is_in]:
            self._waiting[job.is_in].remove(job.key, job)
            job.error = OpCancelled("the copy was stopped before it began")
            job.done(job)

    def stop_all(self, *, drops_waiting: bool = False) -> None:
        """Have every job end after the chunk it is at.

        ``drops_waiting``: those that no worker has begun are forgotten; nobody is told.
        """
        for job in [
            *self._active[True],
            *self._active[False],
            *self._waiting[True],
            *self._waiting[False],
        ]:
            job.is_stopped = True
        if drops_waiting:
            for waiting in self._waiting.values():
                while waiting:
                    waiting.pop()

    def close_blocking(self) -> None:
        """Unpin the chunks. Worker threads only, once no job is active."""
        for channels in self._idle.values():
            while channels:
                channels.pop().close_blocking()

    def _start_waiting(self, is_in: bool) -> None:
        waiting, idle = self._waiting[is_in], self._idle[is_in]
        if not self._backend.is_virtual:
            # One that came while others had the threads began with a few: it gets more now.
            for job in self._active[is_in]:
                if idle and job.error is None and not job.is_stopped:
                    self._join(job, length_hint(job.numbers))
        while waiting and idle:
            job = waiting.pop()
            self._active[is_in][job] = None
            self._join(job, max(1, job.pieces.num))

    def _join(self, job: StagingJob, num_wanted: int) -> None:
        """Have so many more channels work on ``job``, if they are idle."""
        idle = self._idle[job.is_in]
        channels, idle[:] = idle[:num_wanted], idle[num_wanted:]
        job.num_running += len(channels)
        for first, channel in enumerate(channels):
            self._submit(job, channel, first, len(channels))

    def _submit(self, job: StagingJob, channel: _Channel, first: int, step: int) -> None:
        numbers: Iterable[int] = job.numbers  # each takes the next one: some threads are slower
        if self._backend.is_virtual:  # which thread has which is the program's own then (R15)
            numbers = range(first, job.pieces.num, step)

        def task() -> None:
            if self._backend.checker is not None:
                self._backend.checker.attribute(job.told)
            if job.is_timed:
                start = self._backend.create_event(timing=True)
                channel.stream.record(start)
            try:
                (self._fill if job.is_in else self._drain)(job, channel, numbers)
                end = self._backend.create_event(timing=job.is_timed)
                channel.stream.record(end)
            except BaseException:
                # Nobody will be ordered after these copies: let them end first (R6).
                channel.stream.sync()
                raise
            with self._lock:
                job.ends.append(end)
                if job.is_timed:
                    job.starts.append(start)

        def done(_: None, error: BaseException | None) -> None:
            if error is not None and job.error is None:
                job.error = error
            job.num_running -= 1
            # By number, so that an earlier job's copies come first on the engine (rule R15).
            insort(self._idle[job.is_in], channel, key=attrgetter("number"))
            if job.num_running == 0:
                del self._active[job.is_in][job]
                job.done(job)
            self._start_waiting(job.is_in)

        self._workers.submit(job.seq, task, done)

    def _fill(self, job: StagingJob, channel: _Channel, numbers: Iterable[int]) -> None:
        for used, number in enumerate(numbers):
            if job.is_stopped:
                raise OpCancelled("staging was stopped: its scope or device ended")
            offset, piece = job.pieces[number]
            chunk = channel.chunk(used)
            np.copyto(chunk.like(piece), piece)
            self._backend.copy_h2d(
                job.address + offset, chunk.address, piece.nbytes, channel.stream
            )
            self._record(chunk, channel)

    def _drain(self, job: StagingJob, channel: _Channel, numbers: Iterable[int]) -> None:
        pending: deque[tuple[_Chunk, Array]] = deque()
        for used, number in enumerate(numbers):
            if job.is_stopped:
                raise OpCancelled("staging was stopped: its scope or device ended")
            if len(pending) == 2:
                self._copy_out(*pending.popleft())
            offset, piece = job.pieces[number]
            chunk = channel.chunk(used)
            self._backend.copy_d2h(
                chunk.address, job.address + offset, piece.nbytes, channel.stream
            )
            self._record(chunk, channel)
            pending.append((chunk, piece))
        while pending:
            self._copy_out(*pending.popleft())

    def _copy_out(self, chunk: _Chunk, piece: Array) -> None:
        chunk.event.sync()
        np.copyto(piece, chunk.like(piece))

    def _record(self, chunk: _Chunk, channel: _Channel) -> None:
        if chunk.event is None:
            chunk.event = self._backend.create_event()
        channel.stream.record(chunk.event)
