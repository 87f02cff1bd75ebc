"""From the tokens of a C parameter list to :class:`~streamflow.backends.base.Parameter`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np

from streamflow.backends.base import Access, Parameter

__all__ = ["override_access", "read_parameters"]

Aliases = Mapping[str, tuple[str, ...]]

# Keys are a type's words without `signed` and `int`, sorted: one entry per type, not per
# spelling. `long` is the platform's own, 8 bytes on Linux and 4 on Windows.
_BUILTIN: dict[tuple[str, ...], np.dtype[Any]] = {
    (): np.dtype(np.intc),
    ("unsigned",): np.dtype(np.uintc),
    ("char",): np.dtype(np.int8),
    ("char", "unsigned"): np.dtype(np.uint8),
    ("short",): np.dtype(np.short),
    ("short", "unsigned"): np.dtype(np.ushort),
    ("long",): np.dtype("l"),
    ("long", "unsigned"): np.dtype("L"),
    ("long", "long"): np.dtype(np.int64),
    ("long", "long", "unsigned"): np.dtype(np.uint64),
    ("bool",): np.dtype(np.bool_),
    ("float",): np.dtype(np.float32),
    ("double",): np.dtype(np.float64),
}
_BUILTIN_WORDS = frozenset(
    {"void", "signed", "int", "wchar_t", "char8_t", "char16_t", "char32_t", "__int128"}
).union(*_BUILTIN)
_NAMED: dict[str, np.dtype[Any]] = {
    "size_t": np.dtype(np.uintp),
    "ptrdiff_t": np.dtype(np.intp),
    "intptr_t": np.dtype(np.intp),
    "uintptr_t": np.dtype(np.uintp),
    **{f"{kind}{bits}_t": np.dtype(f"{kind}{bits}")
       for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    "half": np.dtype(np.float16),
    "__half": np.dtype(np.float16),
    "cuComplex": np.dtype(np.complex64),
    "cuFloatComplex": np.dtype(np.complex64),
    "complex<float>": np.dtype(np.complex64),
    "cuDoubleComplex": np.dtype(np.complex128),
    "complex<double>": np.dtype(np.complex128),
}  # fmt: skip
_QUALIFIERS = frozenset({"const", "volatile"})
_IGNORED = frozenset(
    {"__restrict__", "__restrict", "restrict", "register", "__grid_constant__"}
    | {"struct", "class", "union", "enum", "typename"}
)
_ATTRIBUTES_WITH_ARGUMENTS = frozenset({"__attribute__", "__align__", "alignas", "__declspec"})
_CLOSING = {"(": ")", "[": "]", "<": ">", "{": "}"}
_ALIAS_DEPTH_MAX = 8


def read_parameters(tokens: Sequence[str], kernel: str, aliases: Aliases) -> tuple[Parameter, ...]:
    """Read a whole parameter list.

    Parameters
    ----------
    tokens : sequence of str
        What stands between the parentheses, comments and literals removed.
    kernel : str
        The kernel's name, for messages.
    aliases : mapping of str to tuple of str
        Type aliases of the source, by name.

    Raises
    ------
    ValueError
        A parameter cannot be passed from Python, or two share a name.
    """
    pieces = _split(tokens)
    if len(pieces) == 1 and tuple(pieces[0]) in ((), ("void",)):
        return ()
    parameters = tuple(
        _Reader(piece, position, kernel, aliases).read() for position, piece in enumerate(pieces)
    )
    names = [parameter.name for parameter in parameters]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"kernel {kernel!r} has two parameters named {name!r}")
    return parameters


def override_access(
    parameters: tuple[Parameter, ...], access: Mapping[str, str | Access] | None, kernel_name: str
) -> tuple[Parameter, ...]:
    """``parameters`` with what the user says about some of them, by name.

    Raises
    ------
    ValueError
        No such parameter or access, a scalar, or a write through a pointer to const.
    """
    if not access:
        return parameters
    remaining = dict(access)
    changed = tuple(
        _override(each, remaining.pop(each.name), kernel_name) if each.name in remaining else each
        for each in parameters
    )
    if remaining:
        raise ValueError(
            f"kernel {kernel_name!r}: access names {', '.join(map(repr, remaining))}; "
            f"the parameters are: {', '.join(each.name for each in parameters) or 'none'}"
        )
    return changed


def _override(parameter: Parameter, wanted: str | Access, kernel_name: str) -> Parameter:
    what = f"kernel {kernel_name!r}: parameter {parameter.name!r}"
    try:
        access = Access(wanted)
    except ValueError:
        known = ", ".join(repr(each.value) for each in Access)
        raise ValueError(f"{what}: access {wanted!r} is none of {known}") from None
    if parameter.access is None:
        raise ValueError(f"{what} is {parameter.ctype}, a scalar: access is for pointers")
    if parameter.access is Access.READ and access is not Access.READ:
        raise ValueError(f"{what} is {parameter.ctype}, which cannot have access {access.value!r}")
    return replace(parameter, access=access)


class _Reader:
    """One parameter's declaration."""

    def __init__(self, tokens: Sequence[str], position: int, kernel: str, aliases: Aliases) -> None:
        self._tokens = tokens
        self._position = position
        self._kernel = kernel
        self._aliases = aliases
        self._name = ""

    def read(self) -> Parameter:
        units = _fold(self._tokens)
        self._refuse_unsupported(units)
        is_array = units[-1:] == ["[]"]
        while units[-1:] == ["[]"]:
            units.pop()
        if "[]" in units:
            self._fail("is not a declaration")
        # One list per pointer level: the base type, then what follows each `*`.
        levels: list[list[str]] = [[]]
        for unit in units:
            if unit == "*":
                levels.append([])
            elif unit not in _IGNORED:
                levels[-1].append(unit)
        consts = ["const" in level for level in levels]
        words = [[unit for unit in level if unit not in _QUALIFIERS] for level in levels]
        self._take_name(words)
        base = words[0]
        if not base or any(words[1:]) or not all(_is_type_word(word) for word in base):
            self._fail("is not a declaration")
        dtype = self._dtype_of(tuple(base))
        depth = len(levels) - 1 + is_array
        if depth == 0:
            if dtype is None:
                self._fail(
                    f"has type {' '.join(base)!r}, passed by value: only integers, bool, float, "
                    "double, half and complex are supported; pass a pointer"
                )
            return Parameter(self._name, " ".join(base), dtype, None)
        # An array parameter decays, so what it points at is the innermost level itself.
        is_read_only = consts[-1] if is_array else consts[-2]
        return Parameter(
            self._name,
            _spell(base, consts if is_array else consts[:-1]),
            dtype if depth == 1 else None,
            Access.READ if is_read_only else Access.READ_WRITE,
        )

    def _take_name(self, words: list[list[str]]) -> None:
        """Remove the parameter's name from ``words``; a type of its own is not one."""
        last = words[-1]
        is_named = bool(last) and last[-1] not in _BUILTIN_WORDS
        if len(words) == 1 and len(last) < 2:
            is_named = False
        self._name = last.pop() if is_named else f"arg{self._position}"

    def _refuse_unsupported(self, units: Sequence[str]) -> None:
        for unit, problem in (
            ("=", "has a default argument, which kernels launched from Python cannot use"),
            ("&", "is a reference: kernels launched from Python take values and pointers"),
            ("&&", "is a reference: kernels launched from Python take values and pointers"),
            ("...", "is variadic, which is not supported"),
            ("(", "is a function pointer or a pointer to an array, which is not supported"),
        ):
            if unit in units:
                self._fail(problem)

    def _dtype_of(self, words: tuple[str, ...], depth: int = 0) -> np.dtype[Any] | None:
        if all(word in _BUILTIN_WORDS for word in words):
            return _BUILTIN.get(tuple(sorted(w for w in words if w not in ("signed", "int"))))
        if len(words) != 1:
            self._fail("is not a declaration")
        name = words[0].rpartition("::")[2]
        if name in self._aliases and depth < _ALIAS_DEPTH_MAX:
            meaning = tuple(u for u in _fold(self._aliases[name]) if u not in _QUALIFIERS)
            return self._dtype_of(meaning, depth + 1) if meaning else None
        return _NAMED.get(name)

    def _fail(self, problem: str) -> NoReturn:
        written = " ".join(self._tokens)
        raise ValueError(
            f"kernel {self._kernel!r}: parameter {self._position} ({written!r}) {problem}"
        )


def _fold(tokens: Iterable[str]) -> list[str]:
    """Join qualified and template names, shorten ``[..]`` to ``[]``, drop attributes."""
    pending = list(tokens)
    units: list[str] = []
    i = 0
    while i < len(pending):
        token = pending[i]
        if token == "[":
            end = _find_close(pending, i)
            if pending[i + 1 : i + 2] != ["["]:
                units.append("[]")
            i = end
        elif token in _ATTRIBUTES_WITH_ARGUMENTS and pending[i + 1 : i + 2] == ["("]:
            i = _find_close(pending, i + 1)
        elif token == "<" and units:
            end = _find_close(pending, i)
            units[-1] += "".join(pending[i : end + 1])
            i = end
        elif token == "::":
            is_continued = bool(units) and i > 0 and _is_type_word(units[-1])
            following = pending[i + 1] if i + 1 < len(pending) else ""
            if is_continued and units[-1] not in _QUALIFIERS:
                units[-1] += "::" + following
            else:
                units.append(following)
            i += 1
        else:
            units.append(token)
        i += 1
    return units


def _split(tokens: Sequence[str]) -> list[list[str]]:
    pieces: list[list[str]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token in _CLOSING) - (token in _CLOSING.values())
        if token == "," and depth == 0:
            pieces.append([])
        else:
            pieces[-1].append(token)
    return pieces


def _find_close(tokens: Sequence[str], at: int) -> int:
    opening, closing = tokens[at], _CLOSING[tokens[at]]
    depth = 0
    for i in range(at, len(tokens)):
        depth += (tokens[i] == opening) - (tokens[i] == closing)
        if depth == 0:
            return i
    raise ValueError(f"unbalanced {opening!r} in a parameter list: {' '.join(tokens)!r}")


def _is_type_word(unit: str) -> bool:
    return unit[:1].isalpha() or unit[:1] == "_"


def _spell(base: Sequence[str], consts: Sequence[bool]) -> str:
    """``const float*``: one star per entry of ``consts``, each said to point at const or not."""
    text = ("const " if consts[0] else "") + " ".join(base)
    for is_const in consts[1:]:
        text += "*" + (" const" if is_const else "")
    return text + "*"
