"""The data of a run, read and tokenised, and the checks of its size and lengths."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from allocation.diagnostics import Finding, Severity
from allocation.model_spec import ModelSpec
from allocation.plan import Plan
from areal_like.backends.megatron.options import row_multiple
from areal_like.capability import scores_episodes
from areal_like.core.algorithms.types import Algorithm
from areal_like.core.config.findings import finding, missing_package
from areal_like.core.config.schema import (
    MOST_KEPT,
    SERVER_RESERVE,
    OptimizerConfig,
    RewardConfig,
    RunConfig,
    TrainerRole,
)
from areal_like.core.trainer.packing import alignment_of
from areal_like.core.types import AnswerCheck, Prompt
from areal_like.data.dataset import load_prompts, training_steps
from areal_like.data.rows import DatasetError
from areal_like.data.tokenizer import Tokenizer, TokenizerError
from areal_like.preflight.prompt_results import check_visits
from areal_like.rewards.verifiers import REWARDS


def answer_check(config: RewardConfig) -> AnswerCheck | None:
    """Return the check of reference answers, or None if only the user's own code judges."""
    types = [judge.type for judge in config.judges.values() if judge.function is None and judge.type in REWARDS]
    return REWARDS[types[0]].check if types else None


Prompts = Mapping[str, Sequence[Prompt]]
_NOTES = {"overlong_prompts": "RUN-DATASET-LENGTH", "path": "RUN-DATASET-FILE"}  # by the field of a note
_IMITATED = ("train_dataset", "valid_dataset")  # by a warm start, which ends by the latter


def find_prompts(config: RunConfig, tokenizer: Tokenizer | None) -> tuple[Prompts, list[Finding]]:
    """Return the prompts of each dataset, by its key; none of one that a finding is about, or without a tokenizer."""
    datasets = {"train_dataset": config.train_dataset, "valid_dataset": config.valid_dataset}
    datasets |= {f"evaluator.datasets.{name}": data for name, data in config.evaluator.datasets.items()}
    prompts: dict[str, Sequence[Prompt]] = dict.fromkeys(datasets, ())
    findings = []

    def note(key: str, field: str, text: str) -> None:
        code = _NOTES.get(field, "RUN-DATASET-ROW")
        findings.append(finding(code, f"{key}.{field}", text, severity=Severity.WARNING))

    played = {"train_dataset": config.played_by}
    played |= {_section(name): data.played_by for name, data in config.evaluations.items()}
    imitated = _IMITATED if config.warm_start else ()
    for key, dataset in datasets.items():
        reference = played.get(key)
        judged = reference is None or scores_episodes(config, reference)
        check = answer_check(config.reward) if judged else None
        try:
            if dataset is not None:
                prompts[key] = load_prompts(
                    dataset, tokenizer, check, train_on_answers=key in imitated, note=partial(note, key)
                )
        except DatasetError as error:
            findings.append(finding(error.code, f"{key}.{error.field}", error.problem, error.remedy))
        except ModuleNotFoundError as error:
            findings.append(missing_package(f"{key}.path", error.name))
    return prompts, findings


def image_share(prompts: Sequence[Prompt], tokenizer: Tokenizer | None) -> float:
    """Return the share of images in the tokens of the prompt that has the most; an image counts once."""
    vision = tokenizer.vision if tokenizer else None
    if vision is None:
        return 0.0
    tokens = {image: vision.sizes.tokens(image) for image in {image for prompt in prompts for image in prompt.images}}
    shares = (
        sum(tokens[image] for image in set(prompt.images)) / len(prompt.tokens) for prompt in prompts if prompt.images
    )
    return max(shares, default=0.0)


def check_data(
    config: RunConfig,
    spec: ModelSpec | None,
    tokenizer: Tokenizer | None,
    plan: Plan | None,
    prompts: Prompts,
    algorithm: Algorithm | None,
) -> Iterator[Finding]:
    """Check numbers of prompts, samples and steps, and lengths in tokens."""
    yield from _samples(config)
    yield from _held_out(config)
    yield from _context(config, spec)
    yield from _steps(config, len(prompts["train_dataset"]))
    if algorithm is not None and "baselines" in algorithm.needs:
        yield from check_visits(config, prompts["train_dataset"], "algorithm")
    if config.warm_start is not None and tokenizer is not None and plan is not None:
        actor = plan.engine("actor")
        for key in _IMITATED:
            rows = row_multiple(config.actor.megatron.override_transformer_config) or 1
            alignment = alignment_of(actor.backend, actor.sizes, rows)
            yield from _warm_start(config, key, prompts[key], tokenizer, alignment)


def _samples(config: RunConfig) -> Iterator[Finding]:
    """Check sampling, and batch arithmetic beyond the allocation's."""
    samples, in_flight = config.gconfig.n_samples, config.rollout.max_concurrent_rollouts
    if config.gconfig.is_cut:
        yield from _masks(config)
    if in_flight is not None and in_flight < samples:
        message = f"{in_flight} samples in flight cannot hold one group of {samples} (gconfig.n_samples)"
        key = "rollout.max_concurrent_rollouts"
        yield finding("RUN-BATCH-IN-FLIGHT", key, message, f"write {key}={samples} or more")


def _masks(config: RunConfig) -> Iterator[Finding]:
    """Check sampling from some ids of the vocabulary (SGLang 0.5.17: scheduler.py, layers/sampler.py)."""
    top_k, key = config.gconfig.top_k, "gconfig.top_k"
    if top_k == 1:
        message = "sampling is greedy with top_k=1: every log-prob is 0 and nothing is learned"
        yield finding("RUN-SAMPLING", key, message, f"write {key}=2 or more, or {key}=-1")
    elif not 0 < top_k <= MOST_KEPT:
        limit = f"allows {top_k}" if top_k > 0 else "sets no limit"
        message = (
            f"servers return the ids that each token was sampled from, at most {MOST_KEPT}, and {key} {limit} "
            f"(gconfig.top_p={config.gconfig.top_p:g}, gconfig.min_p={config.gconfig.min_p:g})"
        )
        yield finding("RUN-SAMPLING", key, message, f"write {key}=100")
    if config.gconfig.min_p > 0 and config.sglang.deterministic:
        message = "SGLang does not support seeded sampling (sglang.deterministic) with min_p"
        yield finding("RUN-SAMPLING", "gconfig.min_p", message, "write gconfig.min_p=0, or sglang.deterministic=false")


def _held_out(config: RunConfig) -> Iterator[Finding]:
    """Check that evaluation prompts exist for everything that is measured on them."""
    freq_steps, some = config.evaluator.freq_steps, bool(config.evaluations)
    for key, value, there in (
        ("warm_start", config.warm_start, config.valid_dataset is not None),
        ("evaluator.freq_steps", freq_steps, some),
    ):
        if not there and value is not None:
            yield finding("RUN-HELD-OUT", key, "needs evaluation prompts", f"set valid_dataset, or write {key}=null")
    if config.valid_dataset is not None and "valid_dataset" in config.evaluator.datasets:
        key, message = "evaluator.datasets.valid_dataset", "the section valid_dataset already has this name"
        yield finding("RUN-HELD-OUT", key, message, "choose another name for the set")
    for name, data in config.evaluations.items():
        if data.n_samples != 1 and (data.temperature == 0 or data.top_k == 1):
            own = config.evaluator.datasets.get(name)
            key = "evaluator" if own is None or own.n_samples is None else f"evaluator.datasets.{name}"
            greedy, fix = ("temperature 0", "temperature=1.0") if data.temperature == 0 else ("top_k=1", "top_k=-1")
            message = f"at {greedy} the {data.n_samples} responses to a prompt are identical"
            help = f"write {key}.{fix}, or {key}.n_samples=1"
            yield finding("RUN-HELD-OUT", f"{key}.n_samples", message, help)


_MOST_TOKENS = 64  # of a character: a normalizer may write one as up to 18, of 3 bytes each


def _warm_start(
    config: RunConfig, key: str, prompts: Sequence[Prompt], tokenizer: Tokenizer, alignment: int
) -> Iterator[Finding]:
    """Check that a prompt with its reference answer, an example of the warm start, fits in a micro-batch."""
    limit = config.actor.mb_spec.max_tokens_per_mb
    long = [each for each in prompts if len(each.tokens) + _MOST_TOKENS * (len(each.answer) + 1) > limit - alignment]
    if not long:
        return
    try:
        longest, row = max((len(p.tokens) + len(tokenizer.encode_response(p.answer)), p.sample_id) for p in long)
    except TokenizerError as error:
        yield finding("RUN-WARM-START", f"{key}.path", f"a reference answer cannot be encoded: {error}")
        return
    longest = -(-longest // alignment) * alignment
    if longest > limit:
        message = f"{key}, row {row + 1} has {longest} tokens with its answer; a micro-batch holds {limit}"
        help = f"write actor.mb_spec.max_tokens_per_mb={longest} or more, or leave that row out"
        yield finding("RUN-WARM-START", "actor.mb_spec.max_tokens_per_mb", message, help)


def _context(config: RunConfig, spec: ModelSpec | None) -> Iterator[Finding]:
    """Check that a server's context holds the longest prompt and response, and the model's positions the context."""
    needed, context = config.longest_generated + SERVER_RESERVE, config.context_length
    positions = spec.max_positions if spec else max(context, needed)
    if context < needed <= positions:
        message = f"{context} tokens cannot hold max_prompt_length + max_new_tokens = {needed - SERVER_RESERVE}"
        help = f"write sglang.context_length={needed} or more; SGLang reserves {SERVER_RESERVE} tokens"
        yield finding("RUN-CONTEXT", "sglang.context_length", message, help)
    if max(context, needed) <= positions or config.longest_sequence > positions:  # the layout's checks report that
        return
    exceeds = "a server's context of {} tokens exceeds the model's {} positions"
    if config.sglang.context_length is not None and context > positions:
        message = exceeds.format(context, positions)
        yield finding("RUN-CONTEXT", "sglang.context_length", message, "write sglang.context_length=null")
    excess = needed - positions
    if excess > 0:
        _, key, value = max(_lengths(config), key=lambda each: each[0])
        message, fitting = exceeds.format(positions + excess, positions), value - excess
        yield finding("RUN-CONTEXT", key, message, f"write {key}={fitting} or less" if fitting > 0 else None)


def _lengths(config: RunConfig) -> Iterator[tuple[int, str, int]]:
    """Yield each length that a server's context must hold, in tokens, and the key that requires it, with its value."""
    own, most = config.evaluator.datasets, config.gconfig.max_new_tokens
    if (episode := config.longest_episode) is not None:
        yield episode, "episode.max_tokens", episode
    yield config.longest_sequence, "gconfig.max_new_tokens", most
    for name, data in config.evaluations.items():
        section = _section(name)
        prompt, response = data.max_prompt_length, data.max_new_tokens or most
        if prompt > response:
            yield prompt + response, f"{section}.max_prompt_length", prompt
        elif name in own and own[name].max_new_tokens is not None:
            yield prompt + response, f"{section}.max_new_tokens", response
        else:
            key = "gconfig" if config.evaluator.max_new_tokens is None else "evaluator"
            yield prompt + response, f"{key}.max_new_tokens", response


def _section(name: str) -> str:
    """Return the key of an evaluation set."""
    return name if name == "valid_dataset" else f"evaluator.datasets.{name}"


def _steps(config: RunConfig, n_prompts: int) -> Iterator[Finding]:
    if n_prompts == 0:  # another finding has the reason
        return
    steps, batch = training_steps(config, n_prompts), "train_dataset.batch_size"
    if steps < 1:
        message = f"{n_prompts} prompts do not fill one batch of {config.train_dataset.batch_size}"
        yield finding("RUN-STEPS", batch, message, f"write {batch}={n_prompts} or less, or raise total_train_epochs")
    elif config.total_train_steps is not None and steps < config.total_train_steps:
        message = f"total_train_epochs ends the run after {steps} steps, before total_train_steps"
        yield finding("RUN-STEPS", "total_train_steps", message, severity=Severity.WARNING)
    if config.critic and 0 < steps <= config.critic.warmup_steps:
        message = f"the run has only {steps} steps, so the actor would not be trained"
        yield finding("RUN-STEPS", "critic.warmup_steps", message, f"write critic.warmup_steps={steps - 1} or less")
    yield from _schedule(config)
    for role, optimizer in _optimizers(config):
        updates, key = config.updates(role, steps), f"{role}.optimizer.warmup_steps"
        if 0 < updates <= optimizer.warmup_steps:
            message = f"the learning rate has {updates} optimizer steps, so it would never reach its peak"
            yield finding("RUN-STEPS", key, message, f"write {key}={updates - 1} or less")


def _optimizers(config: RunConfig) -> Iterator[tuple[TrainerRole, OptimizerConfig]]:
    """Yield the roles with an optimizer of their own, each with it."""
    if config.actor.optimizer:
        yield "actor", config.actor.optimizer
    if config.critic and config.critic.optimizer:
        yield "critic", config.critic.optimizer


def _schedule(config: RunConfig) -> Iterator[Finding]:
    """Yield schedules over a number of optimizer steps that is unknown before the run."""
    for role, optimizer in _optimizers(config) if config.actor.turns_per_minibatch is not None else ():
        if optimizer.lr_scheduler_type != "constant" and optimizer.lr_decay_steps is None:
            key = f"{role}.optimizer.lr_decay_steps"
            message = (
                "with actor.turns_per_minibatch the turns of each step set its optimizer steps, so the length of the "
                f"schedule {optimizer.lr_scheduler_type} is unknown before the run"
            )
            yield finding("RUN-STEPS", key, message, f"set {key}, or {role}.optimizer.lr_scheduler_type=constant")
