"""Checks of rewards: functions are tried on a row under time limits; a judge and a reward model are set and usable."""

import functools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from allocation.diagnostics import Finding
from allocation.plan import Plan
from areal_like.core.config.findings import check_variable, finding, nearest_words
from areal_like.core.config.schema import ChatJudgeConfig, RewardModelConfig, RunConfig
from areal_like.core.rollout.backends import find_backend
from areal_like.core.types import Prompt
from areal_like.core.user_code import Portable, UserCodeError
from areal_like.data.tokenizer import Tokenizer, TokenizerError
from areal_like.preflight.model import find_spec
from areal_like.preflight.served_layout import check_served_layout
from areal_like.preflight.weights import is_local
from areal_like.rewards import functions
from areal_like.rewards.judge_texts import FIELDS, PLACEHOLDER, fill
from areal_like.rewards.pool import IMPORT_LIMIT_S, Cause, Failure, RewardPool

_JUDGE = "reward.judge"


def check_chat_judge(config: RunConfig, prompts: Sequence[Prompt], plan: Plan | None) -> Iterator[Finding]:
    """Check that a judge is set exactly if one is used, where it is, and that its prompt and score can be used."""
    yield from _check_use(config, "judge", "or reward.judge.url=… and reward.judge.model=…")
    if (judge := config.reward.judge) is None:
        return
    yield from _check_judge_place(judge)
    yield from _check_judge_prompt(judge, prompts)
    yield from _check_judge_score(judge)
    if judge.path is not None and judge.url is None:
        yield from _check_served_judge(config, judge, prompts, plan)
    if judge.url is not None:
        yield from check_variable(f"{_JUDGE}.token_variable", judge.token_variable)


def _check_use(config: RunConfig, kind: Literal["judge", "model"], otherwise: str = "") -> Iterator[Finding]:
    """Check that the section of a judge or of a reward model is set exactly if a reward comes from one."""
    named = {"judge": ("judge", "RUN-REWARD-JUDGE"), "model": ("reward model", "RUN-REWARD-MODEL")}
    section, (name, code) = f"reward.{kind}", named[kind]
    asked = [key for key, part in config.reward.judges.items() if part.function is None and part.type == kind]
    is_set = getattr(config.reward, kind) is not None
    for key in asked if not is_set else ():
        message = f"the reward comes from a {name}, and the section {section} is missing"
        help = f"write {section}.path=… and {section}.backend=sglang:d1{otherwise and f', {otherwise}'}"
        yield finding(code, f"{key}.type", message, help)
    if is_set and not asked:
        help = f"write reward.type={kind}, or `type: {kind}` for one of reward.parts"
        yield finding(code, section, f"no reward uses this {kind}", help)


def _check_judge_place(judge: ChatJudgeConfig) -> Iterator[Finding]:
    if (judge.path is None) == (judge.url is None):
        message = f"the judge is either a model ({_JUDGE}.path) or a running server ({_JUDGE}.url)"
        message += ", and both are set" if judge.url else ", and neither is set"
        help = "set one of the two keys, and leave the other null"
        yield finding("RUN-REWARD-JUDGE", f"{_JUDGE}.path", message, help)
    if judge.url is not None and judge.model is None:
        message = f"requests to {_JUDGE}.url name a model, and {_JUDGE}.model is null"
        help = f"write {_JUDGE}.model=…, one of the names that the server lists at /models"
        yield finding("RUN-REWARD-JUDGE", f"{_JUDGE}.model", message, help)


def _check_served_judge(
    config: RunConfig, judge: ChatJudgeConfig, prompts: Sequence[Prompt], plan: Plan | None
) -> Iterator[Finding]:
    """Check a judge on servers of the run: its layout, its chat template, and that a request fits its positions."""
    key, path = f"{_JUDGE}.path", str(judge.path)
    spec, findings = find_spec(path, key)
    yield from findings
    if spec is None:
        return
    yield from check_served_layout(config, "judge", judge.backend, spec, plan)
    if not is_local(path):
        return
    try:
        tokenizer = Tokenizer.load(path)
        longest = max((fill(judge.template, prompt, "") for prompt in prompts), key=len, default="")
        needed = len(tokenizer.encode_prompt(longest)) + (judge.max_tokens or 1)
    except TokenizerError as error:
        yield finding("RUN-REWARD-JUDGE", key, str(error), "put the tokenizer's files beside the model")
        return
    if not tokenizer.has_chat_template:
        message = f"{path} has no chat template, and the judge is asked in a conversation"
        help = "use an instruction-tuned model, or write chat_template.jinja beside it"
        yield finding("RUN-REWARD-JUDGE", key, message, help)
    if spec.max_positions and needed > spec.max_positions:
        message = f"the judge has {spec.max_positions} positions; the longest prompt with an empty response and "
        message += f"{judge.max_tokens or 1} tokens of answer take {needed}"
        rest = spec.max_positions - needed + (judge.max_tokens or 1)
        help = f"write {_JUDGE}.max_tokens={rest} or less" if rest > 0 else "use a judge with a longer context"
        yield finding("RUN-REWARD-JUDGE", f"{_JUDGE}.max_tokens", message, help)


def _check_judge_prompt(judge: ChatJudgeConfig, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    key, named = f"{_JUDGE}.prompt", PLACEHOLDER.findall(judge.template)
    for name in dict.fromkeys(named):
        if name not in FIELDS:
            message = f"the prompt has the field {{{name}}}; its fields are {{question}}, {{answer}} and {{response}}"
            help = "correct the name, or write other braces with a space, as in { name }"
            yield finding("RUN-REWARD-JUDGE-PROMPT", key, message, help, nearest=nearest_words(name, FIELDS))
    if "response" not in named:
        message = "the prompt has no {response}, so the judge would not see what it scores"
        yield finding("RUN-REWARD-JUDGE-PROMPT", key, message, "write {response} where the response belongs")
    without = next((prompt for prompt in prompts if not prompt.answer.strip()), None)
    if "answer" in named and without is not None:
        message = f"the prompt has {{answer}}, and row {without.sample_id + 1} has no reference answer"
        help = "remove {answer} from the prompt, or correct train_dataset.answer_field"
        yield finding("RUN-REWARD-JUDGE-PROMPT", key, message, help)


def _check_judge_score(judge: ChatJudgeConfig) -> Iterator[Finding]:
    if judge.score_min >= judge.score_max:
        message = f"no score is between {judge.score_min:g} (score_min) and {judge.score_max:g} (score_max)"
        help = f"write {_JUDGE}.score_max={judge.score_min + 1:g} or more"
        yield finding("RUN-REWARD-JUDGE-PROMPT", f"{_JUDGE}.score_max", message, help)
    if judge.score_field is not None:
        return
    try:
        groups = re.compile(judge.score_pattern).groups
    except (re.error, OverflowError, RecursionError) as error:
        problem = f"the pattern is not a regular expression: {error}"
    else:
        problem = "" if groups == 1 else f"the pattern has {groups} groups; the score is that of exactly one"
    if problem:
        help = r"write one group around the number, such as 'Score: (\d+)'"
        yield finding("RUN-REWARD-JUDGE-PROMPT", f"{_JUDGE}.score_pattern", problem, help)


_MODEL_PATH = "reward.model.path"


def check_reward_model(config: RunConfig, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    """Check that a reward model is set exactly if one is used, has one label and encodes the first row."""
    yield from _check_use(config, "model")
    if (model := config.reward.model) and is_local(model.path):  # a name on the hub is looked at once it is downloaded
        yield from _check_model_files(model, prompts)


def _check_model_files(model: RewardModelConfig, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    try:
        described = json.loads(Path(model.path, "config.json").read_text())
        tokenizer = Tokenizer.load(model.path)
    except (OSError, ValueError) as error:
        message = f"config.json cannot be read: {error}"
        yield finding("RUN-REWARD-MODEL", _MODEL_PATH, message, "write the directory of a classifier")
        return
    except TokenizerError as error:
        help = "put the tokenizer's files beside the model"
        yield finding("RUN-REWARD-MODEL", _MODEL_PATH, str(error), help)
        return
    names, labels = described.get("architectures") or ["missing"], len(described.get("id2label") or {0: "", 1: ""})
    classes = find_backend().classifiers
    if names[0] not in classes:
        message = f"its architecture is {names[0]}; supported classifiers are {', '.join(classes)}"
        help = "use one of these, or a reward function of your own (reward.function)"
        yield finding("RUN-REWARD-MODEL", _MODEL_PATH, message, help)
    elif labels != 1:
        message = f"it has {labels} labels; a reward model must have exactly one"
        yield finding("RUN-REWARD-MODEL", _MODEL_PATH, message, "use a model with one label")
    for prompt in prompts[:1]:
        try:
            tokenizer.encode_chat(
                [*prompt.messages(), {"role": "assistant", "content": "x"}], add_generation_prompt=False
            )
        except TokenizerError as error:
            message = f"row {prompt.sample_id + 1} with a response cannot be encoded: {error}"
            help = "correct chat_template.jinja beside the reward model"
            yield finding("RUN-REWARD-MODEL", _MODEL_PATH, message, help)


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
        yield finding("RUN-REWARD-FUNCTION", "reward.parts.reward", message, "give this part another name")
    own = {key: judge.function for key, judge in config.reward.judges.items() if judge.function is not None}
    if not own:
        return
    with RewardPool(timeout_s=config.reward.timeout_s, workers=1, memory_mb=config.reward.memory_mb) as pool:
        for key, reference in own.items():
            if found := _try_function(pool, reference, prompts, _group_sizes(config)):
                problem, is_late = found
                help = "correct the function, or raise reward.timeout_s" if is_late else "correct the function"
                yield finding("RUN-REWARD-FUNCTION", f"{key}.function", problem, help)


def _group_sizes(config: RunConfig) -> Sequence[int]:
    """Return how many responses a function that compares is given at once, in training first."""
    sets = config.evaluations.values() if config.evaluates else ()
    evaluated = [data.n_samples or 1 for data in sets if data.played_by is None]
    return list(dict.fromkeys([config.gconfig.n_samples, *evaluated]))


def _try_function(
    pool: RewardPool, reference: str, prompts: Sequence[Prompt], compared: Sequence[int]
) -> tuple[str, bool] | None:
    """Return a line about a function's error, and whether a call of it took too long.

    A function that compares is tried with each number of responses.
    """
    try:
        function = Portable.pack(reference)
    except UserCodeError as error:
        return str(error), False
    compares = pool.call_and_wait(functools.partial(functions.group_test, function))
    if isinstance(compares, Failure):
        limit = f"it cannot be imported within {IMPORT_LIMIT_S:g} s"
        return limit if compares.cause is Cause.TIMED_OUT else compares.message, False
    if not prompts:
        return None
    first = prompts[0]
    for number in compared if compares else [1]:
        responses = [first.answer or _RESPONSE] * number
        outcome = pool.call_and_wait(functools.partial(functions.judge, function), responses, dict(first.row))
        if isinstance(outcome, Failure):
            of_them = f", {number} of its responses" if compares else ""
            problem = f"row {first.sample_id + 1}{of_them}: {outcome.message}"
            return problem, outcome.cause is Cause.TIMED_OUT
    return None
