"""Stacks of resources, written down: ``"limiting(pool(cuda, initial_pool_size=1GiB), 2GiB)"``."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from streamflow.memory.resource import DeviceMemoryResource
from streamflow.scheduler.budget import parse_nbytes

__all__ = ["ResourceSpec", "parse_resource"]

_CLASSES = {
    "cuda": "CudaMemoryResource",
    "async": "CudaAsyncMemoryResource",
    "async_managed": "CudaAsyncManagedMemoryResource",
    "managed": "ManagedMemoryResource",
    "pinned": "PinnedHostMemoryResource",
    "system": "SystemMemoryResource",
    "sam_headroom": "SamHeadroomMemoryResource",
    "pool": "PoolMemoryResource",
    "arena": "ArenaMemoryResource",
    "fixed_size": "FixedSizeMemoryResource",
    "binning": "BinningMemoryResource",
    "limiting": "LimitingResourceAdaptor",
    "statistics": "StatisticsResourceAdaptor",
    "tracking": "TrackingResourceAdaptor",
    "prefetch": "PrefetchResourceAdaptor",
    "aligned": "AlignedResourceAdaptor",
}
_TOKEN = re.compile(
    r"\s*(?:(?P<word>[A-Za-z_]\w*)|(?P<value>-?\d[\w.]*)|(?P<mark>[(),=]))", re.ASCII
)
_WORDS = {"true": True, "false": False, "none": None}


@dataclass(frozen=True, slots=True)
class ResourceSpec:
    """A stack that can be made, any number of times."""

    text: str
    """As it was written."""
    cls: type[DeviceMemoryResource]
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    """Among the arguments, other specs stand for resources."""

    def make(self) -> DeviceMemoryResource:
        """The stack, anew.

        Raises
        ------
        TypeError, ValueError
            A class refuses what it is given.
        """
        made: dict[str, Any] = {name: _made(value) for name, value in self.keywords}
        return self.cls(*map(_made, self.arguments), **made)


def parse_resource(text: str) -> ResourceSpec:
    """Read a stack.

    Parameters
    ----------
    text : str
        A name, with the arguments of its class in parentheses: other resources, numbers, sizes
        such as ``1GiB``, ``true``, ``false`` and ``none``, by position or by RMM's keyword.

    Raises
    ------
    ValueError
        Says what is wrong, and where.
    """
    reader = _Reader(text)
    spec = reader.resource()
    reader.end()
    return spec


def _made(value: Any) -> Any:
    return value.make() if isinstance(value, ResourceSpec) else value


class _Reader:
    """Reads from left to right, one word ahead."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0  # of the next word
        self.after = 0
        self.last = 0  # the end of the word before
        self.kind = ""
        self.word = ""
        self._next()

    def resource(self) -> ResourceSpec:
        start, name = self.at, self.word
        if self.kind != "word":
            raise self._error(f"a resource's name is needed, found {self._found()}")
        if name not in _CLASSES:
            raise self._error(f"no resource {name!r}; known: {', '.join(_CLASSES)}")
        cls = getattr(import_module("streamflow.memory"), _CLASSES[name])
        self._next()
        arguments: list[Any] = []
        keywords: dict[str, Any] = {}
        if self.word == "(":
            self._next()
            while self.word != ")":
                self._argument(arguments, keywords)
                if self.word == ",":
                    self._next()
                elif self.word != ")":
                    raise self._error(f"a comma or a parenthesis is needed, found {self._found()}")
            self._next()
        spec = ResourceSpec(
            self.text[start : self.last], cls, tuple(arguments), tuple(keywords.items())
        )
        self._check(spec, name, start)
        return spec

    def end(self) -> None:
        if self.kind:
            raise self._error(f"nothing more is needed, found {self._found()}")

    def _argument(self, arguments: list[Any], keywords: dict[str, Any]) -> None:
        if self.kind == "word" and self.text[self.after :].lstrip().startswith("="):
            keyword = self.word
            if keyword in keywords:
                raise self._error(f"{keyword}= is given twice")
            self._next()
            self._next()
            keywords[keyword] = self._value()
        elif keywords:
            raise self._error(f"after {next(reversed(keywords))}= all need a keyword")
        else:
            arguments.append(self._value())

    def _value(self) -> Any:
        word = self.word
        if self.kind == "word" and word not in _WORDS:
            return self.resource()
        if self.kind == "word":
            value: Any = _WORDS[word]
        elif self.kind == "value":
            try:
                value = int(word) if re.fullmatch(r"-?\d+", word) else parse_nbytes(word)
            except ValueError:
                raise self._error(f"{word!r} is neither a number nor a size") from None
        else:
            raise self._error(f"an argument is needed, found {self._found()}")
        self._next()
        return value

    def _check(self, spec: ResourceSpec, name: str, start: int) -> None:
        """That the class takes such arguments, and resources where it needs some."""
        signature = inspect.signature(spec.cls)
        try:
            bound = signature.bind(*spec.arguments, **dict(spec.keywords))
        except TypeError as error:
            takes = ", ".join(each for each in signature.parameters if each != "device")
            raise self._error(f"{name}: {error}; it takes ({takes})", start) from None
        for each, value in bound.arguments.items():
            needs = each == "upstream_mr"
            if needs != isinstance(value, ResourceSpec) and (needs or each != "bin_resource"):
                kind = "a resource" if needs else "no resource"
                raise self._error(f"{name}: {each} takes {kind}", start)

    def _next(self) -> None:
        self.last = self.after
        rest = self.text[self.after :]
        match = _TOKEN.match(rest)
        self.at = self.after + len(rest) - len(rest.lstrip())
        if match is None:
            if rest.strip():
                raise self._error(f"{rest.strip()[0]!r} is no part of a resource")
            self.kind = self.word = ""
            return
        self.kind = match.lastgroup or ""
        self.word = match[self.kind]
        self.after += match.end()

    def _found(self) -> str:
        return repr(self.word) if self.kind else "the end"

    def _error(self, problem: str, at: int | None = None) -> ValueError:
        place = self.at if at is None else at
        return ValueError(f"{self.text!r}, at character {place + 1}: {problem}")
