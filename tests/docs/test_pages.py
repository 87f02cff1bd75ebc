"""Every Python block of the README and of the docs runs on the simulator."""

from __future__ import annotations

from pathlib import Path

import doc_blocks
import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    page
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if not {"_build", "_generated"} & set(page.parts) and doc_blocks.python_blocks(page)
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_page_runs(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STREAMFLOW_BACKEND", "sim")
    monkeypatch.setenv("STREAMFLOW_SIM_CLOCK", "virtual")
    monkeypatch.chdir(tmp_path)
    doc_blocks.run_page(doc_blocks.python_blocks(page))


def write(tmp_path: Path, text: str) -> Path:
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    return page


def test_blocks_share_names_and_may_await(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = write(
        tmp_path,
        "<!-- python-setup\nx = 1\n-->\n```python\nimport asyncio\nawait asyncio.sleep(0)\n"
        "y = x + 1\n```\n\n```python\nasync def main():\n    print(y)\n```\n",
    )
    doc_blocks.run_page(doc_blocks.python_blocks(page))
    assert capsys.readouterr().out == "2\n"


def test_a_block_that_calls_main_itself_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = write(
        tmp_path,
        "```python\nimport asyncio\nasync def main():\n    print('once')\n\n"
        "asyncio.run(main())\n```\n",
    )
    doc_blocks.run_page(doc_blocks.python_blocks(page))
    assert capsys.readouterr().out == "once\n"


def test_an_error_names_the_line_of_the_page(tmp_path: Path) -> None:
    page = write(tmp_path, "# A page\n\n```python\nraise KeyError\n```\n")
    with pytest.raises(KeyError) as caught:
        doc_blocks.run_page(doc_blocks.python_blocks(page))
    assert caught.traceback[-1].path == page
    assert caught.traceback[-1].lineno + 1 == 4


def test_a_block_is_left_out_for_a_reason_only(tmp_path: Path) -> None:
    told = write(tmp_path, "```python no-run: needs two GPUs\nraise KeyError\n```\n")
    doc_blocks.run_page(doc_blocks.python_blocks(told))
    with pytest.raises(ValueError, match="no-run: <reason>"):
        doc_blocks.python_blocks(write(tmp_path, "```python no-run\nraise KeyError\n```\n"))
