"""Replay of the experts that the servers chose (R3, arXiv 2510.11370) in transformers' models.

A hook behind each router replaces the experts that it chose, and weights the others by the router's own scores, so that
the router has its gradient. A layer that gradient checkpointing computes again in the backward pass replays the same
experts: the backward pass of a micro-batch ends before the next one is told.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from areal_like.backends.fsdp.support import REPLAYS_ROUTES
from areal_like.core.routes import ROUTES
from areal_like.core.types import Batch


class FSDPRouterReplay:
    """The hooks behind all routers of a model, in the order of its layers; a model of another family has none."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._family = str(getattr(model.config, "model_type", ""))
        routers = [part for part in model.modules() if type(part).__name__.endswith("TopKRouter")]
        self._routers = routers if self._family in REPLAYS_ROUTES else []
        self._told: Tensor | None = None
        for number, router in enumerate(self._routers):
            router.register_forward_hook(self._choosing(number))

    def check(self, batch: Batch) -> None:
        """Raise ValueError for routes of another number of layers than the model has with routers that replay."""
        if (routes := batch.fields.get(ROUTES)) is not None and routes.shape[1] != len(self._routers):
            raise ValueError(
                f"the routes are those of {routes.shape[1]} layers, and the model ({self._family}) has "
                f"{len(self._routers)} whose routers replay them"
            )

    def tell(self, inputs: Mapping[str, Tensor]) -> None:
        """Give the routers the routes `[tokens, layers, chosen]` of the micro-batch that comes next."""
        self._told = None
        if (routes := inputs.get(ROUTES)) is not None:
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
