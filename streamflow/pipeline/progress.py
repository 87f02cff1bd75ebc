"""A progress bar by tqdm's conventions: items, and the bytes behind them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeAlias, runtime_checkable

from streamflow.runtime.units import spell_bytes

__all__ = ["Bar", "Progress", "ProgressBar", "check_progress", "open_progress"]


@runtime_checkable
class ProgressBar(Protocol):
    """What a ready-made bar has, as those of tqdm do.

    A ``set_postfix_str(text, refresh=False)`` is called with the bytes where there is one.
    """

    def update(self, n: int = 1, /) -> object:
        """Count ``n`` more items."""
        ...

    def close(self) -> object:
        """Be done."""
        ...


Progress: TypeAlias = bool | Mapping[str, object] | ProgressBar


class Bar:
    """Counts the items of a run on a bar.

    Parameters
    ----------
    shown : ProgressBar
    is_ours : bool
        Whether :meth:`close` closes it; a bar that the user made is the user's to close.
    """

    __slots__ = ("_is_ours", "_nbytes", "_set_postfix", "_shown")

    def __init__(self, shown: ProgressBar, *, is_ours: bool) -> None:
        self._shown = shown
        self._is_ours = is_ours
        self._nbytes = 0
        self._set_postfix = getattr(shown, "set_postfix_str", None)

    def update(self, items: int, nbytes: int) -> None:
        """Count that many more of both."""
        self._nbytes += nbytes
        if self._nbytes and self._set_postfix is not None:
            self._set_postfix(spell_bytes(self._nbytes), refresh=False)
        self._shown.update(items)

    def close(self) -> None:
        """Leave the bar as it is; a second call does nothing."""
        if self._is_ours:
            self._is_ours = False
            self._shown.close()


def check_progress(progress: Progress) -> None:
    """Raise ``TypeError`` for what :func:`open_progress` doesn't take."""
    if isinstance(progress, (bool, Mapping)):
        return
    if isinstance(progress, type) or not isinstance(progress, ProgressBar):
        raise TypeError(
            "progress= is True, a mapping of tqdm's keyword arguments, or a bar with "
            f"update() and close(); found {progress!r}"
        )


def open_progress(progress: Progress, total: int | None) -> Bar | None:
    """The bar that ``progress=`` asks for.

    Parameters
    ----------
    progress : bool, mapping, or bar
        True for a bar of tqdm's, a mapping of keyword arguments for one that is made to taste,
        or a bar that is there already, and stays open. False for none.
    total : int or None
        How many items there will be; None where the source doesn't say.

    Returns
    -------
    Bar or None
        To be closed on every way out.

    Raises
    ------
    ModuleNotFoundError
        tqdm is not installed; names the extra that brings it.
    TypeError
        Something else than these, or a keyword argument that tqdm doesn't have.
    """
    check_progress(progress)
    if progress is False:
        return None
    if progress is not True and not isinstance(progress, Mapping):
        return Bar(progress, is_ours=False)
    try:
        from tqdm.auto import tqdm  # not before a bar is asked for (P13)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "progress= needs tqdm: pip install 'streamflow-cuda[progress]', or pass a bar of "
            "your own with update() and close()",
            name=error.name,
        ) from error
    chosen = {} if progress is True else progress
    try:
        return Bar(tqdm(**{"total": total, "unit": "item", **chosen}), is_ours=True)
    except KeyError as error:  # tqdm's way of refusing an argument
        raise TypeError(f"progress= holds an argument that tqdm refuses: {error}") from error
