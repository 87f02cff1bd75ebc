import inspect
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from streamflow.backends.base import Access
from streamflow.runtime.kernel import Kernel, kernel

SAXPY = """extern "C" __global__
void saxpy(float a, const float* x, float* y, unsigned long long n) {}
"""


@kernel(SAXPY)
def saxpy(a, x, y, n):  # type: ignore[no-untyped-def]
    """Add a multiple."""
    y[:n] += np.float32(a) * x[:n]


def accesses(made: Kernel) -> list[Access | None]:
    return [parameter.access for parameter in made.parameters]


class TestDecorator:
    def test_makes_a_kernel_that_knows_its_body(self) -> None:
        assert isinstance(saxpy, Kernel)
        assert saxpy.name == "saxpy"
        assert saxpy.spec.source == SAXPY
        assert saxpy.spec.image is None
        assert saxpy.spec.filename == "saxpy.cu"
        assert saxpy.__doc__ == "Add a multiple."
        assert saxpy.__wrapped__ is saxpy.spec.body  # type: ignore[attr-defined]
        assert list(inspect.signature(saxpy).parameters) == ["a", "x", "y", "n"]

    def test_a_call_runs_the_reference_body(self) -> None:
        y = np.ones(4, np.float32)
        saxpy(2.0, np.arange(4, dtype=np.float32), y, 3)
        assert y.tolist() == [1, 3, 5, 1]

    def test_repr_shows_the_signature(self) -> None:
        assert (
            repr(saxpy) == "<Kernel saxpy(float a, const float* x, float* y, unsigned long long n)>"
        )

    def test_the_function_named_as_the_body_is_taken(self) -> None:
        @kernel("__global__ void other(int n) {} __global__ void chosen(int n) {}")
        def chosen(n: int) -> None: ...

        assert chosen.name == "chosen"

    def test_the_only_function_may_have_another_name(self) -> None:
        @kernel(SAXPY)
        def body(a: object, x: object, y: object, n: object) -> None: ...

        assert body.name == "saxpy"

    def test_name_decides(self) -> None:
        @kernel("__global__ void f(int n) {} __global__ void g(int a) {}", name="g")
        def f(a: int) -> None: ...

        assert f.name == "g"

    def test_without_source_says_how_to_write_it(self) -> None:
        with pytest.raises(TypeError, match="write @kernel"):
            kernel(lambda x: None)  # type: ignore[arg-type]

    def test_source_must_be_text(self) -> None:
        with pytest.raises(TypeError, match=r"source must be a str of CUDA C.*found bytes"):
            Kernel.from_source(SAXPY.encode())  # type: ignore[arg-type]


class TestBody:
    @pytest.mark.parametrize(
        "body",
        [
            lambda a, x, y: None,
            lambda a, x, y, n, extra: None,
            lambda a, x, y, *, n: None,
        ],
    )
    def test_a_body_of_other_arity_is_refused(self, body: Callable[..., object]) -> None:
        with pytest.raises(TypeError, match=r"kernel saxpy\(float a, .*4 parameters.*<lambda>\(a"):
            Kernel.from_source(SAXPY, body=body)

    @pytest.mark.parametrize(
        "body",
        [lambda *args: None, lambda a, x, y, n, extra=1: None, lambda a, *rest: None, print, max],
    )
    def test_a_body_that_can_take_them_is_fine(self, body: Callable[..., object]) -> None:
        assert Kernel.from_source(SAXPY, body=body).spec.body is body

    def test_it_must_be_a_plain_callable(self) -> None:
        async def body(a: object, x: object, y: object, n: object) -> None: ...

        with pytest.raises(TypeError, match="plain function, not async"):
            Kernel.from_source(SAXPY, body=body)
        with pytest.raises(TypeError, match="reference body must be callable; found int"):
            Kernel.from_source(SAXPY, body=3)  # type: ignore[arg-type]

    def test_it_may_be_missing(self) -> None:
        made = Kernel.from_source(SAXPY)
        assert made.spec.body is None
        with pytest.raises(TypeError, match="no reference body to call"):
            made()

    def test_cost_is_checked_alike(self) -> None:
        assert Kernel.from_source(SAXPY, cost=lambda a, x, y, n: 1e-6).spec.cost_s is not None
        with pytest.raises(TypeError, match="cost must be callable; found float"):
            Kernel.from_source(SAXPY, cost=1e-6)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="which its cost <lambda>"):
            Kernel.from_source(SAXPY, cost=lambda n: 1e-6)


class TestAccess:
    def test_comes_from_the_signature(self) -> None:
        assert accesses(saxpy) == [None, Access.READ, Access.READ_WRITE, None]

    @pytest.mark.parametrize("wanted", ["write", Access.WRITE])
    def test_can_be_overridden_by_name(self, wanted: str | Access) -> None:
        made = Kernel.from_source(SAXPY, access={"y": wanted})
        assert accesses(made) == [None, Access.READ, Access.WRITE, None]

    @pytest.mark.parametrize(
        ("access", "problem"),
        [
            ({"z": "write"}, "access names 'z'; the parameters are: a, x, y, n"),
            ({"y": "rw"}, "access 'rw' is none of 'read', 'write', 'read-write'"),
            ({"n": "read"}, "'n' is unsigned long long, a scalar"),
            ({"x": "write"}, "'x' is const float\\*, which cannot have access 'write'"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, access: dict[str, str], problem: str) -> None:
        with pytest.raises(ValueError, match=problem):
            Kernel.from_source(SAXPY, access=access)


def test_options_are_a_sequence_of_strings() -> None:
    assert Kernel.from_source(SAXPY, options=["-lineinfo"]).spec.options == ("-lineinfo",)
    for options in ("-lineinfo", [1]):
        with pytest.raises(TypeError, match="options must be a sequence of str"):
            Kernel.from_source(SAXPY, options=options)  # type: ignore[arg-type]


def test_converters_align_with_parameters() -> None:
    a, x, y, n = saxpy.converters
    assert (x, y) == (None, None)
    assert a is not None
    assert n is not None
    assert type(a(2)) is np.float32
    with pytest.raises(TypeError, match="kernel 'saxpy': parameter 'n'"):
        n(2.5)


def test_from_file_keeps_the_file_name(tmp_path: Path) -> None:
    path = tmp_path / "blas.cu"
    path.write_text(SAXPY, encoding="utf-8")
    made = Kernel.from_file(path, access={"y": "write"}, options=("-O3",))
    assert made.spec.filename == str(path)
    assert (made.name, made.spec.source, made.spec.options) == ("saxpy", SAXPY, ("-O3",))
    assert accesses(made)[2] is Access.WRITE


class TestFromModule:
    def test_of_bytes_with_a_parameter_list(self) -> None:
        made = Kernel.from_module(b"\x7fELF", "f", "float a, const float* x", body=lambda a, x: 0)
        assert (made.name, made.spec.image, made.spec.source) == ("f", b"\x7fELF", None)
        assert accesses(made) == [None, Access.READ]

    @pytest.mark.parametrize("kind", [str, Path])
    def test_of_a_file(self, tmp_path: Path, kind: type) -> None:
        path = tmp_path / "m.ptx"
        path.write_bytes(b"// ptx")
        assert Kernel.from_module(kind(path), "f", "").spec.image == b"// ptx"

    def test_with_a_declaration(self) -> None:
        made = Kernel.from_module(b"", "f", "__global__ void f(float* x, int n)")
        assert [parameter.name for parameter in made.parameters] == ["x", "n"]

    def test_a_mangled_name_takes_any_declaration(self) -> None:
        made = Kernel.from_module(b"", "_Z1fPf", "__global__ void f(float* x);")
        assert made.name == "_Z1fPf"

    def test_a_declaration_of_another_function_is_refused(self) -> None:
        with pytest.raises(ValueError, match="no __global__ function named 'g'; found: f"):
            Kernel.from_module(b"", "g", "__global__ void f(float* x)")

    def test_the_image_must_be_bytes_or_a_path(self) -> None:
        with pytest.raises(TypeError, match="bytes or a path; found int"):
            Kernel.from_module(3, "f", "")  # type: ignore[arg-type]
