"""CR18: both backends offer the protocol's verbs, with its signatures, and no others."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from streamflow.backends import open_backend
from streamflow.backends.base import Backend, Event, Stream
from streamflow.config import Settings, SimOptions

pytest.importorskip("cuda.core", reason="cuda.core has no wheel for this platform")

from streamflow.backends.cuda.device import CudaBackend


def _sim_type() -> type[Any]:
    backend = open_backend("sim", 0, Settings(sim=SimOptions(clock="virtual")), None)
    kind = type(backend)
    backend.close()
    return kind


_VERBS = sorted(
    name for name, value in vars(Backend).items() if callable(value) and not name.startswith("_")
)
_DATA = sorted(name for name in Backend.__annotations__ if not name.startswith("_"))


@pytest.fixture(params=["cuda", "sim"])
def kind(request: pytest.FixtureRequest) -> type[Any]:
    return CudaBackend if request.param == "cuda" else _sim_type()


def _shape(function: Any) -> list[tuple[str, Any, Any]]:
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in parameters]


def test_the_protocol_was_read_right() -> None:
    assert {"launch", "allocate", "advance", "translate"} <= set(_VERBS)
    assert len(_VERBS) >= 28


@pytest.mark.parametrize("verb", _VERBS)
def test_cr18_each_verb_has_the_protocols_signature(kind: type[Any], verb: str) -> None:
    assert _shape(getattr(kind, verb)) == _shape(getattr(Backend, verb))


def test_cr18_no_verb_is_offered_by_one_backend_alone(kind: type[Any]) -> None:
    offered = {
        name
        for name in dir(kind)
        if not name.startswith("_") and inspect.isfunction(getattr(kind, name))
    }
    assert offered == set(_VERBS)


@pytest.mark.parametrize("name", _DATA)
def test_cr18_each_constant_is_there(kind: type[Any], name: str) -> None:
    # Those set per device are named by the class's code; a typo there fails here.
    assert hasattr(kind, name) or name in kind.__init__.__code__.co_names


@pytest.mark.parametrize("protocol", [Stream, Event])
def test_cr18_handles_offer_the_protocols_members(protocol: type[Any]) -> None:
    from cuda.core import Event as CudaEvent
    from cuda.core import Stream as CudaStream

    backend = open_backend("sim", 0, Settings(sim=SimOptions(clock="virtual")), None)
    ours = backend.create_stream() if protocol is Stream else backend.create_event()
    theirs = CudaStream if protocol is Stream else CudaEvent
    wanted = {name for name in vars(protocol) if not name.startswith("_")}
    assert wanted
    assert wanted <= set(dir(ours))
    assert wanted <= set(dir(theirs))
    backend.close()
