"""How Sphinx builds these pages. ``nox -s docs`` runs it; a warning is an error."""

from __future__ import annotations

import sys
from importlib.metadata import version as installed_version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "streamflow"
author = "the streamflow authors"
release = version = installed_version("streamflow-cuda")

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
