"""A server whose experts have adapters on a CPU: SGLang has only GPU kernels that add them, so PyTorch does it here."""

import sys
from typing import Any

import torch
from support.family_launcher import serve_family

from areal_like.backends.sglang.launcher import prepare_imports


def compute_experts(experts: Any, dispatched: Any, info: Any) -> torch.Tensor:
    """Return the sum of a token's experts, with the adapters in the buffers that SGLang's kernels read."""
    hidden, topk = dispatched.hidden_states, dispatched.topk_output
    gate_up, down = experts.base_layer.w13_weight, experts.base_layer.w2_weight
    rank, total = info.max_lora_rank, torch.zeros_like(hidden)
    for place, (x, slot) in enumerate(zip(hidden, info.token_lora_mapping.tolist(), strict=True)):
        for weight, expert in zip(topk.topk_weights[place], topk.topk_ids[place].tolist(), strict=True):
            a, b = info.gate_up_lora_a_weights[slot, expert], info.gate_up_lora_b_weights[slot, expert]
            deltas = [half_b @ (half_a @ x) for half_a, half_b in zip(a.split(rank), b.chunk(2), strict=True)]
            gate, up = (gate_up[expert] @ x + torch.cat(deltas)).chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            a, b = info.down_lora_a_weights[slot, expert], info.down_lora_b_weights[slot, expert]
            total[place] += weight * (down[expert] @ inner + b @ (a @ inner))
    return total  # models multiply it themselves on a CPU


def add_adapters_by_pytorch() -> None:
    """Have SGLang's layer of experts with adapters compute without Triton."""
    from sglang.srt.lora.layers import FusedMoEWithLoRA

    def forward(self: Any, hidden: torch.Tensor, topk: Any, info: Any, **_: Any) -> torch.Tensor:
        return compute_experts(self, self.base_layer.dispatcher.dispatch(hidden_states=hidden, topk_output=topk), info)

    FusedMoEWithLoRA._forward_with_lora = forward


def correct_latent_attention_by_pytorch() -> None:
    """Have adapters of the matrix that expands latent keys and values added without Triton."""
    from sglang.srt.lora import deepseek_mla_correction as correction

    def rows(buffer: torch.Tensor, info: Any) -> torch.Tensor:
        return buffer[info.moe_lora_info.token_lora_mapping.long()]

    def scales(info: Any) -> torch.Tensor:
        return info.scalings[info.moe_lora_info.token_lora_mapping.long()][:, None, None]

    def by_head(b: torch.Tensor, info: Any, heads: int) -> torch.Tensor:
        return rows(b, info).unflatten(1, (heads, -1))

    def step_a_q(q: torch.Tensor, b: torch.Tensor, info: Any, _: int) -> torch.Tensor:
        return torch.einsum("shi,shir->shr", q, by_head(b, info, q.shape[1])[:, :, : q.shape[2]])

    def step_b_q(inner: torch.Tensor, a: torch.Tensor, info: Any, out: torch.Tensor) -> torch.Tensor:
        return out + scales(info) * torch.einsum("shr,srk->shk", inner, rows(a, info))

    def step_a_v(attended: torch.Tensor, a: torch.Tensor, info: Any) -> torch.Tensor:
        return torch.einsum("shk,srk->shr", attended, rows(a, info))

    def step_b_v(inner: torch.Tensor, b: torch.Tensor, info: Any, out: torch.Tensor, keys: int, _: int) -> None:
        out += scales(info) * torch.einsum("shr,shvr->shv", inner, by_head(b, info, out.shape[1])[:, :, keys:])

    for step in (step_a_q, step_b_q, step_a_v, step_b_v):
        setattr(correction, f"{step.__name__}_fwd", step)


if __name__ == "__main__":
    prepare_imports(cuda=False)
    add_adapters_by_pytorch()
    correct_latent_attention_by_pytorch()
    serve_family(sys.argv[1:])
