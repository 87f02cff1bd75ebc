"""CUDA C++ to cubin, without a GPU: where the compiler's library is installed, for real."""

# ruff: noqa: N802 - the compiler's own names
from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from streamflow.backends.cuda import compiler
from streamflow.backends.cuda.compiler import (
    cache_directory,
    compile_cubin,
    compiler_version,
    open_cache,
)
from streamflow.errors import BackendUnavailable, CompileFailed

_GOOD = """extern "C" __global__ void scale(float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= FACTOR;
}
"""


class Result(int):
    name = "NVRTC_ERROR_COMPILATION"


class FakeCompiler:
    """Compiles anything to its options, and counts."""

    def __init__(self, version: tuple[int, int] = (13, 4), log: bytes | None = None) -> None:
        self.version = version
        self.log = log
        self.num_compiled = 0
        self.num_live = 0
        self._cubin = b""

    def nvrtcVersion(self) -> tuple[int, int, int]:
        return 0, *self.version

    def nvrtcCreateProgram(self, source: bytes, name: bytes, *_: Any) -> tuple[int, object]:
        self.num_live += 1
        return 0, object()

    def nvrtcCompileProgram(self, program: object, count: int, options: list[bytes]) -> Any:
        assert count == len(options)
        self.num_compiled += 1
        self._cubin = b" ".join(options)
        return (Result(6) if self.log is not None else 0,)

    def nvrtcGetCUBINSize(self, program: object) -> tuple[int, int]:
        return 0, len(self._cubin)

    def nvrtcGetCUBIN(self, program: object, into: bytearray) -> tuple[int]:
        into[:] = self._cubin
        return (0,)

    def nvrtcGetProgramLogSize(self, program: object) -> tuple[int, int]:
        return 0, len(self.log or b"")

    def nvrtcGetProgramLog(self, program: object, into: bytearray) -> tuple[int]:
        into[:] = self.log or b""
        return (0,)

    def nvrtcDestroyProgram(self, program: object) -> tuple[int]:
        self.num_live -= 1
        return (0,)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    nvrtc = FakeCompiler()
    monkeypatch.setattr(compiler, "_nvrtc", lambda: nvrtc)
    return nvrtc


@pytest.fixture
def real() -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="no bindings on this platform")
    try:
        compiler._nvrtc()
    except BackendUnavailable as error:
        pytest.skip(f"{error}")


@pytest.mark.usefixtures("real")
class TestRealCompiler:
    def test_it_compiles_for_an_architecture_that_is_not_here(self) -> None:
        cubin = compile_cubin(_GOOD, "scale.cu", arch="sm_90", options=("-DFACTOR=2.0f",))
        assert cubin.startswith(b"\x7fELF")
        assert b"scale" in cubin

    def test_errors_name_file_and_line(self) -> None:
        with pytest.raises(CompileFailed) as caught:
            compile_cubin(_GOOD, "/home/me/project/scale.cu", arch="sm_90")
        assert "scale.cu(3): error" in caught.value.log
        assert "FACTOR" in caught.value.log
        assert "scale.cu(3): error" in str(caught.value)
        assert "/home/me" not in caught.value.log

    def test_an_unknown_option_is_a_compile_error(self) -> None:
        with pytest.raises(CompileFailed, match="--bogus"):
            compile_cubin(_GOOD, "scale.cu", arch="sm_90", options=("--bogus",))

    def test_seventeen_is_the_default_standard_and_can_be_changed(self) -> None:
        source = 'static_assert(__cplusplus == {}L); extern "C" __global__ void k() {{}}'
        compile_cubin(source.format(201703), "k.cu", arch="sm_90")
        compile_cubin(source.format(202002), "k.cu", arch="sm_90", options=("--std=c++20",))

    def test_the_cache_serves_the_second_call(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cache = open_cache(tmp_path)
        options = ("-DFACTOR=3.0f",)
        first = compile_cubin(_GOOD, "scale.cu", arch="sm_90", options=options, cache=cache)

        def refuse(*_: Any) -> bytes:
            raise AssertionError("compiled again")

        monkeypatch.setattr(compiler, "_compile", refuse)
        again = compile_cubin(_GOOD, "scale.cu", arch="sm_90", options=options, cache=cache)
        assert again == first


def test_the_options_reach_the_compiler_in_order(fake: FakeCompiler) -> None:
    cubin = compile_cubin("x", "k.cu", arch="sm_80", options=("-DN=4", "--use_fast_math"))
    assert cubin == (
        b"--gpu-architecture=sm_80 --generate-line-info --std=c++17 -DN=4 --use_fast_math"
    )
    assert fake.num_live == 0


@pytest.mark.parametrize("option", ["--std=c++20", "-std=c++14"])
def test_the_standard_is_given_once(fake: FakeCompiler, option: str) -> None:
    assert compile_cubin("x", "k.cu", arch="sm_80", options=(option,)).count(b"std=") == 1


def test_a_failed_compile_leaves_no_program_and_no_entry(
    fake: FakeCompiler, tmp_path: Path
) -> None:
    fake.log = b'k.cu(1): error: identifier "x" is undefined\n\n1 error detected\n\0'
    cache: Any = {}
    with pytest.raises(CompileFailed, match=r"k\.cu\(1\): error") as caught:
        compile_cubin("x", "k.cu", arch="sm_80", cache=cache)
    assert caught.value.log.endswith("1 error detected")
    assert fake.num_live == 0
    assert not cache


def test_whatever_decides_the_result_is_in_the_key(fake: FakeCompiler) -> None:
    cache: Any = {}
    base: dict[str, Any] = {
        "source": "x",
        "filename": "k.cu",
        "arch": "sm_80",
        "options": ("-DN=1",),
    }
    for change in (
        {},
        {"source": "y"},
        {"filename": "other.cu"},  # the line table carries the name
        {"arch": "sm_90"},
        {"options": ("-DN=2",)},
        {"options": ("-DN=1", "-DM")},
    ):
        compile_cubin(**(base | change), cache=cache)
    fake.version = (13, 5)
    compile_cubin(**base, cache=cache)
    assert fake.num_compiled == len(cache) == 7
    compile_cubin(**base, cache=cache)
    assert fake.num_compiled == 7


@pytest.mark.parametrize("option", ["-I/include", "--include-path=/x", "-I", "--pre-include=a.h"])
def test_what_depends_on_other_files_is_not_cached(fake: FakeCompiler, option: str) -> None:
    cache: Any = {}
    compile_cubin("x", "k.cu", arch="sm_80", options=(option,), cache=cache)
    assert not cache


def test_a_cache_that_cannot_be_written_is_done_without(fake: FakeCompiler) -> None:
    class Full(dict[bytes, bytes]):
        def __setitem__(self, key: bytes, value: bytes) -> None:
            raise OSError(28, "No space left on device")

    cache: Any = Full()
    assert compile_cubin("x", "k.cu", arch="sm_80", cache=cache)


def test_the_version_is_told_as_people_write_it(fake: FakeCompiler) -> None:
    assert compiler_version() == "13.4"


def test_a_missing_compiler_names_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(BackendUnavailable, match=r"streamflow-cuda\[nvrtc\]"):
        compile_cubin(_GOOD, "k.cu", arch="sm_90")


def test_a_missing_library_names_the_extra_too(monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="no bindings on this platform")

    def not_found() -> None:
        raise RuntimeError("Failure finding libnvrtc.so")

    monkeypatch.setattr(nvrtc, "nvrtcVersion", not_found)
    with pytest.raises(BackendUnavailable, match=r"streamflow-cuda\[nvrtc\]"):
        compile_cubin(_GOOD, "k.cu", arch="sm_90")
    assert compiler_version() is None


@pytest.mark.skipif(sys.platform == "win32", reason="XDG directories are not Windows's")
def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMFLOW_CACHE", "/a/b")
    assert cache_directory() == Path("/a/b/kernels")
    monkeypatch.delenv("STREAMFLOW_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert cache_directory() == Path("/c/streamflow/kernels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert cache_directory() == Path("/h/.cache/streamflow/kernels")


def test_a_cache_directory_that_cannot_be_made_means_no_cache(tmp_path: Path) -> None:
    pytest.importorskip("cuda.core", reason="no cuda.core on this platform")
    file = tmp_path / "file"
    file.write_text("in the way")
    assert open_cache(file / "below") is None
