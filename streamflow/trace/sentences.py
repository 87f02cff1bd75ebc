"""What is said of ops, in words that many ops have in common."""

from __future__ import annotations

import re
from dataclasses import dataclass

from streamflow.runtime.units import spell_seconds
from streamflow.trace.model import TracedOp

__all__ = ["Sentence", "name_on"]

_PLACES = re.compile(r"\{(op|array)\}")


@dataclass(frozen=True, slots=True)
class Sentence:
    """Words with places in them: of thousands of ops the same ``form`` is true.

    Attributes
    ----------
    form : str
        With ``{length}``, ``{op}`` and ``{array}`` where these belong. Without an op there may
        be anybody's words in it, which stay as they are.
    length_s : float or None
    op : TracedOp or None
    array : str or None
        In words.
    """

    form: str
    length_s: float | None = None
    op: TracedOp | None = None
    array: str | None = None

    def __str__(self) -> str:
        words = self.form
        if self.length_s is not None:
            words = words.replace("{length}", spell_seconds(self.length_s), 1)
        if self.op is None:
            return words
        known = {"op": name_on(self.op), "array": self.array or ""}
        return _PLACES.sub(lambda found: known[found[1]], words)


def name_on(op: TracedOp) -> str:
    """``"put#3 on h2d"``; without a place while it has none."""
    if op.stream != "host":
        return f"{op.name} on {op.stream}"
    return f"{op.name} on the host" if op.kind == "host" else op.name
