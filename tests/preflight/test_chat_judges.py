"""What is wrong with a judge is said before anything starts, and the suggested fix is right."""

from __future__ import annotations

import pytest

from areal_like.config.load import load
from areal_like.preflight import preflight

SECTION = ("reward.type=judge", "reward.judge.url=http://127.0.0.1:30000/v1", "reward.judge.model=judge")


def codes(write, *overrides: str) -> list[str]:
    return [found.code for found in preflight(load(write(), overrides)).findings]


def test_a_judge_passes(write, monkeypatch) -> None:
    assert preflight(load(write(), SECTION)).ok
    monkeypatch.setenv("JUDGES_TOKEN", "secret")
    json = ("reward.judge.score_field=score", "reward.judge.token_variable=JUDGES_TOKEN")
    prompt = 'reward.judge.prompt="Rate {response} as {\\"score\\": 1} or { score }"'
    assert codes(write, *SECTION, *json, prompt) == []


@pytest.mark.parametrize(
    ("changes", "code", "fixes"),
    [
        (("reward.type=gsm8k",), "RUN-REWARD-JUDGE-UNUSED", ("reward.type=judge",)),
        (("reward.judge.prompt=Rate it",), "RUN-REWARD-JUDGE-RESPONSE", ("reward.judge.prompt='Rate {response}'",)),
        (
            ("reward.judge.prompt='{reply} {response}'",),
            "RUN-REWARD-JUDGE-FIELD",
            ("reward.judge.prompt='{response}'",),
        ),
        (("train_dataset.answer_field=none",), "RUN-REWARD-JUDGE-ANSWER", ("reward.judge.prompt='{response}'",)),
        (("reward.judge.score_min=10",), "RUN-REWARD-JUDGE-RANGE", ("reward.judge.score_max=11",)),
        (
            ("reward.judge.score_pattern='('",),
            "RUN-REWARD-JUDGE-PATTERN",
            (r"reward.judge.score_pattern='Score: (\d+)'",),
        ),
        (("reward.judge.score_pattern=a",), "RUN-REWARD-JUDGE-PATTERN", ("reward.judge.score_field=score",)),
        (("reward.judge.token_variable=NOT_THERE",), "RUN-REWARD-JUDGE-TOKEN", ("reward.judge.token_variable=null",)),
    ],
)
def test_what_is_wrong_is_said_and_the_fix_is_right(
    write, changes: tuple[str, ...], code: str, fixes: tuple[str, ...]
) -> None:
    assert code in codes(write, *SECTION, *changes)
    assert code not in codes(write, *SECTION, *changes, *fixes)


def test_a_missing_section_is_said(write) -> None:
    assert "RUN-REWARD-JUDGE-MISSING" in codes(write, "reward.type=judge")
    assert "RUN-REWARD-JUDGE-MISSING" not in codes(write, *SECTION)
