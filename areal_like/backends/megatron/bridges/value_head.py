"""A critic: the model of any bridge with a value head (`trainer/value_head.py`) where its output layer was."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from torch import Tensor

from areal_like.backends.megatron.bridges.protocol import Bridge, ModelSource
from areal_like.backends.training.value_head import HEAD_NAME, new_head, stored_head

_LANGUAGE_HEAD = "lm_head.weight"


class ValueHead(torch.nn.Module):
    """Maps hidden states to values in float32, the same on every tensor-parallel rank."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)
        set_defaults_if_not_set_tensor_model_parallel_attributes(self.weight)

    def forward(self, hidden: Tensor, **_: object) -> tuple[Tensor, None]:
        """Map `[rows, hidden]`, the same on every tensor-parallel rank, to `[rows, 1]`."""
        return torch.nn.functional.linear(hidden.float(), self.weight), None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ValueHead":
        """Apply `fn`, but keep the weight in float32."""
        return super()._apply(lambda tensor: tensor.to(fn(tensor).device), recurse)


class ValueBridge:
    """A Bridge whose models have a ValueHead; `source.value_head` is set, so that the bridge reads no output layer."""

    def __init__(self, bridge: Bridge, source: ModelSource) -> None:
        self._bridge, self._source = bridge, source

    def build(self) -> list[torch.nn.Module]:
        """Build chunks with a new head, which `load` replaces with a stored one."""
        models = self._bridge.build()
        for model in models:
            model.share_embeddings_and_output_weights = False
            # Megatron Bridge goes by this, and would send the embedding to the last stage's output layer
            model.config.share_embeddings_and_output_weights = False
            if model.post_process:
                weight = new_head(self._source.config.for_bridge.hidden_size, self._source.seed)
                device = next(model.parameters()).device
                model.output_layer = ValueHead(weight.to(device))
        return models

    def load(self, models: list[torch.nn.Module], path: Path) -> None:
        stored = stored_head(path)
        with _without_heads(models) as heads:
            self._bridge.load(models, path)
        for head in heads:
            if stored is not None:
                head.weight.data.copy_(stored)

    def export(self, models: list[torch.nn.Module]) -> Iterator[tuple[str, Tensor]]:
        with _without_heads(models) as heads:
            for name, weight in self._bridge.export(models):
                if name != _LANGUAGE_HEAD:  # Megatron Bridge derives one from the embedding
                    yield name, weight
        weight = next((head.weight.detach() for head in heads), None)
        yield HEAD_NAME, _from_last_stage(weight, self._source.config.for_bridge.hidden_size)


@contextmanager
def _without_heads(models: list[torch.nn.Module]) -> Iterator[list[ValueHead]]:
    """Remove the value heads in the body, so that a bridge knows the chunks; yield the heads."""
    heads: dict[torch.nn.Module, Any] = {
        model: model._modules.pop("output_layer") for model in models if model.post_process
    }
    try:
        yield list(heads.values())
    finally:
        for model, head in heads.items():
            model.add_module("output_layer", head)


def _from_last_stage(weight: Tensor | None, hidden_size: int) -> Tensor:
    """Broadcast the head from the last pipeline stage, which alone has it."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        assert weight is not None
        return weight
    if weight is None:
        weight = torch.empty(1, hidden_size, device=torch.cuda.current_device())
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    dist.broadcast(weight, src=last, group=parallel_state.get_pipeline_model_parallel_group())
    return weight
