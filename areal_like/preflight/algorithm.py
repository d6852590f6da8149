"""The algorithm of a run: built, tried on made-up trajectories, and held against the run's models and samples."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from allocation import Finding
from allocation.diagnostics import Severity
from areal_like.algorithms.presets import ALGORITHMS, make_algorithm
from areal_like.algorithms.settings import PRESETS, Settings, settings_of
from areal_like.algorithms.types import Algorithm, Experience
from areal_like.config.findings import finding, nearest_words, warn_ignored
from areal_like.config.schema import RunConfig
from areal_like.runtime.user_code import FORM, UserCodeError, where_it_failed
from areal_like.types import Batch


def find_algorithm(config: RunConfig) -> tuple[Algorithm | None, list[Finding]]:
    """The algorithm that the configuration names, and what is wrong with it; None where it cannot be built."""
    name = config.algorithm
    if name not in ALGORITHMS and ":" not in name:
        message = f"there is no algorithm {name!r}; a function of yours is written {FORM}"
        return None, [
            finding("RUN-ALGORITHM-NAME", "algorithm", message, nearest=nearest_words(name, ALGORITHMS) or ["grpo"])
        ]
    try:
        algorithm = make_algorithm(config)
        _try_targets(algorithm, name)
        _try_sending(algorithm, name)
    except UserCodeError as error:
        return None, [finding("RUN-ALGORITHM-CODE", "algorithm", str(error))]
    return algorithm, [*_models(config, algorithm), *_combinations(config)]


def _try_targets(algorithm: Algorithm, name: str) -> None:
    """Targets of two groups of two trajectories; raises UserCodeError where they do not come as they should."""
    lengths, tokens = np.array([3, 4, 3, 4], np.int32), 14
    experience = Experience(
        rewards=np.array([1, 0, 0, 1], np.float32),
        groups=np.array([0, 0, 1, 1], np.int32),
        samples=np.arange(4, dtype=np.int32),
        batch=Batch(lengths, np.zeros(tokens, np.int32), _made_up_fields(tokens, lengths)),
    )
    try:
        targets = algorithm.targets(experience)
    except Exception as error:  # a user's function fails in any way it likes
        raise UserCodeError(f"the targets of {name} fail: {where_it_failed(error, name.rpartition(':')[0])}") from error
    if not isinstance(targets, Mapping):
        raise UserCodeError(f"the targets of {name} are {targets!r:.80}, not a mapping of fields to arrays")
    for field, values in targets.items():
        if np.shape(values) not in ((len(lengths),), (tokens,)):
            raise UserCodeError(
                f"the target {field!r} of {name} has shape {np.shape(values)} for {len(lengths)} trajectories of {tokens} "
                "tokens in all: it needs a number for each trajectory or for each token"
            )


def _try_sending(algorithm: Algorithm, name: str) -> None:
    """The losses as they travel to the ranks; raises UserCodeError where they cannot."""
    if not (modules := set(algorithm.user_modules)):
        return
    import cloudpickle

    registered = [module for module in modules if module.__name__ not in cloudpickle.list_registry_pickle_by_value()]
    for module in registered:
        cloudpickle.register_pickle_by_value(module)
    try:
        for spec in algorithm.losses:
            cloudpickle.dumps(spec)
    except Exception as error:  # a user's objects pickle, or not, in any way they like
        problem = f"{type(error).__name__}: {error}"
        raise UserCodeError(f"the loss of {name} cannot be sent to the trainer's ranks: {problem}") from error
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)


def _made_up_fields(tokens: int, lengths: np.ndarray[Any, np.dtype[np.int32]]) -> dict[str, Any]:
    mask = np.ones(tokens, np.float32)
    mask[np.cumsum(lengths) - lengths] = 0  # prompts of one token
    names = ("behaviour_logprobs", "proximal_logprobs", "reference_logprobs", "values", "on_policy")
    return {"loss_mask": mask, **dict.fromkeys(names, mask / 2)}


def _models(config: RunConfig, algorithm: Algorithm) -> Iterator[Finding]:
    """The models that it asks."""
    if "values" in algorithm.needs and config.critic is None:
        message = f"algorithm={config.algorithm} needs values, and the run has no critic"
        yield finding("RUN-ALGORITHM-CRITIC", "critic", message, "write critic={} to give it one, or algorithm=grpo")
    if "reference" in algorithm.needs and config.ref is None:
        actor = config.actor
        why = next((f"actor.{key}" for key in ("kl_ctl", "kl_loss_coef") if getattr(actor, key)), "algorithm")
        message = f"{why} asks for the log-probs of a reference policy, and the run has none"
        yield finding(
            "RUN-ALGORITHM-REFERENCE", "ref", message, "write ref={} to give it the model that the run starts from"
        )
    if "reference" not in algorithm.needs and config.ref is not None:
        why = "neither the algorithm nor a KL divergence (actor.kl_ctl, actor.kl_loss_coef) asks a reference"
        yield warn_ignored("ref", why, "write ref=null")
    if "values" not in algorithm.needs and algorithm.critic is None and config.critic is not None:
        yield warn_ignored("critic", f"algorithm={config.algorithm} asks no critic", "write critic=null")


def _combinations(config: RunConfig) -> Iterator[Finding]:
    """Settings that contradict each other."""
    preset, actor, longest = PRESETS.get(config.algorithm), config.actor, config.gconfig.max_new_tokens
    if config.algorithm == "dpo" and actor.ppo_n_minibatches > 1:
        message = "a pair's loss is known at the weights that the step starts from: dpo takes one optimizer step"
        yield finding(
            "RUN-ALGORITHM-DPO-MINIBATCHES", "actor.ppo_n_minibatches", message, "write actor.ppo_n_minibatches=1"
        )
    settings = settings_of(preset, actor) if preset else None
    compares = _compares(settings) if settings else config.algorithm == "dpo"
    if config.gconfig.n_samples < 2 and compares:
        message = f"one sample per prompt teaches nothing: algorithm={config.algorithm} compares it with its group"
        yield finding("RUN-BATCH-GROUP", "gconfig.n_samples", message, "write gconfig.n_samples=2 or more")
    if settings is None:
        return
    if settings.kl_loss_coef and settings.kl_estimator == "k1":
        message = "the gradient of k1 in the loss (actor.kl_loss_coef) does not depend on the reference"
        yield finding("RUN-ALGORITHM-KL-LOSS", "actor.kl_estimator", message, nearest=["k3", "k2"])
    if settings.kl_ctl and settings.kl_estimator in ("k2", "k3"):
        message = (
            f"{settings.kl_estimator} in the reward (actor.kl_ctl) has another gradient than the divergence; k1 has its"
        )
        help = "write actor.kl_estimator=null, which is k1 in the reward and k3 in the loss, or use actor.kl_loss_coef alone"
        yield finding("RUN-ALGORITHM-KL-REWARD", "actor.kl_estimator", message, help)
    if preset and _clip(preset) != _clip(Settings()) and _clip(settings) != _clip(preset):
        keys = [key for key in ("eps_clip", "eps_clip_higher") if getattr(actor, key) is not None]
        message = (
            f"algorithm={config.algorithm} clips ratios to {_range(preset)}, and this replaces it by {_range(settings)}"
        )
        help = f"write {' '.join(f'actor.{key}=null' for key in keys)} to keep the algorithm's own range"
        yield finding("RUN-ALGORITHM-CLIP", f"actor.{keys[0]}", message, help, severity=Severity.WARNING)
    if settings.overlong_penalty_factor and (settings.overlong_tokens or 0) > longest:
        message = f"the penalty's {settings.overlong_tokens} tokens are more than a response has (max_new_tokens)"
        help = f"write actor.overlong_tokens={longest} or less"
        yield finding("RUN-ALGORITHM-OVERLONG-TOKENS", "actor.overlong_tokens", message, help)
    if settings.overlong_penalty_factor and "workflow" in config.workflows:
        key = "actor.overlong_penalty_factor"
        message = f"an episode of several turns counts as one response of at most {longest} tokens (max_new_tokens)"
        help = f"write {key}=0 where episodes have several"
        yield finding("RUN-ALGORITHM-OVERLONG-EPISODES", key, message, help, severity=Severity.WARNING)
    for key in ("reward_norm", "adv_norm"):
        norm = getattr(settings, key)
        if norm.mean_leave1out and norm.mean_level is None:
            message = "there is no mean that a value could be left out of"
            owner = f"actor.{key}"
            help = f"write {owner}.mean_level=group"
            yield finding("RUN-ALGORITHM-LEAVE-ONE-OUT", f"{owner}.mean_leave1out", message, help)


def _clip(settings: Settings) -> tuple[float, float]:
    return settings.eps_clip, settings.eps_clip_higher


def _range(settings: Settings) -> str:
    return f"{1 - settings.eps_clip:g} ... {1 + settings.eps_clip_higher:g}"


def _compares(settings: Settings) -> bool:
    """Whether a response counts only beside others to the same prompt."""
    norm = settings.reward_norm
    return settings.dynamic_sampling or "group" in (norm.mean_level, norm.std_level)
