"""Who may have a pool's memory when: the listings of the CUDA guide, and its ways of reuse.

The guide's chapter on the stream-ordered allocator shows them one by one; here each runs with
its middle stream held. Nothing expects a particular address.
"""

from __future__ import annotations

from typing import Any

import pytest

from streamflow.backends.base import Backend
from streamflow.backends.memory import PoolAttribute
from streamflow.errors import OutOfDeviceMemory
from streamflow.testing.contract.harness import Harness, Rig, drain, fidelity, settle
from streamflow.testing.contract.kinds import refused

__all__ = ["SWITCHES", "GuideContract", "reserved_nbytes", "synchronise"]

_MIB = 1 << 20
_SIZE = 64 * _MIB
_FOLLOW = PoolAttribute.REUSE_FOLLOW_EVENT_DEPENDENCIES
_OPPORTUNISTIC = PoolAttribute.REUSE_ALLOW_OPPORTUNISTIC
_INTERNAL = PoolAttribute.REUSE_ALLOW_INTERNAL_DEPENDENCIES
SWITCHES = (_FOLLOW, _OPPORTUNISTIC, _INTERNAL)


def synchronise(rig: Rig, how: str) -> None:
    """Block until the rig's stream, an event behind all its work, or the device is done."""
    if how == "stream":
        rig.stream.sync()
    elif how == "event":
        rig.mark(rig.stream).sync()
    else:
        rig.backend.synchronize_blocking()


def reserved_nbytes(backend: Backend, pool: Any) -> int:
    """What a pool holds of the device."""
    return backend.pool_attribute(pool, PoolAttribute.RESERVED_CURRENT)


def _only(backend: Backend, pool: Any, *switches: PoolAttribute) -> None:
    """Switch these ways of reuse on, and all others off."""
    for switch in SWITCHES:
        backend.set_pool_attribute(pool, switch, int(switch in switches))


class GuideContract(Harness):
    """Allocate, use and free on several streams."""

    @fidelity
    def test_allocate_here_use_there_free_elsewhere(self, rig: Rig) -> None:
        """Memory is allocated on one stream, used on a second and freed on a third, by events."""
        backend, nbytes = rig.backend, 8 * _MIB
        maker, user, freer, next_one = (backend.create_stream() for _ in range(4))
        host, view = rig.pinned(nbytes)
        address = backend.allocate(rig.pool, nbytes, maker)
        backend.fill(address, b"\x21", nbytes, maker)
        user.wait(rig.mark(maker))
        with self.stall(rig, user):
            backend.copy_d2h(host, address, nbytes, user)
            freer.wait(rig.mark(user))
            backend.deallocate(address, freer)
            freed = rig.mark(freer)
            # Whatever this gets, it is not the memory that is still to be read.
            fresh = backend.allocate(rig.pool, nbytes, next_one)
            backend.fill(fresh, b"\xee", nbytes, next_one)
            settle(backend)
            assert not freed.is_done
        drain(backend, freed)
        assert (view == 0x21).all()
        backend.deallocate(fresh, next_one)
        for stream in (maker, user, freer, next_one):
            rig.finish(stream)
            stream.close()

    @fidelity
    @pytest.mark.parametrize("is_on", [True, False])
    def test_reuse_that_follows_events_can_be_switched(self, rig: Rig, is_on: bool) -> None:
        """Reuse by a stream that waited for the free can be switched off while the pool lives."""
        backend, pool = rig.backend, rig.pool
        _only(backend, pool, *([_FOLLOW] if is_on else []))
        second = backend.create_stream()
        address = backend.allocate(pool, _SIZE, rig.stream)
        before = reserved_nbytes(backend, pool)
        with self.stall(rig, rig.stream):
            backend.deallocate(address, rig.stream)
            second.wait(rig.mark(rig.stream))
            again = backend.allocate(pool, _SIZE, second)
            backend.deallocate(again, second)
            assert (reserved_nbytes(backend, pool) == before) is is_on
        rig.finish(second)
        second.close()

    @fidelity
    @pytest.mark.parametrize("is_on", [True, False])
    def test_opportunistic_reuse_takes_what_happens_to_be_freed(
        self, rig: Rig, is_on: bool
    ) -> None:
        """A free that has run is reused by a stream that never waited for it."""
        backend, pool = rig.backend, rig.pool
        _only(backend, pool, *([_OPPORTUNISTIC] if is_on else []))
        second, middle = backend.create_stream(), backend.create_stream()
        address = backend.allocate(pool, _SIZE, rig.stream)
        before = reserved_nbytes(backend, pool)
        with self.stall(rig, middle):
            held = rig.mark(middle)
            backend.deallocate(address, rig.stream)
            freed = rig.mark(rig.stream)
            while not freed.is_done:  # asked only: a synchronisation would prove it
                settle(backend)
            again = backend.allocate(pool, _SIZE, second)
            assert (reserved_nbytes(backend, pool) == before) is is_on
            assert not held.is_done
        backend.deallocate(again, second)
        rig.finish(second)
        rig.finish(middle)
        second.close()
        middle.close()

    @fidelity
    @pytest.mark.parametrize("is_on", [True, False])
    def test_internal_dependencies_wait_for_a_free_that_is_pending(
        self, rig: Rig, is_on: bool
    ) -> None:
        """A pool that can't grow hands out memory whose free is pending, behind it, or none."""
        backend = rig.backend
        pool = backend.create_pool(release_threshold_nbytes=0, max_nbytes=_SIZE)
        _only(backend, pool, *([_INTERNAL] if is_on else []))
        second = backend.create_stream()
        host, view = rig.pinned(_SIZE)
        address = backend.allocate(pool, _SIZE, rig.stream)
        backend.fill(address, b"\x31", _SIZE, rig.stream)
        with self.stall(rig, rig.stream):
            backend.copy_d2h(host, address, _SIZE, rig.stream)
            backend.deallocate(address, rig.stream)
            if is_on:
                again = backend.allocate(pool, _SIZE, second)
                backend.fill(again, b"\xff", _SIZE, second)
                done = rig.mark(second)
                settle(backend)
                assert not done.is_done
            else:
                refused(backend, lambda: backend.allocate(pool, _SIZE, second), OutOfDeviceMemory)
        rig.finish()
        assert (view == 0x31).all()
        if is_on:
            backend.deallocate(again, second)
        rig.finish(second)
        second.close()
        backend.destroy_pool(pool)

    @fidelity
    @pytest.mark.parametrize("how", ["stream", "event", "device"])
    def test_what_a_synchronisation_proves_is_reused_whatever_is_off(
        self, rig: Rig, how: str
    ) -> None:
        """With every way of reuse off, what a synchronisation has proven free is reused."""
        backend, pool = rig.backend, rig.pool
        _only(backend, pool)
        second = backend.create_stream()
        address = backend.allocate(pool, _SIZE, rig.stream)
        before = reserved_nbytes(backend, pool)
        backend.deallocate(address, rig.stream)
        synchronise(rig, how)
        again = backend.allocate(pool, _SIZE, second)
        assert reserved_nbytes(backend, pool) == before
        backend.deallocate(again, second)
        rig.finish(second)
        second.close()

    @fidelity
    def test_c42_trimming_after_a_phase_keeps_what_is_in_use(self, rig: Rig) -> None:
        """Trimming after a phase returns what the phase freed, and leaves what others use."""
        backend, pool = rig.backend, rig.pool
        other = backend.create_stream()
        kept = backend.allocate(pool, _SIZE, other)
        backend.fill(kept, b"\x41", _SIZE, other)
        host, view = rig.pinned(_SIZE)
        rig.finish(other)
        phase = [backend.allocate(pool, _SIZE, rig.stream) for _ in range(4)]
        for address in phase:
            backend.deallocate(address, rig.stream)
        with self.stall(rig, other):
            backend.copy_d2h(host, kept, _SIZE, other)
            rig.stream.sync()
            backend.trim_pool(pool, 2 * _SIZE)
            assert 2 * _SIZE <= reserved_nbytes(backend, pool) < 5 * _SIZE
            backend.trim_pool(pool, 0)
            assert _SIZE <= reserved_nbytes(backend, pool) < 3 * _SIZE
        rig.finish(other)
        assert (view == 0x41).all()
        backend.deallocate(kept, other)
        rig.finish(other)
        other.close()
