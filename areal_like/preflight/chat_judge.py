"""Checks of the language model that judges: its use, its prompt, how its score is read, and its access token."""

import os
import re
from collections.abc import Iterator, Sequence

from allocation.diagnostics import Finding
from areal_like.config.findings import finding, nearest_words
from areal_like.config.schema import ChatJudgeConfig, RunConfig
from areal_like.rewards.judge_texts import FIELDS, PLACEHOLDER
from areal_like.types import Prompt

_SECTION = "reward.judge"


def check_chat_judge(config: RunConfig, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    """Check that a judge is set exactly if one is used, and that its prompt and its score can be used."""
    asked = [key for key, part in config.reward.judges.items() if part.function is None and part.type == "judge"]
    judge = config.reward.judge
    if judge is None:
        for key in asked:
            message = "the reward comes from a judge, and the section reward.judge is missing"
            help = "write reward.judge.url=… and reward.judge.model=…"
            yield finding("RUN-REWARD-JUDGE-MISSING", f"{key}.type", message, help)
        return
    if not asked:
        help = "write reward.type=judge, or `type: judge` for one of reward.parts"
        yield finding("RUN-REWARD-JUDGE-UNUSED", _SECTION, "no reward uses this judge", help)
    yield from _prompt(judge, prompts)
    yield from _score(judge)
    if judge.token_variable is not None and judge.token_variable not in os.environ:
        message = f"the environment variable {judge.token_variable} is not set"
        help = f"export {judge.token_variable} before the start, or write {_SECTION}.token_variable=null"
        yield finding("RUN-REWARD-JUDGE-TOKEN", f"{_SECTION}.token_variable", message, help)


def _prompt(judge: ChatJudgeConfig, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    key, named = f"{_SECTION}.prompt", PLACEHOLDER.findall(judge.template)
    for name in dict.fromkeys(named):
        if name not in FIELDS:
            message = f"the prompt has the field {{{name}}}; its fields are {{question}}, {{answer}} and {{response}}"
            help = "correct the name, or write other braces with a space, as in { name }"
            yield finding("RUN-REWARD-JUDGE-FIELD", key, message, help, nearest=nearest_words(name, FIELDS))
    if "response" not in named:
        message = "the prompt has no {response}, so the judge would not see what it scores"
        yield finding("RUN-REWARD-JUDGE-RESPONSE", key, message, "write {response} where the response belongs")
    without = next((prompt for prompt in prompts if not prompt.answer.strip()), None)
    if "answer" in named and without is not None:
        message = f"the prompt has {{answer}}, and row {without.sample_id + 1} has no reference answer"
        help = "remove {answer} from the prompt, or correct train_dataset.answer_field"
        yield finding("RUN-REWARD-JUDGE-ANSWER", key, message, help)


def _score(judge: ChatJudgeConfig) -> Iterator[Finding]:
    if judge.score_min >= judge.score_max:
        message = f"no score is between {judge.score_min:g} (score_min) and {judge.score_max:g} (score_max)"
        help = f"write {_SECTION}.score_max={judge.score_min + 1:g} or more"
        yield finding("RUN-REWARD-JUDGE-RANGE", f"{_SECTION}.score_max", message, help)
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
        yield finding("RUN-REWARD-JUDGE-PATTERN", f"{_SECTION}.score_pattern", problem, help)
