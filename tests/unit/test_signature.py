import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamflow.backends.base import Access, Parameter
from streamflow.runtime.signature import parse_parameters, parse_signature

SAXPY = """
extern "C" __global__
void saxpy(float a, const float* x, float* y, unsigned long long n) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i < n) y[i] += a * x[i];
}
"""


def one(declaration: str, source_prefix: str = "") -> Parameter:
    _, (parameter,) = parse_signature(f"{source_prefix} __global__ void f({declaration}) {{}}")
    return parameter


def names_of(parameters: tuple[Parameter, ...]) -> list[str]:
    return [parameter.name for parameter in parameters]


def test_the_designs_example() -> None:
    name, parameters = parse_signature(SAXPY)
    assert name == "saxpy"
    assert parameters == (
        Parameter("a", "float", np.dtype(np.float32), None),
        Parameter("x", "const float*", np.dtype(np.float32), Access.READ),
        Parameter("y", "float*", np.dtype(np.float32), Access.READ_WRITE),
        Parameter("n", "unsigned long long", np.dtype(np.uint64), None),
    )


@pytest.mark.parametrize(
    ("spelling", "dtype"),
    [
        ("char", "int8"),
        ("signed char", "int8"),
        ("unsigned char", "uint8"),
        ("short", "int16"),
        ("short unsigned int", "uint16"),
        ("int", "int32"),
        ("signed", "int32"),
        ("unsigned", "uint32"),
        ("long", "l"),
        ("unsigned long int", "L"),
        ("long long", "int64"),
        ("long long unsigned int", "uint64"),
        ("int long unsigned long", "uint64"),
        ("size_t", np.uintp),
        ("std::size_t", np.uintp),
        ("::size_t", np.uintp),
        ("ptrdiff_t", np.intp),
        ("int8_t", "int8"),
        ("uint8_t", "uint8"),
        ("std::int32_t", "int32"),
        ("uint64_t", "uint64"),
        ("bool", "bool"),
        ("float", "float32"),
        ("double", "float64"),
        ("half", "float16"),
        ("__half", "float16"),
        ("cuComplex", "complex64"),
        ("cuFloatComplex", "complex64"),
        ("cuDoubleComplex", "complex128"),
        ("cuda::std::complex<double>", "complex128"),
    ],
)
def test_scalar_types(spelling: str, dtype: str) -> None:
    assert one(f"{spelling} n") == Parameter("n", spelling.lstrip(":"), np.dtype(dtype), None)
    assert one(f"{spelling}* p").dtype == np.dtype(dtype)


@pytest.mark.parametrize(
    "spelling", ["void", "struct cell", "cell", "__nv_bfloat16", "float2", "double2", "wchar_t"]
)
def test_pointers_to_other_types_accept_any_array(spelling: str) -> None:
    parameter = one(f"{spelling}* p")
    assert (parameter.dtype, parameter.access) == (None, Access.READ_WRITE)


@pytest.mark.parametrize(
    ("declaration", "access"),
    [
        ("const float* x", Access.READ),
        ("float const* x", Access.READ),
        ("const float *__restrict__ x", Access.READ),
        ("const volatile float* const __restrict x", Access.READ),
        ("float* const x", Access.READ_WRITE),
        ("volatile float *x", Access.READ_WRITE),
        ("float x[]", Access.READ_WRITE),
        ("const float x[16]", Access.READ),
        ("float const x[][4 * (2 < 3)]", Access.READ),
        ("[[maybe_unused]] const float* x", Access.READ),
        ("__attribute__((aligned(8))) float* x", Access.READ_WRITE),
    ],
)
def test_access_follows_the_constness_of_what_is_pointed_at(
    declaration: str, access: Access
) -> None:
    parameter = one(declaration)
    assert (parameter.name, parameter.dtype, parameter.access) == ("x", np.dtype("float32"), access)


@pytest.mark.parametrize(
    ("declaration", "ctype", "access"),
    [
        ("float** x", "float**", Access.READ_WRITE),
        ("const float** x", "const float**", Access.READ_WRITE),
        ("const float* const* x", "const float* const*", Access.READ),
        ("float* const x[]", "float* const*", Access.READ),
        ("float* x[]", "float**", Access.READ_WRITE),
    ],
)
def test_a_pointer_to_pointers_accepts_any_array(
    declaration: str, ctype: str, access: Access
) -> None:
    assert one(declaration) == Parameter("x", ctype, None, access)


def test_commas_inside_brackets_separate_nothing() -> None:
    parameters = parse_parameters(
        "cuda::std::array<int, 4>* x, __attribute__((a(1, 2))) float y[sizeof(int[2])], int n",
        kernel="f",
    )
    assert names_of(parameters) == ["x", "y", "n"]


def test_qualifiers_of_scalars_do_not_matter() -> None:
    for declaration in ("const int n", "int const n", "const __grid_constant__ int n"):
        assert one(declaration) == Parameter("n", "int", np.dtype(np.int32), None)


def test_plain_type_aliases_are_followed() -> None:
    source = "typedef float real; using word = unsigned long long; typedef word mask; "
    assert one("real a", source).dtype == np.float32
    assert one("const real* x", source).ctype == "const real*"
    assert one("mask m", source).dtype == np.uint64


def test_an_alias_with_two_meanings_is_not_guessed() -> None:
    source = "\n#ifdef BIG\ntypedef double real;\n#else\ntypedef float real;\n#endif\n"
    assert one("real* x", source).dtype is None
    with pytest.raises(ValueError, match="'real', passed by value"):
        one("real a", source)


def test_an_alias_of_itself_ends() -> None:
    assert one("a* x", "using a = b; using b = a;").dtype is None


def test_no_parameters() -> None:
    assert parse_signature("__global__ void f() {}") == ("f", ())
    assert parse_signature("__global__ void f(void) {}") == ("f", ())


def test_unnamed_parameters_are_named_by_position() -> None:
    parameters = parse_parameters("float, const float*, unsigned long, size_t, foo*", kernel="f")
    assert names_of(parameters) == ["arg0", "arg1", "arg2", "arg3", "arg4"]


@pytest.mark.parametrize(
    "source",
    [
        'extern "C" { static __global__ void f(int n) {} }',
        "void __global__ f(int n) {}",
        "__global__ __launch_bounds__(256, (2 + 1)) void f(int n) {}",
        "__global__ void __launch_bounds__(256) f(int n) {}",
        "__global__ void BOUNDS(256) f(int n) {}",
        "__global__ BOUNDS(256) void f(int n) {}",
        "__global__ BOUNDS(256) [[gnu::cold]] void f(int n) {}",
        "int e = 1'000; __global__ void f(int n) { char c = 'a'; }",
        "__global__ void f(int n) noexcept {}",
        "namespace a { inline __global__ void f(int n); }",
        '__attribute__((visibility("default"))) __global__ [[gnu::cold]] void f(int n) {}',
        "__global__ void ns::f(int n) {}",
    ],
)
def test_forms_of_a_declaration(source: str) -> None:
    assert parse_signature(source) == ("f", (Parameter("n", "int", np.dtype(np.int32), None),))


@pytest.mark.parametrize(
    "noise",
    [
        "// __global__ void g(int)",
        "// goes on \\\n __global__ void g(int)",
        "/* __global__ void g(int) */",
        "#define G __global__ void g(int)",
        "#define G \\\n __global__ void \\\r\n g(int)",
        "  #  if /* two\n lines __global__ void g(int) */ 1",
        'const char* s = "__global__ void g(int) \\" {";',
        'auto s = R"x( " __global__ void g(int) )" )x";',
        "char c = '\"'; char d = '\\''; int e = 1'000'000;",
    ],
)
def test_comments_literals_and_directives_are_not_code(noise: str) -> None:
    name, parameters = parse_signature(f"{noise}\n__global__ void f(int /* ) */ n) {{}}\n{noise}")
    assert (name, names_of(parameters)) == ("f", ["n"])


class TestChoice:
    TWO = "__global__ void f(int a) {} __global__ void g(int b) {}"

    def test_by_name(self) -> None:
        assert names_of(parse_signature(self.TWO, name="g")[1]) == ["b"]

    def test_by_hint(self) -> None:
        assert parse_signature(self.TWO, hint="f")[0] == "f"

    def test_a_hint_that_fits_nothing_leaves_the_only_one(self) -> None:
        assert parse_signature(SAXPY, hint="body")[0] == "saxpy"

    def test_a_qualified_name_is_kept(self) -> None:
        assert parse_signature("namespace ns {" + self.TWO + "}", name="ns::f")[0] == "ns::f"

    def test_several_need_a_name(self) -> None:
        with pytest.raises(ValueError, match=r"2 __global__ functions \(f, g\) and none .*'h'"):
            parse_signature(self.TWO, hint="h")

    def test_an_unknown_name_lists_the_known(self) -> None:
        with pytest.raises(ValueError, match="no __global__ function named 'h'; found: f, g"):
            parse_signature(self.TWO, name="h")

    def test_none_at_all(self) -> None:
        with pytest.raises(ValueError, match="no __global__ function"):
            parse_signature("__device__ int f() { return 1; }")

    def test_a_definition_wins_over_a_forward_declaration(self) -> None:
        source = "__global__ void f(float*); __global__ void f(float* x) {}"
        assert names_of(parse_signature(source)[1]) == ["x"]

    def test_overloads_are_refused(self) -> None:
        with pytest.raises(ValueError, match="defined 2 times"):
            parse_signature("__global__ void f(int* x) {} __global__ void f(float* x) {}")

    def test_a_kernel_not_chosen_may_be_unreadable(self) -> None:
        source = "template <class T> __global__ void t(T* x) {} __global__ void f(int n) {}"
        assert parse_signature(source, name="f")[0] == "f"


@pytest.mark.parametrize(
    "source",
    [
        "template <typename T> __global__ void f(T* x) {}",
        "template <> __global__ void f<float>(float* x) {}",
        "template __global__ void f<float>(float* x);",
    ],
)
def test_templates_are_refused(source: str) -> None:
    with pytest.raises(ValueError, match="'f': templates are not supported: instantiate it"):
        parse_signature(source)


@pytest.mark.parametrize(
    ("declaration", "problem"),
    [
        ("int& x", "is a reference"),
        ("T&& x", "is a reference"),
        ("cell x", "has type 'cell', passed by value"),
        ("struct cell x", "has type 'cell', passed by value"),
        ("float2 x", "has type 'float2', passed by value"),
        ("__nv_bfloat16 x", "passed by value"),
        ("long double x", "has type 'long double', passed by value"),
        ("int x = 3", "has a default argument"),
        ("void (*x)(int)", "is a function pointer"),
        ("float (*x)[4]", "pointer to an array"),
        ("...", "is variadic"),
        ("", "is not a declaration"),
        ("* x", "is not a declaration"),
        ("int x y", "is not a declaration"),
        ("float * y z", "is not a declaration"),
    ],
)
def test_what_cannot_be_passed_is_refused_by_position_and_text(
    declaration: str, problem: str
) -> None:
    with pytest.raises(ValueError, match=r"kernel 'f': parameter 1 \(") as info:
        parse_parameters(f"int n, {declaration}", kernel="f")
    assert problem in str(info.value)


def test_two_parameters_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two parameters named 'x'"):
        parse_parameters("int x, float x", kernel="f")


def test_truncated_source_is_refused() -> None:
    with pytest.raises(ValueError, match="source ends before"):
        parse_signature("__global__ void f(int a, ")
    with pytest.raises(ValueError, match=r"unbalanced '\['"):
        parse_parameters("int a[", kernel="f")


# -- round trips -----------------------------------------------------------------------

WORDS = {
    "int8": [["char"], ["signed", "char"]],
    "uint8": [["unsigned", "char"], ["uint8_t"]],
    "int32": [["int"], ["signed"], ["signed", "int"], ["int32_t"]],
    "uint64": [["unsigned", "long", "long"], ["long", "long", "unsigned", "int"], ["uint64_t"]],
    "float32": [["float"]],
    "float64": [["double"]],
    "complex64": [["cuComplex"], ["thrust", "::", "complex", "<", "float", ">"]],
}
SPACE = st.sampled_from([" ", "\n", "\t", " /* , ) */ ", " // (\n", " \\\n "])


@st.composite
def declared(draw: st.DrawFn) -> tuple[list[str], str, Access | None]:
    """The tokens of a parameter without its name, its dtype and its access."""
    dtype = draw(st.sampled_from(sorted(WORDS)))
    words = list(draw(st.sampled_from(WORDS[dtype])))
    if "::" not in words:
        words = draw(st.permutations(words))
    is_const = draw(st.booleans())
    for word in ["const"] * is_const + ["volatile"] * draw(st.booleans()):
        at = draw(st.sampled_from([0, len(words)]))
        words.insert(at, word)
    if not draw(st.booleans()):
        return words, dtype, None
    after_star = draw(st.lists(st.sampled_from(["const", "__restrict__"]), unique=True))
    return [*words, "*", *after_star], dtype, Access.READ if is_const else Access.READ_WRITE


@given(parameters=st.lists(declared(), max_size=6), data=st.data())
def test_a_written_signature_reads_back(
    parameters: list[tuple[list[str], str, Access | None]], data: st.DataObject
) -> None:
    tokens: list[str] = ["__global__", "void", "f", "("]
    for position, (words, _, _) in enumerate(parameters):
        tokens += [","] * (position > 0) + [*words, f"p{position}"]
    tokens += [")", "{", "}"]
    source = "".join(token + data.draw(SPACE) for token in tokens)
    name, read = parse_signature(source)
    assert name == "f"
    assert [(p.name, p.dtype, p.access) for p in read] == [
        (f"p{position}", np.dtype(dtype), access)
        for position, (_, dtype, access) in enumerate(parameters)
    ]


PIECES = [
    "__global__",
    "void",
    "f",
    "::",
    "...",
    "template",
    "const",
    "int",
    "x",
    *"()<>[]{}:*&,=.'\"/#",
]


@given(st.lists(st.sampled_from([*PIECES, "\n", "\\", "//", "/*", "*/", 'R"'])).map(" ".join))
def test_any_text_reads_or_raises_value_error(text: str) -> None:
    for source in (text, f"__global__ void f({text}", f"__global__ void f({text}) {{}}"):
        with contextlib.suppress(ValueError):
            parse_signature(source)
