"""What is wrong with a teacher is said before anything starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from areal_like.config.load import load
from areal_like.config.schema import InitModelConfig
from areal_like.demo.init_model import write_init_model
from areal_like.preflight import preflight

OWN = ("algorithm=distill", "cluster.n_gpus_per_node=4", "teacher.backend=sglang:d1")
ELSEWHERE = ("algorithm=distill", "teacher.url=http://127.0.0.1:30000")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("teacher") / "model"
    write_init_model(InitModelConfig(hidden_size=32), directory, seed=0)
    return directory


def said(write, *overrides: str) -> str:
    """All findings, without the places that their keys come from."""
    findings = preflight(load(write(), overrides)).findings
    lines = (f"{found.key}: {found.message} -> {found.help} {' '.join(found.nearest)}" for found in findings)
    return "\n".join(re.sub(r" [(](command line|default|/[^)]*)[)]", "", line) for line in lines)


def test_a_model_of_the_policys_family_passes(write, model: Path) -> None:
    assert preflight(load(write(), [*OWN, f"teacher.path={model}"])).ok
    whole = "sglang[rollout]:d1+megatron[actor]:d1+sglang[teacher]:d1"
    layout = [f"allocation_mode={whole}", "actor.backend=null", "rollout.backend=null", "teacher.backend=null"]
    assert preflight(load(write(), [*OWN, f"teacher.path={model}", *layout])).ok


def test_a_server_elsewhere_needs_no_place_in_the_layout(write) -> None:
    assert preflight(load(write(), ELSEWHERE)).ok


def test_a_teacher_is_refused_beside_images_in_the_data_or_in_an_agents_messages(write) -> None:
    root = Path(__file__).parents[2]
    seeing = ("actor.init_model={tokenizer: bytes, vision_layers: 1}", "actor.backend=fsdp:d2", *ELSEWHERE)
    assert "scores the tokens of text alone" not in said(write, *seeing)
    data = (
        f"train_dataset.path={root}/examples/vision/pictures.py:train",
        "valid_dataset=null",
        "train_dataset.max_prompt_length=64",
    )
    assert "scores the tokens of text alone, and row 1 has images" in said(write, *seeing, *data)
    agent = f"workflow={root}/examples/workflows/retry.py:run"
    assert "and an agent's messages may have images" in said(write, *seeing, agent)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (("algorithm=grpo",), "teacher: ignored: the algorithm does not use a teacher"),
        (("teacher.backend=null",), "teacher.backend: no layout is given for the teacher -> write"),
        (("teacher.backend=megatron:d1",), "teacher.backend: megatron cannot be the teacher"),
        (("cluster.n_gpus_per_node=3",), "teacher.backend: the groups need 4 GPUs"),
        (("teacher.url=http://a",), "and several are set"),
        (
            ("teacher.hint_field=answr",),
            "row 1 has no column answr -> name a column of every row, or set teacher.hint_field=null answer",
        ),
    ],
)
def test_what_is_wrong_is_said(write, model: Path, changes: tuple[str, ...], words: str) -> None:
    assert words in said(write, *OWN, f"teacher.path={model}", *changes)


def test_an_algorithm_that_asks_a_teacher_needs_one(write) -> None:
    assert "algorithm=distill needs the log-probs of a teacher" in said(write, "algorithm=distill")
    assert "actor.teacher_coef needs the log-probs" in said(write, "actor.teacher_coef=0.1")
    assert "none is set" in said(write, "algorithm=distill", "teacher={}")


def test_a_server_elsewhere_scores_at_temperature_1(write, model: Path) -> None:
    assert "they score at temperature 1 -> set `gconfig.temperature=1.0`" in said(
        write, *ELSEWHERE, "gconfig.temperature=0.7"
    )
    assert preflight(load(write(), [*OWN, f"teacher.path={model}", "gconfig.temperature=0.7"])).ok


def test_a_token_of_the_environment_has_to_be_there(write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEACHER_TOKEN", raising=False)
    assert "TEACHER_TOKEN is not set" in said(write, *ELSEWHERE, "teacher.token_variable=TEACHER_TOKEN")
    monkeypatch.setenv("TEACHER_TOKEN", "secret")
    assert preflight(load(write(), [*ELSEWHERE, "teacher.token_variable=TEACHER_TOKEN"])).ok


def test_another_tokenizer_is_refused(write, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_init_model(InitModelConfig(hidden_size=32, tokenizer="bytes"), other, seed=0)
    assert "the teacher's tokenizer differs from the policy's in" in said(write, *OWN, f"teacher.path={other}")
    (other / "tokenizer.json").unlink()
    assert "the teacher's tokenizer cannot be read" in said(write, *OWN, f"teacher.path={other}")


def test_one_sample_for_each_prompt_is_enough_without_a_reward(write, model: Path) -> None:
    one = [*OWN, f"teacher.path={model}", "gconfig.n_samples=1"]
    assert "compares the samples of a prompt" not in said(write, *one)
    assert "compares the samples of a prompt" in said(write, *one, "actor.reward_coef=1")


def test_a_teacher_holds_the_longest_sequence(write, tmp_path: Path) -> None:
    short = tmp_path / "short"
    write_init_model(InitModelConfig(hidden_size=32, max_position_embeddings=16), short, seed=0)
    words = (
        "teacher.path: sequences of 40 tokens do not fit the teacher's 16 positions -> use a teacher with 48 positions"
    )
    assert words in said(write, *OWN, f"teacher.path={short}")


def test_a_teacher_holds_the_longest_hint(write, tmp_path: Path, model: Path) -> None:
    """A prompt has at most 21 tokens and a response 8; the hint is what does not fit into 37 positions."""
    narrow, short = tmp_path / "narrow", ["train_dataset.max_prompt_length=21", "gconfig.max_new_tokens=8"]
    write_init_model(InitModelConfig(hidden_size=32, max_position_embeddings=37), narrow, seed=0)
    assert preflight(load(write(), [*OWN, f"teacher.path={narrow}", *short])).ok
    hinted = [*short, "teacher.hint_field=answer"]
    assert "with its hint has" in said(write, *OWN, f"teacher.path={narrow}", *hinted)
    assert preflight(load(write(), [*OWN, f"teacher.path={model}", *hinted])).ok


def test_a_teacher_has_files(write, tmp_path: Path, model: Path) -> None:
    (empty := tmp_path / "empty").mkdir()
    assert f"teacher.path: {empty} is not a model directory: it has no config.json" in said(
        write, *OWN, f"teacher.path={empty}"
    )
    (empty / "config.json").write_text((model / "config.json").read_text())
    assert "has no weights" in said(write, *OWN, f"teacher.path={empty}")


def test_a_teachers_layout_divides_its_heads(write, model: Path) -> None:
    own = [*OWN, f"teacher.path={model}", "cluster.n_gpus_per_node=6"]
    words = "heads cannot be split by `t3`"
    assert f"teacher.backend: 4 attention {words}" in said(write, *own, "teacher.backend=sglang:t3")
    whole = "sglang[rollout]:d1+megatron[actor]:d1+sglang[teacher]:t3"
    layout = [f"allocation_mode={whole}", "actor.backend=null", "rollout.backend=null", "teacher.backend=null"]
    assert f"allocation_mode: 4 attention {words}" in said(write, *own, *layout)


def test_a_server_with_openais_interface_is_asked_for_a_model_by_name(write) -> None:
    openai = (*ELSEWHERE, "teacher.api=openai")
    assert "teacher.model: teacher.api=openai cannot be combined with teacher.model=null" in said(write, *openai)
    assert preflight(load(write(), [*openai, "teacher.model=big"])).ok


SELF = ("algorithm=distill", "teacher.from_policy=true", "gconfig.temperature=1.0")


def test_the_policy_as_its_teacher_needs_a_hint_and_temperature_1(write) -> None:
    assert preflight(load(write(), [*SELF, "teacher.hint_field=answer"])).ok
    assert "without a hint the policy would learn what it knows" in said(write, *SELF)
    hot = ("teacher.hint_field=answer", "gconfig.temperature=1.2")
    assert "they score at temperature 1" in said(write, *SELF, *hot)
    assert "and several are set" in said(write, *SELF, "teacher.url=http://a")


def test_likeliest_tokens_need_ids_and_a_vocabulary(write, model: Path) -> None:
    assert "names likely tokens by their texts" in said(
        write, *ELSEWHERE, "gconfig.temperature=1.0", "teacher.api=openai", "teacher.model=big", "teacher.top_k=4"
    )
    assert "cannot return 1000 ids" in said(write, *OWN, f"teacher.path={model}", "teacher.top_k=1000")
