"""The stages on the device: items go there, through the program's functions, and back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from streamflow.errors import OutOfDeviceMemory
from streamflow.pipeline.flow import Deliver, Item, Node, Sequencer, Stop
from streamflow.pipeline.items import host_arrays, is_host_array, leaves, map_leaves, tell
from streamflow.pipeline.stages import Clock
from streamflow.pipeline.work import Work
from streamflow.runtime.array import Allocation, DeviceArray
from streamflow.runtime.op import Op

if TYPE_CHECKING:
    from streamflow.runtime.core import Core
    from streamflow.runtime.submit import Submit
    from streamflow.scheduler.timeline import Ticket

__all__ = ["OnDevice", "Step"]


class Step:
    """One ``.map``: the function, its name, and who takes notes of it."""

    __slots__ = ("clock", "function", "name")

    def __init__(self, function: Callable[[Any, Any], Any], name: str, clock: Clock) -> None:
        self.function = function
        self.name = name
        self.clock = clock


class _Passage:
    """One item on the device, and the bytes it takes of the limit."""

    __slots__ = ("charge", "deliver", "item", "num_left")

    def __init__(self, item: Item, deliver: Deliver, charge: int) -> None:
        self.item = item
        self.deliver = deliver
        self.charge = charge
        self.num_left = 0


class OnDevice(Sequencer):
    """Submits all there is to do for an item at once: it overlaps with what is there already.

    Parameters
    ----------
    depth : int
        Items on the device at a time, from ``put`` to the end of what the last one needs of it.
    limit_nbytes : int or None
        Bytes of those items, as they came and as they leave.
    is_loader : bool
        Arrays stay on the device, for the consumer; else they are copied to the host.
    """

    def __init__(
        self,
        dev: Submit,
        work: Work,
        upstream: Node,
        steps: Sequence[Step],
        put_clock: Clock,
        get_clock: Clock,
        *,
        depth: int,
        limit_nbytes: int | None,
        ordered: bool,
        is_loader: bool,
    ) -> None:
        super().__init__(upstream, ordered)
        self._dev = dev
        self._core: Core = dev._core
        self._work = work
        self._steps = steps
        self._put_clock = put_clock
        self._get_clock = get_clock
        self._depth = depth
        self._limit_nbytes = limit_nbytes
        self._is_loader = is_loader
        self._queue: deque[_Passage] = deque()  # for room under the limit
        self._num_inside = 0
        self._used_nbytes = 0
        self._made_nbytes = 0  # the most that stages have added to what came

    def num_wanted(self) -> int:
        return min(len(self.waiting), self._depth - self._num_inside - len(self._queue))

    def take(self, item: Item) -> None:
        nbytes = sum(array.nbytes for array in host_arrays(item.value))
        self._queue.append(_Passage(item, self.waiting.popleft(), nbytes))
        self._admit()

    def _admit(self) -> None:
        while self._queue:
            passage = self._queue[0]
            came_nbytes = passage.charge
            nbytes = came_nbytes + self._made_nbytes
            if self._num_inside and not self._fits(nbytes):
                return
            self._queue.popleft()
            self._num_inside += 1
            passage.charge = nbytes
            self._used_nbytes += nbytes
            try:
                self._check_limit(came_nbytes)
                self._go(passage)
            except BaseException as error:  # SystemExit, say: the consumer's, not the loop's
                self._leave(passage)
                passage.deliver(Stop(self._work.placed(error, self._work.at or "a pipeline")))
            finally:
                self._work.at = None

    def _go(self, passage: _Passage) -> None:
        """Submit all of one item."""
        item, work = passage.item, self._work
        number = item.number
        ops = work.gather() if self._is_loader else ()
        value, put = self._put(item)
        put_allocations = {array._memory for array in put}
        for step in self._steps:
            work.at = f"stage {step.name!r} of the pipeline, item {number}"
            work.is_programs = True
            try:
                value = step.function(self._dev, value)
            finally:
                work.is_programs = False
            _check_returned(value, step.name)
            self._note(step.clock, number, [a for a in leaves(value) if _is_array(a)])
        arrays = [leaf for leaf in leaves(value) if _is_array(leaf)]
        made = {array._memory for array in arrays} - put_allocations
        nbytes = sum(memory.nbytes for memory in made)
        self._recharge(passage, nbytes)
        work.at = f"the end of the pipeline, item {number}"
        if self._is_loader:
            for array in arrays:
                array.check_usable()
            memories = list({array._memory: None for array in arrays})
            back = partial(self._handed_back, passage, memories)
            made_item = Item(value, number, back, item.nbytes)
            made_item.ops = ops
            passage.deliver(made_item)
            return
        self._get(passage, value, len(arrays))

    def _put(self, item: Item) -> tuple[Any, list[DeviceArray]]:
        arrays: list[DeviceArray] = []
        number, nbytes = item.number, 0
        self._work.at = f"put of the pipeline, item {number}"
        self._put_clock.came(number)

        def put(leaf: Any) -> Any:
            nonlocal nbytes
            if not is_host_array(leaf):
                return leaf
            nbytes += leaf.nbytes
            array = self._dev.put(leaf)
            arrays.append(array)
            return array

        try:
            value = map_leaves(item.value, put)
            if not arrays:
                raise TypeError(
                    f"item {number} has no ndarray to go to the device: {tell(item.value)}"
                )
        finally:
            self._lend(item, arrays)
        item.nbytes = nbytes
        item.value = None
        self._note(self._put_clock, number, arrays, nbytes)
        return value, arrays

    def _lend(self, item: Item, arrays: list[DeviceArray]) -> None:
        """Give the source its item back once all of it has been read."""
        if not item.is_lent:
            return
        reading = [op for array in arrays if (op := array._staged) is not None and not op.done()]
        num_left = len(reading)

        def read(_: Any, error: BaseException | None) -> None:
            nonlocal num_left
            num_left -= 1
            if not num_left:
                item.give_back()

        for op in reading:
            self._work.when_ended(op, read)
        if not reading:
            item.give_back()

    def _get(self, passage: _Passage, value: Any, num: int) -> None:
        ops: list[Op[Any]] = []

        def get(leaf: Any) -> Any:
            if not _is_array(leaf):
                return leaf
            op = self._dev.get(leaf)
            ops.append(op)
            return op

        structure = map_leaves(value, get)
        passage.num_left = num

        def got(_: Any, __: BaseException | None) -> None:
            passage.num_left -= 1
            if not passage.num_left:
                self._got(passage, structure, ops)

        for op in ops:
            self._work.when_ended(op, got)

    def _got(self, passage: _Passage, structure: Any, ops: list[Op[Any]]) -> None:
        self._leave(passage)
        item = passage.item
        error = next((op._error for op in ops if op._error is not None), None)
        if error is not None:
            passage.deliver(Stop(error))
        else:
            value = map_leaves(structure, lambda leaf: leaf._result if _is_op(leaf) else leaf)
            out_nbytes = sum(op._result.nbytes for op in ops)
            self._get_clock.ended(item.number, out_nbytes)
            passage.deliver(Item(value, item.number, nbytes=item.nbytes + out_nbytes))
        self._admit()
        self.advance()

    def _handed_back(self, passage: _Passage, memories: list[Allocation]) -> None:
        """The consumer is done with the item: so is the device once its uses have ended (R6)."""
        tickets: list[Ticket] = []
        for memory in memories:
            if not memory.is_freed:
                memory.root.before_write(tickets)
        memories.clear()  # the consumer's references are the last ones now

        def ended() -> None:
            if not self._work.is_stopped:
                self._core.shell.call_soon(partial(self._work.context.run, self._out, passage))

        self._core.when_all_ended(tickets, ended)

    def _out(self, passage: _Passage) -> None:
        if self._work.is_stopped:
            return
        self._leave(passage)
        self._admit()
        self.advance()

    # -- the books -------------------------------------------------------------------------

    def _leave(self, passage: _Passage) -> None:
        self._num_inside -= 1
        self._used_nbytes -= passage.charge

    def _recharge(self, passage: _Passage, made_nbytes: int) -> None:
        """The stages have made so many bytes: later items are expected to take as many."""
        came_nbytes = passage.item.nbytes
        self._used_nbytes += came_nbytes + made_nbytes - passage.charge
        passage.charge = came_nbytes + made_nbytes
        self._made_nbytes = max(self._made_nbytes, made_nbytes)
        self._check_limit(passage.charge)

    def _fits(self, nbytes: int) -> bool:
        limit = self._limit_nbytes
        return limit is None or self._used_nbytes + nbytes <= limit

    def _check_limit(self, nbytes: int) -> None:
        if self._limit_nbytes is not None and nbytes > self._limit_nbytes:
            raise OutOfDeviceMemory(
                f"one item takes {nbytes} bytes of the device, and the pipeline's limit is "
                f"{self._limit_nbytes}: use smaller items, or raise the limit"
            )

    def _note(
        self, clock: Clock, number: int, arrays: Sequence[DeviceArray], nbytes: int = 0
    ) -> None:
        """Have ``clock`` told once the latest write of ``arrays`` has ended."""
        op = max((array.ready for array in arrays), key=lambda op: op.ticket.seq)

        def ended(op: Op[Any]) -> None:
            if op._error is None:
                clock.ended(number, nbytes)

        op.add_done_callback(ended)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, DeviceArray)


def _is_op(leaf: Any) -> bool:
    return isinstance(leaf, Op)


def _check_returned(value: Any, name: str) -> None:
    """Raise ``TypeError`` unless ``value`` is an item of device arrays."""
    num_arrays = 0
    for leaf in leaves(value):
        if is_host_array(leaf):
            raise TypeError(
                f"stage {name!r} returned {tell(leaf)}, which is on the host: dev.put it, or do "
                "this in a map_host"
            )
        if isinstance(leaf, Op):
            raise TypeError(
                f"stage {name!r} returned the op {leaf.name!r}: return the arrays that it writes"
            )
        num_arrays += isinstance(leaf, DeviceArray)
    if not num_arrays:
        raise TypeError(
            f"stage {name!r} returned {tell(value)}: an item is a device array, or a tuple, list, "
            "dict or dataclass with some"
        )
