"""Checks of the language model that judges: its use, its prompt, how its score is read, and its access token."""

import re
from collections.abc import Iterator, Sequence

from allocation.diagnostics import Finding
from allocation.plan import Plan
from areal_like.config.findings import check_variable, finding, nearest_words
from areal_like.config.schema import ChatJudgeConfig, RunConfig
from areal_like.data.tokenizer import Tokenizer, TokenizerError
from areal_like.preflight.model import find_spec
from areal_like.preflight.served_layout import check_served_layout
from areal_like.preflight.weights import is_local
from areal_like.rewards.judge_texts import FIELDS, PLACEHOLDER, fill
from areal_like.types import Prompt

_SECTION = "reward.judge"


def check_chat_judge(config: RunConfig, prompts: Sequence[Prompt], plan: Plan | None) -> Iterator[Finding]:
    """Check that a judge is set exactly if one is used, where it is, and that its prompt and score can be used."""
    asked = [key for key, part in config.reward.judges.items() if part.function is None and part.type == "judge"]
    judge = config.reward.judge
    if judge is None:
        for key in asked:
            message = "the reward comes from a judge, and the section reward.judge is missing"
            help = "write reward.judge.path=… and reward.judge.backend=sglang:d1, or reward.judge.url=… and "
            help += "reward.judge.model=…"
            yield finding("RUN-REWARD-JUDGE", f"{key}.type", message, help)
        return
    if not asked:
        help = "write reward.type=judge, or `type: judge` for one of reward.parts"
        yield finding("RUN-REWARD-JUDGE", _SECTION, "no reward uses this judge", help)
    yield from _where(judge)
    yield from _prompt(judge, prompts)
    yield from _score(judge)
    if judge.path is not None and judge.url is None:
        yield from _check_served(config, judge, prompts, plan)
    if judge.url is not None:
        yield from check_variable(f"{_SECTION}.token_variable", judge.token_variable)


def _where(judge: ChatJudgeConfig) -> Iterator[Finding]:
    if (judge.path is None) == (judge.url is None):
        message = f"the judge is either a model ({_SECTION}.path) or a running server ({_SECTION}.url)"
        message += ", and both are set" if judge.url else ", and neither is set"
        help = "set one of the two keys, and leave the other null"
        yield finding("RUN-REWARD-JUDGE", f"{_SECTION}.path", message, help)
    if judge.url is not None and judge.model is None:
        message = f"requests to {_SECTION}.url name a model, and {_SECTION}.model is null"
        help = f"write {_SECTION}.model=…, one of the names that the server lists at /models"
        yield finding("RUN-REWARD-JUDGE", f"{_SECTION}.model", message, help)


def _check_served(
    config: RunConfig, judge: ChatJudgeConfig, prompts: Sequence[Prompt], plan: Plan | None
) -> Iterator[Finding]:
    """Check a judge on servers of the run: its layout, its chat template, and that a request fits its positions."""
    key, path = f"{_SECTION}.path", str(judge.path)
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
        help = f"write {_SECTION}.max_tokens={rest} or less" if rest > 0 else "use a judge with a longer context"
        yield finding("RUN-REWARD-JUDGE", f"{_SECTION}.max_tokens", message, help)


def _prompt(judge: ChatJudgeConfig, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    key, named = f"{_SECTION}.prompt", PLACEHOLDER.findall(judge.template)
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


def _score(judge: ChatJudgeConfig) -> Iterator[Finding]:
    if judge.score_min >= judge.score_max:
        message = f"no score is between {judge.score_min:g} (score_min) and {judge.score_max:g} (score_max)"
        help = f"write {_SECTION}.score_max={judge.score_min + 1:g} or more"
        yield finding("RUN-REWARD-JUDGE-PROMPT", f"{_SECTION}.score_max", message, help)
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
        yield finding("RUN-REWARD-JUDGE-PROMPT", f"{_SECTION}.score_pattern", problem, help)
