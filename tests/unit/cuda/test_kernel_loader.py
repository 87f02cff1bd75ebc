"""One compile per source, whoever asks; images told apart by how they begin."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from streamflow.backends.base import KernelSpec
from streamflow.errors import CompileFailed, DeviceError

kernels = pytest.importorskip(
    "streamflow.backends.cuda.kernels", reason="no cuda.core on this platform"
)


@pytest.fixture
def loader() -> Any:
    return kernels.KernelLoader(SimpleNamespace(arch="90", device_id=0))


def _spec(name: str = "k", **changes: Any) -> KernelSpec:
    return KernelSpec(name, (), **({"source": "source"} | changes))


def test_two_threads_compile_a_kernel_once(loader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, both_asked = threading.Event(), threading.Event()
    loaded: list[object] = []

    def load(self: Any, spec: KernelSpec) -> object:
        begun.set()
        assert both_asked.wait(10)
        loaded.append(object())
        return loaded[-1]

    monkeypatch.setattr(kernels.KernelLoader, "_load", load)
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda: found.append(loader.load_blocking(_spec())))
        for _ in range(2)
    ]
    threads[0].start()
    assert begun.wait(10)
    threads[1].start()
    both_asked.set()
    for thread in threads:
        thread.join(10)
    assert len(loaded) == 1
    assert found == loaded * 2
    assert loader.find(_spec()) is loaded[0]


def test_a_spec_with_the_same_content_is_the_same_kernel(
    loader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels.KernelLoader, "_load", lambda self, spec: object())
    assert loader.find(_spec()) is None
    kernel = loader.load_blocking(_spec())
    assert loader.load_blocking(_spec()) is kernel
    for other in (_spec("other"), _spec(source="else"), _spec(options=("-DN=1",))):
        assert loader.find(other) is None


def test_a_failure_is_not_remembered(loader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: list[Any] = [CompileFailed("once"), "kernel"]

    def load(self: Any, spec: KernelSpec) -> object:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(kernels.KernelLoader, "_load", load)
    with pytest.raises(CompileFailed):
        loader.load_blocking(_spec())
    assert loader.find(_spec()) is None
    assert loader.load_blocking(_spec()) == "kernel"


def test_a_kernel_with_neither_source_nor_image(loader: Any) -> None:
    with pytest.raises(DeviceError, match="simulator only"):
        loader.load_blocking(_spec(source=None))


@pytest.mark.parametrize(
    ("image", "kind"),
    [
        (b"\x7fELF\x02\x01", "cubin"),
        (b"\x50\xed\x55\xba\x01\x00", "fatbin"),
        (b"//\n// Generated\n.version 8.0\n.target sm_80\n", "ptx"),
    ],
)
def test_images_are_told_apart(image: bytes, kind: str) -> None:
    assert kernels.object_code(image, "k").code_type == kind


def test_an_image_of_no_known_kind_says_how_it_begins() -> None:
    with pytest.raises(CompileFailed, match="GARBAGE!"):
        kernels.object_code(b"GARBAGE!andmore", "k")
