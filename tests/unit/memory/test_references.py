"""``require``: a resource with the properties asked for, or an error that names the missing."""

from __future__ import annotations

from itertools import product

import pytest

from streamflow.memory import references as refs
from streamflow.memory.blocks import Piece
from streamflow.memory.references import require
from streamflow.memory.resource import DeviceMemoryResource
from streamflow.memory.space import Place

PROPERTIES = {
    "device": ("is_device_accessible", "device accessible"),
    "host": ("is_host_accessible", "host accessible"),
    "stream_ordered": ("is_stream_ordered", "stream ordered"),
}
ALIASES = {
    refs.device_resource_ref: {"device"},
    refs.device_async_resource_ref: {"device", "stream_ordered"},
    refs.host_resource_ref: {"host"},
    refs.host_async_resource_ref: {"host", "stream_ordered"},
    refs.host_device_resource_ref: {"host", "device"},
    refs.host_device_async_resource_ref: {"host", "device", "stream_ordered"},
}


class Odd(DeviceMemoryResource):
    def __init__(self, has: set[str]) -> None:
        super().__init__()
        for name, (attribute, _) in PROPERTIES.items():
            setattr(self, attribute, name in has)

    def _take(self, nbytes: int, alignment: int, place: Place) -> Piece:
        raise NotImplementedError

    def _give(self, piece: Piece, place: Place) -> None:
        raise NotImplementedError


def all_kinds() -> list[set[str]]:
    return [
        {name for name, has in zip(PROPERTIES, choice, strict=True) if has}
        for choice in product((False, True), repeat=3)
    ]


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("name", PROPERTIES)
def test_each_property_is_checked_and_named(name: str, wanted: bool) -> None:
    for has in all_kinds():
        resource = Odd(has)
        if (name in has) is wanted:
            assert require(resource, **{name: wanted}) is resource
        else:
            verb = "is not" if wanted else "is"
            with pytest.raises(ValueError, match=f"{verb} {PROPERTIES[name][1]}$"):
                require(resource, **{name: wanted})


def test_what_is_not_asked_for_does_not_matter() -> None:
    for has in all_kinds():
        resource = Odd(has)
        assert require(resource) is resource


def test_every_missing_property_is_named_at_once() -> None:
    with pytest.raises(ValueError, match="not device accessible and is not host accessible"):
        require(Odd({"stream_ordered"}), device=True, host=True, stream_ordered=True)


@pytest.mark.parametrize("alias", ALIASES)
def test_the_named_shorthands_ask_for_what_their_names_say(alias) -> None:
    for has in all_kinds():
        resource = Odd(has)
        if ALIASES[alias] <= has:
            assert alias(resource) is resource
        else:
            with pytest.raises(ValueError, match="is not"):
                alias(resource)


@pytest.mark.parametrize("nothing", [None, 7, object()])
def test_none_and_what_is_no_resource_are_refused(nothing: object) -> None:
    for check in (require, *ALIASES):
        with pytest.raises(TypeError, match="takes a memory resource"):
            check(nothing)
