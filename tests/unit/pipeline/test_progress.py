"""What ``progress=`` takes, and what the bar is told."""

from __future__ import annotations

import builtins
import io
from typing import Any

import pytest

from streamflow.pipeline.progress import open_progress

tqdm = pytest.importorskip("tqdm", reason="the extra 'progress' is not installed")


class Recorded:
    """A bar that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def update(self, n: int = 1) -> None:
        self.told.append(n)

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        self.told.append((text, refresh))

    def close(self) -> None:
        self.told.append("closed")


def test_none_is_made_for_false() -> None:
    assert open_progress(False, 3) is None


def test_true_makes_a_bar_of_tqdm(capsys: pytest.CaptureFixture[str]) -> None:
    bar = open_progress(True, 3)
    assert bar is not None
    for _ in range(3):
        bar.update(1, 1 << 20)
    bar.close()
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert "3.00 MiB" in shown


def test_a_mapping_holds_arguments_of_tqdm() -> None:
    file = io.StringIO()
    bar = open_progress({"file": file, "desc": "frames", "unit": "frame", "mininterval": 0}, None)
    assert bar is not None
    bar.update(2, 0)
    bar.close()
    assert "frames: 2frame" in file.getvalue()


def test_a_mapping_may_set_the_total() -> None:
    file = io.StringIO()
    bar = open_progress({"file": file, "total": 7}, 3)
    assert bar is not None
    bar.close()
    assert "0/7" in file.getvalue()


def test_closing_twice_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Recorded] = []

    def make(**_: Any) -> Recorded:
        made.append(Recorded())
        return made[-1]

    monkeypatch.setattr("tqdm.auto.tqdm", make)
    bar = open_progress(True, None)
    assert bar is not None
    bar.close()
    bar.close()
    assert made[0].told == ["closed"]


def test_a_ready_made_bar_is_told_and_stays_open() -> None:
    ready = Recorded()
    bar = open_progress(ready, 3)
    assert bar is not None
    bar.update(1, 512)
    bar.update(2, 512)
    bar.close()
    assert ready.told == [("512 B", False), 1, ("1.00 KiB", False), 2]


def test_a_bar_without_a_postfix_counts_items_only() -> None:
    class Plain:
        num = 0

        def update(self, n: int = 1) -> None:
            self.num += n

        def close(self) -> None: ...

    ready = Plain()
    bar = open_progress(ready, None)
    assert bar is not None
    bar.update(4, 100)
    assert ready.num == 4


@pytest.mark.parametrize("progress", [None, 1, "yes", object(), Recorded], ids=repr)
def test_other_things_are_refused(progress: Any) -> None:
    with pytest.raises(TypeError, match=r"mapping of tqdm's keyword arguments.*found"):
        open_progress(progress, None)


def test_an_argument_that_tqdm_has_not_is_refused() -> None:
    with pytest.raises(TypeError, match=r"refuses.*colour_of_joy"):
        open_progress({"colour_of_joy": "blue"}, None)


def test_the_extra_is_named_where_tqdm_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "tqdm":
            raise ModuleNotFoundError(f"No module named {name!r}", name="tqdm")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModuleNotFoundError, match=r"streamflow-cuda\[progress\]") as caught:
        open_progress(True, None)
    assert caught.value.name == "tqdm"
    ready = Recorded()
    assert open_progress(ready, None) is not None
