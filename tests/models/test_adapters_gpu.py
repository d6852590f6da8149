"""Adapters on a GPU: servers add them to every layer, experts too, and FSDP trains those of experts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import batched
from pathlib import Path

import numpy as np
import pytest
import torch
from adapter_files import write_adapter
from adapter_jobs import FIRST, GRADIENTS, log_probs_and_gradients, merge, peak_of_a_step, two_steps
from test_servers_gpu import AT_ONCE, BOUNDS, compare, write_model
from tiny_models import Variant, hugging_face_log_probs, write_tiny
from tiny_servers import Post, distance, score, served
from trainer_jobs import GPU, Setting, make_batch
from transformers import AutoModelForCausalLM

from allocation.adapters import merged_parameters
from allocation.model_spec import load_model
from areal_like.backends.sglang import COMMAND
from areal_like.core.config.schema import ALL_LINEAR
from areal_like.core.trainer.engine import LoRA
from areal_like.core.transfer import ONLY_ADAPTER as ONLY
from areal_like.preflight.exclusions import SERVED, SERVED_EXPERTS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
RANK, ALPHA = 8, 16.0
SETTINGS = (
    "actor.use_lora=true",
    f"actor.lora_rank={RANK}",
    f"actor.lora_alpha={ALPHA:g}",
    "actor.target_modules=[all-linear]",
    "weight_update={adapters: true, mode: disk}",
)
WITH_GRAPHS = ("sglang.extra_args.disable_cuda_graph=false", "sglang.extra_args.cuda_graph_max_bs_decode=4")
WAVES = list(batched((*SERVED, *SERVED_EXPERTS), AT_ONCE))
# In a small model the few tokens that rounding sends to other experts decide the mean, and the others the median
WITH_FLIPS = {np.nanmedian: 2, np.nanmean: 4}
LENGTHS = (48, 17, 9, 30, 3, 12, 8, 21)


def check_server(family: str, model: Path, post: Post, adapters: Sequence[tuple[Path, Path]]) -> Iterator[str]:
    """Yield what is wrong with a server's log-probs before the first adapter, with it, and after an update of it."""
    bounds = WITH_FLIPS if family in SERVED_EXPERTS else BOUNDS
    yield compare(family, model, post, bounds)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    for version, (adapter, merged) in enumerate(adapters):
        command = {"name": "adapters", "text": json.dumps({ONLY: str(adapter)})}
        answer = post(COMMAND, command | {"weight_version": str(version)})
        if not answer["success"]:
            yield f"{family}: {answer['message']}"
        yield compare(family, merged, post, bounds)
        if (apart := np.mean(distance(base, score(post)))) < 1:
            yield f"{family}: {adapter.name} changes log-probs by only {apart:.3g} nats"


def check_servers(folder: Path, families: Sequence[str], *overrides: str) -> list[str]:
    """Return what is wrong with servers of these families, which run side by side."""
    wrong, made = list[str](), {}
    for family in families:
        write_model(family, folder / family)
        adapters = folder / f"{family}-adapters"
        made[family] = [
            write_adapter(folder / family, adapters, seed, rank=RANK, alpha=ALPHA, size=0.1) for seed in (1, 2)
        ]
    with ExitStack() as stack, ThreadPoolExecutor(len(families)) as threads:
        starting = [
            threads.submit(stack.enter_context, served(folder / each, "cuda", *SETTINGS, *overrides))
            for each in families
        ]
        for family, server in zip(families, starting, strict=True):
            try:
                wrong += check_server(family, folder / family, server.result(), made[family])
            except (pytest.fail.Exception, OSError) as error:  # the others are compared all the same
                log = (folder / family / "server.log").read_text(errors="replace")
                wrong.append(f"{family}: {error}\n{log[-3000:]}")
    return [told for told in wrong if told]


@pytest.mark.parametrize("families", WAVES, ids="-".join)
def test_servers_add_adapters_as_merged_weights(tmp_path: Path, families: tuple[str, ...]) -> None:
    assert not (wrong := check_servers(tmp_path, families)), "\n".join(wrong)


def test_servers_add_adapters_in_cuda_graphs(tmp_path: Path) -> None:
    wrong = check_servers(tmp_path, ("qwen3", "qwen3_moe", "deepseek_v3"), *WITH_GRAPHS)
    assert not wrong, "\n".join(wrong)


def trained(model: Path, targets: tuple[str, ...] = (ALL_LINEAR,), **fsdp: bool) -> Setting:
    lora = LoRA(rank=RANK, alpha=ALPHA, targets=targets)
    return Setting(model, machine=GPU, backend="fsdp", lora=lora, optimizer=GRADIENTS, fsdp=fsdp)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3", "qwen3_next"])
def test_adapters_of_experts_train_as_merged_weights_in_float32(ranks, tmp_path, family):
    """Log-probs, and the gradients of both matrices of each adapter; those of float32 are computed on the CPU."""
    write_model(family, tmp_path)
    (found,) = ranks.run(two_steps, 1, trained(tmp_path), LENGTHS, FIRST)
    exact, rounded = (
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, attn_implementation="eager").eval()
        for dtype in (torch.float32, torch.bfloat16)
    )
    expected, gradients = log_probs_and_gradients(exact, merge(exact, found.before, ALPHA / RANK), LENGTHS)
    merge(rounded, {name: tensor.bfloat16() for name, tensor in found.before.items()}, ALPHA / RANK)
    of_rounding = np.nanmean(np.abs(hugging_face_log_probs(rounded, make_batch(lengths=LENGTHS)) - expected))
    places, values = found.log_probs
    apart, similar = np.nanmean(np.abs(values - expected[places])), {}
    for kind in ("self_attn", ".experts."):
        pairs = [(found.before[name] - found.after[name], each) for name, each in gradients.items() if kind in name]
        steps, others = (torch.cat([tensor.flatten() for tensor in side]) for side in zip(*pairs, strict=True))
        similar[kind] = float(steps @ others / steps.norm() / others.norm())
    print(f"{family}: {apart:.3g} nats from merged, transformers {of_rounding:.3g}; cosines of gradients {similar}")
    assert found.after.keys() == gradients.keys()
    assert apart < 2 * of_rounding
    assert min(similar.values()) > 0.95


def test_merged_experts_take_the_memory_that_is_counted(ranks, tmp_path):
    """Of all layers at once; with gradient checkpointing of one layer. Adapters of attention alone need none."""
    sizes = {"num_experts": 64, "hidden_size": 512, "moe_intermediate_size": 512, "num_hidden_layers": 6}
    others = {"head_dim": 64, "initializer_range": 0.02}  # with larger weights, rounding would move log-probs by 1 nat
    write_tiny(Variant("qwen3_moe", sizes | others), tmp_path).to(torch.bfloat16).save_pretrained(tmp_path)
    layer = 2 * merged_parameters(load_model(str(tmp_path)), lambda name: True)
    adapters = 4 * RANK * 64 * (512 + 512) * 3 * sizes["num_hidden_layers"]  # gradients in float32
    attention = trained(tmp_path, ("q_proj", "v_proj"))
    plain, all_layers, one_layer = (
        ranks.run(peak_of_a_step, 1, each, LENGTHS)[0]
        for each in (attention, trained(tmp_path), trained(tmp_path, gradient_checkpointing=True))
    )
    for name, found, layers in (("all layers", all_layers, 7), ("one layer", one_layer, 2)):
        counted = layers * layer + adapters
        print(
            f"{name}: {(found - plain) >> 20} MiB more than attention, counted {counted >> 20}, a layer {layer >> 20}"
        )
    assert all_layers - plain < 1.1 * (7 * layer + adapters)
    assert one_layer - plain < 1.1 * (2 * layer + adapters)
    assert all_layers - one_layer > 3 * layer
