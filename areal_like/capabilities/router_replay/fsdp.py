"""Replay of the experts that the servers chose (R3, arXiv 2510.11370) in transformers' models.

A hook behind each router replaces the experts that it chose, and weights the others by the router's own scores, so that
the router has its gradient. A layer that gradient checkpointing computes again in the backward pass replays the same
experts: the backward pass of a micro-batch ends before the next one is told.
"""

from typing import Any

import torch
from torch import Tensor

from areal_like.capabilities.router_replay.columns import ROUTES
from areal_like.capabilities.router_replay.decision import FSDP_FAMILIES
from areal_like.trainer.device_batch import DeviceBatch
from areal_like.trainer.hooks import EngineHook
from areal_like.types import Batch


class FSDPRouterReplay(EngineHook):
    """The hooks behind all routers of a model, in the order of its layers; a model of another family has none."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._family = str(getattr(model.config, "model_type", ""))
        routers = [part for part in model.modules() if type(part).__name__.endswith("TopKRouter")]
        self._routers = routers if self._family in FSDP_FAMILIES else []
        self._told: Tensor | None = None
        for number, router in enumerate(self._routers):
            router.register_forward_hook(self._choosing(number))

    def prepare_batch(self, batch: Batch) -> Batch:
        """Return the batch; raise ValueError for routes of another number of layers than have routers that replay."""
        if (routes := batch.fields.get(ROUTES)) is not None and routes.shape[1] != len(self._routers):
            raise ValueError(
                f"the routes are those of {routes.shape[1]} layers, and the model ({self._family}) has "
                f"{len(self._routers)} whose routers replay them"
            )
        return batch

    def prepare_forward(self, model: torch.nn.Module, micro_batch: DeviceBatch, *, trains: bool) -> None:
        """Set the routes `[tokens, layers, chosen]` of the micro-batch."""
        self._told = None
        if (routes := micro_batch.inputs.get(ROUTES)) is not None:
            self._told = routes.long().masked_fill_(routes == torch.iinfo(routes.dtype).max, -1)

    def _choosing(self, number: int) -> Any:
        def choose(router: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor] | None:
            if self._told is None:
                return None
            logits, own_scores, own = output
            told = self._told[:, number]
            chosen = torch.where(told < 0, own, told)
            scores = torch.softmax(logits, -1, dtype=torch.float32).gather(1, chosen)
            if getattr(router, "norm_topk_prob", True):
                scores = scores / scores.sum(-1, keepdim=True)
            return logits, scores.to(own_scores.dtype), chosen

        return choose
