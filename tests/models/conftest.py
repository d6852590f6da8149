"""The trainer's ranks, for tests of whole models."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "trainer"))
