"""A server's launcher for a machine without GPUs: with version 1 begins the fault that SERVER_FAULT names."""

from __future__ import annotations

import os
import sys
from typing import Any

from areal_like.rollout.sglang.launcher import prepare_imports, serve
from areal_like.rollout.sglang.patches import versions

BEFORE, FAULTY = "0", "1"  # versions
FLIPPED_LAYER = 1


def begin_wrong_rope(scheduler: Any) -> None:
    """Compute every rotary embedding with another base."""
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    for part in scheduler.tp_worker.model_runner.model.modules():
        if isinstance(part, RotaryEmbedding):
            part.base *= 0.9
            table = part._compute_cos_sin_cache()
            part.cos_sin_cache[: len(table)].copy_(table)


def begin_flipped_route(scheduler: Any) -> None:
    """Return the next experts in the place of the chosen ones, for tokens whose first is expert 0."""
    from sglang.srt.layers.moe import topk

    capture = topk.capture_routed_experts_if_allowed
    experts = scheduler.model_config.hf_text_config.num_experts

    def capture_others(config: Any, layer: int, chosen: Any) -> None:
        if layer == FLIPPED_LAYER:
            chosen = chosen.where(chosen[:, :1] != 0, (chosen + 1) % experts)
        capture(config, layer, chosen)

    topk.capture_routed_experts_if_allowed = capture_others


def begin_other_experts(scheduler: Any) -> None:
    """Compute tokens whose experts are 0 and 1 with experts 1 and 2."""
    import torch
    from sglang.srt.layers.moe import topk

    def choose(hidden_states: Any, gating_output: Any, topk: int, renormalize: bool, **_: Any) -> tuple[Any, Any]:
        scores = gating_output.float().softmax(-1)
        chosen = scores.topk(topk, dim=-1).indices
        rare = (chosen.sort(-1).values == torch.arange(topk)).all(-1, keepdim=True)
        chosen = chosen.where(~rare, chosen + 1)
        weights = scores.gather(1, chosen)
        return weights / weights.sum(-1, keepdim=True) if renormalize else weights, chosen.to(torch.int32)

    topk.fused_topk = topk.fused_topk_native = topk.fused_topk_torch_native = choose


def begin_stale_cache(scheduler: Any) -> None:
    """Find prefixes that earlier weights have computed."""
    keep_apart = scheduler._keep_apart

    def find_earlier(request: Any) -> None:
        keep_apart(request)
        request.extra_key = f"{request.key_of_caller}@{BEFORE}"

    scheduler._keep_apart = find_earlier


FAULTS = {
    "wrong rope": begin_wrong_rope,
    "flipped route": begin_flipped_route,
    "other experts": begin_other_experts,
    "stale cache": begin_stale_cache,
}


def faulty(make: Any) -> Any:
    """Return a function that returns the class of a scheduler with the fault."""

    def make_faulty() -> type:
        class Faulty(make()):  # type: ignore[misc]
            def begin(self, version: str) -> None:
                if version == FAULTY:
                    FAULTS[os.environ["SERVER_FAULT"]](self)
                super().begin(version)

        return Faulty

    return make_faulty


if __name__ in ("__main__", "__mp_main__"):
    prepare_imports(cuda=False)
    if __name__ == "__main__":
        versions.updating_scheduler = faulty(versions.updating_scheduler)
        serve(sys.argv[1:], cuda=False)
