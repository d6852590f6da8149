"""A run with a reference and a critic: real ranks in layouts of their own, and what they leave."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from running import run
from transformers import AutoModelForSequenceClassification

pytestmark = pytest.mark.covers("PPO with critic", "reference model")

ROLES = (
    *("ref.backend=megatron:t2", "ref.update_every_steps=2", "ref.ema_decay=0.5"),
    *("critic.backend=megatron:c2", "critic.megatron.bridge_type=megatron-bridge"),
    *("ref.offload=true", "critic.offload=true", "actor.megatron.optimizer_offload=true"),
)


@pytest.mark.long
def test_a_reference_and_a_critic_run_beside_the_actor(tmp_path: Path) -> None:
    with run(tmp_path, *ROLES, "total_train_steps=3", "warm_start.steps=2", "actor.optimizer.lr=1e-4") as started:
        assert started.end() == 0, started.errors
        assert started.remains() == []
    logs = {file.stem for file in (started.directory / "logs").glob("*.log")}
    assert {"actor-0", "actor-1", "ref-0", "ref-1", "critic-0", "critic-1"} <= logs
    checkpoints = started.directory / "checkpoints"
    assert {path.name for path in checkpoints.iterdir()} == {"step-3", "step-3-critic"}
    critic = AutoModelForSequenceClassification.from_pretrained(
        checkpoints / "step-3-critic", num_labels=1, dtype=torch.float32
    )
    assert critic.score.weight.abs().max() > 0
    assert not (started.directory / ".weights").exists()
