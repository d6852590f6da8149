"""One training step among models that do as a test tells them: which passes an algorithm gets, and what is trained."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import numpy as np
import pytest
from running import CONFIG

from areal_like.core.algorithms.losses import decoupled_ppo, dpo, value_loss
from areal_like.core.algorithms.presets import make_algorithm
from areal_like.core.config.load import load
from areal_like.core.hooks import Share
from areal_like.core.loop.logprob_check import check_logprobs
from areal_like.core.loop.policies import Policy
from areal_like.core.loop.step import Models, train_step
from areal_like.core.types import Batch, FinishReason, LossSpec, Trajectory


class Silent:
    """A record of nothing."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()


class Model:
    """The actor, the reference or the critic; `did` is shared, `batches` are those that it trained on."""

    def __init__(self, name: str, did: list[str], answer: float) -> None:
        self._name, self._did, self._answer = name, did, answer
        self.batches: list[Batch] = []
        self.temperatures: list[float] = []
        self.losses: list[LossSpec] = []

    async def log_probs(self, batch: Batch, temperature: float) -> np.ndarray:
        self._did.append(f"{self._name}: log-probs of {len(batch.lengths)}")
        return np.full(len(batch.tokens), self._answer, np.float32)

    async def values(self, batch: Batch) -> np.ndarray:
        self._did.append(f"{self._name}: values of {len(batch.lengths)}")
        return np.full(len(batch.tokens), self._answer, np.float32)

    async def train(self, batch: Batch, loss: LossSpec, temperature: float) -> dict[str, float]:
        self._did.append(f"{self._name}: train on {len(batch.lengths)}")
        self.batches.append(batch)
        self.temperatures.append(temperature)
        self.losses.append(loss)
        drift = {"on_policy_logprob_diff": 10.0 ** len(self.batches), "on_policy_share": 1.0}
        return {"loss": self._answer, "loss_tokens": 1.0, **(drift if self._name == "actor" else {})}


class EpisodeContext:
    """A step of `algorithm` at version 0 on one group of four with these rewards; each has two generated tokens."""

    def __init__(self, *overrides: str, rewards: tuple[float | None, ...] = (1.0, 0.0, 0.0, 1.0)) -> None:
        self.did: list[str] = []
        self.actor, self.reference, self.critic = (
            Model(name, self.did, answer) for name, answer in (("actor", -1), ("reference", -2), ("critic", 0.25))
        )
        config = load(CONFIG, overrides).config
        made, logprobs = np.array([-1, 0, 0], np.int32), np.array([0, -1, -1], np.float32)
        tokens = np.arange(3, dtype=np.int32)
        group = [
            Trajectory(0, 7, tokens, logprobs, made, FinishReason.STOP, reward, sample=sample)
            for sample, reward in enumerate(rewards)
        ]
        policy = Policy("", config, make_algorithm(config), cast(Any, self.actor), cast(Any, None))
        models = Models(
            reference=cast(Any, self.reference) if config.ref else None,
            critic=cast(Any, self.critic) if config.critic else None,
        )
        self.stats = asyncio.run(train_step(policy, models, Share(group), 0, cast(Any, Silent())))


def test_the_proximal_policy_is_asked_from_the_second_mini_batch_on() -> None:
    scene = EpisodeContext("actor.ppo_n_minibatches=2", "actor.use_decoupled_loss=true")
    assert scene.did == ["actor: log-probs of 2", "actor: train on 2", "actor: train on 2"]
    assert ["proximal_logprobs" in batch.fields for batch in scene.actor.batches] == [False, True]
    assert (scene.stats["tokens"], scene.stats["logprob_diff"]) == (12, 55)


def test_without_a_proximal_policy_servers_are_compared_with_the_weights_that_they_have() -> None:
    """The second mini-batch meets others."""
    scene = EpisodeContext("actor.ppo_n_minibatches=2", "actor.use_decoupled_loss=false")
    assert scene.did == ["actor: train on 2", "actor: train on 2"]
    assert scene.stats["logprob_diff"] == 10


def test_the_reference_is_asked_about_the_whole_batch_before_rewards_are_made_of_its_answer() -> None:
    """Log-probs are -1, the reference's -2: each of two tokens costs 0.1 of k1."""
    scene = EpisodeContext(
        "actor.ppo_n_minibatches=1", "actor.kl_ctl=0.1", "ref={}", "actor.reward_norm={mean_level: null}"
    )
    assert scene.did == ["reference: log-probs of 4", "actor: train on 4"]
    (batch,) = scene.actor.batches
    np.testing.assert_allclose(batch.fields["advantages"][:6], [0, 0.8, 0.9, 0, -0.2, -0.1], rtol=1e-6)


def test_a_reference_in_the_loss_reaches_every_mini_batch() -> None:
    scene = EpisodeContext("actor.ppo_n_minibatches=2", "actor.kl_loss_coef=0.1", "ref={}")
    assert [set(batch.fields["reference_logprobs"]) for batch in scene.actor.batches] == [{-2.0}, {-2.0}]
    assert scene.actor.losses[0].parameters.kl_loss_coef == 0.1


def test_a_critic_gives_values_and_is_trained_on_the_returns() -> None:
    scene = EpisodeContext(
        "algorithm=ppo", "critic={}", "actor.ppo_n_minibatches=1", "actor.adv_norm={mean_level: null}"
    )
    assert scene.did == ["critic: values of 4", "critic: train on 4", "actor: train on 4"]
    (batch,) = scene.critic.batches
    assert [spec.function for spec in (*scene.critic.losses, *scene.actor.losses)] == [value_loss, decoupled_ppo]
    np.testing.assert_allclose(batch.fields["returns"][:6], [0, 1, 1, 0, 0, 0])
    np.testing.assert_allclose(batch.fields["advantages"][:6], [0, 0.75, 0.75, 0, -0.25, -0.25])
    assert {"tokens": 12, "critic_loss": 0.25, "critic_loss_tokens": 1, "loss": -1}.items() <= scene.stats.items()


def test_a_critic_that_warms_up_is_trained_alone() -> None:
    scene = EpisodeContext("algorithm=ppo", "critic.warmup_steps=1", "actor.ppo_n_minibatches=2")
    assert scene.did == ["critic: values of 4", "critic: train on 2", "critic: train on 2"]
    assert "loss" not in scene.stats


def test_dpo_trains_on_pairs_under_the_weights_that_the_step_starts_from() -> None:
    scene = EpisodeContext("algorithm=dpo", "ref={}", "actor.ppo_n_minibatches=1")
    assert scene.did == ["reference: log-probs of 4", "actor: log-probs of 4", "actor: train on 4"]
    assert scene.actor.losses[0].function is dpo
    (batch,) = scene.actor.batches
    slopes = [0, -0.1, -0.1, 0, 0.1, 0.1, 0, 0.1, 0.1, 0, -0.1, -0.1]  # two pairs each, at margins of 0
    assert batch.fields["slope"].tolist() == pytest.approx(slopes)


def test_a_step_without_any_pair_trains_nothing_and_is_a_step_all_the_same() -> None:
    scene = EpisodeContext("algorithm=dpo", "ref={}", "actor.ppo_n_minibatches=1", rewards=(1.0, 1.0))
    assert not scene.actor.batches
    assert scene.stats == {"tokens": 0, "unselected": 1}


@pytest.mark.parametrize(("algorithm", "temperature"), [("grpo", 0.7), ("sft", 1.0)])
def test_data_is_fitted_at_temperature_one(algorithm: str, temperature: float) -> None:
    scene = EpisodeContext(f"algorithm={algorithm}", "gconfig.temperature=0.7", "actor.ppo_n_minibatches=1")
    assert scene.actor.temperatures == [temperature]


@pytest.mark.parametrize("algorithm", ["grpo", "dpo"])
def test_a_step_without_rewards_asks_nobody(algorithm: str) -> None:
    scene = EpisodeContext(f"algorithm={algorithm}", "ref={}", "actor.ppo_n_minibatches=1", rewards=(None, None))
    assert scene.did == []
    assert scene.stats == {}


@pytest.mark.parametrize("known", [False, True])
def test_the_gate_compares_what_the_servers_have_said(known: bool) -> None:
    """Log-probs of data are nan; the trainer's are -1 here, as the known ones of the second response."""
    did: list[str] = []
    made, unknown = np.array([-1, 0, 0], np.int32), np.array([0, np.nan, np.nan], np.float32)
    said = np.array([0, -1, -1], np.float32) if known else unknown
    tokens = np.arange(3, dtype=np.int32)
    group = [Trajectory(0, 7, tokens, logprobs, made, FinishReason.STOP, 1.0) for logprobs in (unknown, said)]
    asyncio.run(check_logprobs(load(CONFIG, []).config, cast(Any, Model("actor", did, -1)), group))
    assert did == ["actor: log-probs of 2"]
