"""Tries reward functions on one row before the start, in a process of their own and under time limits."""

import functools
from collections.abc import Iterator, Sequence

from allocation.diagnostics import Finding
from allocation.plan import Plan
from areal_like.config.findings import finding
from areal_like.config.schema import RunConfig
from areal_like.preflight.chat_judge import check_chat_judge
from areal_like.preflight.reward_model import check_reward_model
from areal_like.rewards import functions
from areal_like.rewards.pool import IMPORT_LIMIT_S, Cause, Failure, RewardPool
from areal_like.runtime.user_code import Portable, UserCodeError
from areal_like.types import Prompt

_RESPONSE = "The answer is 42."  # to a row without a reference answer


def check_rewards(config: RunConfig, prompts: Sequence[Prompt], plan: Plan | None) -> Iterator[Finding]:
    """Check the run's reward functions, its reward model and its judge."""
    yield from _check_functions(config, prompts)
    yield from check_chat_judge(config, prompts, plan)
    yield from check_reward_model(config, prompts)


def _check_functions(config: RunConfig, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    """Import each function, look at its parameters, and have it score the first row, if there is one."""
    if config.reward.parts and "reward" in config.reward.parts:
        message = "the metric `reward` is the sum of the parts, so a part cannot have this name"
        yield finding("RUN-REWARD-PART-NAME", "reward.parts.reward", message, "give this part another name")
    own = {key: judge.function for key, judge in config.reward.judges.items() if judge.function is not None}
    if not own:
        return
    with RewardPool(timeout_s=config.reward.timeout_s, workers=1, memory_mb=config.reward.memory_mb) as pool:
        for key, reference in own.items():
            if found := _problem(pool, reference, prompts, _group_sizes(config)):
                code, problem, is_late = found
                help = "correct the function, or raise reward.timeout_s" if is_late else "correct the function"
                yield finding(code, f"{key}.function", problem, help)


def _group_sizes(config: RunConfig) -> Sequence[int]:
    """Return how many responses a function that compares is given at once, in training first."""
    sets = config.evaluations.values() if config.evaluates else ()
    evaluated = [data.n_samples or 1 for data in sets if data.played_by is None]
    return list(dict.fromkeys([config.gconfig.n_samples, *evaluated]))


def _problem(
    pool: RewardPool, reference: str, prompts: Sequence[Prompt], compared: Sequence[int]
) -> tuple[str, str, bool] | None:
    """Return the code, a line about a function's error, and whether a call of it took too long.

    A function that compares is tried with each number of responses.
    """
    try:
        function = Portable.pack(reference)
    except UserCodeError as error:
        return "RUN-REWARD-IMPORT", str(error), False
    compares = pool.call_and_wait(functools.partial(functions.group_test, function))
    if isinstance(compares, Failure):
        limit = f"it cannot be imported within {IMPORT_LIMIT_S:g} s"
        return "RUN-REWARD-IMPORT", limit if compares.cause is Cause.TIMED_OUT else compares.message, False
    if not prompts:
        return None
    first = prompts[0]
    for number in compared if compares else [1]:
        responses = [first.answer or _RESPONSE] * number
        outcome = pool.call_and_wait(functools.partial(functions.judge, function), responses, dict(first.row))
        if isinstance(outcome, Failure):
            of_them = f", {number} of its responses" if compares else ""
            problem = f"row {first.sample_id + 1}{of_them}: {outcome.message}"
            return "RUN-REWARD-FUNCTION", problem, outcome.cause is Cause.TIMED_OUT
    return None
