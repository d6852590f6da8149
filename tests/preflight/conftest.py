from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def existing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What an existing Ray cluster answers when it is asked what it has; a test may change it."""
    answer: dict[str, Any] = {"nodes": [{"CPU": 64.0, "GPU": 8.0}] * 4, "free": {}}
    monkeypatch.setattr("areal_like.backends.ray.resources._ask", lambda address: answer)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # where it would have written its address
    return answer


@pytest.fixture(autouse=True)
def _asked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-core is asked about overrides in this process, where it is imported once."""

    def answer(asked: str) -> tuple[int, str, str]:
        from areal_like.backends.megatron.cpu import cuda as cpu
        from areal_like.backends.megatron.refusals import Asked, judge

        cpu.install()
        return 0, judge(Asked.model_validate_json(asked)).model_dump_json(), ""

    monkeypatch.setattr("areal_like.preflight.overrides._answer", answer)
