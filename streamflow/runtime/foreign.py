"""``dev.call``: a task over foreign code, ordered by what it is said to touch (R3)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from inspect import iscoroutine, iscoroutinefunction
from typing import Any, TypeVar

import numpy as np

from streamflow.backends.base import Access
from streamflow.errors import Closed, StreamflowError
from streamflow.runtime.array import Allocation, DeviceArray
from streamflow.runtime.core import Core
from streamflow.runtime.failures import placed
from streamflow.runtime.op import Op
from streamflow.runtime.stream import Stream, explicit_line
from streamflow.scheduler.hazards import Region

__all__ = ["CallStream", "ForeignCall", "RepeatedCall", "call", "lent"]

T = TypeVar("T")

Arrays = DeviceArray | Sequence[DeviceArray]

_READ, _READ_WRITE = Access.READ, Access.READ_WRITE

_NUM_CALLS = 16
"""Driver calls that one call counts as: how many a function makes is not known (rule R7).

A window of 512 takes 32 calls, so up to 31 launches and copies in each stay below the
1022 at which a driver blocks its caller.
"""


class CallStream:
    """The stream that the function of :meth:`Device.call` submits to, until it returns."""

    __slots__ = ("_stream",)

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    @property
    def backend_stream(self) -> Any:
        """The backend's own stream object; on CUDA a ``cuda.core.Stream``."""
        if self._stream is None:
            raise Closed("the stream of dev.call is lent until its function returns")
        return self._stream

    @property
    def handle(self) -> int:
        """The driver's handle as an int; on the simulator a number that means nothing."""
        return int(self.backend_stream.handle)

    def __cuda_stream__(self) -> tuple[int, int]:
        """Protocol version and handle, for other libraries."""
        return (0, self.handle)

    def __repr__(self) -> str:
        return f"<CallStream {'returned' if self._stream is None else self.handle}>"


class ForeignCall:
    """One call of a function, from its submission to its outcome."""

    __slots__ = (
        "_accesses",
        "_args",
        "_core",
        "_error",
        "_fn",
        "_kept",
        "_op",
        "_result",
        "_stream",
    )

    def __init__(
        self,
        core: Core,
        op: Op[Any],
        fn: Callable[..., Any],
        args: Sequence[Any],
        accesses: Sequence[Access | None],
    ) -> None:
        self._core = core
        self._op = op
        self._fn: Callable[..., Any] | None = fn
        self._kept: Callable[..., Any] | None = None  # for further calls
        self._args = args
        self._accesses = accesses
        self._stream: CallStream | None = None
        self._error: BaseException | None = None
        self._result: Any = None

    @property
    def stop(self) -> BaseException | None:
        """A KeyboardInterrupt or the like that the function raised at its submission."""
        return None if isinstance(self._error, Exception) else self._error

    def __call__(self, target: Any) -> int:
        core, op = self._core, self._op
        args, self._args = self._args, ()  # held until now, and no longer (rule R6)
        self._stream = CallStream(target)
        backend = core.backend
        if not backend.is_cuda:
            backend.call(target, op.name, self._run, self._accesses, *args)
            return _NUM_CALLS
        backend.call(target, op.name, self._run, self._accesses, *map(lent, args))
        error = self._error
        if error is None:
            op._result, self._result = self._result, None
            return _NUM_CALLS
        if isinstance(error, Exception) and not isinstance(error, StreamflowError):
            failure = core.lose(error, f"running {op.name}")
            if core.lost is not None:
                raise failure
        # Submitted all the same: later ops come after what the function had submitted.
        op.rare().doomed = error
        return _NUM_CALLS

    def repeated(self) -> RepeatedCall:
        """The same call, for a graph that makes it at each launch. In place of this one."""
        assert self._fn is not None
        return RepeatedCall(self._core, self._op, self._fn, self._args, self._accesses)

    @property
    def error(self) -> BaseException | None:
        """What the function has raised."""
        return self._error

    def finish(self) -> None:
        """The simulated device has run it: hand over the outcome, or raise it."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        self._op._result, self._result = self._result, None

    def let_go(self) -> None:
        """The op has ended: where that was before its submission, nothing needs holding."""
        if self._stream is None:
            self._fn, self._args = None, ()

    def _run(self, *args: Any) -> None:
        """Call the function; on an engine's thread on the simulator's wall clock."""
        core, fn, stream = self._core, self._fn, self._stream
        assert fn is not None
        assert stream is not None
        self._fn = self._kept
        outer = sys.exception()
        is_here = core.is_here()
        if is_here:
            # What it would submit through the device is not known to come after what it
            # has submitted itself.
            core.calling = self._op.name
            core.needs_check = True
        try:
            result = fn(stream, *args)
            if iscoroutine(result):
                result.close()
                raise TypeError(f"{self._op.name} returned a coroutine: {_USE_HOST}")
            self._result = result if core.backend.is_cuda else _detached(result, args)
        except BaseException as error:
            if not core.backend.is_cuda and not isinstance(error, Exception):
                raise  # Ctrl-C on the loop: the machine knows what to do
            self._error = placed(error, outer, "dev.call")
        finally:
            stream._stream = None
            if is_here:
                core.calling = None


class RepeatedCall(ForeignCall):
    """A call that a graph holds: on the simulator each launch makes it again.

    Attributes
    ----------
    errors : dict of int to BaseException
        What the function raised, by the number of the call.
    """

    __slots__ = ("_held", "_target", "errors", "num_calls")

    def __init__(
        self,
        core: Core,
        op: Op[Any],
        fn: Callable[..., Any],
        args: Sequence[Any],
        accesses: Sequence[Access | None],
    ) -> None:
        super().__init__(core, op, fn, args, accesses)
        self._kept = fn
        # What a captured kernel may use: each launch does, long after the one call (R6).
        self._held: list[Any] = [args]
        self._target: Any = None
        self.num_calls = 0
        self.errors: dict[int, BaseException] = {}

    def __call__(self, target: Any) -> int:
        self._target = target
        self._args = self._held[0]  # again, where somebody ended the capture of the first call
        return super().__call__(target)

    def _run(self, *args: Any) -> None:
        self._stream = CallStream(self._target)
        self._error = None  # of an earlier run
        super()._run(*args)
        if self._core.backend.is_cuda:
            self._held.append(self._result)
        self._result = None
        self.num_calls += 1
        if self._error is not None and not self._core.backend.is_cuda:
            self.errors[self.num_calls], self._error = self._error, None


_USE_HOST = "dev.call takes a plain function that submits; for work on the host use dev.host"


def call(
    core: Core,
    fn: Callable[..., T],
    args: Sequence[Any],
    reads: Arrays | None,
    writes: Arrays | None,
    stream: Stream | None,
    after: Any,
    name: str | None,
) -> Op[T]:
    """``Device.call``: check everything, then submit or park."""
    if not callable(fn):
        raise TypeError(f"dev.call takes a function, found {fn!r}")
    if iscoroutinefunction(fn) or iscoroutinefunction(getattr(fn, "__call__", None)):  # noqa: B004
        raise TypeError(f"{fn!r} is a coroutine function: {_USE_HOST}")
    read, written = _named("reads", reads), _named("writes", writes)
    for array in (*(arg for arg in args if isinstance(arg, DeviceArray)), *read, *written):
        if array._core is not core:
            raise ValueError(f"dev.call: {array!r} belongs to another device or event loop")
        array.check_usable()
    used = {array._region: _READ for array in read}
    used.update((array._region, _READ_WRITE) for array in written)
    accesses: list[Access | None] = []
    for place, arg in enumerate(args):
        access = None
        if isinstance(arg, DeviceArray):
            access = used.get(arg._region)
            if access is None:
                if reads is not None and writes is not None:
                    raise ValueError(
                        f"dev.call: argument {place}, {arg!r}, is in neither reads= nor writes="
                    )
                access = _READ if writes is not None else _READ_WRITE
                used[arg._region] = access
        accesses.append(access)
    line = explicit_line(core, stream)
    first = core.after(after)
    given = getattr(fn, "__name__", None) if name is None else name
    op: Op[T] = Op(core, "call", None if given == "<lambda>" else given)
    if core.backend.is_cuda:
        values = args
    else:
        values = [arg.argument() if isinstance(arg, DeviceArray) else arg for arg in args]
    task = ForeignCall(core, op, fn, values, accesses)
    rare = op.rare()
    rare.on_retired = task.let_go
    if not core.backend.is_cuda:
        rare.on_device_done = task.finish
    core.parking.submit(
        op,
        task,
        line=line or core.picker(op),
        reads=_regions(used, _READ),
        writes=_regions(used, _READ_WRITE),
        after=first,
    )
    if task.stop is not None:
        core.observed(task.stop)
        raise task.stop
    return op


def _named(what: str, arrays: Arrays | None) -> Sequence[DeviceArray]:
    if arrays is None:
        return ()
    if isinstance(arrays, DeviceArray):
        return (arrays,)
    if not isinstance(arrays, Sequence):
        raise TypeError(f"{what}= takes a DeviceArray or a sequence of them, found {arrays!r}")
    for array in arrays:
        if not isinstance(array, DeviceArray):
            raise TypeError(f"{what}= takes DeviceArrays, found {array!r}")
    return arrays


def _regions(used: dict[Region, Access], access: Access) -> list[Region]:
    return [region for region, found in used.items() if found is access]


def lent(arg: Any) -> Any:
    """``arg``; in place of an array freed behind this op before it is submitted, one like it."""
    if not isinstance(arg, DeviceArray) or not arg.is_freed:
        return arg
    memory = arg._memory
    # Address 0: it frees nothing when it goes.
    stand_in = Allocation(memory.core, 0, memory.nbytes, memory.op, memory.home)
    return DeviceArray(stand_in, arg._region, arg.address, arg.shape, arg.dtype, arg.size)


def _detached(value: Any, args: Sequence[Any]) -> Any:
    """``value`` with copies in place of ndarrays that may lie in simulated device memory."""
    if isinstance(value, np.void):  # a record is a view of its array
        return value.copy()
    if isinstance(value, np.ndarray):
        lent = (arg for arg in args if isinstance(arg, np.ndarray))
        return value.copy() if any(np.may_share_memory(value, arg) for arg in lent) else value
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(_detached(item, args) for item in value)
    if type(value) in (list, tuple):
        return type(value)(_detached(item, args) for item in value)
    if type(value) is dict:
        return {key: _detached(item, args) for key, item in value.items()}
    return value
