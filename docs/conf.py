"""How Sphinx builds these pages. ``nox -s docs`` runs it; a warning is an error."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

_ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(_ROOT), str(_ROOT / "docs/_ext")]
_PROJECT = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = "streamflow"
author = "the streamflow authors"
release = version = _PROJECT["version"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "doc_directives",
]
exclude_patterns = ["_build", "_generated", "_ext"]
html_theme = "furo"
html_title = f"streamflow {release}"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

napoleon_google_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_custom_sections = ["Ordering", "Source"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# The public names are documented in their modules as well: two targets, one meaning.
suppress_warnings = ["ref.python"]
