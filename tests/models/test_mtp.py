"""The layer for multi-token prediction is trained beside the policy, which it leaves as it is."""

from __future__ import annotations

import json
import shutil
import socket
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from conversions import command
from safetensors.torch import load_file, save_file
from tiny_mtp import PREFIX, expected_of_mtp, with_layer, write_mtp
from tiny_servers import distance, score, served, update
from tolerance import THOUSAND, assert_gradient, close_to, rounding
from trainer_jobs import (
    THOUSANDFOLD,
    Machine,
    Setting,
    engine,
    exported,
    initial_weights,
    make_batch,
    resume,
    save_after_two_steps,
)
from transformers import AutoModelForCausalLM

from allocation import MemorySettings, ParallelSizes
from allocation.memory.megatron import phases_of_stage
from allocation.model_spec import load_model
from allocation.parameters import Held, count_held, stage_chunks, stages
from allocation.settings import Workload
from areal_like.backends.fsdp.checkpoint_names import in_checkpoint
from areal_like.core.algorithms.losses import sft
from areal_like.core.config.schema import OptimizerConfig
from areal_like.core.trainer.engine import PARTS, Rendezvous
from areal_like.core.types import LossSpec

LENGTHS = (48, 17, 9, 30, 3, 2, 12, 8, 1, 21)
TRAINED = {"train_mtp_layers": True}
LONG = pytest.mark.long
NAMES = ("deepseek_v3-yarn", "glm4_moe", "glm4_moe_lite", "kimi_k2")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    @cache
    def make(name: str) -> Path:
        path = tmp_path_factory.mktemp(name)
        write_mtp(name, path)
        return path

    return make


def setting_of(path: Path, sizes: ParallelSizes | None = None, **more) -> Setting:
    more = {"optimizer": THOUSANDFOLD, "megatron": TRAINED, **more}
    return Setting(path, sizes or ParallelSizes(), bridge="megatron-bridge", **more)


def step_and_updates(
    rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting
) -> tuple[np.ndarray | None, dict[str, float], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Log-probs, the metrics of a step, what it subtracts from each weight, and the weights before."""
    batch = make_batch(lengths=LENGTHS)
    with engine(rendezvous, listener, setting) as made:
        read, before = made.log_probs(batch), exported(made)
        step = made.train(batch, LossSpec(sft))
        after = exported(made)
    return read, step, {name: before[name] - after[name] for name in before}, before


@pytest.mark.parametrize("name", [*NAMES[:2], *(pytest.param(name, marks=LONG) for name in NAMES[2:])])
def test_loss_and_gradients_are_those_of_transformers_layers(ranks, tiny, name):
    path = tiny(name)
    _, step, updates, before = ranks.run(step_and_updates, 1, setting_of(path))[0]
    original = load_file(path / "model.safetensors")
    assert before.keys() == original.keys()
    for key, tensor in original.items():
        np.testing.assert_array_equal(before[key], tensor.numpy(), err_msg=key)
    loss, gradients = expected_of_mtp(path, LENGTHS)
    assert step["mtp_loss"] == close_to(loss)
    longer = with_layer(path)
    stored = {key: part for name, grad in gradients.items() for key, part in in_checkpoint(longer, name, grad).items()}
    assert {key for key in updates if key.startswith(PREFIX)} - {*stored} == {
        key for key in updates if key.startswith(PREFIX) and key.endswith("e_score_correction_bias")
    }
    for key, expected in stored.items():
        assert_gradient(updates[key], expected, is_update=True, err_msg=key)
        assert expected.abs().max() > 0


@pytest.mark.parametrize("name", [*NAMES[:2], *(pytest.param(name, marks=LONG) for name in NAMES[2:])])
def test_the_policy_is_trained_as_without_it(ranks, tiny, name):
    setting = setting_of(tiny(name), optimizer=OptimizerConfig(lr=1e-2, gradient_clipping=0.1))
    (read, step, updates, _), (plain_read, plain_step, plain, _) = (
        ranks.run(step_and_updates, 1, each)[0] for each in (setting, replace(setting, megatron={}))
    )
    np.testing.assert_array_equal(read[1], plain_read[1])
    assert step.pop("mtp_loss") > 0
    assert step == plain_step
    assert {key for key in updates if not key.startswith(PREFIX)} == plain.keys()
    for key, change in plain.items():
        np.testing.assert_array_equal(updates[key], change, err_msg=key)
    assert np.abs(updates[f"{PREFIX}eh_proj.weight"]).max() > 1e-3


RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SIZES = {
    "recomputed": ParallelSizes(),
    "t2": ParallelSizes(tp=2, etp=2),
    "e2": ParallelSizes(dp=2, ep=2),
    "c2": ParallelSizes(cp=2, edp=2),
    "p2": ParallelSizes(pp=2),
}


@pytest.mark.parametrize("layout", [pytest.param(it, marks=[LONG] if it == "e2" else []) for it in SIZES])
def test_a_layout_trains_it_as_one_rank_does(ranks, tiny, layout):
    sizes, path = SIZES[layout], tiny("deepseek_v3-yarn")
    _, expected, wanted, before = ranks.once(step_and_updates, 1, setting_of(path))[0]
    more = {"megatron": {**TRAINED, **RECOMPUTED}} if layout == "recomputed" else {}
    _, step, updates, here = ranks.run(
        step_and_updates, sizes.dp * sizes.tp * sizes.cp * sizes.pp, setting_of(path, sizes, **more)
    )[0]
    assert step == close_to(expected)
    assert updates.keys() == wanted.keys()
    for key, change in wanted.items():
        np.testing.assert_array_equal(here[key], before[key], err_msg=key)
        assert_gradient(updates[key], change / THOUSAND, is_update=True, err_msg=key)


def held(rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting) -> tuple[Held, dict[str, int]]:
    """Parameters of a rank by their grid, and bytes of weights, gradients and optimizer after a step."""
    with engine(rendezvous, listener, setting) as made:
        own = [named for model in made._models for named in model.named_parameters()]
        expert = sum(p.numel() for name, p in own if ".experts." in name)
        made.train(make_batch(lengths=LENGTHS), LossSpec(sft))
        parts = {part: list(made._memory._tensors[part]()) for part in PARTS}
        sizes = {
            part: sum(s.nbytes() for s in set(made._memory._on_device(iter(there)))) for part, there in parts.items()
        }
        return Held(sum(p.numel() for _, p in own) - expert, expert), sizes


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("glm4_moe", ParallelSizes(tp=2, ep=2)),
        *(pytest.param(name, ParallelSizes(tp=2, ep=2), marks=LONG) for name in NAMES if name != "glm4_moe"),
        ("deepseek_v3-yarn", ParallelSizes(pp=2)),
        pytest.param("glm4_moe", ParallelSizes(tp=2, pp=2, etp=2), marks=LONG),
        pytest.param("kimi_k2", ParallelSizes(pp=2, dp=2, ep=2), marks=LONG),
    ],
)
def test_a_rank_has_what_the_memory_model_counts(ranks, tiny, name, sizes):
    setting = setting_of(tiny(name), sizes, machine=Machine("cpu", "bfloat16"))
    model = load_model(str(tiny(name)))
    work = Workload(model, memory=MemorySettings(mtp_trained=True))
    layers = stages(model, sizes, work.megatron)
    world = sizes.tp * sizes.pp * sizes.dp
    for rank, (found, bytes_of) in enumerate(ranks.run(held, world, setting)):
        stage = rank * sizes.pp // world
        ends = {"first": stage == 0, "last": stage == sizes.pp - 1}
        assert found == count_held(model, sizes, layers[stage], **ends, predicts=True)
        phases = phases_of_stage(sizes, work, stage_chunks(model, sizes, work.megatron)[stage], stage, True)
        step = {
            item.name.split()[0]: item.bytes for item in next(p for p in phases if p.name == "optimizer step").items
        }
        assert bytes_of["params"] == pytest.approx(step["weights"], rel=0.03)
        assert bytes_of["grads"] == pytest.approx(step["gradients"], rel=0.03)
        assert bytes_of["optimizer"] == pytest.approx(step["main"] + step["Adam's"], rel=0.03)


def test_it_is_saved_and_goes_on_in_another_layout(ranks, tiny, tmp_path):
    path, optimizer = tiny("deepseek_v3-yarn"), OptimizerConfig(lr=1e-2, eps=1e-2)
    before, after = (
        setting_of(path, sizes, optimizer=optimizer) for sizes in (ParallelSizes(), ParallelSizes(dp=2, ep=2))
    )
    steps, *_ = ranks.run(save_after_two_steps, 1, before, tmp_path)
    (resumed, *_) = ranks.run(resume, 2, after, tmp_path)
    assert all(step["mtp_loss"] > 0 for step in steps)
    assert resumed == [close_to(step) for step in steps]
    saved, original = (load_file(folder / "model.safetensors") for folder in (tmp_path / "hf", path))
    assert saved.keys() == original.keys()
    assert not torch.equal(saved[f"{PREFIX}eh_proj.weight"], original[f"{PREFIX}eh_proj.weight"])
    assert json.loads((tmp_path / "hf/config.json").read_text())["num_nextn_predict_layers"] == 1
    arguments = (
        str(tmp_path / "state"),
        str(tmp_path / "converted"),
        "--model",
        str(path),
        "--bridge",
        "megatron-bridge",
    )
    ((status, output),) = ranks.run(command, 1, *arguments)
    assert status == 0, output
    converted = load_file(tmp_path / "converted/model.safetensors")
    assert converted.keys() == saved.keys() and all(torch.equal(converted[key], t) for key, t in saved.items())
    (again,) = ranks.run(initial_weights, 1, setting_of(tmp_path / "hf"))
    for key, tensor in saved.items():
        np.testing.assert_array_equal(again[key], tensor.numpy(), err_msg=key)


BRIDGE = "actor.megatron.bridge_type=megatron-bridge"
TRAIN = "actor.megatron.train_mtp_layers=true"
OVERRIDES = "actor.megatron.override_transformer_config"


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("deepseek_v3", [BRIDGE], None),
        ("glm4_moe", [BRIDGE, "actor.backend=megatron:d1p2"], None),
        ("glm4_moe", [], "only megatron-bridge converts the layer"),
        ("glm4_moe", [BRIDGE, "actor.mb_spec.share_prompts=true"], "several next tokens"),
        ("glm4_moe", [BRIDGE, "actor.use_lora=true", "actor.target_modules=[q_proj]"], "all weights of the layer"),
        ("minimax_m2", [BRIDGE], "the model is a minimax_m2"),
        (
            "glm4_moe",
            [BRIDGE, "actor.backend=megatron:d1p2", f"{OVERRIDES}.pipeline_model_parallel_layout='Et|tL'"],
            "the layer is on the last stage",
        ),
    ],
)
def test_a_run_starts_where_a_test_shows_that_it_is_right(checks, tiny, name, settings, words):
    errors = checks.errors(tiny(name), TRAIN, *settings)
    if words is None:
        assert not errors
    else:
        assert [(error.partition(" ")[0], words in error) for error in errors] == [("RUN-MTP-UNSUPPORTED", True)]


def test_a_model_without_the_layer_is_refused(checks, tiny, tmp_path):
    path = shutil.copytree(tiny("glm4_moe"), tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    save_file({key: t for key, t in tensors.items() if not key.startswith(PREFIX)}, path / "model.safetensors")
    (error,) = checks.errors(path, TRAIN, BRIDGE)
    assert error.startswith("RUN-MTP-UNSUPPORTED actor.megatron.train_mtp_layers") and "the weights in" in error
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    (error,) = checks.errors(path, TRAIN, BRIDGE)
    assert "config.json of the model has no num_nextn_predict_layers" in error


@LONG
@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "glm4_moe_lite"])
def test_a_server_that_is_sent_it_computes_the_policy(tiny, tmp_path, name):
    model = shutil.copytree(tiny(name), tmp_path / "model")
    updated = shutil.copytree(model, tmp_path / "updated")
    torch.manual_seed(1)
    tensors = {key: t * (1 + 0.3 * torch.randn_like(t)) for key, t in load_file(model / "model.safetensors").items()}
    save_file(tensors, updated / "model.safetensors", {"format": "pt"})
    before, after = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (model, updated))
    (model / "tokenizer.json").unlink()
    with served(model) as post:
        assert max(distance(before, score(post))) < rounding(5.0)
        update(post, updated)
        assert max(distance(after, score(post))) < rounding(5.0)
