"""Parts of SGLang 0.5.17 whose code for a CPU needs a kernel or a chip that is not there, in plain PyTorch."""

from __future__ import annotations

import json
import sys
from collections.abc import Set
from pathlib import Path
from typing import Any

ATTENTION = "torch_native"
# By the architectures that SGLang serves with other attention only: the name under which ours passes for that
_UNDER_ANOTHER_NAME = {"GptOssForCausalLM": "triton"}
_WITH_LATENT_KEYS = frozenset({"DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"})


def name_attention(arguments: list[str]) -> list[str]:
    """Return a server's arguments with the name of the CPU's attention that SGLang takes for the model."""
    config = Path(arguments[arguments.index("--model-path") + 1], "config.json")
    architectures = json.loads(config.read_text()).get("architectures") or () if config.is_file() else ()
    name = next((_UNDER_ANOTHER_NAME[it] for it in architectures if it in _UNDER_ANOTHER_NAME), ATTENTION)
    if name == ATTENTION:
        return arguments
    renamed = [name if argument == ATTENTION else argument for argument in arguments]
    return [*renamed, "--disable-hybrid-swa-memory"]  # our attention finds windows in one cache for all layers


def register_attention() -> None:
    """Have the CPU's attention under each of its names; forked schedulers look it up."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from areal_like.rollout.sglang.cpu_attention import BatchedTorchNativeBackend

    for name in (ATTENTION, *_UNDER_ANOTHER_NAME.values()):
        register_attention_backend(name)(BatchedTorchNativeBackend)


def replace_kernels(architectures: Set[str]) -> None:
    """Replace what SGLang's models call on a CPU too and what needs Triton, AMX or bfloat16."""
    _add_shared_experts_without_triton()
    _rotate_without_amx()
    if not architectures.isdisjoint(_WITH_LATENT_KEYS):
        _attend_to_latent_keys()
    if "GptOssForCausalLM" in architectures:
        _keep_sinks()
        _place_tokens_without_triton()
    if "MiniMaxM2ForCausalLM" in architectures:
        _normalise_without_triton()


def _add_shared_experts_without_triton() -> None:
    """Have qwen2_moe weight its shared expert by PyTorch: SGLang does it by a Triton kernel on a CPU too."""
    import torch
    from sglang.kernels.ops.elementwise import elementwise

    def add(hidden: torch.Tensor, weight: torch.Tensor, shared: torch.Tensor, total: torch.Tensor) -> None:
        gate = torch.sigmoid((hidden.float() * weight.float()).sum(-1, keepdim=True))
        total.copy_(total.float() + gate * shared.float())

    named = "fused_gate_sigmoid_mul_add"
    for module in (elementwise, sys.modules.get("sglang.srt.models.qwen2_moe")):
        if hasattr(module, named):
            setattr(module, named, add)


def _rotate_without_amx() -> None:
    """Have deepseek's models rotate by any rope: SGLang asserts YaRN, for which alone it has a kernel on a CPU."""
    from sglang.srt.layers.rotary_embedding import factory

    of_yarn = factory.get_rope_cpu

    def get_rope_cpu(*arguments: Any) -> Any:
        scaling = arguments[5]
        return of_yarn(*arguments) if scaling is not None else factory.get_rope(*arguments[:8])

    factory.get_rope_cpu = get_rope_cpu


def _attend_to_latent_keys() -> None:
    """Have deepseek's models attend to the latent keys in the cache, where SGLang's prefill passes others beside it."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry, AttnForwardMethod

    AttentionBackendRegistry.register(ATTENTION, lambda attention, batch: AttnForwardMethod.MLA)


def _keep_sinks() -> None:
    """Keep gpt_oss's sinks in float32: SGLang rounds them to bfloat16 for most kinds of attention."""
    import torch
    from sglang.srt.models import gpt_oss

    build = gpt_oss.GptOssAttention.__init__

    def build_with_exact_sinks(self: Any, *arguments: Any, **named: Any) -> None:
        build(self, *arguments, **named)
        self.sinks = torch.nn.Parameter(self.sinks.float(), requires_grad=False)

    gpt_oss.GptOssAttention.__init__ = build_with_exact_sinks


def _place_tokens_without_triton() -> None:
    """Have the places of tokens written by PyTorch, though the attention passes for Triton's."""
    from sglang.srt.mem_cache import allocation
    from sglang.srt.model_executor import forward_batch_info

    for module in (allocation, forward_batch_info):
        module.support_triton = lambda backend: False


def _normalise_without_triton() -> None:
    """Have MiniMax-M2 normalise queries and keys by its own norms in PyTorch."""
    from sglang.srt.models import minimax_m2

    minimax_m2.MiniMaxM2QKRMSNorm._forward_naive = lambda self, q, k: (self._q_norm(q), self._k_norm(k))
