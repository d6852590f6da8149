"""What hostile processes do. It imports little: hostile_job.py starts many of them."""

from __future__ import annotations

import os
import time
from pathlib import Path

from areal_like.backends.ray.lineage import identity


def wait(folder: str) -> None:
    """Note this process, and wait."""
    pid, started = identity(os.getpid())
    (Path(folder) / f"{pid}.{started}").touch()
    time.sleep(3600)
