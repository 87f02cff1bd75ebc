"""``python tests/house/mutants.py``: break streamflow in one place at a time; tests must notice.

Each edit is made in a copy of the sources, and the tests named with it run there until the first
one fails. Prints a table, also as Markdown into ``--output``. Exits with 1 where an edit survives.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PATIENCE_S = 240


class Edit(NamedTuple):
    """One mistake.

    ``old`` is there exactly once; ``tests`` are folders, files or node ids that run in order.
    """

    rule: str
    what: str
    file: str
    old: str
    new: str
    tests: str


EDITS = (
    Edit(
        "R2",
        "an op counts as done once it is submitted",
        "streamflow/scheduler/completion.py",
        "        if inflight[-1].event.is_done:\n            return high\n",
        "        return high\n",
        "tests/property/test_count_done_property.py tests/integration/test_exactness.py",
    ),
    Edit(
        "R3",
        "a launch issues none of the waits it needs",
        "streamflow/runtime/launch.py",
        "                                waits = needed_waits(line, deps)\n",
        "                                waits = []\n",
        "tests/integration/test_exactness.py tests/property/test_runtime_property.py",
    ),
    Edit(
        "R3",
        "a write does not come after the reads since the last write",
        "streamflow/scheduler/hazards.py",
        "        for read in self.reads:\n"
        "            if read.failure is None or read.position:  "
        "# a read that never ran orders nothing\n"
        "                add_unpassed(read, into)\n",
        "",
        "tests/property/test_hazards_property.py tests/property/test_runtime_property.py",
    ),
    Edit(
        "R3",
        "the loop copies what is small into parts of pinned memory",
        "streamflow/runtime/transfers.py",
        " and not into.is_pinned",
        "",
        "tests/integration/test_page_locked_ends.py",
    ),
    Edit(
        "R3",
        "copies and fills issue none of the waits they need",
        "streamflow/runtime/parking.py",
        "            waits = needed_waits(line, self.flattened(deps))\n",
        "            waits = []\n",
        "tests/integration/test_exactness.py tests/property/test_runtime_property.py",
    ),
    Edit(
        "R4",
        "a wait that another one implies is issued all the same",
        "streamflow/scheduler/timeline.py",
        "or position <= clock.get(line, 0):\n            continue\n",
        "or position < 0:\n            continue\n",
        "tests/property/test_timeline_property.py tests/integration/test_exactness.py",
    ),
    Edit(
        "R4",
        "the watermark jumps to the newest op once the oldest is done",
        "streamflow/scheduler/completion.py",
        "        high -= 1  # the newest is pending: between 1 and all but one are done\n",
        "        return high\n",
        "tests/property/test_count_done_property.py tests/integration/test_exactness.py",
    ),
    Edit(
        "R5",
        "a free goes to the stream of its allocation, whoever uses the memory",
        "streamflow/runtime/allocate.py",
        "        if len(deps) > 1:\n            deps = needed_waits(_NOWHERE, deps)\n",
        "        return home\n",
        "tests/integration/test_exactness.py tests/integration/test_field_cases.py "
        "tests/property/test_runtime_property.py",
    ),
    Edit(
        "R5",
        "the lane `free` does not wait for the uses",
        "streamflow/runtime/allocate.py",
        "                waits = needed_waits(line, deps)\n                for wait in waits:\n",
        "                waits = []\n                for wait in waits:\n",
        "tests/integration/test_exactness.py tests/integration/test_field_cases.py "
        "tests/property/test_runtime_property.py tests/stress/test_soak.py",
    ),
    Edit(
        "R6",
        "the pinned block of a small copy is given back at its submission",
        "streamflow/runtime/transfers.py",
        "            op.rare().on_retired = block.release\n",
        "            block.release()\n",
        "tests/integration/test_races.py tests/integration/test_exactness.py",
    ),
    Edit(
        "R6",
        "a staging chunk is filled again without a look at its last copy",
        "streamflow/memory/staging.py",
        "        if chunk.event is not None:\n"
        "            chunk.event.sync()\n"
        "        return chunk\n",
        "        return chunk\n",
        "tests/integration/test_races.py tests/integration/test_field_cases.py",
    ),
    Edit(
        "R6",
        "an unpin does not wait for the ops that use the memory",
        "streamflow/runtime/pinning.py",
        "            region.before_write(pending)\n",
        "            pass\n",
        "tests/integration/test_pin.py",
    ),
    Edit(
        "R6",
        "the last unpin waits for the ops on its own bytes only",
        "streamflow/runtime/pinning.py",
        "                region = share.root\n",
        "                pass\n",
        "tests/integration/test_pin.py",
    ),
    Edit(
        "R6",
        "the first unpin of several unpins for all",
        "streamflow/memory/registered.py",
        "        if registration.num_holds:\n            return\n",
        "",
        "tests/integration/test_pin.py",
    ),
    Edit(
        "R6",
        "a copy that meets an unpin uses the memory as it is",
        "streamflow/runtime/host_memory.py",
        " and not isinstance(usable, Staged)",
        "",
        "tests/integration/test_pin_copies.py",
    ),
    Edit(
        "R6",
        "closing a device unpins what others of its loop use",
        "streamflow/runtime/closing.py",
        "        core.pins.unpin_all()\n",
        "",
        "tests/integration/test_pin_devices.py",
    ),
    Edit(
        "R12",
        "a dropped pin is never undone",
        "streamflow/runtime/core.py",
        "            self.pins.take_dropped()\n",
        "            pass\n",
        "tests/integration/test_pin_edges.py",
    ),
    Edit(
        "R6",
        "the host's side of a mapped array does not keep the memory",
        "streamflow/runtime/mapped.py",
        "        self._memory = memory\n",
        "        self._memory = Allocation(memory.core, 0, 0, memory.op, memory.home)\n",
        "tests/integration/test_mapped.py",
    ),
    Edit(
        "R6",
        "what work that was left behind uses is given back all the same",
        "streamflow/runtime/losing.py",
        "        if keeps_blocks and rare is not None:\n            rare.on_retired = None\n",
        "",
        "tests/integration/test_lifetimes.py tests/integration/test_robustness_closing.py "
        "tests/integration/test_cases_kept_errors.py tests/integration/test_cases_cancel.py",
    ),
    Edit(
        "R7",
        "a stream's window has no end",
        "streamflow/runtime/parking.py",
        "        if line.num_outstanding >= window:\n",
        "        if line.num_outstanding >= window + 10**9:\n",
        "tests/integration/test_exactness.py tests/integration/test_robustness_parking.py",
    ),
    Edit(
        "R7",
        "a launch on an explicit stream overtakes what is parked there",
        "streamflow/runtime/launch.py",
        "                if line.parked_tail is None and (\n",
        "                if True and (\n",
        "tests/integration/test_after.py tests/integration/test_robustness_parking.py "
        "tests/property/test_program_order_property.py",
    ),
    Edit(
        "R8",
        "a cancellation does not wait for a write into the caller's memory",
        "streamflow/runtime/op.py",
        "                yield from wait(rare.writes_host).__await__()\n",
        "                yield from wait(False).__await__()\n",
        "tests/integration/test_cases_cancel.py tests/integration/test_robustness_waiting.py",
    ),
    Edit(
        "R9",
        "a reader of a failed write runs on what happens to be there",
        "streamflow/runtime/parking.py",
        "            failure = source.failure\n"
        "            if failure is None:\n"
        "                continue\n",
        "            failure = source.failure\n            if True:\n                continue\n",
        "tests/integration/test_failures.py",
    ),
    Edit(
        "R9",
        "a failure that nobody asked for is forgotten",
        "streamflow/runtime/failures.py",
        "        self._unseen.setdefault(id(error), (error, set()))[1].add(scope)\n",
        "        return\n",
        "tests/integration/test_failures.py",
    ),
    Edit(
        "R9",
        "a lost device does not fail what was in flight",
        "streamflow/runtime/losing.py",
        "    abandon(core, lost)\n    for peer",
        "    for peer",
        "tests/integration/test_failures.py tests/integration/test_cases_faults.py",
    ),
    Edit(
        "R9",
        "a failed call of a captured function fails those after it",
        "streamflow/capture/replay.py",
        "                if region.allocation.seq > first_seq\n",
        "                if not region\n",
        "tests/integration/test_captured.py",
    ),
    Edit(
        "R3",
        "a captured function's copies come after nothing",
        "streamflow/capture/replay.py",
        "            reads=reads,\n",
        "",
        "tests/integration/test_captured.py tests/property/test_capture_property.py",
    ),
    Edit(
        "R3",
        "a write in a graph does not come after the reads",
        "streamflow/capture/recorder.py",
        "                    deps.update(dict.fromkeys(book.reads))\n",
        "                    pass\n",
        "tests/property/test_capture_property.py",
    ),
    Edit(
        "R3",
        "what a captured function wrote to its arguments is not copied back",
        "streamflow/capture/replay.py",
        "        moves = [(start, own, nbytes) for own, start, nbytes in back]\n",
        "        moves = []\n",
        "tests/integration/test_captured.py",
    ),
    Edit(
        "R11",
        "calls from another thread are let through",
        "streamflow/runtime/core.py",
        "        if self.shell.current() is not self.shell.key:\n            check_process()\n",
        "        if False:\n            check_process()\n",
        "tests/integration/test_lifetimes.py tests/integration/test_bad_input.py",
    ),
    Edit(
        "R12",
        "a finaliser's free is lost",
        "streamflow/runtime/core.py",
        "            self._dropped.append((address, home, root))\n",
        "",
        "tests/integration/test_lifetimes.py tests/integration/test_field_cases.py "
        "tests/integration/test_robustness.py",
    ),
    Edit(
        "R12",
        "a fork uses its parent's device",
        "streamflow/runtime/core.py",
        "        self.shell = EndedShell(self.shell.key)\n"
        "        self.needs_check = self.is_closing = self.is_closed = True\n\n    def on_exit",
        "        pass\n\n    def on_exit",
        "tests/integration/test_processes.py",
    ),
    Edit(
        "R5",
        "a pool hands a block to another stream without a wait",
        "streamflow/memory/store.py",
        "        self.num_waits += self.order.put_after(place, points)\n",
        "        self.num_waits += len(points)\n",
        "tests/unit/memory/test_suballocators.py",
    ),
    Edit(
        "R5",
        "a pool takes any other stream's free for one that it comes after",
        "streamflow/memory/store.py",
        "if all(is_implied(place, point) for point in span.points):",
        "if is_implied:",
        "tests/unit/memory/test_suballocators.py",
    ),
    Edit(
        "R5",
        "joined neighbours come after one of their frees only",
        "streamflow/memory/store.py",
        "            span.points = self._maximal([*span.points, *after.points])\n",
        "            pass\n",
        "tests/unit/memory/test_pool.py",
    ),
    Edit(
        "R12",
        "a finaliser's free in the middle of a pool's call is lost",
        "streamflow/memory/suballocator.py",
        "                self._late.append((piece, place))\n                return\n",
        "                return\n",
        "tests/unit/memory/test_suballocators.py",
    ),
    Edit(
        "R2",
        "who waits for memory is overtaken by smaller requests",
        "streamflow/runtime/memory_queue.py",
        "            except OutOfDeviceMemory:\n                return\n",
        "            except OutOfDeviceMemory:\n                continue\n",
        "tests/integration/test_alloc.py",
    ),
    Edit(
        "R2",
        "a circle of tasks that wait for memory is never told",
        "streamflow/runtime/memory_queue.py",
        "        if core.space.is_releasing or not self._is_circle():\n            return\n",
        "        return\n",
        "tests/integration/test_alloc.py",
    ),
    Edit(
        "R2",
        "a synced array is synced when its copy begins",
        "streamflow/scheduler/synced_table.py",
        "        self.copy = copy\n",
        "        self.state, self.copy = SyncedState.SYNCED, copy\n",
        "tests/unit/scheduler/test_synced_table.py",
    ),
    Edit(
        "R6",
        "a copy of older data makes a synced array synced",
        "streamflow/scheduler/synced_table.py",
        "        if copy is not self.copy:\n            return False\n",
        "",
        "tests/unit/scheduler/test_synced_table.py",
    ),
    Edit(
        "R6",
        "a host block is entered while a copy reads the memory",
        "streamflow/runtime/synced_sides.py",
        "            if (writes or is_write) and _overlap",
        "            if writes and _overlap",
        "tests/integration/test_synced_copies.py",
    ),
    Edit(
        "R6",
        "what a device block lent can be used after it",
        "streamflow/runtime/synced_blocks.py",
        "        revoke(self._lent)\n",
        "",
        "tests/integration/test_synced_traps.py",
    ),
    Edit(
        "R8",
        "a copy that others share belongs to the scope that asked first",
        "streamflow/runtime/synced_copies.py",
        "        context.run(SCOPE.set, None)\n",
        "",
        "tests/integration/test_synced_copies.py",
    ),
    Edit(
        "R8",
        "a pull into the caller's memory is cancelled at once",
        "streamflow/runtime/synced_pair.py",
        "            parked.op.rare().writes_host = True\n",
        "",
        "tests/integration/test_synced_copies.py",
    ),
    Edit(
        "R9",
        "a half written synced array is not poisoned",
        "streamflow/scheduler/synced_table.py",
        "            self.settle(SyncedState.POISONED, cause)\n",
        "            pass\n",
        "tests/unit/scheduler/test_synced_table.py",
    ),
    Edit(
        "R9",
        "a pull trusts a kernel that has failed",
        "streamflow/runtime/synced_copies.py",
        "self.look_at_state(looks=True) is SyncedState.POISONED:",
        "False:",
        "tests/integration/test_synced_traps.py",
    ),
    Edit(
        "R5",
        "a resource gets its memory back before the last use of it",
        "streamflow/runtime/allocate.py",
        "            writes=(root,),\n            is_overwrite=True,",
        "            writes=(),\n            is_overwrite=True,",
        "tests/integration/test_memory_resources.py",
    ),
    Edit(
        "R6",
        "a cached pinned block waits for the first of its streams only",
        "streamflow/memory/host_cache.py",
        "        for space, stream in tuple(cell.uses.values()):\n",
        "        for space, stream in tuple(cell.uses.values())[:1]:\n",
        "tests/unit/memory/test_caching_host_flaws.py",
    ),
    Edit(
        "R6",
        "a cached pinned block does not wait for the ops that use it",
        "streamflow/memory/host_cache.py",
        "        points: list[Point] = list(op_points(cell))\n",
        "        points: list[Point] = []\n",
        "tests/integration/test_caching_host_ops.py",
    ),
    Edit(
        "R6",
        "a cached pinned block is free when its event can't be asked",
        "streamflow/memory/host_blocks.py",
        "DeviceLost):  # the ops report it\n                return False\n",
        "DeviceLost):  # the ops report it\n                return True\n",
        "tests/unit/memory/test_caching_host_flaws.py",
    ),
    Edit(
        "R6",
        "a cached pinned block is handed out though too little of it is pinned",
        "streamflow/memory/host_cache.py",
        "                    if cell.pinned_nbytes < num_asked:\n",
        "                    if False:\n",
        "tests/unit/memory/test_caching_host_flaws.py tests/property/test_caching_host_property.py",
    ),
    Edit(
        "R15",
        "workers' results are handed over as they come",
        "streamflow/runtime/poller.py",
        "        results.sort(key=itemgetter(0, 1))\n",
        "",
        "tests/integration/test_host_tasks.py tests/property/test_program_order_property.py "
        "tests/property/test_runtime_property.py",
    ),
    Edit(
        "R6",
        "a lease gives its block back while ops on it run",
        "streamflow/runtime/lease_queue.py",
        "            region.before_write(pending)\n",
        "",
        "tests/integration/test_leases.py",
    ),
    Edit(
        "R2",
        "whoever fits overtakes those who wait for a lease",
        "streamflow/memory/pinned.py",
        "                    if self.on_release is not None and not is_waiter and"
        " nbytes > SMALL_NBYTES:\n                        return None\n",
        "",
        "tests/unit/memory/test_pinned_blocks.py tests/integration/test_leases.py",
    ),
    Edit(
        "R2",
        "what comes back while the queue looks is not heard of",
        "streamflow/runtime/lease_queue.py",
        "        self._be_short(bool(queue))  # before looking: what comes back from now on is"
        " heard of\n",
        "",
        "tests/integration/test_leases.py",
    ),
    Edit(
        "R11",
        "a lease is ordered with the ops of another event loop",
        "streamflow/memory/pinned_block.py",
        "return self if not self.is_leased or self.pool.is_here() else Staged(None)",
        "return self",
        "tests/integration/test_leases.py",
    ),
    Edit(
        "R6",
        "a cached pinned block is free when the device that uses it was left",
        "streamflow/memory/host_ops.py",
        "if not self.is_over and not self._ticket.is_left_behind:",
        "if not self.is_over:",
        "tests/integration/test_caching_host_ops.py",
    ),
    Edit(
        "R8",
        "leaving a pipeline drops what its consumer has got",
        "streamflow/pipeline/pump.py",
        "                self._work.keep(outcome.ops)\n",
        "",
        "tests/integration/test_pipeline_ends.py",
    ),
    Edit(
        "R3",
        "the nodes of a graph do not wait for the launching stream",
        "streamflow/backends/sim/graphs.py",
        "                branch.follow(start)\n",
        "                pass\n",
        "tests/unit/sim/test_sim_graphs.py tests/contract/test_sim_backend.py",
    ),
    Edit(
        "R3",
        "launches of one graph overlap",
        "streamflow/backends/sim/graphs.py",
        "                    branch.follow(executable.last)\n",
        "                    pass\n",
        "tests/unit/sim/test_sim_graphs.py tests/contract/test_sim_backend.py",
    ),
    Edit(
        "R3",
        "a node of a graph runs on any stream of those before it",
        "streamflow/backends/sim/graphs.py",
        "next((branch for branch, last in known.items() if tails[branch] == last), len(tails))",
        "next(iter(known), len(tails))",
        "tests/unit/sim/test_sim_graphs.py tests/contract/test_sim_backend.py",
    ),
    Edit(
        "R7",
        "a launch of a graph keeps its places in the queue for good",
        "streamflow/backends/sim/graphs.py",
        "        self.stream.num_work -= self.num_places\n",
        "",
        "tests/unit/sim/test_sim_graphs.py tests/contract/test_sim_backend.py",
    ),
    Edit(
        "R7",
        "a launch of a graph takes one place of the queue, whatever is in it",
        "streamflow/backends/graph_places.py",
        "            num += places\n",
        "            num = max(num, places)\n",
        "tests/unit/sim/test_sim_graphs.py tests/contract/test_sim_backend.py",
    ),
    Edit(
        "R7",
        "a graph that does not fit above a window is launched behind others' work",
        "streamflow/capture/alone.py",
        "        before = [line.inflight[-1]] if line.inflight else []\n",
        "        before: list[Ticket] = []\n",
        "tests/integration/test_capture_queue.py",
    ),
    Edit(
        "R6",
        "a graph that is refused keeps the pinned memory of its copies",
        "streamflow/backends/sim/graphs.py",
        "            for block in pinned:\n                block.drop()\n",
        "",
        "tests/unit/sim/test_sim_graphs.py tests/contract/test_sim_backend.py",
    ),
    Edit(
        "R6",
        "memory of a graph's copies goes with the graph, though launches use it",
        "streamflow/backends/cuda/graphs.py",
        "            memory.num_holders += 1\n",
        "            pass\n",
        "tests/unit/cuda/test_graphs.py",
    ),
    Edit(
        "R3",
        "an op of a graph isn't ordered after the reads of what it writes",
        "streamflow/capture/recorder.py",
        "                    deps.update(dict.fromkeys(book.reads))\n",
        "                    pass\n",
        "tests/integration/test_capture.py",
    ),
    Edit(
        "R3",
        "ops of a graph on one explicit stream have no order",
        "streamflow/capture/recorder.py",
        "            deps[self._lines[line]] = None\n",
        "            pass\n",
        "tests/integration/test_capture.py",
    ),
    Edit(
        "R3",
        "a launch is not ordered after the writes of what its graph reads",
        "streamflow/capture/graph.py",
        "                reads=reads,\n",
        "",
        "tests/integration/test_capture.py tests/integration/test_capture_lives.py",
    ),
    Edit(
        "R6",
        "a launch holds neither its executable nor its arrays",
        "streamflow/capture/graph.py",
        "        _in_flight[self._op.ticket.seq] = self\n",
        "",
        "tests/integration/test_capture_lives.py",
    ),
    Edit(
        "R6",
        "a graph doesn't keep the arrays it uses",
        "streamflow/capture/recorder.py",
        "                self.recorded.arrays.setdefault(arg._memory, arg)\n",
        "                pass\n",
        "tests/integration/test_capture.py tests/integration/test_capture_lives.py",
    ),
    Edit(
        "R8",
        "an await of a launch is cancelled before it has written the program's memory",
        "streamflow/capture/recorder.py",
        "        self.recorded.writes_host |= op.writes_host\n",
        "",
        "tests/integration/test_capture_lives.py",
    ),
    Edit(
        "R9",
        "a launch that overwrites all it uses inherits a failure",
        "streamflow/capture/graph.py",
        "                is_overwrite=is_overwrite,\n",
        "",
        "tests/integration/test_capture_lives.py",
    ),
    Edit(
        "CR15",
        "pageable memory is read in a capture",
        "streamflow/runtime/transfers.py",
        "        if nbytes and not host.is_direct:\n",
        "        if not nbytes:\n",
        "tests/integration/test_capture_refusals.py",
    ),
    Edit(
        "CR15",
        "an op is awaited in a capture",
        "streamflow/runtime/op.py",
        "            core.recording.refuse_await(self)\n",
        "            pass\n",
        "tests/integration/test_capture_refusals.py",
    ),
    Edit(
        "C40",
        "other tasks' calls are captured as well",
        "streamflow/runtime/recording.py",
        "        return self._recorders.get(self._core.shell.task())\n",
        "        return next(iter(self._recorders.values()))\n",
        "tests/integration/test_capture_beside.py",
    ),
    Edit(
        "C40",
        "unpinning what was dropped is taken for a part of the graph",
        "streamflow/runtime/parking.py",
        'frozenset(("free", "pin", "unpin"))',
        'frozenset(("free", "pin"))',
        "tests/integration/test_capture_beside.py",
    ),
    Edit(
        "C40",
        "an update is built while launches of before are parked",
        "streamflow/capture/graph.py",
        "        earlier = [ticket for ticket in self._parked if ticket.is_parked]\n",
        "        earlier: list[Any] = []\n",
        "tests/integration/test_capture_updates.py",
    ),
    Edit(
        "LRU",
        "the block used last is the first one dropped for room",
        "streamflow/memory/pinned.py",
        "            oldest = min(\n",
        "            oldest = max(\n",
        "tests/unit/memory/test_pinned_blocks.py",
    ),
    Edit(
        "R3",
        "a trace lays a write behind a read to what was read",
        "streamflow/runtime/tracer.py",
        '"free" if is_free else "write-after-read"',
        '"free" if is_free else "read-after-write"',
        "tests/integration/test_trace.py",
    ),
    Edit(
        "R7",
        "a trace does not tell whose end made room",
        "streamflow/runtime/tracer.py",
        '        self._add(op, (ended.seq, "capacity", None))\n',
        "        pass\n",
        "tests/integration/test_trace.py",
    ),
    Edit(
        "R4",
        "a trace shows every wait as implied",
        "streamflow/trace/recorder.py",
        "EdgeReason(reason), src in waited, of",
        "EdgeReason(reason), False, of",
        "tests/unit/trace tests/integration/test_trace.py",
    ),
    Edit(
        "C23",
        "a trace keeps the events of what has ended",
        "streamflow/runtime/tracer.py",
        "        note.base, note.starts, note.ends = None, (), ()\n",
        "        pass\n",
        "tests/integration/test_trace.py tests/integration/test_trace_in_part.py",
    ),
    Edit(
        "traces",
        "merging shifts a device by its clock as if it were the first",
        "streamflow/trace/merge.py",
        " + (device.began_s - base.began_s)",
        "",
        "tests/unit/trace/test_trace_store.py",
    ),
    Edit(
        "traces",
        "a trace of a newer version is read all the same",
        "streamflow/trace/store.py",
        "not 1 <= version <= VERSION",
        "version < 1",
        "tests/unit/trace/test_trace_store.py",
    ),
    Edit(
        "C48",
        "a name can end the script of the page",
        "streamflow/trace/html.py",
        '        text.replace("<", "\\\\u003c")\n',
        "        text\n",
        "tests/unit/trace/test_page_data.py",
    ),
    Edit(
        "traces",
        "a flow of a Chrome trace ends at the slice it began at",
        "streamflow/trace/chrome.py",
        "            incoming.setdefault(edge.dst, []).append((number, edge))\n",
        "            incoming.setdefault(edge.src, []).append((number, edge))\n",
        "tests/unit/trace/test_trace_chrome.py",
    ),
    Edit(
        "traces",
        "a step of the critical path may be what ended first",
        "streamflow/trace/critical.py",
        "    latest_s = max((_end(each.op) for each in found), default=0.0) - EPS_S\n",
        "    latest_s = 0.0\n",
        "tests/unit/trace/test_critical_path.py",
    ),
    Edit(
        "traces",
        "an op waits for its engine when it waits for data",
        "streamflow/trace/waits.py",
        "(each.reason in _SAY_LITTLE, -_src_end(each))",
        "(each.reason not in _SAY_LITTLE, -_src_end(each))",
        "tests/unit/trace tests/integration/test_trace_explain.py",
    ),
    Edit(
        "traces",
        "any overlap is enough",
        "streamflow/trace/assertion.py",
        "    if found.ratio >= ratio:\n",
        "    if found.ratio >= 0:\n",
        "tests/integration/test_trace_assert_overlap.py",
    ),
    Edit(
        "traces",
        "what_if keeps the lanes of before",
        "streamflow/trace/what_if.py",
        "    chooses_lanes = compute_lanes is not None or depth is not None\n",
        "    chooses_lanes = depth is not None\n",
        "tests/integration/test_what_if.py",
    ),
)


def place(edit: Edit, root: Path) -> str:
    """The text of the edited file. Raises where ``old`` isn't there exactly once."""
    text = (root / edit.file).read_text(encoding="utf-8")
    if text.count(edit.old) != 1:
        raise ValueError(f"{edit.what}: its text is {text.count(edit.old)} times in {edit.file}")
    return text.replace(edit.old, edit.new)


def try_out(edit: Edit, copy: Path) -> tuple[str | None, float]:
    """The test that notices, or None; and how many seconds that took."""
    file = copy / edit.file
    before = file.read_text(encoding="utf-8")
    file.write_text(place(edit, copy), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout"]
    command += ["30", "--timeout-method=thread", "-m", "not gpu", "--no-header", "-rfE"]
    env = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    start_s = time.monotonic()
    try:
        done = subprocess.run(
            [*command, *edit.tests.split()],
            cwd=copy,
            env=env,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        said, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired:
        said, code = "FAILED (the tests hung)", 1
    finally:
        file.write_text(before, encoding="utf-8")
    taken_s = time.monotonic() - start_s
    if code == 0:
        return None, taken_s
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
    if found is None:  # stopped by its time limit: the stack names the test
        found = re.search(r"in (test_\w+)", said)
    if found is None:
        raise RuntimeError(f"{edit.what}: the tests did not run:\n{said[-2000:]}")
    return found[1], taken_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="edits whose rule or text has this in it")
    parser.add_argument("--output", type=Path, help="a Markdown file")
    chosen = parser.parse_args()
    rows, num_alive = ["| rule | the mistake | noticed by |", "|---|---|---|"], 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("streamflow", "tests", "docs", "examples"):
            ignored = shutil.ignore_patterns("__pycache__", "_build", "_generated")
            shutil.copytree(ROOT / name, copy / name, ignore=ignored)
        for name in ("pyproject.toml", "README.md", "noxfile.py"):
            shutil.copy(ROOT / name, copy / name)
        for edit in EDITS:
            if chosen.only not in f"{edit.rule} {edit.what}":
                continue
            noticed, taken_s = try_out(edit, copy)
            num_alive += noticed is None
            print(
                f"{edit.rule:4}{edit.what}: {noticed or 'SURVIVED'} ({taken_s:.0f} s)", flush=True
            )
            test = (noticed or "nothing").rpartition("::")[2].partition("[")[0]
            rows.append(f"| {edit.rule} | {edit.what} | `{test}` |")
    if chosen.output is not None:
        chosen.output.write_text("\n".join(rows) + "\n", encoding="utf-8")
    print(f"{num_alive} survived" if num_alive else "every edit was noticed")
    return min(num_alive, 1)


if __name__ == "__main__":
    sys.exit(main())
