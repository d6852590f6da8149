"""A server's launcher for a machine without GPUs: noise decides which experts its routers choose, not their weights.

The noise is a function of the token's hidden state: one that is computed twice has the same experts again. SGLang drops
what it computed of a prompt's last token where another sample of the prompt was earlier, and then returns its routes.
"""

from __future__ import annotations

import sys
from typing import Any

from areal_like.backends.sglang.launcher import prepare_imports, serve

NOISE = 0.3  # beside scores that add up to 1


def choose_noisily(hidden_states: Any, gating_output: Any, topk: int, renormalize: bool, **_: Any) -> tuple[Any, Any]:
    """Choose experts as `fused_topk_torch_native` does, but by scores with noise."""
    import torch

    scores = gating_output.float().softmax(-1)
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(hidden_states.shape[1], scores.shape[1], generator=generator)
    noise = torch.sin(hidden_states.float() @ directions)
    chosen = (scores + NOISE * noise).topk(topk, dim=-1).indices
    weights = scores.gather(1, chosen)
    return weights / weights.sum(-1, keepdim=True) if renormalize else weights, chosen.to(torch.int32)


if __name__ in ("__main__", "__mp_main__"):
    prepare_imports(cuda=False)
    if __name__ == "__main__":
        from sglang.srt.layers.moe import topk

        topk.fused_topk = topk.fused_topk_native = topk.fused_topk_torch_native = choose_noisily
        serve(sys.argv[1:], cuda=False)
