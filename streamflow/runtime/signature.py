"""Find a ``__global__`` function in CUDA C++ source and read its signature.

This is a reader for declarations, not a compiler: it skips comments, literals
and preprocessor directives and understands the parameter types that a kernel
launched from Python can take. Macros are not expanded, so a kernel whose
declaration is written by a macro needs :meth:`Kernel.from_module` or a plain
declaration. Everything it does not understand is left to the compiler, except
parameters that could never be passed: those raise here, by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from streamflow.backends.base import Parameter
from streamflow.runtime.parameters import read_parameters

__all__ = ["parse_parameters", "parse_signature"]

_TOKEN = re.compile(
    r"""
    (?P<skipped>
        ^[^\S\n]*\#(?:\\\r?\n|//[^\n]*|/\*.*?\*/|[^\n])*   # a directive, with continuations
      | //(?:\\\r?\n|[^\n])*
      | /\*.*?(?:\*/|\Z)
      | \\\r?\n
      | [^\S\n]+ | \n
    )
  | (?P<literal>
        (?:u8|[uUL])?R"(?P<fence>[^\s()\\"]{0,16})\(.*?\)(?P=fence)"
      | "(?:\\.|[^"\\\n])*"
      | '(?:\\.|[^'\\\n])+'
    )
  | (?P<token>
        [^\W\d]\w*
      | \.?\d(?:'?[\w.])*                                   # 1'000'000 is one number
      | :: | && | \.\.\. | .
    )
    """,
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_CLOSING = {"(": ")", "[": "]", "<": ">", "{": "}"}
_STATEMENT_ENDS = frozenset("{};")
_AFTER_PARAMETERS = frozenset({"noexcept", "requires", "__attribute__", "__launch_bounds__"})
_ATTRIBUTES = frozenset(
    {
        "__launch_bounds__",
        "__cluster_dims__",
        "__block_size__",
        "__maxnreg__",
        "__attribute__",
        "__declspec",
        "__align__",
        "alignas",
    }
)


@dataclass(frozen=True, slots=True)
class _Declaration:
    name: str
    parameters: tuple[str, ...]
    is_definition: bool
    is_template: bool


def parse_signature(
    source: str, *, name: str | None = None, hint: str | None = None
) -> tuple[str, tuple[Parameter, ...]]:
    """The name and parameters of one ``__global__`` function of ``source``.

    Parameters
    ----------
    source : str
        CUDA C++ source.
    name : str, optional
        The function wanted. A qualified name (``"ns::f"``) is matched by its last part
        and handed on as given.
    hint : str, optional
        A name to prefer when ``name`` is not given; if no function bears it, the only
        function of the source is taken.

    Returns
    -------
    tuple of str and tuple of Parameter
        An unnamed parameter is called ``arg0``, ``arg1``, .. by its position.

    Raises
    ------
    ValueError
        No such function, several to choose from, a template, or a parameter that cannot
        be passed from Python.
    """
    tokens = _tokens_of(source)
    found = [
        declaration
        for at, token in enumerate(tokens)
        if token == "__global__" and (declaration := _read_declaration(tokens, at)) is not None
    ]
    chosen = name if name is not None else _choose(found, hint)
    candidates = [each for each in found if each.name == chosen.rpartition("::")[2]]
    if not candidates:
        raise ValueError(
            f"the source has no __global__ function named {chosen!r}; found: {_names_of(found)}"
        )
    if any(each.is_template for each in candidates):
        raise ValueError(
            f"kernel {chosen!r}: templates are not supported: instantiate it, for example as a "
            f'__device__ template called from extern "C" __global__ void {candidates[0].name}_float'
        )
    # A forward declaration may leave the names out, so definitions win.
    candidates = [each for each in candidates if each.is_definition] or candidates
    aliases = _aliases_of(tokens)
    signatures = {read_parameters(each.parameters, chosen, aliases) for each in candidates}
    if len(signatures) > 1:
        raise ValueError(
            f"kernel {chosen!r} is defined {len(signatures)} times with different parameters "
            "(overloads, or branches of an #if): give each a name of its own"
        )
    return chosen, signatures.pop()


def parse_parameters(text: str, *, kernel: str) -> tuple[Parameter, ...]:
    """The parameters in a C parameter list such as ``"float a, const float* x"``.

    Parameters
    ----------
    text : str
        What stands between the parentheses of a declaration.
    kernel : str
        The kernel's name, for messages.

    Raises
    ------
    ValueError
        A parameter cannot be passed from Python.
    """
    return read_parameters(_tokens_of(text), kernel, {})


def _tokens_of(source: str) -> list[str]:
    tokens = []
    for match in _TOKEN.finditer(source):
        kind = match.lastgroup
        if kind == "token":
            tokens.append(match[0])
        elif kind != "skipped":
            tokens.append('""')
    return tokens


def _read_declaration(tokens: Sequence[str], at: int) -> _Declaration | None:
    """The function that the ``__global__`` at ``at`` belongs to; None if there is none."""
    start = at
    while start > 0 and tokens[start - 1] not in _STATEMENT_ENDS:
        start -= 1
    before = tokens[start:at]
    is_template = "template" in before
    saw_void = "void" in before
    i = at + 1
    while i < len(tokens) and tokens[i] not in _STATEMENT_ENDS:
        token = tokens[i]
        saw_void = saw_void or token == "void"
        if token == "<":  # f<float>(..): a specialisation or an explicit instantiation
            is_template = True
        if token not in _CLOSING:
            i += 1
            continue
        end = _find_close(tokens, i)
        following = tokens[end + 1] if end + 1 < len(tokens) else ""
        named = _name_before(tokens, i) if token == "(" else None
        if (
            named is not None
            and saw_void
            # An identifier after the parentheses: what stood before them was an
            # attribute macro, as in `void BOUNDS(256) f(int n)`.
            and (not _is_word(following) or following in _AFTER_PARAMETERS)
        ):
            is_definition = following != ";" and following != ""
            parameters = tuple(tokens[i + 1 : end])
            return _Declaration(named, parameters, is_definition, is_template)
        i = end + 1
    return None


def _name_before(tokens: Sequence[str], at: int) -> str | None:
    """The function name that ends just before the parenthesis at ``at``."""
    i = at - 1
    if tokens[i] == ">":
        while i > 0 and tokens[i] != "<":
            i -= 1
        i -= 1
    word = tokens[i]
    return word if _is_word(word) and word not in _ATTRIBUTES and word != "void" else None


def _find_close(tokens: Sequence[str], at: int) -> int:
    opening, closing = tokens[at], _CLOSING[tokens[at]]
    depth = 0
    for i in range(at, len(tokens)):
        if tokens[i] == opening:
            depth += 1
        elif tokens[i] == closing:
            depth -= 1
            if depth == 0:
                return i
    raise ValueError(f"the source ends before the {opening!r} of a __global__ declaration closes")


def _choose(found: Sequence[_Declaration], hint: str | None) -> str:
    names = {each.name for each in found}
    if not names:
        raise ValueError("the source has no __global__ function")
    if hint in names:
        return hint
    if len(names) == 1:
        return names.pop()
    wanted = "" if hint is None else f" and none is named {hint!r}"
    raise ValueError(
        f"the source has {len(names)} __global__ functions ({_names_of(found)}){wanted}: pass name="
    )


def _names_of(found: Sequence[_Declaration]) -> str:
    return ", ".join(dict.fromkeys(each.name for each in found)) or "none"


def _aliases_of(tokens: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """Plain ``typedef T name;`` and ``using name = T;``, without those of pointers and the like.

    A name given two meanings (in branches of an ``#if``) has none here.
    """
    aliases: dict[str, tuple[str, ...]] = {}
    for at, token in enumerate(tokens):
        if token not in ("typedef", "using"):
            continue
        end = at + 1
        while end < len(tokens) and tokens[end] not in _STATEMENT_ENDS:
            end += 1
        statement = tuple(tokens[at + 1 : end])
        if token == "typedef" and len(statement) >= 2:
            name, meaning = statement[-1], statement[:-1]
        elif token == "using" and statement[1:2] == ("=",):
            name, meaning = statement[0], statement[2:]
        else:
            continue
        if not {"*", "&", "(", "["}.isdisjoint(statement):
            continue
        aliases[name] = meaning if aliases.get(name, meaning) == meaning else ()
    return aliases


def _is_word(token: str) -> bool:
    return token[:1].isalpha() or token[:1] == "_"
