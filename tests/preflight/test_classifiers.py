"""What is wrong with a reward model is said before anything starts."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "rewards"))
from classifiers import classifier

from areal_like.core.config.load import load
from areal_like.preflight import preflight

SLOTS = ("cluster.n_gpus_per_node=4", "reward.type=model", "reward.model.backend=sglang:d1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return classifier(tmp_path_factory.mktemp("classifier") / "model")


def said(write, *overrides: str) -> str:
    """All findings, without the places that their keys come from."""
    findings = preflight(load(write(), overrides)).findings
    lines = (f"{found.key}: {found.message} -> {found.help}" for found in findings)
    return "\n".join(re.sub(r" [(](command line|default|/[^)]*)[)]", "", line) for line in lines)


def test_a_classifier_with_one_label_passes(write, model: Path) -> None:
    assert preflight(load(write(), [*SLOTS, f"reward.model.path={model}"])).ok


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (("reward.type=gsm8k",), "reward.model: no reward uses this model -> write reward.type=model"),
        (("reward.model.backend=null",), "reward.model.backend: no layout is given for the reward model"),
        (("reward.model.backend=megatron:d1",), "reward.model.backend: megatron cannot be the reward"),
        (("cluster.n_gpus_per_node=3",), "reward.model.backend: the groups need 4 GPUs"),
        (("reward.model.path=/nowhere",), "reward.model.path: config.json cannot be read"),
    ],
)
def test_what_is_wrong_is_said(write, model: Path, changes: tuple[str, ...], words: str) -> None:
    overrides = [*SLOTS, f"reward.model.path={model}", *changes]
    assert words in said(write, *overrides)


def test_other_classes_and_labels_are_refused(write, model: Path, tmp_path: Path) -> None:
    two = classifier(tmp_path / "two", labels=2)
    assert "it has 2 labels" in said(write, *SLOTS, f"reward.model.path={two}")
    config = (two / "config.json").read_text().replace("Qwen3ForSequenceClassification", "Qwen3ForCausalLM")
    (two / "config.json").write_text(config)
    assert "its architecture is Qwen3ForCausalLM; supported classifiers are" in said(
        write, *SLOTS, f"reward.model.path={two}"
    )


def test_a_reward_that_no_model_gives_is_refused(write) -> None:
    assert "reward.model is missing -> write reward.model.path" in said(write, "reward.type=model")
