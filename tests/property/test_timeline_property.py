"""The waits issued for random ops equal the transitive reduction of a brute-force graph (R4)."""

from __future__ import annotations

from hypothesis import event, given, settings
from hypothesis import strategies as st

from streamflow.scheduler.timeline import Ticket, Timeline, needed_waits


class Model:
    """Every op and edge ever made; answers by walking the graph."""

    def __init__(self, num_lines: int) -> None:
        self.lines = [Timeline(i, name=f"s{i}") for i in range(num_lines)]
        self.tickets: list[Ticket] = []
        self.edges: list[set[int]] = []  # op -> ops that come directly before it
        self.last: list[set[int]] = [set() for _ in self.lines]  # what comes before the next op
        self.is_done: list[bool] = []

    def before(self, roots: set[int]) -> set[int]:
        """``roots`` and everything that happens before them."""
        found: set[int] = set()
        stack = list(roots)
        while stack:
            op = stack.pop()
            if op not in found:
                found.add(op)
                stack.extend(self.edges[op])
        return found

    def reduction(self, line: int, deps: set[int]) -> set[int]:
        """The fewest waits that order ``deps`` before the next op of ``line``."""
        known = self.before(self.last[line])
        open_ = {d for d in deps if not self.tickets[d].is_passed and d not in known}
        return {d for d in open_ if not any(d in self.before({o}) for o in open_ - {d})}

    def wait(self, line: int, deps: list[int]) -> None:
        """Do what the runtime does, and check it."""
        timeline = self.lines[line]
        waits = needed_waits(timeline, [self.tickets[d] for d in deps])
        issued = {ticket.seq for ticket in waits}
        assert len(issued) == len(waits)
        assert issued == self.reduction(line, set(deps))
        if waits:
            timeline.join(waits)
            event("waits were issued")
        self.last[line] |= issued
        ordered = self.before(self.last[line])
        assert all(d in ordered or self.tickets[d].is_passed for d in deps)

    def submit(self, line: int, deps: list[int], num_calls: int) -> None:
        self.wait(line, deps)
        ticket = Ticket(len(self.tickets))
        self.lines[line].advance(ticket, num_calls, None)
        self.tickets.append(ticket)
        self.edges.append(set(self.last[line]))
        self.is_done.append(False)
        self.last[line] = {ticket.seq}

    def complete(self, choice: int) -> None:
        """The device finishes some op whose predecessors have all finished."""
        ready = [
            op
            for op, is_done in enumerate(self.is_done)
            if not is_done and all(self.is_done[e] for e in self.edges[op])
        ]
        if ready:
            self.is_done[ready[choice % len(ready)]] = True

    def retire(self, line: int, most: int) -> None:
        """The host learns of some of what has finished."""
        timeline = self.lines[line]
        num = 0
        for ticket in timeline.inflight:
            if num == most or not self.is_done[ticket.seq]:
                break
            num += 1
        for ticket in timeline.retire(num):
            ticket.forget()
            event("an op retired")


small = st.integers(0, 1 << 16)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), small, st.lists(small, max_size=5), st.integers(1, 3)),
        st.tuples(st.just("submit"), small, st.lists(small, max_size=5), st.integers(1, 3)),
        st.tuples(st.just("wait"), small, st.lists(small, min_size=1, max_size=3)),
        st.tuples(st.just("complete"), small),
        st.tuples(st.just("retire"), small, st.integers(1, 4)),
    ),
    max_size=50,
)


@settings(deadline=None, max_examples=400, derandomize=True)
@given(num_lines=st.integers(1, 6), program=actions, nearness=st.integers(1, 20))
def test_waits_are_the_transitive_reduction_and_order_every_dependency(
    num_lines: int, program: list[tuple], nearness: int
) -> None:
    model = Model(num_lines)
    for kind, choice, *rest in program:
        line, num = choice % num_lines, len(model.tickets)
        if kind == "complete":
            model.complete(choice)
        elif kind == "retire":
            model.retire(line, rest[0])
        else:
            # Mostly recent ops: those are in flight and related to each other.
            deps = [num - 1 - d % min(nearness, num) for d in rest[0]] if num else []
            if kind == "wait":
                model.wait(line, deps)
            else:
                model.submit(line, deps, rest[1])
    for line in model.lines:
        assert all(seen <= other.position for other, seen in line.clock.items())
        assert line not in line.clock


@settings(deadline=None, max_examples=50, derandomize=True)
@given(program=actions, num_lines=st.integers(2, 4))
def test_older_tickets_keep_the_clock_they_were_given(program: list[tuple], num_lines: int) -> None:
    model = Model(num_lines)
    kept: list[dict[Timeline, int]] = []
    for kind, choice, *rest in program:
        if kind == "submit":
            num = len(model.tickets)
            model.submit(choice % num_lines, [d % num for d in rest[0]] if num else [], rest[1])
            kept.append(dict(model.tickets[-1].seen))
    assert [dict(ticket.seen) for ticket in model.tickets] == kept
