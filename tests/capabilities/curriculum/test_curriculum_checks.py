"""What is wrong with a curriculum is said before anything starts, and the fix is right."""

from __future__ import annotations

import pytest
from running import CONFIG

from areal_like.config.load import load
from areal_like.preflight import preflight

LORA = ("actor.use_lora=true", "weight_update={adapters: true, mode: disk}", "warm_start=null", "adapters.math={}")


def codes(*overrides: str) -> list[str]:
    return [found.code for found in preflight(load(CONFIG, overrides)).findings]


@pytest.mark.parametrize(
    ("overrides", "code", "fixes"),
    [
        (("train_dataset.curriculum.low=0.95",), "RUN-CURRICULUM", ("train_dataset.curriculum.high=1.45",)),
        (
            ("train_dataset.curriculum.field=anwser",),
            "RUN-CURRICULUM",
            ("train_dataset.curriculum.field=answer",),
        ),
        (
            ("train_dataset.curriculum={}", "total_train_steps=2"),
            "RUN-PROMPTS-ONCE",
            ("total_train_steps=1000", "total_train_epochs=1000"),
        ),
        (
            (*LORA, "adapters.code={train_dataset: {curriculum: {}}}"),
            "RUN-SEVERAL",
            ("adapters.code={train_dataset: {curriculum: null}}",),
        ),
    ],
)
def test_what_is_wrong_is_said_and_the_fix_is_right(overrides, code, fixes) -> None:
    assert code in codes(*overrides)
    assert code not in codes(*overrides, *fixes)
