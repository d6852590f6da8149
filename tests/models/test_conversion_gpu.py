"""What one process converts on the CPU is what Transformer Engine's layers on a GPU read and write; needs one GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models
import torch
from conversions import trained
from safetensors.torch import load_file
from trainer_jobs import CPU, GPU, Setting, initial_weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
MACHINE = GPU if torch.cuda.is_available() else CPU


def convert(*arguments: object) -> str:
    command = [sys.executable, "-m", "areal_like", "convert-checkpoint", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("name", "bridge"), [("qwen3-tied", "mbridge"), ("glm4_moe", "megatron-bridge")])
def test_a_gpu_starts_from_a_converted_checkpoint_and_its_own_is_converted(ranks, tmp_path, name, bridge):
    model = tmp_path / "model"
    dtype = getattr(torch, MACHINE.dtype)
    tiny_models.write_tiny(tiny_models.VARIANTS[name], model).to(dtype).save_pretrained(model)
    (model / "tokenizer.json").write_text("{}")
    convert(model, tmp_path / "megatron", "--bridge", bridge)
    setting = Setting(model, bridge=bridge, machine=MACHINE, weights=tmp_path / "megatron")
    (weights,) = ranks.run(initial_weights, 1, setting)
    original = load_file(model / "model.safetensors")
    assert weights.keys() == original.keys()
    assert all((weights[tensor] == original[tensor].float().numpy()).all() for tensor in original)

    ranks.run(trained, 1, setting, tmp_path)
    convert(tmp_path / "state", tmp_path / "policy", "--model", model)
    written, saved = (load_file(Path(tmp_path, at, "model.safetensors")) for at in ("policy", "hf"))
    assert written.keys() == saved.keys()
    assert all(torch.equal(written[tensor], saved[tensor]) for tensor in saved)
