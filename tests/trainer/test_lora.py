"""Adapters train alike in every layout and on both backends, and leave the weights beside them as they are."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_layouts import assembled, world
from tolerance import BACKWARD, assert_close, close_to
from torch.distributed.checkpoint import FileSystemReader
from trainer_jobs import TEMPERATURE, Setting, adapted_steps, initial_weights, make_batch, resume, save_after_two_steps
from transformers import AutoModelForCausalLM

from allocation import ParallelSizes
from areal_like.core.trainer.engine import LoRA

pytestmark = pytest.mark.covers("LoRA")

ALL = LoRA(rank=4, alpha=8, targets=("all-linear",))
ATTENTION = LoRA(rank=4, alpha=8, targets=("q_proj", "v_proj", "o_proj"))
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
ONE = ParallelSizes()
DP2 = ParallelSizes(dp=2, edp=2)
TP2 = ParallelSizes(tp=2, etp=2)  # and sequence parallelism, as always with tensor parallelism
LAYOUTS = [
    ("tied", ALL, TP2, {}),
    ("tied", ALL, DP2, {"bridge": "megatron-bridge"}),
    ("tied", ALL, ParallelSizes(cp=2, edp=2), {"backend": "fsdp"}),
    ("tied", ALL, TP2, {"backend": "fsdp"}),
]
MORE_LAYOUTS = [
    ("tied", ALL, ParallelSizes(pp=2), {}),
    ("tied", ALL, DP2, {"backend": "fsdp"}),
    ("tied", ALL, ONE, {"bridge": "megatron-bridge"}),
    ("tied", ALL, ONE, {"backend": "fsdp"}),
    ("tied", ALL, TP2, {"bridge": "megatron-bridge"}),
    ("untied", ALL, ParallelSizes(pp=2, vpp=2), {}),
    ("untied", ALL, ParallelSizes(cp=2, edp=2), {}),
    ("untied", ALL, DP2, {"megatron": {"overlap_grad_reduce": True, "overlap_param_gather": True}}),
    ("untied", ALL, ParallelSizes(tp=2, pp=2, etp=2), {"bridge": "megatron-bridge"}),
    ("untied", ATTENTION, TP2, {"megatron": RECOMPUTED}),
    ("untied", ATTENTION, DP2, {"backend": "fsdp", "fsdp": {"gradient_checkpointing": True}}),
    ("untied", ALL, ParallelSizes(dp=2, tp=2), {"backend": "fsdp", "fsdp": {"gradient_checkpointing": True}}),
    ("moe", ATTENTION, ParallelSizes(dp=2, ep=2), {}),
    ("moe", ATTENTION, ParallelSizes(tp=2, dp=2, ep=2, etp=2), {"bridge": "megatron-bridge"}),
]


@pytest.fixture(scope="module")
def one_rank(ranks, models):
    return lambda model, lora: ranks.once(adapted_steps, 1, Setting(models[model], lora=lora))[0]


@pytest.mark.parametrize(
    ("model", "lora", "sizes", "how"),
    [*LAYOUTS, *(pytest.param(*row, marks=pytest.mark.long) for row in MORE_LAYOUTS)],
)
def test_a_layout_trains_adapters_as_one_rank_does(ranks, models, one_rank, model, lora, sizes, how):
    expected = one_rank(model, lora)
    outcomes = ranks.run(adapted_steps, world(sizes), Setting(models[model], sizes, lora=lora, **how))
    assert_close(assembled(outcomes), assembled([expected]))
    for outcome in outcomes:
        if outcome.log_probs is not None:  # before the first step, and without adapters after the last
            np.testing.assert_array_equal(outcome.of_base[1], outcome.log_probs[1])
            assert not np.array_equal(outcome.log_probs_after[1], outcome.log_probs[1])
        for step, wanted in zip(outcome.steps, expected.steps, strict=True):
            assert step == close_to(wanted)
    for name in ("weights", "adapters"):
        found, wanted = getattr(outcomes[0], name), getattr(expected, name)
        assert found.keys() == wanted.keys()
        for tensor in found:
            assert_close(found[tensor], wanted[tensor], depth=BACKWARD, err_msg=tensor)


@pytest.mark.parametrize(
    "how", [{}, pytest.param({"backend": "fsdp"}, marks=pytest.mark.long)], ids=["megatron", "fsdp"]
)
def test_before_the_first_step_it_is_the_model_that_was_loaded(ranks, models, how):
    (weights,) = ranks.run(initial_weights, 1, Setting(models["tied"], lora=ALL, **how))
    original = load_file(models["tied"] / "model.safetensors")
    assert weights.keys() == original.keys()
    for name, tensor in original.items():
        np.testing.assert_array_equal(weights[name], tensor.numpy(), err_msg=name)


@pytest.mark.parametrize("how", [{}, {"backend": "fsdp"}], ids=["megatron", "fsdp"])
def test_transformers_with_the_saved_adapters_is_the_model_that_was_trained(ranks, models, tmp_path, how):
    """PEFT's names and its sum, done by hand; its base is the model that the run began with."""
    (outcome,) = ranks.run(adapted_steps, 1, Setting(models["tied"], lora=ALL, **how), tmp_path / "adapters")
    config = json.loads((tmp_path / "adapters/adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8)
    assert config["target_modules"] == sorted(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down"))
    model = AutoModelForCausalLM.from_pretrained(config["base_model_name_or_path"], dtype=torch.float32)
    adapters = load_file(tmp_path / "adapters/adapter_model.safetensors")
    assert len(adapters) == 2 * 7 * model.config.num_hidden_layers
    with torch.no_grad():
        for name in [name for name in adapters if ".lora_A." in name]:
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            a, b = adapters[name], adapters[name.replace("lora_A", "lora_B")]
            assert b.abs().min() > 0
            model.get_submodule(layer).weight += config["lora_alpha"] / config["r"] * b @ a
    for name, weight in model.named_parameters():
        assert_close(outcome.weights[name], weight.detach().numpy(), depth=BACKWARD, err_msg=name)
    batch, expected = make_batch(), []
    for tokens in torch.from_numpy(batch.tokens).long().split(batch.lengths.tolist()):
        predicted = torch.log_softmax(model(tokens[None]).logits[0] / TEMPERATURE, -1)[:-1]
        expected += [predicted.new_full((1,), torch.nan), predicted.gather(1, tokens[1:, None])[:, 0]]
    places, values = outcome.log_probs_after
    assert_close(values, torch.cat(expected).detach().numpy()[places])
    assert outcome.trained == sum(tensor.numel() for tensor in adapters.values())


def test_peft_loads_what_is_saved(ranks, models, tmp_path):
    peft = pytest.importorskip("peft")
    (outcome,) = ranks.run(adapted_steps, 1, Setting(models["tied"], lora=ATTENTION), tmp_path / "adapters")
    base = AutoModelForCausalLM.from_pretrained(models["tied"], dtype=torch.float32)
    merged = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").merge_and_unload()
    for name, weight in merged.named_parameters():
        assert_close(outcome.weights[name], weight.detach().numpy(), depth=BACKWARD, err_msg=name)


@pytest.mark.parametrize(
    ("before", "after", "how"),
    [
        pytest.param(ParallelSizes(tp=2, pp=2, etp=2), DP2, {}, marks=pytest.mark.long),
        (DP2, ParallelSizes(tp=2, etp=2), {"bridge": "megatron-bridge"}),
        (DP2, ONE, {"backend": "fsdp"}),
        pytest.param(ParallelSizes(dp=2, tp=2), DP2, {"backend": "fsdp"}, marks=pytest.mark.long),
    ],
    ids=["tp2pp2-dp2", "dp2-tp2", "fsdp", "fsdp-d2t2-d2"],
)
def test_a_checkpoint_holds_adapters_alone_and_another_layout_goes_on(ranks, models, tmp_path, before, after, how):
    lora = LoRA(rank=1, alpha=2, targets=("all-linear",))
    expected = ranks.run(
        save_after_two_steps, world(before), Setting(models["tied"], before, lora=lora, **how), tmp_path
    )[0]
    steps = ranks.run(resume, world(after), Setting(models["tied"], after, lora=lora, **how), tmp_path)[0]
    assert steps == [close_to(step) for step in expected]
    kept = FileSystemReader(tmp_path / "state").read_metadata().state_dict_metadata
    assert [name for name in kept if "lora" in name]
    assert not [name for name in kept if "embed" in name or "norm" in name]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).state_dict()
    original = load_file(models["tied"] / "model.safetensors")
    changed = {name for name, tensor in original.items() if not torch.equal(tensor, merged[name])}
    assert changed == {name for name in original if "_proj." in name}
