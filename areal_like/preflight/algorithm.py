"""Checks of the algorithm: it can be built, works on made-up trajectories, and fits the run's models."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from allocation.diagnostics import Finding, Severity
from areal_like.capability import uses_reference
from areal_like.core.algorithms.presets import ALGORITHMS, make_algorithm
from areal_like.core.algorithms.settings import GEOMETRIC_CAP, PRESETS, Settings, settings_of
from areal_like.core.algorithms.types import Algorithm, Experience
from areal_like.core.config.findings import finding, nearest_words, warn_ignored
from areal_like.core.config.schema import RunConfig
from areal_like.core.types import Batch
from areal_like.core.user_code import FORM, UserCodeError, where_it_failed

_FAR_MEAN = 1.5  # a geometric mean that is further from 1 belongs to a policy with 0.4 nats of divergence per token


def find_algorithm(config: RunConfig) -> tuple[Algorithm | None, list[Finding]]:
    """Return the algorithm that the configuration names, and findings about it; None where it cannot be built."""
    name = config.algorithm
    if name not in ALGORITHMS and ":" not in name:
        message = f"the algorithm {name!r} is unknown; a function of your own is written {FORM}"
        return None, [
            finding("RUN-ALGORITHM", "algorithm", message, nearest=nearest_words(name, ALGORITHMS) or ["grpo"])
        ]
    try:
        algorithm = make_algorithm(config)
        _try_targets(algorithm, name)
        _try_sending(algorithm, name)
    except UserCodeError as error:
        return None, [finding("RUN-ALGORITHM", "algorithm", str(error))]
    return algorithm, [*_models(config, algorithm), *_combinations(config)]


def _try_targets(algorithm: Algorithm, name: str) -> None:
    """Compute targets of two groups of two trajectories; raise UserCodeError where they are not as they should be."""
    lengths, tokens = np.array([3, 4, 3, 4], np.int32), 14
    experience = Experience(
        rewards=np.array([1, 0, 0, 1], np.float32),
        groups=np.array([0, 0, 1, 1], np.int32),
        samples=np.arange(4, dtype=np.int32),
        batch=Batch(lengths, np.zeros(tokens, np.int32), _made_up_fields(tokens, lengths)),
        truncated=np.zeros(4, bool),
        baselines=np.zeros(4, np.float32),
    )
    try:
        targets = algorithm.targets(experience)
    except Exception as error:  # a user's function may raise anything
        raise UserCodeError(f"the targets of {name} fail: {where_it_failed(error, name.rpartition(':')[0])}") from error
    if not isinstance(targets, Mapping):
        raise UserCodeError(f"the targets of {name} are {targets!r:.80}, not a mapping of fields to arrays")
    for field, values in targets.items():
        if np.shape(values) not in ((len(lengths),), (tokens,)):
            raise UserCodeError(
                f"the target {field!r} of {name} has shape {np.shape(values)} for {len(lengths)} trajectories of {tokens} "
                "tokens in total; it needs one number per trajectory or per token"
            )


def _try_sending(algorithm: Algorithm, name: str) -> None:
    """Send the losses as they travel to the ranks; raise UserCodeError where they cannot."""
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
    names = ("behaviour_logprobs", "proximal_logprobs", "reference_logprobs", "teacher_logprobs", "values", "on_policy")
    return {"loss_mask": mask, **dict.fromkeys(names, mask / 2)}


def _models(config: RunConfig, algorithm: Algorithm) -> Iterator[Finding]:
    """Check that the run has the models that the algorithm uses."""
    if "values" in algorithm.needs and config.critic is None:
        message = f"algorithm={config.algorithm} needs values, and the run has no critic"
        yield finding("RUN-ALGORITHM-MODELS", "critic", message, "write critic={} to add one, or algorithm=grpo")
    if "reference" in algorithm.needs and config.ref is None:
        actor = config.actor
        why = next((f"actor.{key}" for key in ("kl_ctl", "kl_loss_coef") if getattr(actor, key)), "algorithm")
        message = f"{why} needs the log-probs of a reference policy, and the section ref is missing"
        yield finding("RUN-ALGORITHM-MODELS", "ref", message, "write ref={} to use the model that the run starts from")
    if "reference" not in algorithm.needs and config.ref is not None and not uses_reference(config):
        why = "neither the algorithm nor a KL divergence (actor.kl_ctl, actor.kl_loss_coef) uses a reference policy"
        yield warn_ignored("ref", why, "write ref=null")
    if "values" not in algorithm.needs and algorithm.critic is None and config.critic is not None:
        yield warn_ignored("critic", f"algorithm={config.algorithm} does not use a critic", "write critic=null")


def _combinations(config: RunConfig) -> Iterator[Finding]:
    """Yield settings that contradict each other."""
    preset, actor = PRESETS.get(config.algorithm), config.actor
    yield from _steps_of_dpo(config)
    settings = settings_of(preset, actor) if preset else None
    compares = _compares(settings) if settings else config.algorithm == "dpo"
    if config.gconfig.n_samples < 2 and compares:
        message = f"algorithm={config.algorithm} compares the samples of a prompt, and each prompt has only one"
        yield finding("RUN-BATCH-GROUP", "gconfig.n_samples", message, "write gconfig.n_samples=2 or more")
    if settings is None:
        return
    if settings.prompt_baseline and config.gconfig.n_samples > 1:
        message = (
            f"algorithm={config.algorithm} takes the baseline of a response from earlier steps, and each prompt has "
        )
        message += f"{config.gconfig.n_samples} samples, whose mean is the better baseline"
        help = "write gconfig.n_samples=1 and a larger train_dataset.batch_size, or algorithm=grpo"
        yield finding("RUN-ALGORITHM-SETTINGS", "gconfig.n_samples", message, help)
    yield from _divergence(settings)
    yield from _weights(settings)
    if preset and _range(preset) != _range(Settings()) and _range(settings) != _range(preset):
        keys = [key for key in ("eps_clip", "eps_clip_higher") if getattr(actor, key) is not None]
        message = f"algorithm={config.algorithm} clips ratios to {_range(preset)}; this key changes the range to {_range(settings)}"
        help = f"write {' '.join(f'actor.{key}=null' for key in keys)} to keep the algorithm's own range"
        yield finding("RUN-ALGORITHM-SETTINGS", f"actor.{keys[0]}", message, help, severity=Severity.WARNING)
    yield from _overlong(config, settings)
    yield from _rewards(settings)


def _steps_of_dpo(config: RunConfig) -> Iterator[Finding]:
    """Yield the keys that give DPO several optimizer steps per training step."""
    plain = {"ppo_n_minibatches": 1, "ppo_epochs": 1, "turns_per_minibatch": None}
    for key, value in plain.items() if config.algorithm == "dpo" else ():
        if getattr(config.actor, key) != value:
            message = "algorithm=dpo needs one optimizer step per training step, since it computes a pair's loss once per step"
            help = f"write actor.{key}={'null' if value is None else value}"
            yield finding("RUN-ALGORITHM-SETTINGS", f"actor.{key}", message, help)


def _divergence(settings: Settings) -> Iterator[Finding]:
    """Yield estimators of the KL divergence whose gradient is another one."""
    if settings.kl_loss_coef and settings.kl_estimator == "k1":
        message = "the gradient of k1 in the loss (actor.kl_loss_coef) does not depend on the reference"
        yield finding("RUN-ALGORITHM-KL", "actor.kl_estimator", message, nearest=["k3", "k2"])
    if settings.kl_ctl and settings.kl_estimator in ("k2", "k3"):
        message = f"{settings.kl_estimator} in the reward (actor.kl_ctl) does not have the gradient of the KL divergence; k1 does"
        help = "write actor.kl_estimator=null, which is k1 in the reward and k3 in the loss, or use actor.kl_loss_coef alone"
        yield finding("RUN-ALGORITHM-KL", "actor.kl_estimator", message, help)


def _overlong(config: RunConfig, settings: Settings) -> Iterator[Finding]:
    """Yield contradictions between the penalty for length and the longest response."""
    longest = config.gconfig.max_new_tokens
    if settings.overlong_penalty_factor and (settings.overlong_tokens or 0) > longest:
        message = f"the penalty covers {settings.overlong_tokens} tokens; "
        message += f"a response has at most {longest} (gconfig.max_new_tokens)"
        help = f"write actor.overlong_tokens={longest} or less"
        yield finding("RUN-ALGORITHM-OVERLONG", "actor.overlong_tokens", message, help)
    if settings.overlong_penalty_factor and config.played_by is not None:
        key = "actor.overlong_penalty_factor"
        message = f"an episode of several turns counts as one response of at most {longest} tokens (max_new_tokens)"
        help = f"write {key}=0 if episodes have several turns"
        yield finding("RUN-ALGORITHM-OVERLONG", key, message, help, severity=Severity.WARNING)


def _rewards(settings: Settings) -> Iterator[Finding]:
    """Yield bounds of rewards that no group is within, and norms that contradict themselves."""
    low, high = settings.group_reward_above, settings.group_reward_below
    if low is not None and high is not None and low >= high:
        message = f"no mean reward is above {low:g} and below {high:g}, so no group is trained on"
        help = "write actor.group_reward_below=null, or a value above actor.group_reward_above"
        yield finding("RUN-ALGORITHM-SETTINGS", "actor.group_reward_below", message, help)
    for key in ("reward_norm", "adv_norm"):
        norm = getattr(settings, key)
        if norm.mean_leave1out and norm.mean_level is None:
            message = "mean_leave1out needs a mean, and mean_level is null"
            owner = f"actor.{key}"
            help = f"write {owner}.mean_level=group"
            yield finding("RUN-ALGORITHM-SETTINGS", f"{owner}.mean_leave1out", message, help)


def _weights(settings: Settings) -> Iterator[Finding]:
    """Yield contradictions between the keys of the behaviour importance weight."""
    level, _, limit = settings.behave_imp_weight_mode.partition("_")
    if not settings.use_decoupled_loss or level == "disabled":
        return
    floor, cap = settings.weight_bounds
    if limit == "mask" and floor == cap:
        message = f"behave_imp_weight_mode={level}_mask removes every weight except {cap:g}: the cap equals the floor"
        help = "write actor.behave_imp_weight_floor=0.5, or actor.behave_imp_weight_cap=5"
        yield finding("RUN-ALGORITHM-WEIGHT", "actor.behave_imp_weight_floor", message, help)
    veto = settings.behave_imp_weight_veto or 0
    if level == "token" and 0 < floor <= veto:
        message = f"a token below {veto:g} vetoes its whole sequence, so the floor of {floor:g} never takes effect"
        help = f"write actor.behave_imp_weight_veto={floor / 1000:g}, or actor.behave_imp_weight_floor=null"
        yield finding("RUN-ALGORITHM-WEIGHT", "actor.behave_imp_weight_veto", message, help)
    if settings.importance_sampling_level == "sequence" and level == "token":
        message = (
            "the ratio is per sequence and the behaviour weight per token, so their product is not a ratio of policies"
        )
        help = "write actor.behave_imp_weight_mode=geometric_truncate, the level of the ratio"
        key = "actor.behave_imp_weight_mode"
        yield finding("RUN-ALGORITHM-WEIGHT", key, message, help, severity=Severity.WARNING)
    if level == "geometric" and cap > _FAR_MEAN:
        message = (
            f"the geometric mean over a sequence is near 1 and does not reach {cap:g}, so the cap never takes effect"
        )
        key, help = "actor.behave_imp_weight_cap", f"write actor.behave_imp_weight_cap={GEOMETRIC_CAP}"
        yield finding("RUN-ALGORITHM-WEIGHT", key, message, help, severity=Severity.WARNING)


def _range(settings: Settings) -> str:
    return f"{1 - settings.eps_clip:g} ... {1 + settings.eps_clip_higher:g}"


def _compares(settings: Settings) -> bool:
    """Return whether a response is compared with others to the same prompt."""
    norm = settings.reward_norm
    uses_group = bool(settings.reward_coef) and "group" in (norm.mean_level, norm.std_level)
    return settings.dynamic_sampling or uses_group
