"""A mixture of experts of transformers whose routers are told the experts, as an unpacked reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from areal_like.capabilities.router_replay.columns import unknown_expert


class ToldModel:
    """A model whose routers take the softmax's largest shares, computed a sequence at a time, in float32."""

    def __init__(self, path: Path) -> None:
        plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **plain)
        self._rows: list[torch.Tensor] | None = None
        gates = [getattr(part, "gate", None) for part in self.model.modules()]
        for number, gate in enumerate(gate for gate in gates if hasattr(gate, "top_k")):
            gate.forward = self._choosing(gate, number)

    def log_probs(self, tokens: NDArray[np.int32], routes: Any, temperature: float = 1.0) -> torch.Tensor:
        """Log-probs of all tokens but the first; `routes` `[tokens, layers, chosen]`, None: the model's own choice."""
        self._rows = None
        if routes is not None:
            rows = np.where(routes == unknown_expert(routes.dtype), -1, routes.astype(np.int64))
            self._rows = list(torch.from_numpy(rows).unbind(1))
        ids = torch.from_numpy(tokens).long()
        scores = torch.log_softmax(self.model(ids[None]).logits[0] / temperature, -1)
        return scores[:-1].gather(1, ids[1:, None])[:, 0]

    def _choosing(self, gate: Any, number: int) -> Any:
        def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            logits = torch.nn.functional.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
            probs = torch.softmax(logits, -1, dtype=torch.float)
            chosen = probs.topk(gate.top_k, -1).indices
            if self._rows is not None:
                told = self._rows[number]
                chosen = torch.where(told < 0, chosen, told)
            weights = probs.gather(1, chosen)
            if getattr(gate, "norm_topk_prob", True):  # mixtral always does
                weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights, chosen

        return forward
