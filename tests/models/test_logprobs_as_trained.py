"""The log-prob check takes the path that training takes: a model that loses shared prompts does not pass it."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
from tiny_models import VARIANTS, hugging_face_log_probs, write_tiny
from trainer_jobs import VOCABULARY, Setting, engine

from areal_like.core.config.load import load
from areal_like.core.errors import LogprobMismatch
from areal_like.core.loop.logprob_check import check_logprobs
from areal_like.core.trainer.engine import Rendezvous
from areal_like.core.types import Batch, FinishReason, Trajectory

CONFIG = Path(__file__).parents[2] / "examples/math/gsm8k_grpo_cpu.yaml"
AT_ONE = ["gconfig.temperature=1.0"]


def groups() -> Batch:
    """Two groups of three responses to a prompt of their own."""
    rng = np.random.default_rng(0)
    tokens, masks, lengths = [], [], []
    for prompt in (rng.integers(3, VOCABULARY, 12), rng.integers(3, VOCABULARY, 7)):
        for response in (rng.integers(3, VOCABULARY, length) for length in (5, 9, 3)):
            tokens.append(np.concatenate([prompt, response]))
            masks.append(np.concatenate([np.zeros(len(prompt)), np.ones(len(response))]))
            lengths.append(len(tokens[-1]))
    fields = {"loss_mask": np.concatenate(masks).astype(np.float32)}
    return Batch(np.array(lengths, np.int32), np.concatenate(tokens).astype(np.int32), fields)


def trajectories(batch: Batch, logprobs: np.ndarray) -> list[Trajectory]:
    ends = np.cumsum(batch.lengths)[:-1]
    parts = (np.split(array, ends) for array in (batch.tokens, logprobs, batch.fields["loss_mask"]))
    return [
        Trajectory(i, i // 3, tokens, np.where(mask > 0, said, 0).astype(np.float32), mask.astype(np.int32) - 1,
                   FinishReason.STOP, 1.0)
        for i, (tokens, said, mask) in enumerate(zip(*parts, strict=True))
    ]  # fmt: skip


def log_probs_without_the_refusal(
    rendezvous: Rendezvous, listener: socket.socket, setting: Setting, batch: Batch, temperature: float
) -> Any:
    """What the engine computes if it is built without looking at whether attention knows of shared prompts."""
    looks = mock.patch("areal_like.backends.fsdp.model._attention", return_value="eager")
    with looks, mock.patch("areal_like.backends.fsdp.engine.check_packing"):
        return _log_probs(rendezvous, listener, setting, batch, temperature)


def _log_probs(
    rendezvous: Rendezvous, listener: socket.socket, setting: Setting, batch: Batch, temperature: float
) -> Any:
    with engine(rendezvous, listener, setting) as made:
        return made.log_probs(batch, temperature)


class OneRank:
    """What the check asks of a trainer, answered by one rank."""

    def __init__(self, ranks: Any, setting: Setting, job: Any = _log_probs) -> None:
        self._ranks, self._setting, self._job = ranks, setting, job

    async def log_probs(self, batch: Batch, temperature: float) -> np.ndarray:
        result = np.zeros(len(batch.tokens), np.float32)
        ((places, values),) = self._ranks.run(self._job, 1, self._setting, batch, temperature)
        result[places] = values
        return result


@pytest.mark.parametrize(
    ("name", "backend", "shares"),
    [("gemma2", "fsdp", False), ("gemma3_text-window", "fsdp", True), ("qwen3", "megatron", True)],
)
def test_a_model_that_is_computed_as_the_servers_do_passes(ranks, tmp_path, name, backend, shares):
    batch = groups()
    said = hugging_face_log_probs(write_tiny(VARIANTS[name], tmp_path), batch)
    setting = Setting(tmp_path, backend=backend, share_prompts=shares)
    asyncio.run(
        check_logprobs(load(CONFIG, AT_ONE).config, cast(Any, OneRank(ranks, setting)), trajectories(batch, said))
    )


def test_lost_prompts_end_the_run_before_its_first_step(ranks, tmp_path):
    batch = groups()
    said = hugging_face_log_probs(write_tiny(VARIANTS["qwen3_next"], tmp_path), batch)
    setting = Setting(tmp_path, backend="fsdp", share_prompts=True)
    with pytest.raises(AssertionError, match="does not support shared prompts"):
        ranks.run(_log_probs, 1, setting, batch, 1.0)
    losing = cast(Any, OneRank(ranks, setting, log_probs_without_the_refusal))
    with pytest.raises(LogprobMismatch):
        asyncio.run(check_logprobs(load(CONFIG, AT_ONE).config, losing, trajectories(batch, said)))


def test_a_distance_of_the_longest_responses_alone_is_seen() -> None:
    class Wrong:
        async def log_probs(self, batch: Batch, temperature: float) -> np.ndarray:
            return np.where(np.repeat(batch.lengths > 50, batch.lengths), -1.01, -1.0) * batch.fields["loss_mask"]

    lengths = np.array([20] * 600 + [60] * 16, np.int32)
    total = int(lengths.sum())
    batch = Batch(lengths, np.ones(total, np.int32), {"loss_mask": np.ones(total, np.float32)})
    config = load(CONFIG, ["rollout.max_logprob_diff=0.005"]).config
    with pytest.raises(LogprobMismatch, match=r"0\.01 apart"):
        asyncio.run(check_logprobs(config, cast(Any, Wrong()), trajectories(batch, np.full(total, -1.0))))
