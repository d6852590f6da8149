"""What is wrong with a judge is said before anything starts, and the suggested fix is right."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from areal_like.config.load import load
from areal_like.config.schema import InitModelConfig
from areal_like.demo.init_model import write_init_model
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
        (("reward.type=gsm8k",), "RUN-REWARD-JUDGE", ("reward.type=judge",)),
        (("reward.judge.prompt=Rate it",), "RUN-REWARD-JUDGE-PROMPT", ("reward.judge.prompt='Rate {response}'",)),
        (
            ("reward.judge.prompt='{reply} {response}'",),
            "RUN-REWARD-JUDGE-PROMPT",
            ("reward.judge.prompt='{response}'",),
        ),
        (("train_dataset.answer_field=none",), "RUN-REWARD-JUDGE-PROMPT", ("reward.judge.prompt='{response}'",)),
        (("reward.judge.score_min=10",), "RUN-REWARD-JUDGE-PROMPT", ("reward.judge.score_max=11",)),
        (
            ("reward.judge.score_pattern='('",),
            "RUN-REWARD-JUDGE-PROMPT",
            (r"reward.judge.score_pattern='Score: (\d+)'",),
        ),
        (("reward.judge.score_pattern=a",), "RUN-REWARD-JUDGE-PROMPT", ("reward.judge.score_field=score",)),
        (("reward.judge.token_variable=NOT_THERE",), "RUN-VARIABLE", ("reward.judge.token_variable=null",)),
    ],
)
def test_what_is_wrong_is_said_and_the_fix_is_right(
    write, changes: tuple[str, ...], code: str, fixes: tuple[str, ...]
) -> None:
    assert code in codes(write, *SECTION, *changes)
    assert code not in codes(write, *SECTION, *changes, *fixes)


def test_a_missing_section_is_said(write) -> None:
    assert "RUN-REWARD-JUDGE" in codes(write, "reward.type=judge")
    assert "RUN-REWARD-JUDGE" not in codes(write, *SECTION)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("judge") / "model"
    shape = InitModelConfig(tokenizer="bytes", hidden_size=32, max_position_embeddings=1024)
    write_init_model(shape, directory, seed=0)
    (directory / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return directory


SERVED = ("reward.type=judge", "reward.judge.backend=sglang:d1", "cluster.n_gpus_per_node=4")


def served(model: Path, *more: str) -> list[str]:
    return [*SERVED, f"reward.judge.path={model}", "reward.judge.max_tokens=16", *more]


def test_a_judge_on_servers_of_the_run_has_a_place_in_the_layout(write, model: Path) -> None:
    assert codes(write, *served(model)) == []
    whole = "allocation_mode=sglang[rollout]:d1+megatron[actor]:d2+sglang[judge]:d1"
    layout = [whole, "actor.backend=null", "rollout.backend=null", "reward.judge.backend=null"]
    assert codes(write, *served(model, *layout)) == []
    assert "RUN-LAYOUT" in codes(write, *served(model, "reward.judge.backend=null"))
    assert "RUN-ROLE" in codes(write, *layout, *SECTION, "cluster.n_gpus_per_node=4")


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        (("reward.judge.url=http://a/v1",), "RUN-REWARD-JUDGE"),
        (("reward.judge.path=null",), "RUN-REWARD-JUDGE"),
        (("reward.judge.max_tokens=1000",), "RUN-REWARD-JUDGE"),
        (("reward.judge.backend=sglang:t3",), "ALLOC-HEADS"),
    ],
)
def test_a_judge_that_cannot_be_served_is_refused(write, model: Path, changes: tuple[str, ...], code: str) -> None:
    assert code in codes(write, *served(model, *changes))


def test_a_judge_needs_a_chat_template(write, model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "base", ignore=shutil.ignore_patterns("*.jinja"))
    assert codes(write, *served(tmp_path / "base")) == ["RUN-REWARD-JUDGE"]
    (tmp_path / "base/tokenizer.json").unlink()
    assert "RUN-REWARD-JUDGE" in codes(write, *served(tmp_path / "base"))


def test_a_judge_elsewhere_needs_the_name_of_its_model(write) -> None:
    assert "RUN-REWARD-JUDGE" in codes(write, *SECTION[:2])
