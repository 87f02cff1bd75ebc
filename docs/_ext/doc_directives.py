"""The Sphinx directives behind the generated parts of these pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import doc_cases
import doc_layers
import doc_settings
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

_ROOT = Path(__file__).resolve().parents[2]


class CoveredBy(SphinxDirective):
    """``{covered-by} C5``: the tests whose names carry that id."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Render one line."""
        tests = doc_cases.tests_by_case(_ROOT).get(self.arguments[0], [])
        if not tests:
            return self.parse_text_to_nodes("*No test yet.*")
        listed = "\n".join(f"- `{test}`" for test in tests)
        return self.parse_text_to_nodes(f"Covered by:\n\n{listed}")


class CoverageSummary(SphinxDirective):
    """``{coverage-summary}``: how many of the page's cases have a test."""

    def run(self) -> list[nodes.Node]:
        """Render one sentence."""
        cases = doc_cases.cases_on_page(Path(self.env.doc2path(self.env.docname)))
        covered = doc_cases.tests_by_case(_ROOT)
        count = sum(case in covered for case in cases)
        return self.parse_text_to_nodes(
            f"At this build, {count} of the {len(cases)} cases have a test of their own."
        )


class SettingsTable(SphinxDirective):
    """``{settings-table}``: every field of ``Settings``."""

    def run(self) -> list[nodes.Node]:
        """Render the table."""
        lines = ["| setting | variable | default | meaning |", "|---|---|---|---|"]
        for name, variable, default, meaning in doc_settings.settings_rows():
            meaning = meaning.replace("``", "`").replace("|", "\\|")
            lines.append(f"| `{name}` | `{variable}` | `{default}` | {meaning} |")
        return self.parse_text_to_nodes("\n".join(lines))


class LayersPicture(SphinxDirective):
    """``{layers-picture}``: the rooms, and the imports between them."""

    def run(self) -> list[nodes.Node]:
        """Write the SVG next to the sources and refer to it."""
        target = Path(self.env.srcdir) / "_generated" / "layers.svg"
        target.parent.mkdir(exist_ok=True)
        rooms = doc_layers.read_rooms(_ROOT / "streamflow")
        layers = doc_layers.layers_of(_ROOT / "pyproject.toml")
        target.write_text(doc_layers.draw(rooms, layers), encoding="utf-8")
        return self.parse_text_to_nodes(
            "```{image} /_generated/layers.svg\n"
            ":alt: The rooms of the package in their layers, with arrows for imports\n```"
        )


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives."""
    app.add_directive("covered-by", CoveredBy)
    app.add_directive("coverage-summary", CoverageSummary)
    app.add_directive("settings-table", SettingsTable)
    app.add_directive("layers-picture", LayersPicture)
    return {"parallel_read_safe": False}
