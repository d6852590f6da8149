"""A model of text and images: a bridge's model of its language model, with transformers' tower on the first stage."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig

from areal_like.backends.fsdp.checkpoint_names import LANGUAGE, PACKED_EXPERTS, TRANSPOSED, empty_model, in_checkpoint
from areal_like.backends.megatron.bridges.language_part import TOWER
from areal_like.backends.megatron.bridges.packed_experts import pack
from areal_like.backends.megatron.bridges.protocol import Bridge, ModelSource

_TOWER, _BODY = f"model.{TOWER}.", "model."


class VisionBridge:
    """A Bridge whose first chunk has a tower; the `bridge` behind it sees the language model alone."""

    def __init__(self, bridge: Bridge, source: ModelSource) -> None:
        self._bridge, self._source = bridge, source
        self._whole = empty_model(AutoConfig.from_pretrained(source.path))

    def build(self) -> list[torch.nn.Module]:
        models = self._bridge.build()
        for model in models:
            if model.pre_process:
                model.add_module(TOWER, self._build_tower())
        return models

    def load(self, models: list[torch.nn.Module], path: Path) -> None:
        with _without_towers(models) as towers:
            self._bridge.load(models, path)
        for tower in towers:
            self._load_tower(tower, path)

    def export(self, models: list[torch.nn.Module]) -> Iterator[tuple[str, Tensor]]:
        with _without_towers(models) as towers:
            for name, weight in self._pack_experts(self._bridge.export(models)):
                inner = name.removeprefix(_BODY)
                whole = name if inner == name else f"{_BODY}{LANGUAGE}.{inner}"
                if name.endswith(PACKED_EXPERTS):
                    yield whole, weight
                else:
                    yield from self._name_as_stored(whole, weight)
        own = towers[0].state_dict() if towers else {}
        for name, shape in (
            (name, tensor.shape) for name, tensor in self._whole.base_model.visual.state_dict().items()
        ):
            yield from self._name_as_stored(_TOWER + name, self._from_first_stage(own.get(name), shape))

    def _pack_experts(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Return the tensors of the language model, with experts packed if the checkpoint packs them."""
        config = self._whole.config
        return pack(weights, config.text_config.num_experts) if config.model_type in TRANSPOSED else weights

    def _build_tower(self) -> torch.nn.Module:
        """Return a tower with random weights, whole on each tensor-parallel rank."""
        empty = self._whole.base_model.visual
        tower: torch.nn.Module = (
            type(empty)
            ._from_config(empty.config, dtype=self._source.dtype, attn_implementation="sdpa")
            .to(torch.cuda.current_device())
        )
        for parameter in tower.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
            # kernels may add in another order on each of these ranks, whose weights would drift apart
            parameter.average_gradients_across_tp_domain = True
        return tower

    def _load_tower(self, tower: torch.nn.Module, path: Path) -> None:
        files: dict[str, Path] = {}
        for file in sorted(path.glob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                files |= dict.fromkeys(tensors.keys(), file)
        for name, held in tower.state_dict().items():
            for stored, part in self._name_as_stored(_TOWER + name, held):
                with safe_open(files[stored], "pt") as tensors:
                    part.copy_(tensors.get_tensor(stored))

    def _name_as_stored(self, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield a tensor of transformers' model under its name in a checkpoint."""
        yield from in_checkpoint(self._whole, name, weight).items()

    def _from_first_stage(self, weight: Tensor | None, shape: torch.Size) -> Tensor:
        group = parallel_state.get_pipeline_model_parallel_group()
        if weight is None:
            weight = torch.empty(shape, dtype=self._source.dtype, device=torch.cuda.current_device())
        if group.size() > 1:
            dist.broadcast(weight, group=group, group_src=0)
        return weight


@contextmanager
def _without_towers(models: list[torch.nn.Module]) -> Iterator[list[torch.nn.Module]]:
    """Remove the towers in the body, so that a bridge knows the chunks; yield them."""
    towers = {model: model._modules.pop(TOWER) for model in models if TOWER in model._modules}
    try:
        yield list(towers.values())
    finally:
        for model, tower in towers.items():
            model.add_module(TOWER, tower)
