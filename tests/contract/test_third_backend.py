"""Anyone can bring a backend: a registered third one passes the whole contract."""

from __future__ import annotations

from typing import Any

import pytest

import streamflow.backends
from streamflow.backends import choose_backend, open_backend, register_backend
from streamflow.backends.base import Backend
from streamflow.config import Settings, SimOptions
from streamflow.errors import BackendUnavailable
from streamflow.testing.contract import BackendContract, PeerContract


class MirrorBackend:
    """Hands every verb to a simulated device, and counts them."""

    name = "mirror"

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self.num_asked = 0

    def __getattr__(self, verb: str) -> Any:
        if not verb.startswith("__"):
            self.num_asked += 1
        return getattr(self._inner, verb)


def open_mirror(index: int, settings: Settings, loop_key: object) -> Backend:
    return MirrorBackend(open_backend("sim", index, settings, loop_key))


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamflow.backends, "_OPENERS", dict(streamflow.backends._OPENERS))
    register_backend("mirror", open_mirror)


class _Mirrored:
    def open(self, index: int = 0) -> Backend:
        return open_backend("mirror", index, Settings(sim=SimOptions(clock="virtual")), self)


class TestMirror(_Mirrored, BackendContract):
    def test_it_is_the_registered_one(self, rig: Any) -> None:
        assert isinstance(rig.backend, MirrorBackend)
        assert rig.backend.name == "mirror"
        assert rig.backend.num_asked > 0


class TestMirrorPeers(_Mirrored, PeerContract):
    pass


def test_a_backend_is_registered_by_import_path() -> None:
    register_backend("by-path", "streamflow.backends.sim:open_device")
    backend = open_backend("by-path", 0, Settings(sim=SimOptions(clock="virtual")), None)
    assert isinstance(backend, Backend)
    backend.close()


def test_a_registered_name_can_be_chosen() -> None:
    assert choose_backend("mirror") == ("mirror", None)


@pytest.mark.parametrize("name", ["auto", ""])
def test_some_names_are_not_for_backends(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be named"):
        register_backend(name, open_mirror)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(BackendUnavailable, match="mirror"):
        choose_backend("nonesuch")
