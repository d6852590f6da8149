from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def existing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What an existing Ray cluster answers when it is asked what it has; a test may change it."""
    answer: dict[str, Any] = {"nodes": [{"CPU": 64.0, "GPU": 8.0}] * 4, "free": {}}
    monkeypatch.setattr("areal_like.cluster.resources._ask", lambda address: answer)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # where it would have written its address
    return answer
