"""Failures that nobody has seen yet (rule R9)."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from streamflow.errors import RaceDetected, UpstreamFailed

if TYPE_CHECKING:
    from streamflow.runtime.scope import Scope

__all__ = ["Failures", "add_note", "add_notes", "placed", "raise_group"]


class Failures:
    """Root causes only: an op that failed with its upstream says nothing new."""

    __slots__ = ("_unseen",)

    def __init__(self) -> None:
        # By id: one error may be the failure of ops in several scopes.
        self._unseen: dict[int, tuple[BaseException, set[Scope | None]]] = {}

    def note(self, error: BaseException, scope: Scope | None) -> None:
        """An op of ``scope`` failed with ``error``."""
        self._unseen.setdefault(id(error), (error, set()))[1].add(scope)

    def observed(self, error: BaseException) -> None:
        """Somebody has seen ``error``, and so what caused it."""
        self._unseen.pop(id(error), None)
        if isinstance(error, UpstreamFailed) and error.__cause__ is not None:
            self._unseen.pop(id(error.__cause__), None)

    def take(self, is_asked: Callable[[Scope | None], bool]) -> list[BaseException]:
        """The failures of the scopes that ``is_asked`` is true of; they are seen there now."""
        taken: list[BaseException] = []
        for key, (error, owners) in list(self._unseen.items()):
            asked = {owner for owner in owners if is_asked(owner)}
            if asked:
                taken.append(error)
                owners -= asked
                if not owners:
                    del self._unseen[key]
        return taken


def raise_group(what: str, error: BaseException | None, failures: list[BaseException]) -> NoReturn:
    """Leave with the failures that nobody saw, and the error that was on its way.

    Races alone come as they are: one error tells all of them.
    """
    if error is None and len(failures) == 1 and isinstance(failures[0], RaceDetected):
        raise failures[0]
    num_failed = sum(not isinstance(failure, RaceDetected) for failure in failures)
    noun = "op" if num_failed == 1 else "ops"
    told = [f"{num_failed} {noun} failed and nobody asked for the result"] if num_failed else []
    if num_failed < len(failures):
        told.append("races were found")
    message = f"{what}: {', and '.join(told)}"
    errors = failures if error is None or error in failures else [error, *failures]
    raise BaseExceptionGroup(message, errors) from None


def add_notes(error: BaseException, failures: list[BaseException]) -> None:
    """Tell of failures that nobody saw on an error that has to stay as it is."""
    for failure in failures:
        what = str(failure) if isinstance(failure, RaceDetected) else repr(failure)
        add_note(error, f"{type(failure).__name__} as well: {what}")


def add_note(error: BaseException | None, note: str) -> None:
    """Add a note once."""
    if error is not None and note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def placed(error: BaseException, outer: BaseException | None, what: str) -> BaseException:
    """``error`` with a note of where it was raised, and without its frames.

    They, and through them every caller's, hold arrays, and the op may outlive those (C23).
    """
    trace = error.__traceback__
    if trace is not None and trace.tb_next is not None:  # the first frame is our own
        lines = traceback.format_list(traceback.extract_tb(trace.tb_next))
        error.add_note(f"Raised in the function of {what}:\n" + "".join(lines).rstrip())
    seen: set[int] = {id(outer), id(None)}
    chain: list[BaseException | None] = [error]
    while chain:
        link = chain.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            link.__traceback__ = None
            if link.__context__ is outer:  # what the caller was handling: not this op's affair
                link.__context__ = None
            chain += (link.__cause__, link.__context__)
    return error
