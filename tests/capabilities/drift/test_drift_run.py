"""A server of a real run that holds one wrong tensor ends the run, which names it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from running import run
from safetensors.torch import save_file

TENSOR, SHAPE = "model.layers.0.mlp.down_proj.weight", (128, 384)
WRONG_AFTER_A_STEP = """
from areal_like.rollout.http import Deadline
from areal_like.run import loop

original = loop.publish

async def with_one_wrong_tensor(sync, version, timeout_s):
    await original(sync, version, timeout_s)
    if version == 1:
        async with sync.pool.interrupt(version, Deadline(timeout_s)):
            await sync.pool.servers[0].load({folder!r}, version, timeout_s)

if __name__ == "__main__":
    loop.publish = with_one_wrong_tensor
    from areal_like.cli import app
    app()
"""


@pytest.mark.long
def test_one_wrong_tensor_of_a_server_is_named(tmp_path: Path) -> None:
    (folder := tmp_path / "wrong").mkdir()
    save_file({TENSOR: torch.ones(SHAPE)}, folder / "model.safetensors", {"format": "pt"})
    (script := tmp_path / "wrong_tensor.py").write_text(WRONG_AFTER_A_STEP.format(folder=str(folder)))
    settings = ("total_train_steps=4", "warm_start=null", "evaluator.at_start=false", "rollout.drift_patience=1")
    with run(tmp_path, *settings, script=script) as started:
        assert started.end() == 1, started.errors
        assert started.steps() == [1]
        assert started.remains() == []
    assert "different log-probs at version 1: " in started.errors, started.errors
    assert "Likely cause: the weights of server 0. server 0: 1 of " in started.errors, started.errors
    assert "tensors differ from the trainer's: model.layers.0.mlp.down_proj.weight" in started.errors
