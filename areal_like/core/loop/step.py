"""One training step of a policy: batches, the passes that its algorithm needs, and the optimizer steps."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from areal_like.core.algorithms.batch import join, minibatches, policy_batches, with_field
from areal_like.core.algorithms.types import Experience, Need
from areal_like.core.errors import RunError
from areal_like.core.hooks import Share
from areal_like.core.loop.policies import Policy
from areal_like.core.trainer.remote import Reference, Trainer
from areal_like.core.types import Batch, Floats, Ints
from areal_like.metrics.record import Record


@dataclass(frozen=True)
class Models:
    """Models that an algorithm uses beside the policy, as far as the run has them; `baselines` are of groups."""

    reference: Reference | None = None
    critic: Trainer | None = None
    baselines: Callable[[Ints], Floats] | None = None


async def train_step(policy: Policy, models: Models, share: Share, version: int, record: Record) -> dict[str, float]:
    """Move the policy from `version` to the next: one optimizer step per mini-batch, also of a critic.

    Returns their statistics, or {} if no trajectory has a reward. During its warm-up only the critic is trained.
    """
    config, algorithm, actor = policy.config, policy.algorithm, policy.config.actor
    share.experience = experience = await _gather(policy, models, share, version, record)
    if experience is None:
        return {}
    with record.phase("batch"):
        n = minibatches(experience.batch, actor.ppo_n_minibatches, actor.turns_per_minibatch)
        batches = await asyncio.to_thread(policy_batches, algorithm, experience, n)
    share.batches = batches
    stats = {"tokens": float(sum(len(batch.tokens) for batch in batches))} | ({} if batches else {"unselected": 1.0})
    if models.critic and algorithm.critic:
        with record.phase("training the critic"):
            temperature = config.gconfig.temperature
            of_critic = [await models.critic.train(batch, algorithm.critic, temperature) for batch in batches]
        stats |= {f"critic_{name}": value for name, value in mean(of_critic).items()}
        if config.critic and version < config.critic.warmup_steps:
            return stats
    return stats | await _train_policy(policy, batches, record)


async def _gather(policy: Policy, models: Models, share: Share, version: int, record: Record) -> Experience | None:
    """Return the joined trajectories with everything that the algorithm needs before its targets."""
    algorithm = policy.algorithm
    with record.phase("batch"):
        experience = await asyncio.to_thread(join, share.trajectories, version)
    if experience is None:
        return None
    if "baselines" in algorithm.needs:
        if models.baselines is None:
            raise RunError("The algorithm needs baselines, but the run keeps no values of prompts.")
        experience = replace(experience, baselines=models.baselines(experience.groups))
    for need, name, phase in _PASSES:
        if need in algorithm.needs:
            with record.phase(phase):
                values = await _pass(policy, models, need, experience.batch)
            experience = with_field(experience, name, values)
    return experience


async def _train_policy(policy: Policy, batches: list[Batch], record: Record) -> dict[str, float]:
    """Train on the mini-batches, `actor.ppo_epochs` times, with log-probs of the proximal policy where it is needed."""
    algorithm, trainer, epochs = policy.algorithm, policy.trainer, policy.config.actor.ppo_epochs
    temperature = policy.config.gconfig.temperature
    if "proximal" in algorithm.needs and len(batches) * epochs > 1:
        # At the first optimizer step the proximal policy is the current one, which the loss knows without another pass.
        later = 0 if epochs > 1 else 1
        with record.phase("log-probs"):
            batches[later:] = [await _with_proximal(trainer, batch, temperature) for batch in batches[later:]]
    with record.phase("training"):
        at = algorithm.temperature or temperature
        stats = [await trainer.train(batch, algorithm.loss, at) for _ in range(epochs) for batch in batches]
    if "proximal" not in algorithm.needs:  # later mini-batches know no log-probs of the weights that servers have
        stats[1:] = [{name: part[name] for name in part if name not in _ON_POLICY} for part in stats[1:]]
    return mean(stats)


_ON_POLICY = ("on_policy_logprob_diff", "on_policy_share")
_OF_A_STEP = frozenset(
    {"loss", "grad_norm", "lr", "skipped", "loss_scale"}
)  # steps that leave responses out count as others
_PASSES: Sequence[tuple[Need, str, str]] = (  # before the targets: field and phase of each
    ("reference", "reference_logprobs", "reference"),
    ("values", "values", "values"),
    ("policy", "proximal_logprobs", "log-probs"),
)


async def _pass(policy: Policy, models: Models, need: Need, batch: Batch) -> Floats:
    """Return values or log-probs that an algorithm needs from a model; preflight has checked that the run has it."""
    if need == "values" and models.critic:
        return await models.critic.values(batch)
    model = models.reference if need == "reference" else policy.trainer
    if model is None or need == "values":
        raise RunError(f"The algorithm needs {need}, but the run has no model for it. Set ref={{}} or critic={{}}.")
    return await model.log_probs(batch, policy.config.gconfig.temperature)


async def _with_proximal(trainer: Trainer, batch: Batch, temperature: float) -> Batch:
    logprobs = await trainer.log_probs(batch, temperature)
    return replace(batch, fields={**batch.fields, "proximal_logprobs": logprobs})


def mean(stats: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return means of the optimizer steps' statistics, weighted by tokens, or by steps for statistics of a whole step.

    `loss_tokens` are summed. Log-probs of servers and trainer are compared where both used the same weights; a step may
    have no such token.
    """
    result: dict[str, float] = {}
    for name in dict.fromkeys(name for part in stats for name in part):
        having = [part for part in stats if name in part]
        weights = [1 if name in _OF_A_STEP else part.get("loss_tokens", 1) for part in having]
        values = [part[name] for part in having]
        result[name] = float(sum(values) if name == "loss_tokens" else np.average(values, weights=weights))
    drift, share = result.pop(_ON_POLICY[0], 0.0), result.get(_ON_POLICY[1])
    return result | ({"logprob_diff": drift / share} if share else {})


def mean_of_shares(shares: Mapping[str, Share]) -> dict[str, float]:
    """Return the statistics of a step: its policy's, or means over adapters and each one's by `NAME/`."""
    if "" in shares:
        return dict(shares[""].stats)
    found = {name: share.stats for name, share in shares.items() if share.stats}
    if not found:
        return {}
    tokens = {"tokens": sum(stats["tokens"] for stats in found.values())}
    each = {f"{name}/{tag}": value for name, stats in found.items() for tag, value in stats.items()}
    return mean(list(found.values())) | tokens | each
