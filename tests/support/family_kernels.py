"""Parts of SGLang 0.5.17 whose code for a CPU needs a missing kernel or chip, in plain PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import psutil

from allocation.model_spec import from_config
from areal_like.backends.sglang.architectures import read_fields
from areal_like.data.processor import SEES_WHOLE_IMAGES

ATTENTION = "torch_native"
STATES = 4  # of delta nets, per sequence: one is computed with, and the others serve prefixes
MEMORY_SHARE = 4  # a quarter of what is free, for these at most
# Of models whose image tokens attend to later ones: no pass may end within an image, and memory that SGLang would set
# aside for a pass of all prompts, which may be more than there is
_WHOLE_IMAGES = ("--enable-multimodal", "--chunked-prefill-size", "-1", "--mem-fraction-static", "0.8")
TOKENS = 512  # of a sequence, on servers that are not told how long it can be
# By the architectures that SGLang serves with other attention only: the name under which ours passes for that
_UNDER_ANOTHER_NAME = dict.fromkeys(("GptOssForCausalLM", "Exaone4ForCausalLM"), "triton")
_WITH_LATENT_KEYS = frozenset({"DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"})
_WITH_DELTA_NETS = frozenset(
    {
        *("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
        *("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
    }
)


def adapt_arguments(arguments: list[str]) -> list[str]:
    """Return a server's arguments with the CPU's attention as SGLang takes it for the model, and with few states."""
    given, fields = dict(pairwise(arguments)), read_fields(arguments)
    architectures = fields.get("architectures") or ()
    if not _WITH_DELTA_NETS.isdisjoint(architectures) and "--max-mamba-cache-size" not in given:
        sequences = int(given["--max-total-tokens"]) // int(given.get("--context-length", TOKENS))
        arguments = [*arguments, "--max-mamba-cache-size", str(_count_states(fields, sequences))]
    if fields.get("model_type") in SEES_WHOLE_IMAGES:
        arguments = [*arguments, *_WHOLE_IMAGES]
    name = next((_UNDER_ANOTHER_NAME[it] for it in architectures if it in _UNDER_ANOTHER_NAME), ATTENTION)
    if name == ATTENTION:
        return arguments
    renamed = [name if argument == ATTENTION else argument for argument in arguments]
    return [*renamed, "--disable-hybrid-swa-memory"]  # our attention finds windows in one cache for all layers


def _count_states(config: Mapping[str, Any], sequences: int) -> int:
    """Return the states of delta nets that a server keeps, for which SGLang would take most of the host's memory."""
    model = from_config(config)
    queries, values = model.linear_key_heads * model.linear_key_dim, model.linear_value_heads * model.linear_value_dim
    convolved = (2 * queries + values) * (model.linear_kernel - 1)
    size = 4 * len(model.linear_layers) * (values * model.linear_key_dim + convolved)  # bytes
    return min(STATES * sequences, psutil.virtual_memory().available // MEMORY_SHARE // size)


def prepare_cpu(config: Any) -> None:
    """Register the attention, and replace kernels for the model of a `config` that need Triton, AMX or bfloat16."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from support.family_attention import FamilyBackend

    for name in (ATTENTION, *_UNDER_ANOTHER_NAME.values()):
        register_attention_backend(name)(FamilyBackend)
    architectures = set(config.architectures)
    _add_shared_experts_without_triton()
    _rotate_without_amx()
    if not architectures.isdisjoint(_WITH_LATENT_KEYS):
        _attend_to_latent_keys()
    if "GemmaForCausalLM" in architectures:
        _activate_as_configured(config.hidden_act)
    if "GptOssForCausalLM" in architectures:
        _keep_sinks()
    if not architectures.isdisjoint(_UNDER_ANOTHER_NAME):
        _place_tokens_without_triton()
    if "MiniMaxM2ForCausalLM" in architectures:
        _normalise_without_triton()
    if not architectures.isdisjoint(_WITH_DELTA_NETS):
        from support import delta_net_kernels

        delta_net_kernels.add_kernels()
        delta_net_kernels.replace_norms()


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


def _activate_as_configured(name: str) -> None:
    """Have gemma approximate GELU by a tanh where its config does: SGLang computes it exactly."""
    from sglang.srt.models import gemma

    activation = gemma.GeluAndMul
    gemma.GeluAndMul = lambda _: activation("none" if name == "gelu" else "tanh")


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
