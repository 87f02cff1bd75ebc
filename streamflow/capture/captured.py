"""``dev.captured(function)``: recorded on the first call for each signature, then replayed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import update_wrapper
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from operator import index
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar
from weakref import WeakSet

from streamflow.capture.replay import Replay
from streamflow.capture.signature import Arguments
from streamflow.runtime.recording import recorder_of

if TYPE_CHECKING:
    from streamflow.runtime.submit import Submit

__all__ = ["CapturedFunction"]

P = ParamSpec("P")
R = TypeVar("R")


class CapturedFunction(Generic[P, R]):
    """A function whose ops are recorded once for each signature, and then launched as a graph.

    Made by :meth:`Device.captured`: as the function's decorator, or for a stage of a pipeline,
    ``.map(dev.captured(model))``. A signature is the shapes and dtypes of the arrays among the
    arguments, in tuples, lists, dicts and dataclasses too, and the values of all else.

    The graph works on memory of its own: a call copies its arguments there, and what the function
    wrote to them and its results back out, within the device. So calls with other arrays need no
    other recording, and results are new arrays, as without a graph. The function's own Python runs
    only while it is recorded: what changes from call to call comes in by its arguments. Arrays from
    around it are used where they are, without a copy, and kept.

    Attributes
    ----------
    num_recordings : int
        Calls that ran the function, to record it.
    num_replays : int
        Calls that launched what an earlier one had recorded.
    """

    def __init__(
        self,
        dev: Submit,
        function: Callable[P, R],
        maxsize: int,
        name: str | None,
        known: WeakSet[CapturedFunction[..., Any]],
    ) -> None:
        dev._core.check_open()
        if not callable(function) or _is_suspended(function):
            raise TypeError(
                f"captured takes a plain function that submits to the device, found {function!r}"
            )
        if isinstance(maxsize, bool):
            raise TypeError("maxsize= takes an int, found a bool")
        if index(maxsize) < 1:
            raise ValueError(f"maxsize= is at least 1, found {maxsize}")
        update_wrapper(self, function, updated=())
        self._dev = dev
        self._core = dev._core
        self._function = function
        own_name: str = getattr(function, "__name__", type(function).__name__)
        self._name = own_name if name is None else name
        self._maxsize = maxsize
        self._replays: OrderedDict[tuple[Any, ...], Replay] = OrderedDict()  # newest last
        self.num_recordings = 0
        self.num_replays = 0
        known.add(self)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Submit what the function submits, as a graph; returns what it returned.

        Where it returned an array that it had made, each call returns one of its own; arrays that
        it was given come back as they are given now; an op, as the one that ends the call. In a
        block of :meth:`Device.capture` the function itself is called, and recorded there.

        Ordering
        --------
        After the last write of every array it is given, and every use of those that it writes;
        later uses come after it. Calls with one signature run one after another.

        Raises
        ------
        TypeError
            An argument that is no array on the device, and not hashable.
        CaptureRefused
            The function does what a graph can't hold; or its result is what it can't know.
        Closed, ValueError
            An array that was freed, or is on another device.
        OutOfDeviceMemory
            No room for the results, or for what the graph needs.
        """
        core = self._core
        core.check_open()
        if recorder_of(core) is not None:
            return self._function(*args, **kwargs)
        given = Arguments(args, kwargs)
        for array in given.arrays:
            array.check_usable()
            if array._core is not core:
                raise ValueError(f"{self._name} was captured for another device than {array!r}")
        replay = self._replays.get(given.key)
        if replay is None or not replay.is_usable:
            self._replays.pop(given.key, None)
            return self._record(given, args, kwargs)
        self._replays.move_to_end(given.key)
        if replay.is_shared_with(given.arrays):
            return self._function(*args, **kwargs)  # its copies would be others than the function's
        self.num_replays += 1
        result: R = replay(given)
        return result

    def _record(self, given: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        replay = Replay(self._dev, self._function, self._name, args, kwargs, given)
        self.num_recordings += 1
        if replay.is_shared_with(given.arrays):
            result = self._function(*args, **kwargs)
        else:
            result = replay(given)
        self._replays[given.key] = replay  # not before: what found no memory keeps none
        if len(self._replays) > self._maxsize:
            self._replays.popitem(last=False)
        return result

    def clear(self) -> None:
        """Forget all recordings, and give their memory back once their launches have ended."""
        self._core.check_here()
        self._replays.clear()

    def __repr__(self) -> str:
        return f"<captured {self._name}: {len(self._replays)} signatures>"


def _is_suspended(function: Callable[..., Any]) -> bool:
    return (
        iscoroutinefunction(function)
        or isasyncgenfunction(function)
        or isgeneratorfunction(function)
    )
