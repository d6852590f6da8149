"""What is wrong with single rollouts is said before anything starts, and the fix is right."""

from __future__ import annotations

import pytest

from areal_like.config.load import load
from areal_like.preflight import preflight

SINGLE = ("algorithm=single_rollout", "gconfig.n_samples=1")


def codes(write, *overrides: str) -> list[str]:
    return [found.code for found in preflight(load(write(), overrides)).findings]


@pytest.mark.parametrize(
    ("overrides", "code", "fixes"),
    [
        (("algorithm=single_rollout", "gconfig.n_samples=4"), "RUN-ALGORITHM-SETTINGS", ("gconfig.n_samples=1",)),
        (("algorithm=single_rollout", "gconfig.n_samples=4"), "RUN-ALGORITHM-SETTINGS", ("algorithm=grpo",)),
        ((*SINGLE, "total_train_steps=2"), "RUN-PROMPTS-ONCE", ("total_train_steps=1000", "total_train_epochs=1000")),
    ],
)
def test_what_is_wrong_is_said_and_the_fix_is_right(write, overrides, code, fixes) -> None:
    assert code in codes(write, *overrides)
    assert code not in codes(write, *overrides, *fixes)


def test_the_decay_of_values_is_ignored_without_them(write) -> None:
    findings = preflight(load(write(), ["actor.value_decay=0.5"])).findings
    assert [found.code for found in findings if found.key == "actor.value_decay"] == ["RUN-UNUSED"]
    assert not [
        found
        for found in preflight(load(write(), [*SINGLE, "actor.value_decay=0.5"])).findings
        if found.key == "actor.value_decay"
    ]
