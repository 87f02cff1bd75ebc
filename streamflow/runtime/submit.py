"""The verbs that submit work: what ``dev.put``, ``dev.launch`` and the others promise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from sys import _getframe
from typing import Any, TypeVar

import numpy as np
from anyio.lowlevel import checkpoint

from streamflow.backends.origin import caller, origin_of
from streamflow.memory.registry import EVER_CHOSEN
from streamflow.memory.resource import DeviceMemoryResource
from streamflow.runtime.array import DeviceArray, checked_dtype, checked_shape
from streamflow.runtime.core import Core
from streamflow.runtime.foreign import Arrays, call
from streamflow.runtime.kernel import Kernel
from streamflow.runtime.launch import Launcher
from streamflow.runtime.op import SCOPE, Op
from streamflow.runtime.recording import recorder_of, refuse
from streamflow.runtime.stream import ENTERED, Stream, explicit_line
from streamflow.runtime.transfers import Transfers, fill_pattern
from streamflow.scheduler.placement import least_loaded

__all__ = ["Submit"]

T = TypeVar("T")


class Submit(ABC):
    """Allocate, fill, copy, launch, call: plain functions that return at once (rule R1).

    ``Device`` is this and a life of its own: it sets the three attributes when entered.
    """

    _transfers: Transfers
    _launcher: Launcher

    @property
    @abstractmethod
    def _core(self) -> Core:
        """The open device; raises ``Closed`` before it is entered."""

    # -- memory ----------------------------------------------------------------------------

    def empty(
        self,
        shape: Any,
        dtype: Any = np.float64,
        *,
        memory: DeviceMemoryResource | None = None,
        stream: Stream | None = None,
    ) -> DeviceArray:
        """An uninitialised array.

        Parameters
        ----------
        shape : int or tuple of int
        dtype : dtype-like
            Of fixed size: boolean, integer, floating, complex or structured.
        memory : DeviceMemoryResource, optional
            Where it lies. Default: the resource of ``sf.memory.using`` in this task, else the
            device's (``Device(memory=)``), else what was set for the device in the registry,
            else the device's own pool.
        stream : Stream, optional
            Default: the current stream, else the least loaded compute lane.

        Ordering
        --------
        Allocated in stream order; a use elsewhere comes after it (rule R5). Never waits.

        Raises
        ------
        OutOfDeviceMemory
            After giving back what can be given back without waiting. Its ``report`` says who
            holds the memory and what to try.
        """
        core = self._core
        if core.needs_check or core.shell.current() is not core.shell.key:
            core.check_open()
        checked = checked_dtype(dtype)
        dims, size = checked_shape(shape, checked.itemsize)
        if SCOPE.get() is not None:
            core.check_budgets(size * checked.itemsize, "empty")
        line = explicit_line(core, stream) if stream is not None or ENTERED.get() else None
        if line is None:
            placement = core.placement
            if placement is None:
                line = least_loaded(core.compute)
            else:
                line = placement.pick("empty", "empty", ())
        resource = None
        if memory is not None or EVER_CHOSEN or core.memory.must_choose:
            resource = core.memory.choose(memory)
        return core.memory.array(dims, size, checked, line, _getframe(1), resource)

    async def alloc(
        self,
        shape: Any,
        dtype: Any = np.float64,
        *,
        timeout: float | None = None,
        memory: DeviceMemoryResource | None = None,
        stream: Stream | None = None,
    ) -> DeviceArray:
        """:meth:`empty`, as soon as there is memory.

        Whoever came first is served first, by each resource, whatever the sizes. ``empty``
        does not wait, and may take memory that somebody here waits for.

        Parameters
        ----------
        shape, dtype, memory, stream
            As for :meth:`empty`; and so is the order.
        timeout : float, optional
            Seconds by the device's clock; default: no limit.

        Raises
        ------
        OutOfDeviceMemory
            At once if no device could serve it; later, if no free is pending and every task
            that holds arrays or uses the device waits here as well.
        DeadlineExceeded
            Not within ``timeout``.
        Closed, DeviceLost
            The device was closed or failed meanwhile.
        """
        core = self._core
        core.check_open()
        refuse(core, "alloc waits for memory; empty does not")
        checked = checked_dtype(dtype)
        _, size = checked_shape(shape, checked.itemsize)
        if timeout is not None and (isinstance(timeout, bool) or not timeout >= 0):
            raise ValueError(f"timeout= takes seconds from 0 on, found {timeout!r}")
        core.check_budgets(size * checked.itemsize, "alloc")
        resource = core.memory.choose(memory)
        origin = origin_of(caller(1))  # no frame: it would hold its program's arrays (C23)

        def make() -> DeviceArray:
            array = self.empty(shape, dtype, memory=memory, stream=stream)
            array.allocation._origin = origin
            return array

        array = await core.memory.queue.take(
            make, size * checked.itemsize, resource, timeout, origin
        )
        await checkpoint()
        return array

    def zeros(
        self,
        shape: Any,
        dtype: Any = np.float64,
        *,
        memory: DeviceMemoryResource | None = None,
        stream: Stream | None = None,
    ) -> DeviceArray:
        """:meth:`full` of zeros. Parameters and errors are those of :meth:`empty`."""
        return self.full(shape, 0, dtype, memory=memory, stream=stream)

    def full(
        self,
        shape: Any,
        value: Any,
        dtype: Any = np.float64,
        *,
        memory: DeviceMemoryResource | None = None,
        stream: Stream | None = None,
    ) -> DeviceArray:
        """:meth:`empty`, then :meth:`fill` with ``value`` on the same stream.

        Parameters
        ----------
        shape, dtype, memory, stream
            As for :meth:`empty`, and so are the order and the errors.
        value : scalar
            As for :meth:`fill`; refused before anything is allocated.
        """
        fill_pattern(value, checked_dtype(dtype))  # refuse before anything is allocated
        array = self.empty(shape, dtype, memory=memory, stream=stream)
        array.allocation._origin = origin_of(caller(1))
        self._transfers.fill(array, value, stream, array.allocation.ticket.timeline)
        return array

    def fill(self, array: DeviceArray, value: Any, *, stream: Stream | None = None) -> Op[None]:
        """Write ``value`` to every element.

        Parameters
        ----------
        array : DeviceArray
        value : scalar
            One that the array's dtype can hold.
        stream : Stream, optional
            Default: the current stream, else a compute lane.

        Ordering
        --------
        After every earlier use of ``array``; later uses come after it.

        Raises
        ------
        TypeError, ValueError, OverflowError
            ``value`` is not a scalar that the dtype can hold.
        """
        self._core.check_open()
        return self._transfers.fill(array, value, stream)

    # -- copies ------------------------------------------------------------------------------

    def put(
        self,
        source: Any,
        *,
        out: DeviceArray | None = None,
        stream: Stream | None = None,
        after: Any = (),
    ) -> DeviceArray:
        """Copy host data to the device.

        Parameters
        ----------
        source : array-like
            Any layout; copied in C order. Buffers of bytes are ``uint8``. Up to 64 KiB it is
            read before this returns; larger, it must not change until ``await array.staged``,
            which debug mode and the simulator look after. Pinned memory in C order is read by
            the device as it is, that of a lease or pin at any size. An :class:`Op`, of a host
            task say, stands for its result; it needs ``out``.
        out : DeviceArray, optional
            Of the same shape and dtype; default: a new array.
        stream : Stream, optional
            Default: the current stream, else the lane ``h2d``.
        after : Op, DeviceArray, future or a sequence of these
            What else this comes after. A future is one of anyio (or its ``Event`` or
            ``TaskHandle``), asyncio or a thread pool; if its result is an op or an array,
            this comes after that, too.

        Ordering
        --------
        After every earlier use of ``out``, and what writes the lease that the source lies in.
        Later uses of the result come after it.

        Raises
        ------
        TypeError, ValueError
            A dtype that is not plain bytes, a masked array, a lease that was released, or an
            ``out`` that does not match.
        OutOfDeviceMemory
            No room for a new array.
        """
        self._core.check_open()
        return self._transfers.put(source, out, stream, after)[0]

    def get(
        self,
        array: DeviceArray,
        *,
        out: Any = None,
        stream: Stream | None = None,
        after: Any = (),
    ) -> Op[Any]:
        """Copy an array to the host.

        Parameters
        ----------
        array : DeviceArray
        out : ndarray or writable buffer, optional
            Of the same shape and dtype, any layout; only its own elements are written, and
            it is the result. Pinned memory in C order is written by the device as it is.
            Default: a new ndarray that *is* the pinned block the copy wrote; the block
            returns to its pool when the ndarray is collected. Above the budget for those,
            and where it is short, the ndarray is pageable.
        stream, after
            As in :meth:`put`; the default lane is ``d2h``.

        Returns
        -------
        Op of ndarray

        Ordering
        --------
        After the last write of ``array``, and every use of the lease that ``out`` lies in; later
        writes come after it. Cancelling an await of it, where it writes ``out``, is delivered
        once that write has ended (rule R8).

        Raises
        ------
        TypeError, ValueError
            An ``out`` that does not match, is read-only, masked, in a lease that was released,
            or whose elements share bytes.
        """
        self._core.check_open()
        return self._transfers.get(array, out, stream, after)

    def copy(self, dst: Any, src: Any, *, stream: Stream | None = None, after: Any = ()) -> Op[Any]:
        """Copy ``src`` to ``dst``, each an array of this device, of another one, or an ndarray.

        Parameters
        ----------
        dst, src : DeviceArray, ndarray or buffer
            Of one shape and dtype. Where ``src`` is on the host, as in :meth:`put`; where
            ``dst`` is, as in :meth:`get`.
        stream, after
            As in :meth:`put`; the default lane is that of the copy's direction, and a
            compute lane within a device and directly between two.

        Ordering
        --------
        After the last write of ``src`` and every use of ``dst``, on both devices. Between
        devices it goes directly where one may access the other's pool
        (:meth:`MemoryPool.set_access`), else through pinned memory: on the lane ``d2h`` of the
        one and ``h2d`` of the other, in chunks that overlap. It is one op all the same.

        Raises
        ------
        TypeError, ValueError
            Shapes or dtypes differ, or neither is of this device.
        """
        self._core.check_open()
        return self._transfers.copy(dst, src, stream, after)

    # -- kernels -------------------------------------------------------------------------------

    def launch(
        self,
        kernel: Kernel,
        *args: Any,
        grid: Any = None,
        block: Any = None,
        shared_bytes: int = 0,
        stream: Stream | None = None,
        after: Any = (),
        name: str | None = None,
    ) -> Op[None]:
        """Run a kernel.

        Parameters
        ----------
        kernel : Kernel
        *args
            One per parameter: a :class:`DeviceArray` for a pointer, a scalar otherwise.
        grid, block : int or tuple of int, optional
            Blocks and threads per block. Default: one thread for each element of the
            largest array, ``settings.block`` threads per block.
        shared_bytes : int
            Dynamic shared memory per block.
        stream : Stream, optional
            Default: the current stream, else a compute lane.
        after : Op, DeviceArray, future or a sequence of these
            What else this comes after. A future is one of anyio (or its ``Event`` or
            ``TaskHandle``), asyncio or a thread pool; if its result is an op or an array,
            this comes after that, too.
        name : str, optional
            For errors and traces; default: the kernel's name.

        Ordering
        --------
        After the last write of every array it reads, and every use of those it writes,
        as the signature and ``access=`` say.

        Raises
        ------
        TypeError, ValueError, OverflowError
            Arguments or geometry that do not fit, before anything is submitted.
        LaunchFailed
            On the simulator: the kernel has no reference body.
        """
        self._core  # noqa: B018  (raises before the device is entered, which replaces this method)
        return self._launcher.launch(
            kernel,
            *args,
            grid=grid,
            block=block,
            shared_bytes=shared_bytes,
            stream=stream,
            after=after,
            name=name,
        )

    def call(
        self,
        fn: Callable[..., T],
        *args: Any,
        reads: Arrays | None = None,
        writes: Arrays | None = None,
        stream: Stream | None = None,
        after: Any = (),
        name: str | None = None,
    ) -> Op[T]:
        """Run GPU code of another library as an op.

        Parameters
        ----------
        fn : callable
            Called as ``fn(stream, *args)``, with a :class:`CallStream` to submit to. On
            CUDA that is on the loop's thread, when the op is submitted: it must not block,
            and the device's own methods raise meanwhile. On the simulator it *is* the
            work, as a kernel is: it runs once, when the device comes to it.
        *args
            Any values. A :class:`DeviceArray` arrives as it is on CUDA, where it offers
            ``__cuda_array_interface__``, and on the simulator as an ndarray over its
            memory, read-only if only read. Inside a list or the like it isn't noticed.
        reads, writes : DeviceArray or sequence of them, optional
            What ``fn`` uses, also through a closure. By default every array among ``args``
            is read and written. Given ``writes`` alone, the others are read; given
            ``reads`` alone, the others are written. What is in both is written.
        stream : Stream, optional
            Default: the current stream, else a compute lane.
        after
            As in :meth:`put`.
        name : str, optional
            For errors and traces; default: the function's name.

        Returns
        -------
        Op
            With what ``fn`` returned; on the simulator, ndarrays in it (also in lists,
            tuples and dicts) that lie in device memory are copied.

        Ordering
        --------
        After the last write of every array it reads, and every use of those it writes; it
        ends when all that ``fn`` submitted has ended. A write never counts as a full
        overwrite. In the stream's window it counts as 16 driver calls (rule R7).

        An exception of ``fn`` fails this op only, with a note of where it was raised. What
        ``fn`` had submitted stays ordered. On the simulator the failure shows when the op
        runs: ops submitted later that need its result fail with ``UpstreamFailed``, those
        submitted before run.

        Raises
        ------
        TypeError
            ``fn`` is no function or a coroutine function, or ``reads`` or ``writes`` holds
            something else than arrays.
        ValueError
            An array of another device; with ``reads`` and ``writes``, one in neither.
        Closed
            An array was freed.
        """
        core = self._core
        core.check_open()
        return call(core, fn, args, reads, writes, stream, after, name)

    # -- work on the host ------------------------------------------------------------------------

    def host(
        self, function: Callable[..., Any], *args: Any, after: Any = (), name: str | None = None
    ) -> Op[Any]:
        """Run ``function(*args)`` in the graph: on a worker thread, or on the loop if async.

        Parameters
        ----------
        function : callable
            A coroutine function runs as a task of the event loop, in the caller's context.
        *args
            A :class:`DeviceArray` arrives as an ndarray of its contents, an :class:`Op` as
            its result; everything else as it is.
        after : Op, DeviceArray, future or a sequence of these
            As in :meth:`put`.
        name : str, optional
            For errors and traces; default: the function's own.

        Returns
        -------
        Op
            Of what the function returns. It may be an argument of later host tasks, a
            scalar of a later launch, or stand in ``after=``.

        Ordering
        --------
        Starts once everything it comes after has ended; at most ``settings.host_workers``
        at a time, taking turns between scopes. Until then it can be cancelled.

        Raises
        ------
        TypeError
            ``function`` is not callable.
        """
        core = self._core
        core.check_open()
        if not callable(function):
            raise TypeError(f"host takes a function to call, found {function!r}")
        first = core.after(after)
        for arg in args:
            if isinstance(arg, DeviceArray):
                self._transfers.check_array(arg)
            elif isinstance(arg, Op):
                core.tickets_of(arg)
        label = getattr(function, "__name__", None) if name is None else name
        op: Op[Any] = Op(core, "host", label)
        if (recorder := recorder_of(core)) is not None:
            recorder.record_host(op, function, args, first)
            return op
        values = [
            self._transfers.get(arg, None, None, ()) if isinstance(arg, DeviceArray) else arg
            for arg in args
        ]
        core.host.submit(op, function, values, first)
        return op
