"""The stages on the host: pulling the source, and what is done to items there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from streamflow.pipeline.flow import Deliver, Item, Node, Outcome, Sequencer, Stop
from streamflow.pipeline.items import copied, rows, stacked
from streamflow.pipeline.sources import END, Opened
from streamflow.pipeline.work import Work

__all__ = ["Batch", "Clock", "Filter", "Map", "Pulls", "Unbatch", "Zip"]


class Clock(Protocol):
    """Takes notes of one stage, for ``pipeline.stats()``."""

    def came(self, number: int) -> None:
        """The stage may begin with that item."""

    def ended(self, number: int, nbytes: int = 0) -> None:
        """The stage was seen to be done with it."""


class Pulls:
    """Pulls the source, one item at a time.

    Unless the source's items are its consumers' own, the next is pulled once the last one was
    given back: a source that fills one buffer again and again is right by default.
    """

    def __init__(self, work: Work, opened: Opened, clock: Clock, *, lends: bool, copies: bool):
        self._work = work
        self._opened = opened
        self._clock = clock
        self._lends = lends and not copies
        self._copies = copies
        self._waiting: deque[Deliver] = deque()
        self._is_busy = False  # pulling, or the last item is lent
        self._is_over = False
        self._is_going = False
        self._num_pulled = 0

    def request(self, deliver: Deliver) -> None:
        self._waiting.append(deliver)
        self._go_on()

    def _go_on(self) -> None:
        if self._is_going:  # pulls that take no time follow each other without recursion
            return
        self._is_going = True
        try:
            while self._waiting and (self._is_over or not self._is_busy):
                self._serve()
        finally:
            self._is_going = False

    def _serve(self) -> None:
        opened = self._opened
        if self._is_over:
            self._waiting.popleft()(Stop(None))
            return
        self._is_busy = True
        self._clock.came(self._num_pulled)
        if opened.to_call is not None:
            self._work.host(opened.to_call, name="source", then=self._called)
        elif opened.is_instant and not self._copies:
            self._pulled(opened.pull(False)(), None)
        else:
            self._pull()

    def _called(self, given: Any, error: BaseException | None) -> None:
        if error is None:
            try:
                self._opened.returned(given)
            except TypeError as wrong:
                error = wrong
        if error is not None:
            self._stop(error)
        else:
            self._is_busy = False
            self._go_on()

    def _pull(self) -> None:
        then = self._copy if self._copies and self._opened.is_async else self._pulled
        self._work.host(self._opened.pull(self._copies), name="pull", then=then)

    def _copy(self, value: Any, error: BaseException | None) -> None:
        if error is not None or value is END:
            self._pulled(value, error)
        else:
            self._work.host(copied, value, name="copy", then=self._pulled)

    def _pulled(self, value: Any, error: BaseException | None) -> None:
        if error is not None or value is END:
            self._stop(error)
            return
        number = self._num_pulled
        self._num_pulled += 1
        self._clock.ended(number)
        if not self._lends:
            self._is_busy = False
        deliver = self._waiting.popleft()
        deliver(Item(value, number, self._given_back if self._lends else None))
        self._go_on()

    def _given_back(self) -> None:
        self._is_busy = False
        self._go_on()

    def _stop(self, error: BaseException | None) -> None:
        self._is_over, self._is_busy = True, False
        self._waiting.popleft()(Stop(error))
        self._go_on()


class Map:
    """Calls a function on each item, on up to ``workers`` threads at a time."""

    def __init__(
        self,
        work: Work,
        upstream: Node,
        clock: Clock,
        function: Callable[[Any], Any],
        *,
        workers: int,
        name: str,
    ) -> None:
        self._work = work
        self._upstream = upstream
        self._clock = clock
        self._function = function
        self._num_free = workers
        self._name = name
        self._queue: deque[tuple[Item, Deliver]] = deque()

    def request(self, deliver: Deliver) -> None:
        self._upstream.request(partial(self._arrived, deliver))

    def _arrived(self, deliver: Deliver, outcome: Outcome) -> None:
        if isinstance(outcome, Stop):
            deliver(outcome)
            return
        self._clock.came(outcome.number)
        self._queue.append((outcome, deliver))
        self._go_on()

    def _go_on(self) -> None:
        while self._queue and self._num_free:
            self._num_free -= 1
            item, deliver = self._queue.popleft()
            then = partial(self._ended, item, deliver)
            self._work.host(self._function, item.value, name=self._name, then=then)

    def _ended(self, item: Item, deliver: Deliver, value: Any, error: BaseException | None) -> None:
        self._num_free += 1
        item.give_back()
        if error is not None:
            deliver(Stop(error))
        else:
            self._clock.ended(item.number)
            deliver(Item(value, item.number, nbytes=item.nbytes))
        self._go_on()


class Filter(Sequencer):
    """Lets those items pass that a function is true of."""

    def __init__(
        self,
        work: Work,
        upstream: Node,
        clock: Clock,
        function: Callable[[Any], Any],
        *,
        ordered: bool,
        name: str,
    ) -> None:
        super().__init__(upstream, ordered)
        self._work = work
        self._clock = clock
        self._function = function
        self._name = name
        self._num_kept = 0

    def num_wanted(self) -> int:
        return len(self.waiting)

    def prepare(self, outcome: Outcome, settle: Deliver) -> None:
        if isinstance(outcome, Stop):
            settle(outcome)
            return
        item = outcome
        self._clock.came(item.number)

        def ended(is_kept: Any, error: BaseException | None) -> None:
            if error is None:
                self._clock.ended(item.number)
                settle(Item((item, is_kept), item.number))
            else:
                settle(Stop(error))

        self._work.host(_is_true, self._function, item.value, name=self._name, then=ended)

    def take(self, item: Item) -> None:
        judged, is_kept = item.value
        if is_kept:
            kept = Item(judged.value, self._num_kept, judged.hand_on(), judged.nbytes)
            self._num_kept += 1
            self.waiting.popleft()(kept)
        else:
            judged.give_back()


def _is_true(function: Callable[[Any], Any], value: Any) -> bool:
    return bool(function(value))


class Batch(Sequencer):
    """Makes one item of several, on a worker thread."""

    def __init__(
        self,
        work: Work,
        upstream: Node,
        clock: Clock,
        size: int,
        *,
        drop_last: bool,
        ordered: bool,
    ) -> None:
        super().__init__(upstream, ordered)
        self._work = work
        self._clock = clock
        self._size = size
        self._drop_last = drop_last
        self._gathered: list[Item] = []
        self._num_made = 0

    def num_wanted(self) -> int:
        return self._size * len(self.waiting) - len(self._gathered)

    def take(self, item: Item) -> None:
        self._gathered.append(item)
        if len(self._gathered) == self._size:
            self._make()

    def stop(self, stop: Stop) -> None:
        if self._gathered and not self._drop_last:
            self._make()  # the good items before the end, and before an error
        self.end(stop)

    def _make(self) -> None:
        items, self._gathered = self._gathered, []
        number, deliver = self._num_made, self.waiting.popleft()
        self._num_made += 1
        self._clock.came(number)
        nbytes = sum(item.nbytes for item in items)

        def made(value: Any, error: BaseException | None) -> None:
            for item in items:
                item.give_back()
            if error is None:
                self._clock.ended(number)
                deliver(Item(value, number, nbytes=nbytes))
            else:
                deliver(Stop(error))

        values = [item.value for item in items]
        self._work.host(stacked, values, name="batch", then=made)


class Unbatch(Sequencer):
    """Makes several items of one: views along the first axis."""

    def __init__(self, upstream: Node, clock: Clock, *, ordered: bool) -> None:
        super().__init__(upstream, ordered)
        self._clock = clock
        self._rows: deque[Item] = deque()
        self._num_made = 0

    def num_wanted(self) -> int:
        return 1 if len(self.waiting) > len(self._rows) else 0

    def request(self, deliver: Deliver) -> None:
        self.waiting.append(deliver)
        self._serve()
        self.advance()

    def take(self, item: Item) -> None:
        self._clock.came(item.number)
        try:
            values = rows(item.value)
        except ValueError as error:
            self.end(Stop(error))
            return
        self._clock.ended(item.number)
        for value in values:
            self._rows.append(Item(value, self._num_made, nbytes=item.nbytes // len(values)))
            self._num_made += 1
        self._serve()

    def _serve(self) -> None:
        while self._rows and self.waiting:
            self.waiting.popleft()(self._rows.popleft())


class Zip:
    """Pairs items with those of another source; ends with the shorter one."""

    def __init__(self, upstream: Node, other: Node, clock: Clock) -> None:
        self._upstream = upstream
        self._other = other
        self._clock = clock

    def request(self, deliver: Deliver) -> None:
        came: dict[int, Outcome] = {}

        def arrived(place: int, outcome: Outcome) -> None:
            came[place] = outcome
            if place == 0 and isinstance(outcome, Item):
                self._clock.came(outcome.number)
            if len(came) < 2:
                return
            first, second = came[0], came[1]
            if isinstance(first, Stop) or isinstance(second, Stop):
                for one in (first, second):
                    if isinstance(one, Item):
                        one.give_back()
                # An error where the other has only ended is the error all the same.
                errors = [one.error for one in (first, second) if isinstance(one, Stop)]
                deliver(Stop(next((error for error in errors if error is not None), None)))
                return
            lent = [lent for lent in (first.hand_on(), second.hand_on()) if lent is not None]
            value = (first.value, second.value)
            self._clock.ended(first.number)
            deliver(Item(value, first.number, partial(_call_all, lent) if lent else None))

        self._upstream.request(partial(arrived, 0))
        self._other.request(partial(arrived, 1))


def _call_all(functions: list[Callable[[], None]]) -> None:
    for function in functions:
        function()
