"""FSDP trains as Megatron does on one rank, on any number of ranks, with sequences shared among them or not."""

from __future__ import annotations

import json
import math
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_layouts import alike, assembled, log_probs_of, same_gradients, same_training
from test_trainer_roles import gathered
from tolerance import assert_close, close_to
from trainer_jobs import (
    FOURTH,
    THIRD,
    VOCABULARY,
    OptimizerConfig,
    Setting,
    critic_steps,
    engine,
    initial_weights,
    learning_rates,
    make_batch,
    resume,
    resumed_critic,
    save_after_two_steps,
    three_steps,
)
from transformers import AutoConfig, AutoModelForCausalLM, GemmaConfig, GemmaForCausalLM

from allocation import ParallelSizes
from areal_like.backends.fsdp.conversion import to_hugging_face
from areal_like.core.algorithms.losses import sft
from areal_like.core.trainer.engine import Rendezvous
from areal_like.core.types import LossSpec

pytestmark = pytest.mark.covers("FSDP", "CP")

SCHEDULES = [
    {},
    {"lr_scheduler_type": "linear", "warmup_steps": 2, "min_lr_ratio": 0.1},
    {"lr_scheduler_type": "cosine", "warmup_steps_proportion": 0.25},
]


def fsdp(model, d: int = 1, c: int = 1, t: int = 1, **settings) -> Setting:
    return Setting(model, ParallelSizes(dp=d, cp=c, tp=t, edp=d * c * t), backend="fsdp", **settings)


SPLIT = [
    ("tied", 1, 1, 2, {}),
    pytest.param("untied", 2, 1, 2, {"gradient_checkpointing": True}, marks=pytest.mark.long),
    pytest.param("tied", 1, 2, 2, {}, marks=pytest.mark.long),
    pytest.param("tied", 3, 1, 2, {}, marks=pytest.mark.long),  # layers that 3 ranks cannot share evenly
]


@pytest.mark.parametrize(("model", "d", "c", "t", "settings"), SPLIT)
def test_ranks_that_split_matrices_train_as_one_megatron_rank_does(ranks, models, model, d, c, t, settings):
    (expected,) = ranks.once(three_steps, 1, Setting(models[model]))
    setting = fsdp(models[model], d, c, t, fsdp=settings)
    alike(ranks.run(three_steps, d * c * t, setting), expected)
    same_gradients(ranks, setting)


@pytest.mark.parametrize(
    ("model", "d", "c", "settings"),
    [
        ("tied", 1, 1, {}),
        pytest.param("tied", 2, 1, {}, marks=pytest.mark.long),
        pytest.param("untied", 3, 1, {"gradient_checkpointing": True}, marks=pytest.mark.long),
        ("tied", 1, 2, {}),
        pytest.param("untied", 2, 2, {"gradient_checkpointing": True}, marks=pytest.mark.long),
        pytest.param("tied", 1, 4, {}, marks=pytest.mark.long),  # of 2 key heads: each is on two ranks
    ],
)
def test_it_trains_as_one_megatron_rank_does(ranks, models, model, d, c, settings):
    (expected,) = ranks.once(three_steps, 1, Setting(models[model]))
    setting = fsdp(models[model], d, c, fsdp=settings)
    alike(ranks.run(three_steps, d * c, setting), expected)
    same_gradients(ranks, setting)


def test_a_word_that_pads_elsewhere_is_trained_like_any_other(ranks, models, tmp_path):
    """It may be the one that ends a turn: transformers gives its embedding no gradient, Megatron does."""
    (expected,) = ranks.once(three_steps, 1, Setting(models["untied"]))
    model = shutil.copytree(models["untied"], tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    word = int(make_batch().tokens[0])
    (model / "config.json").write_text(json.dumps(config | {"pad_token_id": word}))
    alike(ranks.run(three_steps, 1, fsdp(model)), expected)


def test_windows_and_biases_are_transformers_own_wherever_tokens_lie(ranks, models):
    (alone,) = ranks.run(three_steps, 1, fsdp(models["sliding"]))
    with torch.no_grad():
        expected = log_probs_of(AutoModelForCausalLM.from_pretrained(models["sliding"], dtype=torch.float32)).numpy()
    assert_close(assembled([alone]), expected)
    alike(ranks.run(three_steps, 2, fsdp(models["sliding"], c=2)), alone)


def late_token(
    rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting
) -> tuple[dict[str, float], dict[int, float]]:
    """A step on the last token of a sequence alone, and its log-prob before by its place, where a rank has it."""
    batch = make_batch(lengths=(20,))
    batch.fields["loss_mask"][:-1], batch.fields["loss_mask"][-1] = 0, 1
    with engine(rendezvous, listener, setting) as made:
        found = made.log_probs(batch)
        of_rank = dict(zip(*(array.tolist() for array in found), strict=True)) if found else {}
        return made.train(batch, LossSpec(sft)), of_rank


@pytest.mark.parametrize("backend", ["fsdp", pytest.param("megatron", marks=pytest.mark.long)])
def test_ranks_that_have_nothing_to_predict_take_part(ranks, models, backend):
    """The tokens before are theirs, or no sequence is."""
    ((alone, log_probs),) = ranks.run(late_token, 1, replace(fsdp(models["tied"]), backend=backend))
    assert alone["loss_tokens"] == 1 and list(log_probs) == [19]
    steps, parts = zip(*ranks.run(late_token, 4, replace(fsdp(models["tied"], 2, 2), backend=backend)), strict=True)
    assert list(steps) == [close_to(alone)] * 4
    assert [part for part in parts if part] == [close_to(log_probs)]


@pytest.mark.parametrize(
    ("d", "c", "t"), [*(pytest.param(*sizes, marks=pytest.mark.long) for sizes in ((2, 1, 1), (1, 2, 1))), (1, 1, 2)]
)
def test_a_critic_trains_as_megatrons_does_and_goes_on_there(ranks, models, tmp_path, d, c, t):
    (expected,) = ranks.once(critic_steps, 1, Setting(models["tied"]))
    outcomes = ranks.run(critic_steps, d * c * t, fsdp(models["tied"], d, c, t), tmp_path / "hf", tmp_path / "state")
    for moment in ("before", "after"):
        values = gathered([getattr(outcome, moment) for outcome in outcomes])
        assert_close(values, gathered([getattr(expected, moment)]))
    same_training(outcomes, expected)
    (resumed,) = ranks.run(resumed_critic, 1, fsdp(models["tied"]), tmp_path / "state")
    (straight,) = ranks.once(resumed_critic, 1, Setting(models["tied"]), None)
    assert resumed == [close_to(step) for step in straight]
    (tmp_path / "converted").mkdir()
    to_hugging_face(tmp_path / "state", models["tied"], models["tied"], "float32", tmp_path / "converted")
    saved, converted = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "converted"))
    assert converted.keys() == saved.keys()
    assert all(torch.equal(converted[name], tensor) for name, tensor in saved.items())
    for how in (Setting(tmp_path / "hf"), fsdp(tmp_path / "hf")):
        (again,) = ranks.run(critic_steps, 1, how)
        assert_close(gathered([again.before]), gathered([expected.after]))


@pytest.mark.parametrize(
    "schedule", [*(pytest.param(it, marks=pytest.mark.long) for it in SCHEDULES[:-1]), SCHEDULES[-1]]
)
def test_learning_rates_are_megatrons(ranks, models, schedule):
    optimizer = OptimizerConfig(lr=1e-2, **schedule)
    rates = [
        ranks.run(learning_rates, 1, setting, 1)[0]
        for setting in (
            Setting(models["tied"], optimizer=optimizer, total_steps=6),
            fsdp(models["tied"], optimizer=optimizer, total_steps=6),
        )
    ]
    assert rates[1] == pytest.approx(rates[0])


def log_probs_twice(rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting) -> list[np.ndarray]:
    with engine(rendezvous, listener, setting) as made:
        return [made.log_probs(make_batch())[1] for _ in range(2)]


@pytest.mark.parametrize("family", ["phi3", pytest.param("seed_oss", marks=pytest.mark.long)])
def test_nothing_is_dropped_out(ranks, tmp_path, family):
    """A model may name dropout for its pretraining; servers sample without."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_key_value_heads": 4}
    drops = dict.fromkeys(("resid_pdrop", "attention_dropout", "residual_dropout"), 0.1)
    config = AutoConfig.for_model(family, **shape, **special, vocab_size=VOCABULARY, **drops)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    ((first, second),) = ranks.run(log_probs_twice, 1, fsdp(tmp_path))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2,), [(1,), (1, 2), (1, 1, 2)]),
        pytest.param((2, 1, 2), [(1,), (2,), (1, 1, 2)], marks=pytest.mark.long),
    ],
)
def test_a_checkpoint_goes_on_with_another_number_of_ranks(ranks, models, tmp_path, before, after):
    steps, *_ = ranks.run(save_after_two_steps, math.prod(before), fsdp(models["tied"], *before), tmp_path)
    for sizes in after:
        for resumed in ranks.run(resume, math.prod(sizes), fsdp(models["tied"], *sizes), tmp_path):
            assert resumed == [close_to(step) for step in steps]
    weights = ranks.run(initial_weights, 2, fsdp(tmp_path / "hf", 2))[0]
    assert weights.keys() == ranks.run(initial_weights, 1, Setting(tmp_path / "hf"))[0].keys()


def steps_after_a_save(
    rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting, folder: Path | None
) -> list[dict[str, float]]:
    """Two steps, before which a checkpoint is written where there is a folder for it."""
    with engine(rendezvous, listener, setting) as made:
        if folder is not None:
            made.save(folder)
            made.finish_save()
        return [made.train(make_batch(i), LossSpec(sft)) for i in (THIRD, FOURTH)]


def test_a_checkpoint_before_the_first_step_changes_nothing(ranks, models, tmp_path):
    setting = fsdp(models["tied"])
    (expected,) = ranks.run(steps_after_a_save, 1, setting, None)
    (saved,) = ranks.run(steps_after_a_save, 1, setting, tmp_path / "state")
    (resumed,) = ranks.run(resume, 1, setting, tmp_path)
    assert saved == resumed == expected


@pytest.mark.parametrize("backend", ["fsdp", pytest.param("megatron", marks=pytest.mark.long)])
def test_a_longer_run_goes_on_at_the_rate_of_its_own_schedule(ranks, models, tmp_path, backend):
    schedule = OptimizerConfig(lr=1e-2, eps=1e-2, lr_scheduler_type="linear")
    setting = replace(fsdp(models["tied"], optimizer=schedule, total_steps=4), backend=backend)
    ranks.run(save_after_two_steps, 1, setting, tmp_path)
    (resumed,) = ranks.run(resume, 1, replace(setting, total_steps=8), tmp_path)
    assert [step["lr"] for step in resumed] == pytest.approx([1e-2 * 6 / 8, 1e-2 * 5 / 8])


def test_a_converted_checkpoint_is_the_saved_one_where_a_config_leaves_out_that_its_head_is_the_embedding(
    ranks, tmp_path
):
    """Gemma's do: it is their family's default."""
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    GemmaForCausalLM(GemmaConfig(**shape, **heads, vocab_size=VOCABULARY)).save_pretrained(tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    config.pop("tie_word_embeddings", None)
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    ranks.run(save_after_two_steps, 1, fsdp(tmp_path / "model"), tmp_path)
    (tmp_path / "converted").mkdir()
    to_hugging_face(tmp_path / "state", tmp_path / "model", tmp_path / "model", "float32", tmp_path / "converted")
    saved, converted = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "converted"))
    assert converted.keys() == saved.keys()
    assert all(torch.equal(converted[name], tensor) for name, tensor in saved.items())
