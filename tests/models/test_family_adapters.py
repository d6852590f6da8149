"""Adapters of every family train as merged weights do in transformers, on both backends."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from adapter_jobs import FIRST, GRADIENTS, Trained, log_probs_and_gradients, merge, two_steps
from safetensors.torch import load_file, save_file
from test_fsdp_families import alone
from tiny_models import (
    FAMILIES,
    FSDP_DENSE,
    FSDP_EXPERTS,
    FSDP_OTHERS,
    MBRIDGE,
    TWO_RANKS,
    VARIANTS,
    Variant,
    config_of,
)
from tolerance import SEQUENCE, assert_close, assert_gradient, close_to, depth_of, rounding
from trainer_jobs import Setting, resume, save_after_two_steps
from transformers import AutoModelForCausalLM

from allocation import ParallelSizes
from allocation.adapters import WITH_EXPERTS, adaptable_layers, adapter_parameters, merged_parameters
from allocation.families import FAMILIES as KNOWN
from allocation.families import TRAINED
from allocation.model_spec import from_config, load_model
from areal_like.backends.fsdp.lora import attach
from areal_like.backends.training.lora import _peft_config
from areal_like.core.config.schema import ALL_LINEAR, OptimizerConfig
from areal_like.core.trainer.engine import LoRA

pytestmark = pytest.mark.covers("LoRA")

SCALE = 2.0
LENGTHS = (20, 17, 9, 3)  # beyond the tiny models' windows
LONG = pytest.mark.long
EXPERTS_SOON = ("mixtral", "deepseek_v3")
SOON = ("gemma2", "deepseek_v3", "qwen3_next")
FSDP = (*FSDP_DENSE, *FSDP_EXPERTS, *FSDP_OTHERS)
MEGATRON = [name for name in FAMILIES if FAMILIES[name][1]]
LAYOUTS = [
    ("deepseek_v3", TWO_RANKS[0]),
    *(pytest.param(name, TWO_RANKS[0], marks=LONG) for name in ("qwen3_5_text", "qwen3_next")),
    *(
        pytest.param(name, sizes, marks=LONG)
        for name in ("deepseek_v3", "qwen3_next", "qwen3_5_moe_text")
        for sizes in TWO_RANKS[1:]
    ),
]


def setting(path: Path, backend: str, sizes: ParallelSizes | None = None) -> Setting:
    lora = LoRA(rank=4, alpha=4 * SCALE, targets=tuple(adaptable_layers(load_model(str(path)))))
    bridge = FAMILIES[load_model(str(path)).family][1][-1:] or MBRIDGE
    made = Setting(path, sizes or ParallelSizes(), bridge=bridge[0], backend=backend)
    return replace(made, lora=lora, optimizer=GRADIENTS)


def check(path: Path, of_ranks: list[Trained]) -> None:
    """Compare with transformers: log-probs, exported weights, and the gradients of both matrices of each adapter."""
    first, model = of_ranks[0], alone(path)
    parameters = merge(model, first.before, SCALE)
    expected, gradients = log_probs_and_gradients(model, parameters, LENGTHS)
    for rank in of_ranks:
        if rank.log_probs is not None:
            assert_close(rank.log_probs[1], expected[rank.log_probs[0]], depth=SEQUENCE)
    assert first.after.keys() == gradients.keys()
    for name, gradient in gradients.items():
        step = (first.before[name] - first.after[name]).numpy()
        assert_gradient(step, gradient, depth_of(path.name), is_update=True, err_msg=name)
    original = load_file(path / "model.safetensors")
    for name, a in first.before.items():
        if ".lora_A." in name:
            b = first.before[name.replace("lora_A", "lora_B")]
            assert b.abs().max() > 0
            original[name.removeprefix("base_model.model.").replace("lora_A.weight", "weight")] += SCALE * b @ a
    assert first.weights.keys() == original.keys()
    for name, weight in original.items():
        assert_close(first.weights[name], weight.numpy(), err_msg=name)


@pytest.mark.parametrize("name", [name if name in SOON else pytest.param(name, marks=LONG) for name in FSDP])
def test_adapters_under_fsdp_train_as_merged_weights(ranks, tiny, name):
    check(tiny(name), ranks.run(two_steps, 1, setting(tiny(name), "fsdp"), LENGTHS, FIRST))


def with_experts(path: Path, d: int = 1, targets: tuple[str, ...] = (ALL_LINEAR,)) -> Setting:
    lora = LoRA(rank=4, alpha=4 * SCALE, targets=targets)
    return replace(setting(path, "fsdp", ParallelSizes(dp=d, edp=d)), lora=lora)


@pytest.mark.parametrize(
    "name", [name if name in EXPERTS_SOON else pytest.param(name, marks=LONG) for name in WITH_EXPERTS]
)
def test_adapters_of_experts_train_as_merged_weights(ranks, tiny, name):
    """Each expert has adapters of its own, under the names of a checkpoint's tensors; routers have none."""
    of_ranks = ranks.run(two_steps, 1, with_experts(tiny(name)), LENGTHS, FIRST)
    check(tiny(name), of_ranks)
    adapted = {name.split(".lora_")[0] for name in of_ranks[0].before}
    assert adapted == {f"base_model.model.{layer}" for layer in matrices(tiny(name))}


@pytest.mark.parametrize("targets", [("up_proj",), ("down_proj", "q_proj")], ids=str)
def test_experts_may_have_adapters_in_some_of_their_matrices(ranks, tiny, targets):
    check(tiny("qwen3_moe"), ranks.run(two_steps, 1, with_experts(tiny("qwen3_moe"), targets=targets), LENGTHS, FIRST))


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_adapters_of_experts_on_two_ranks_train_as_merged_weights(ranks, tiny, name):
    made = replace(with_experts(tiny(name), 2), fsdp={"gradient_checkpointing": True})
    check(tiny(name), ranks.run(two_steps, 2, made, LENGTHS, FIRST))


@pytest.mark.long
def test_adapters_of_experts_resume(ranks, tiny, tmp_path):
    """In the same layout exactly, in another one up to rounding."""
    two, one = (replace(with_experts(tiny("mixtral"), d), optimizer=OptimizerConfig(lr=1e-2, eps=1e-2)) for d in (2, 1))
    expected = ranks.run(save_after_two_steps, 2, two, tmp_path)[0]
    assert ranks.run(resume, 2, two, tmp_path)[0] == expected
    steps = ranks.run(resume, 1, one, tmp_path)[0]
    assert steps == [close_to(step) for step in expected]


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "olmoe", "minimax_m2"])
def test_peft_loads_adapters_of_experts(tiny, tmp_path, name):
    """It converts the names of checkpoints to those of transformers' packed tensors."""
    peft = pytest.importorskip("peft")
    lora = LoRA(rank=4, alpha=4 * SCALE, targets=(ALL_LINEAR,))
    model, parameters = alone(tiny(name)), random_adapters(tiny(name), lora)
    save_file(parameters, tmp_path / "adapter_model.safetensors")
    layers = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in parameters})
    (tmp_path / "adapter_config.json").write_text(json.dumps(_peft_config(lora, str(tiny(name)), layers)))
    loaded = peft.PeftModel.from_pretrained(alone(tiny(name)), tmp_path)
    merge(model, parameters, SCALE)
    tokens = torch.arange(1, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, atol=rounding(10.0), rtol=0)


def random_adapters(path: Path, lora: LoRA) -> dict[str, torch.Tensor]:
    """Return adapters of all matrices, by their names in PEFT's files."""
    torch.manual_seed(0)
    found = {}
    for layer, (outputs, inputs) in matrices(path).items():
        found[f"base_model.model.{layer}.lora_A.weight"] = torch.randn(lora.rank, inputs) / 10
        found[f"base_model.model.{layer}.lora_B.weight"] = torch.randn(outputs, lora.rank) / 10
    return found


def matrices(path: Path) -> dict[str, torch.Size]:
    """Return the shapes of the matrices of attention and feed-forward layers, by the layers' names in a checkpoint."""
    return {
        name.removesuffix(".weight"): weight.shape
        for name, weight in load_file(path / "model.safetensors").items()
        if weight.ndim == 2 and ("_proj" in name or ".experts." in name)
    }


@pytest.mark.parametrize("name", [name if name in SOON else pytest.param(name, marks=LONG) for name in MEGATRON])
def test_adapters_on_megatron_train_as_merged_weights(ranks, tiny, name):
    check(tiny(name), ranks.run(two_steps, 1, setting(tiny(name), "megatron"), LENGTHS, FIRST))


@pytest.mark.parametrize(("name", "sizes"), LAYOUTS, ids=str)
def test_adapters_in_megatron_layouts_train_as_merged_weights(ranks, tiny, name, sizes):
    world = sizes.dp * sizes.tp * sizes.pp * sizes.cp
    check(tiny(name), ranks.run(two_steps, world, setting(tiny(name), "megatron", sizes), LENGTHS, FIRST))


@pytest.mark.parametrize("name", ["qwen3_5_text", pytest.param("deepseek_v3", marks=LONG)])
def test_one_rank_resumes_what_two_ranks_saved(ranks, tiny, tmp_path, name):
    split = replace(setting(tiny(name), "megatron", TWO_RANKS[0]), optimizer=OptimizerConfig(lr=1e-2, eps=1e-2))
    expected = ranks.run(save_after_two_steps, 2, split, tmp_path)[0]
    steps = ranks.run(resume, 1, replace(split, sizes=ParallelSizes()), tmp_path)[0]
    assert steps == [close_to(step) for step in expected]


def test_every_family_is_tested():
    tested = {VARIANTS[name].family for name in FSDP}, {VARIANTS[name].family for name in MEGATRON}
    assert tested == tuple({*TRAINED[backend]} for backend in ("fsdp", "megatron"))


@pytest.mark.parametrize("family", [name for name in FAMILIES if name in TRAINED["fsdp"]])
def test_the_layers_are_the_linear_layers_of_transformers(family):
    """Names and sizes; with experts, those of attention and delta nets."""
    config = config_of(Variant(family))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    spec, expected = from_config(config.to_dict()), Counter()
    for name, layer in model.named_modules():
        attention = "attn" in name
        if isinstance(layer, torch.nn.Linear) and ".layers." in name and (attention or not spec.experts):
            expected[name.rpartition(".")[2]] += layer.in_features + layer.out_features
    assert adaptable_layers(spec) == expected


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_parameters_of_adapters_of_experts_are_those_that_are_trained(family):
    config = config_of(Variant(family))
    model, lora = AutoModelForCausalLM.from_config(config), LoRA(rank=3, alpha=6, targets=(ALL_LINEAR,))
    attach(model, lora, seed=1)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    spec = from_config(config.to_dict())
    assert adapter_parameters(spec, lora.rank, lambda name: True) == trained
    packed = [p for name, p in model.named_parameters() if "experts" in name and name.endswith("_proj")]
    layers = spec.layers - len(spec.dense_layers)
    assert merged_parameters(spec, lambda name: True) * layers == sum(map(torch.numel, packed))


@pytest.mark.parametrize(
    "targets", [(ALL_LINEAR,), ("up_proj", "q_proj"), ("down_proj", "q_proj"), ("q_proj",)], ids=str
)
def test_merged_experts_are_what_layers_keep_for_the_backward_pass(targets):
    """The first layer too, if something before its experts has a gradient."""
    config = config_of(Variant("qwen3_moe"))
    model, kept = AutoModelForCausalLM.from_config(config), {}
    lora = LoRA(rank=3, alpha=6, targets=targets)
    attach(model, lora, seed=1)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(torch.arange(1, 6)[None], use_cache=False).logits
    assert logits.requires_grad
    sizes = [tensor.untyped_storage().nbytes() // 4 for place, tensor in kept.items() if place not in own]
    smallest = config.num_experts * config.hidden_size * config.moe_intermediate_size
    merged = merged_parameters(from_config(config.to_dict()), lora.adapts)
    assert sum(size for size in sizes if size >= smallest) == merged * config.num_hidden_layers


def test_other_families_with_experts_have_them_in_another_form():
    others = {name for name in TRAINED["fsdp"] if KNOWN[name].experts} - {*WITH_EXPERTS}
    assert others == {"gpt_oss"}
