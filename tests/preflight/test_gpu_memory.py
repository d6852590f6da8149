"""A run that its GPUs cannot hold is refused before it starts, with the keys that would change it."""

from pathlib import Path

import pytest

from areal_like.config.load import load
from areal_like.preflight import memory
from areal_like.preflight.layout import find_plan
from areal_like.preflight.model import find_model

EXAMPLE = Path(__file__).parents[2] / "examples/math/gsm8k_grpo_qwen3_0.6b.yaml"


def findings(*overrides):
    config = load(EXAMPLE, ["device=cuda", *overrides]).config
    plan, found = find_plan(config, find_model(config)[0])
    assert (plan is None) == any(finding.severity == "error" for finding in found)
    return {finding.code: finding for finding in found}


@pytest.mark.parametrize("gib", [24, 80, None])
def test_a_gpu_that_is_too_small_is_told(monkeypatch, gib):
    monkeypatch.setattr(memory, "gpu_bytes", lambda: gib and gib << 30)
    found = findings()
    assert ("ALLOC-MEMORY" in found) == (gib == 24)
    if gib == 24:
        options = [word for word in found["ALLOC-MEMORY"].help.split() if "=" in word]
        assert options
        assert all(word.startswith(("actor.", "sglang.")) for word in options)
        assert "ALLOC-MEMORY" not in findings(*options)


def test_the_driver_is_asked(monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 81559\necho 143771\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert memory.gpu_bytes() == 81559 << 20
    program.write_text("#!/bin/sh\nexit 9\n")
    assert memory.gpu_bytes() is None
