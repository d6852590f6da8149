"""FP8 rollouts: the rounding is SGLang's, servers hold what was sent, and what cannot work is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from running import CONFIG

from allocation import ParallelSizes, load_model
from allocation.families import TRAINED
from allocation.memory import footprint_of
from allocation.memory.fp8 import BYTES, fp8_layers, fp8_share
from allocation.parameters import layers_together
from allocation.settings import MemorySettings, Workload
from areal_like.backends.sglang.patch import Launch, all_patches
from areal_like.backends.transports.buckets import Buckets
from areal_like.backends.transports.checksum import checksum
from areal_like.capabilities.fp8.checks import check_fp8
from areal_like.capabilities.fp8.quantize import is_quantized, quantize, quantize_weights
from areal_like.capabilities.fp8.served import LOGPROB_DIFF, server_options
from areal_like.capabilities.fp8.sglang import PATCH
from areal_like.capability import Known
from areal_like.core.config.load import load
from areal_like.core.config.schema import InitModelConfig
from areal_like.core.loop.logprob_check import allowed_logprob_diff
from areal_like.demo.init_model import write_init_model
from areal_like.preflight import preflight
from areal_like.preflight.layout import find_plan
from areal_like.preflight.model import find_model

ALL = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
SHAPE = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "tie_word_embeddings": False}
FP8 = [
    "device=cuda",
    "rollout.dtype=fp8",
    "actor.dtype=bfloat16",
    *(f"actor.init_model.{name}={value}" for name, value in SHAPE.items()),
    "actor.init_model.intermediate_size=256",
    "actor.use_decoupled_loss=true",
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_numbers_and_scales_have_the_bits_of_sglangs_own(dtype: torch.dtype) -> None:
    from sglang.srt.layers.quantization.fp8_utils import per_block_cast_to_fp8

    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(512, 384, generator=generator)
    blocks = normal.view(4, 128, 3, 128)
    sizes = 2.0 ** torch.randint(-30, 20, (4, 1, 3, 1), generator=generator)
    edges = torch.tensor([448.0, 224.0, 449.0, 1e-4, 1e-38, 0.0, 447.9, 3e38, 1.0, 0.875, 2.0**-9, 896.0])
    for weight in (
        normal * 0.02,
        (blocks * sizes).view(512, 384),
        (blocks.sign() * edges.view(4, 1, 3, 1)).view(512, 384),  # blocks whose largest number is on an edge
        torch.zeros(128, 128),
        torch.full((128, 256), -(2.0**-20)),
    ):
        ours, theirs = quantize(weight.to(dtype)), per_block_cast_to_fp8(weight.to(dtype))
        for one, other in zip(ours, theirs, strict=True):
            assert one.dtype == other.dtype and one.shape == other.shape
            assert torch.equal(one.view(torch.uint8), other.contiguous().view(torch.uint8))


def test_a_rounded_weight_is_near_and_rounding_it_again_changes_nothing() -> None:
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(2)).bfloat16()
    numbers, scales = quantize(weight)
    again = (numbers.float().view(2, 128, 2, 128) * scales.view(2, 1, 2, 1)).view(256, 256)
    assert torch.equal(again.bfloat16().float(), again)  # powers of two: nothing is lost in bfloat16
    assert ((again - weight.float()).abs() <= weight.float().abs() / 16 + scales.max() * 2**-10).all()
    assert torch.equal(quantize(again)[0].float(), numbers.float())


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("model.layers.3.self_attn.q_proj.weight", {"q_proj"}),
        ("model.layers.3.mlp.down_proj.weight", {"down_proj"}),
        ("model.layers.3.mlp.experts.7.down_proj.weight", {"experts"}),
    ],
)
def test_layers_are_rounded_by_their_kind(name: str, layers: set[str]) -> None:
    assert is_quantized(name, layers)
    assert not is_quantized(name, (ALL | {"experts"}) - layers)
    for other in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.gate.weight", "model.norm.weight"):
        assert not is_quantized(other, ALL | {"experts"})
    assert not is_quantized("model.layers.0.self_attn.q_norm.weight", ALL)
    assert not is_quantized("model.layers.0.self_attn.q_proj.bias", ALL)


@pytest.mark.parametrize(
    ("model", "sizes", "layers"),
    [
        ("qwen3-8b", ParallelSizes(tp=8), ALL),
        ("qwen3-30b-a3b", ParallelSizes(), {"q_proj", "k_proj", "v_proj", "o_proj", "experts"}),
        ("qwen3-30b-a3b", ParallelSizes(tp=4), {"q_proj", "k_proj", "v_proj", "o_proj"}),  # 192 columns of an expert
        ("qwen3-30b-a3b", ParallelSizes(tp=4, ep=4), {"q_proj", "k_proj", "v_proj", "o_proj", "experts"}),
        ("deepseek-v3", ParallelSizes(), set()),
    ],
)
def test_layers_without_whole_blocks_on_a_gpu_stay_as_they_are(
    model: str, sizes: ParallelSizes, layers: set[str]
) -> None:
    from sglang.srt.layers.quantization.utils import is_layer_skipped

    spec = load_model(model)
    assert fp8_layers(spec, sizes) == layers
    named = json.loads(str(server_options(spec, sizes)["json-model-override-args"]))["quantization_config"]
    for layer in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj", "mlp.experts"):
        first = {"qkv_proj": "q_proj", "gate_up_proj": "gate_proj"}.get(last := layer.rpartition(".")[2], last)
        prefix = f"model.layers.0.{layer}"
        assert is_layer_skipped(prefix, named["modules_to_not_convert"]) == (first not in layers)


def test_a_server_needs_memory_for_the_bytes_that_it_gets() -> None:
    spec, sizes = load_model("qwen3-8b"), ParallelSizes()

    def weights(*, fp8: bool) -> int:
        work = Workload(spec, memory=MemorySettings(gpu_bytes=80 << 30, fp8_servers=fp8))
        found = footprint_of("rollout", "sglang", sizes, work)
        return next(item.bytes for item in found.phase("load").items if item.name == "weights")

    layers = layers_together(spec, range(spec.layers)).total
    assert fp8_share(spec, sizes) == pytest.approx(1, abs=1e-3)
    assert weights(fp8=False) - weights(fp8=True) == pytest.approx(layers * (2 - BYTES), rel=1e-3)


@pytest.mark.parametrize("experts", [{}, EXPERTS], ids=["dense", "experts"])
def test_sglangs_model_holds_the_bits_that_were_sent(tmp_path: Path, experts: dict[str, Any]) -> None:
    write_init_model(InitModelConfig(**SHAPE, intermediate_size=256, **experts), tmp_path, seed=0)
    command = [sys.executable, str(Path(__file__).with_name("served_model.py")), str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["different"] == [[], []]
    assert found["plans"] == found["buckets"]  # so the second update made copies only
    in_fp8 = {name for name, kind in found["kinds"].items() if kind == "float8_e4m3fn"}
    assert {name.rpartition("layers.0.")[2] for name in in_fp8 if "layers.0." in name} == {
        *("self_attn.qkv_proj.weight", "self_attn.o_proj.weight"),
        *(
            ("mlp.experts.w13_weight", "mlp.experts.w2_weight")
            if experts
            else ("mlp.gate_up_proj.weight", "mlp.down_proj.weight")
        ),
    }
    assert found["kinds"]["model.embed_tokens.weight"] == "bfloat16"


def test_an_update_has_half_the_bytes_and_checksums_of_the_sent_numbers() -> None:
    class Engine:
        def weights(self):
            named = {"model.embed_tokens.weight": (3, 5), "model.layers.0.mlp.up_proj.weight": (256, 128)}
            tensors = ((name, torch.ones(shape, dtype=torch.bfloat16)) for name, shape in named.items())
            return quantize_weights(tensors, ALL)

    buckets = Buckets(Engine(), 0)  # type: ignore[arg-type]
    buckets.sums = {}
    (layout,) = buckets.layout(1)
    buckets.prepare(0)
    assert [(each.name, each.dtype, each.nbytes) for each in layout] == [
        ("model.embed_tokens.weight", "bfloat16", 30),
        ("model.layers.0.mlp.up_proj.weight", "float8_e4m3fn", 256 * 128),
        ("model.layers.0.mlp.up_proj.weight_scale_inv", "float32", 8),
    ]
    numbers, scales = quantize(torch.ones(256, 128))
    assert buckets.sums[layout[1].name] == checksum(numbers)
    assert buckets.sums[layout[2].name] == checksum(scales)


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        ([], None),
        (["device=cpu"], "RUN-FP8-CPU"),
        (["actor.dtype=float16"], "RUN-FP8-DTYPE"),
        (["weight_update.mode=disk"], "RUN-FP8-MODE"),
        (["actor.behave_imp_weight_mode=disabled"], "RUN-FP8-WEIGHTS"),
        (["actor.use_decoupled_loss=false"], "RUN-FP8-CLIP"),
        (["actor.init_model.hidden_size=64"], "RUN-FP8-LAYERS"),
        (["rollout.dtype=null", "device=cpu"], None),
    ],
)
def test_what_fp8_rollouts_need(overrides: list[str], code: str | None) -> None:
    found = preflight(load(CONFIG, [*FP8, *overrides]))
    assert [each.code for each in found.findings if "-FP8-" in each.code] == ([code] if code else [])


@pytest.mark.parametrize("family", sorted(set().union(*TRAINED.values())))
def test_families_whose_layers_have_other_names_are_refused(family: str) -> None:
    config = load(CONFIG, FP8).config
    spec, *_ = find_model(config)
    assert spec is not None
    models, (plan, _) = {"actor": replace(spec, family=family)}, find_plan(config, spec)
    known = Known(
        config=config, device="cuda", plan=plan, models=models, tokenizer=None, algorithms={}, prompts={}, steps=1
    )
    supported = {"llama", "mistral", "qwen2", "qwen3", "qwen3_moe"}
    assert ["RUN-FP8-FAMILY" in each.code for each in check_fp8(known)] == [True] * (family not in supported)


@pytest.mark.parametrize(("reported", "codes"), [(["9.0", "9.0"], []), (["9.0", "10.0"], ["RUN-FP8-GPU"]), ([], [])])
def test_gpus_for_which_sglang_derives_other_weights_are_refused(
    monkeypatch: pytest.MonkeyPatch, reported: list[str], codes: list[str]
) -> None:
    monkeypatch.setattr("areal_like.capabilities.fp8.checks._compute_capabilities", lambda: reported)
    found = preflight(load(CONFIG, FP8))
    assert [each.code for each in found.findings if "-FP8-" in each.code] == codes


def test_the_log_prob_check_and_the_drift_alarm_allow_a_larger_distance() -> None:
    assert allowed_logprob_diff(load(CONFIG, FP8).config) == LOGPROB_DIFF
    assert allowed_logprob_diff(load(CONFIG, [*FP8, "rollout.max_logprob_diff=0.05"]).config) == 0.05
    assert allowed_logprob_diff(load(CONFIG, [*FP8, "rollout.dtype=null"]).config) == 0.1


@pytest.mark.parametrize(("cuda", "users", "set_to"), [(True, None, "1"), (True, "0", "0"), (False, None, None)])
def test_servers_compile_for_few_numbers_of_tokens_before_they_answer(
    monkeypatch: pytest.MonkeyPatch, cuda: bool, users: str | None, set_to: str | None
) -> None:
    name = "SGLANG_JIT_DEEPGEMM_FAST_WARMUP"
    monkeypatch.setenv(name, users or "")
    if users is None:
        monkeypatch.delenv(name)
    assert PATCH in all_patches()
    PATCH.serve(Launch([], {}, cuda))
    assert os.environ.get(name) == set_to
    monkeypatch.delenv(name, raising=False)
