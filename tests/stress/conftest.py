"""Make ``tests.stress`` importable; at the end, so that an installed streamflow comes first."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
