"""CUDA C++ to cubin with NVRTC: needs the compiler's library, no driver and no device.

``cuda.bindings.nvrtc`` rather than ``cuda.core.Program``: a Program takes structured
options only, and users pass the compiler's own (``-DN=4``, ``--use_fast_math``). The
on-disk cache is cuda.core's.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamflow.errors import BackendUnavailable, CompileFailed

if TYPE_CHECKING:
    from cuda.core.utils import FileStreamProgramCache

__all__ = ["cache_directory", "compile_cubin", "compiler_version", "open_cache"]

_NO_COMPILER = (
    "no NVRTC library found: pip install 'streamflow-cuda[nvrtc]' or a CUDA toolkit. "
    "Kernels given as cubin or PTX need no compiler"
)
_CACHE_NBYTES_MAX = 256 << 20
_CACHE_SCHEMA = "streamflow-cubin-1"

# Options that let files outside the source decide the result: their content is not in
# the cache's key, so what they make is not cached.
_READS_FILES = re.compile(r"--?(I|include-path|include|pre-include|pch|use-pch|create-pch)\b|-I")
_HAS_STD = re.compile(r"--?std\b")


def cache_directory() -> Path:
    """Where compiled kernels are kept.

    ``STREAMFLOW_CACHE`` if set; else ``streamflow`` in the user's cache directory.
    """
    named = os.environ.get("STREAMFLOW_CACHE")
    if named:
        return Path(named) / "kernels"
    if sys.platform == "win32":
        root = os.environ.get("LOCALAPPDATA")
        base = Path(root) if root else Path.home() / "AppData" / "Local"
    else:
        root = os.environ.get("XDG_CACHE_HOME")
        base = Path(root) if root else Path.home() / ".cache"
    return base / "streamflow" / "kernels"


def open_cache(path: Path | None = None) -> FileStreamProgramCache | None:
    """The on-disk cache, bounded at 256 MiB; None where the directory cannot be made."""
    from cuda.core.utils import FileStreamProgramCache

    try:
        return FileStreamProgramCache(path or cache_directory(), max_size_bytes=_CACHE_NBYTES_MAX)
    except (OSError, RuntimeError):
        # A read-only home, or none (Path.home raises RuntimeError): compiling each time
        # is right, only slower.
        return None


def compile_cubin(
    source: str,
    filename: str,
    *,
    arch: str,
    options: Sequence[str] = (),
    cache: FileStreamProgramCache | None = None,
) -> bytes:
    """Compile CUDA C++ for one architecture.

    Parameters
    ----------
    source : str
        CUDA C++17 unless an option says otherwise.
    filename : str
        What the compiler's messages call the source; its folder is dropped.
    arch : str
        Such as ``"sm_90"``.
    options : sequence of str
        NVRTC's own, passed on as they are.
    cache : FileStreamProgramCache, optional
        Looked up first and filled, unless an option includes files.

    Raises
    ------
    CompileFailed
        The source or an option is wrong; ``log`` has the compiler's words with file and line.
    BackendUnavailable
        No NVRTC library on this machine.
    """
    name = Path(filename).name or "kernel.cu"
    flags = [f"--gpu-architecture={arch}", "--generate-line-info"]
    if not any(_HAS_STD.match(option) for option in options):
        flags.append("--std=c++17")
    flags += options
    nvrtc = _nvrtc()
    if any(_READS_FILES.match(option) for option in options):
        cache = None
    key = _cache_key(nvrtc, source, name, flags)
    if cache is not None:
        found: bytes | None = cache.get(key)
        if found is not None:
            return found
    cubin = _compile(nvrtc, source, name, flags)
    if cache is not None:
        with suppress(OSError):  # full or read-only by now: the result is good all the same
            cache[key] = cubin
    return cubin


def compiler_version() -> str | None:
    """NVRTC's, as ``"13.1"``; None where there is no such library."""
    try:
        _, major, minor = _nvrtc().nvrtcVersion()
    except BackendUnavailable:
        return None
    return f"{major}.{minor}"


def _nvrtc() -> Any:
    """The bindings, with the library loaded."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:  # DynamicLibNotFoundError is a RuntimeError
        raise BackendUnavailable(_NO_COMPILER) from error
    return nvrtc


def _cache_key(nvrtc: Any, source: str, name: str, flags: Sequence[str]) -> bytes:
    _, major, minor = nvrtc.nvrtcVersion()
    digest = hashlib.sha256()
    for part in (_CACHE_SCHEMA, f"{major}.{minor}", name, *flags, source):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


def _compile(nvrtc: Any, source: str, name: str, flags: Sequence[str]) -> bytes:
    program = _value(nvrtc, nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], []))
    try:
        encoded = [flag.encode() for flag in flags]
        (code,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        if code:
            raise _failed(code.name, name, _log(nvrtc, program))
        cubin = bytearray(_value(nvrtc, nvrtc.nvrtcGetCUBINSize(program)))
        _value(nvrtc, nvrtc.nvrtcGetCUBIN(program, cubin))
        return bytes(cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _log(nvrtc: Any, program: Any) -> str:
    log = bytearray(_value(nvrtc, nvrtc.nvrtcGetProgramLogSize(program)))
    _value(nvrtc, nvrtc.nvrtcGetProgramLog(program, log))
    return log.rstrip(b"\0").decode(errors="backslashreplace").strip()


def _failed(code: str, name: str, log: str) -> CompileFailed:
    first = next((line for line in log.splitlines() if "error" in line), log) or code
    return CompileFailed(f"{name} does not compile ({code}): {first}", log=log)


def _value(nvrtc: Any, result: tuple[Any, ...]) -> Any:
    if result[0]:
        _, text = nvrtc.nvrtcGetErrorString(result[0])
        raise CompileFailed(f"NVRTC: {result[0].name}: {text.decode()}")
    return result[1] if len(result) == 2 else None
