"""Trace: the view of what a program did that the user holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamflow.trace.model import (
    Contents,
    TracedArray,
    TracedDevice,
    TracedEdge,
    TracedMemory,
    TracedOp,
)

if TYPE_CHECKING:
    from streamflow.runtime.op import Op
    from streamflow.trace.answers import Overlap
    from streamflow.trace.critical import CriticalPath
    from streamflow.trace.explain import Explanation
    from streamflow.trace.hints import Hint
    from streamflow.trace.what_if import WhatIf

__all__ = ["Trace"]


class Trace:
    """The ops of a piece of a program and the edges between them.

    ``dev.trace()`` makes one; it may be read while it is still being recorded.

    Parameters
    ----------
    read : callable
        Returns the contents as they are now.
    """

    __slots__ = ("_read",)

    def __init__(self, read: Callable[[], Contents]) -> None:
        self._read = read

    @classmethod
    def of(
        cls,
        ops: Iterable[TracedOp],
        edges: Iterable[TracedEdge] = (),
        arrays: Iterable[TracedArray] = (),
        memory: Iterable[TracedMemory] = (),
        devices: Iterable[TracedDevice] = (),
    ) -> Trace:
        """A finished trace, made by hand.

        Parameters
        ----------
        ops : iterable of TracedOp
            In order of submission.
        edges : iterable of TracedEdge
            Both ends of each are among ``ops``.
        arrays : iterable of TracedArray
        memory : iterable of TracedMemory
            In order of time.
        devices : iterable of TracedDevice
        """
        contents = Contents(tuple(ops), tuple(edges), tuple(arrays), tuple(memory), tuple(devices))
        return cls(lambda: contents)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read a trace that :meth:`save` wrote to a ``.json`` file.

        Parameters
        ----------
        path : str or os.PathLike

        Raises
        ------
        ValueError
            The file is not a trace, or of a newer version.
        OSError
            It can't be read.
        """
        from streamflow.trace.store import from_json

        path = Path(path)
        contents = from_json(path.read_bytes(), path.name)
        return cls(lambda: contents)

    @classmethod
    def merged(cls, traces: Iterable[Trace]) -> Trace:
        """One trace of several devices, or of several processes.

        Times are put on one axis, which begins where the earliest trace does: by the device's
        clock within a process, by the time of day between processes and between virtual time
        and the host's. Edges from one device to another are in the result where both their ops
        are. Ops of other processes than the first's get new ids.

        Parameters
        ----------
        traces : iterable of Trace
            At least one; each of one process.

        Raises
        ------
        ValueError
            There are none, or a part has no device (it was made by hand), or two of them hold
            the same op.
        """
        from streamflow.trace.merge import merge

        contents = merge([trace._read() for trace in traces])
        return cls(lambda: contents)

    # -- what is in it -----------------------------------------------------------------------

    @property
    def ops(self) -> tuple[TracedOp, ...]:
        """In the order in which they were called for."""
        return self._read().ops

    @property
    def edges(self) -> tuple[TracedEdge, ...]:
        """By the op that waits; both ends are in :attr:`ops`."""
        return self._read().edges

    @property
    def arrays(self) -> tuple[TracedArray, ...]:
        """What the ops touch, by id."""
        return self._read().arrays

    @property
    def memory(self) -> tuple[TracedMemory, ...]:
        """Memory in use, in order of time; each holds until the next of its device."""
        return self._read().memory

    @property
    def devices(self) -> tuple[TracedDevice, ...]:
        """Whose ops these are; empty for a trace made by hand."""
        return self._read().devices

    @property
    def num_dropped(self) -> int:
        """Ops that were there and are not any more: the trace keeps so many."""
        return self._read().num_dropped

    def op(self, which: Op[Any] | TracedOp | int | str) -> TracedOp:
        """The traced op of an op, of an id, or of a name.

        Parameters
        ----------
        which : Op, TracedOp, int or str

        Raises
        ------
        LookupError
            The trace has no such op, or several of that name.
        """
        ops = self.ops
        if isinstance(which, str):
            found = [op for op in ops if op.name == which]
            if len(found) > 1:
                ids = ", ".join(str(op.id) for op in found[:5])
                more = ", .." if len(found) > 5 else ""
                raise LookupError(
                    f"{len(found)} ops are named {which!r}: say which by id ({ids}{more})"
                )
        else:
            if isinstance(which, TracedOp):
                wanted = which.id
            else:
                wanted = which if isinstance(which, int) else which.ticket.seq
            found = [op for op in ops if op.id == wanted]
        if not found:
            raise LookupError(f"no op {which!r} among the {len(ops)} of this trace")
        return found[0]

    # -- answers -----------------------------------------------------------------------------

    def overlap(self) -> Overlap:
        """How much of the copying and computing ran at the same time."""
        # Here and below: few programs ask all of it, and `dev.trace()` should load quickly.
        from streamflow.trace.answers import overlap

        return overlap(self)

    def critical_path(self) -> CriticalPath:
        """The chain of ops and waits that made the run as long as it was."""
        from streamflow.trace.critical import critical_path

        return critical_path(self)

    def explain(self, which: Op[Any] | TracedOp | int | str) -> Explanation:
        """What an op waited for, from its call until the program knew its end.

        Parameters
        ----------
        which : Op, TracedOp, int or str
            As for :meth:`op`.

        Raises
        ------
        LookupError
            The trace has no such op, or several of that name.
        """
        from streamflow.trace.explain import explain

        return explain(self, which)

    def hints(self) -> tuple[Hint, ...]:
        """What could be better, with the lines it was seen at; empty where nothing was found.

        Each kind of hint looks for one mistake, whose thresholds are constants of
        ``streamflow.trace.hints``.
        """
        from streamflow.trace.hints import hints

        return hints(self)

    def assert_overlap(self, ratio: float = 0.9) -> None:
        """Fail where less of the copying and computing than ``ratio`` ran at the same time.

        For CI: a change that makes a pipeline wait breaks a test then. On the simulator's
        virtual clock the result is the same each time (rule R15).

        Parameters
        ----------
        ratio : float
            From 0 to 1: what :attr:`Overlap.ratio` must reach.

        Raises
        ------
        AssertionError
            It was less, or no op has a time. The message has the overlap, the longest gaps
            with their causes, and the hints.
        ValueError
            ``ratio`` is no number from 0 to 1.
        """
        from streamflow.trace.assertion import assert_overlap

        assert_overlap(self, ratio)

    def what_if(
        self,
        *,
        compute_lanes: int | None = None,
        h2d_rate: float | None = None,
        d2h_rate: float | None = None,
        kernel_speed: float | None = None,
        copy_engines: int | None = None,
        compute_slots: int | None = None,
        depth: int | None = None,
    ) -> WhatIf:
        """What the traced work would take on another machine, or with other settings.

        The ops run again on the simulator's machine with the durations that were measured; no
        array is made. What is not given stays as it was.

        Parameters
        ----------
        compute_lanes : int, optional
            As :class:`Settings` has it: every op that was on a compute lane gets one anew.
        h2d_rate, d2h_rate : float, optional
            Bytes per second of copies in and out. Their fixed part stays.
        kernel_speed : float, optional
            How many times as fast kernels, calls and graphs run.
        copy_engines, compute_slots : int, optional
            As :class:`SimOptions` has them: 1 or 2; and how much the device computes at a time.
        depth : int, optional
            Items at a time of the pipelines in the trace. Gives lanes anew, too.

        Returns
        -------
        WhatIf

        Raises
        ------
        TypeError, ValueError
            A value that is none, or not positive; the trace has no timed ops, has lost some, or
            has failed ones, or is of several processes; ``depth`` without a pipeline.
        """
        from streamflow.trace.what_if import what_if

        return what_if(
            self,
            compute_lanes=compute_lanes,
            h2d_rate=h2d_rate,
            d2h_rate=d2h_rate,
            kernel_speed=kernel_speed,
            copy_engines=copy_engines,
            compute_slots=compute_slots,
            depth=depth,
        )

    # -- files -------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], *, max_ops: int = 5000) -> None:
        """Write the trace to a file whose ending chooses the format.

        ``.json`` is ours, for :meth:`load`. ``.chrome.json`` is for Perfetto and
        ``chrome://tracing``. ``.svg`` is the timeline as a picture. ``.dot`` (Graphviz) and
        ``.mmd`` (Mermaid) are the graph.

        Parameters
        ----------
        path : str or os.PathLike
        max_ops : int
            Pictures of more ops than this show less: the graphs a synopsis, groups of like ops
            and how many edges lead between them, since layout tools take minutes beyond a few
            thousand; the timeline draws as one what is too small to see. Mermaid's viewers stop
            at 500 edges unless told otherwise.

        Raises
        ------
        ValueError
            Another ending. Nothing is written.
        ModuleNotFoundError
            What lays out the page's graph is not installed.
        """
        from streamflow.trace.writers import write

        write(self, Path(path), max_ops)

    def _repr_html_(self) -> str:
        """The page in a notebook."""
        from streamflow.trace.html import to_notebook

        return to_notebook(self)

    def __repr__(self) -> str:
        contents = self._read()
        return f"<Trace of {len(contents.ops)} ops, {len(contents.edges)} edges>"
