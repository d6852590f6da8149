"""Replay of the servers' experts (R3, arXiv 2510.11370) in a model's routers.

The weights of these experts come from the trainer's own scores, so that the router has its gradient. Megatron-core
0.19.2 has `moe/router_replay.py`, but its class keeps one list of instances, which two models in a process would share.
Here each router has its own stand-in for Megatron's object, which `topk_routing_with_score_function` calls.

A recomputed layer is called twice for a micro-batch: without gradients, and in the backward pass. In every schedule the
recomputations have the order of the forward passes, so the stand-in keeps the routes until then.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from areal_like.capabilities.router_replay.columns import ROUTES
from areal_like.trainer.device_batch import DeviceBatch
from areal_like.trainer.hooks import EngineHook
from areal_like.types import Batch

UNKNOWN = -1  # on the device


class _Replay:
    """Sets one router's experts `[tokens, chosen]`; UNKNOWN lets the router choose. `layer` counts from 0."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self._told: Tensor | None = None
        self._trains = False
        self._recomputed: deque[Tensor | None] = deque()

    def tell(self, experts: Tensor | None, *, trains: bool) -> None:
        """Set the experts of the micro-batch whose forward pass is next; `trains`: a backward pass follows."""
        self._told, self._trains = experts, trains

    def forget(self) -> int:
        """Drop all routes; return the number of forward passes whose expected recomputation did not happen."""
        left, self._told = len(self._recomputed), None
        self._recomputed.clear()
        return left

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return scores and numbers of the experts; Megatron calls this instead of its own selection."""
        own_scores, own = default_compute_topk(scores, topk, num_groups, group_topk)
        told = self._next()
        if told is None:
            return own_scores, own
        chosen = torch.where(told == UNKNOWN, own, told)
        return scores.gather(1, chosen), chosen

    def _next(self) -> Tensor | None:
        if torch.is_grad_enabled() and self._recomputed:
            return self._recomputed.popleft()
        if self._trains and not torch.is_grad_enabled():
            self._recomputed.append(self._told)
        return self._told


class MegatronRouterReplay(EngineHook):
    """The stand-ins of all routers of a rank's models, from the first batch with routes on."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self._models = models
        self._of_models: dict[int, list[_Replay]] = {}

    def prepare_batch(self, batch: Batch) -> Batch:
        """Return the batch; raise ValueError for routers that cannot replay, and for routes of other layers."""
        if (routes := batch.fields.get(ROUTES)) is None:
            return batch
        if not self._of_models:
            self._replace_choices()
        if self._layers and routes.shape[1] != len(self._layers):
            raise ValueError(
                f"the routes are those of {routes.shape[1]} layers, and the model has {len(self._layers)} with experts"
            )
        return batch

    def _replace_choices(self) -> None:
        routers = [router for model in self._models for router in _routers(model)]
        self._is_cut = bool(routers) and routers[0].config.sequence_parallel
        if any(router.config.moe_router_fusion for router in routers):
            raise ValueError("moe_router_fusion chooses experts in a kernel of its own, which cannot replay them")
        self._layers = layers_with_experts(routers[0].config) if routers else []
        self._of_models = {id(model): [_stand_in(router) for router in _routers(model)] for model in self._models}

    def prepare_forward(self, model: torch.nn.Module, micro_batch: DeviceBatch, *, trains: bool) -> None:
        """Set the routes `[tokens, layers, chosen]` of the micro-batch in a model's routers."""
        routes, replays = micro_batch.inputs.get(ROUTES), self._of_models.get(id(model), [])
        if routes is None or not replays:
            for replay in replays:
                replay.tell(None, trains=trains)
            return
        if self._is_cut:
            share = len(routes) // parallel_state.get_tensor_model_parallel_world_size()
            first = parallel_state.get_tensor_model_parallel_rank() * share
            routes = routes[first : first + share]
        experts = torch.stack([routes[:, self._layers.index(replay.layer)] for replay in replays]).long()
        experts = experts.masked_fill(experts == torch.iinfo(routes.dtype).max, UNKNOWN)
        for replay, of_layer in zip(replays, experts, strict=True):
            replay.tell(of_layer, trains=trains)

    @contextmanager
    def during_pass(self) -> Iterator[None]:
        """Drop the routes of a failed pass before, and this one's after; raise RuntimeError if any were not used."""
        self._forget()
        yield
        if left := self._forget():
            raise RuntimeError(
                f"{left} forward passes of layers with experts were kept for a recomputation that never came"
            )

    def _forget(self) -> int:
        """Drop the routers' routes; return how many were kept for a recomputation that did not happen."""
        return sum(replay.forget() for replays in self._of_models.values() for replay in replays)


def layers_with_experts(config: Any) -> list[int]:
    """Return the numbers of the layers with experts, from 0, by Megatron's `moe_layer_freq`."""
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return list(range(0, config.num_layers, frequency))
    return [layer for layer, has_experts in enumerate(frequency) if has_experts]


def _routers(model: torch.nn.Module) -> list[TopKRouter]:
    return [part for part in model.modules() if isinstance(part, TopKRouter) and not part.is_mtp_layer]


def _stand_in(router: TopKRouter) -> _Replay:
    replay = _Replay(router.layer_number - 1)
    router.router_replay = replay
    return replay
