"""Low-rank adapters of both backends: initial values, merging into a weight, and files in PEFT's format.

An adapter of a linear layer W is A `[rank, in]` and B `[out, rank]`: W x becomes W x + alpha / rank * B A x (Hu et al.,
arXiv 2106.09685). W gets no gradient and no optimizer state.
"""

import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from areal_like.backends.training.hf_checkpoint import complete_directory, save_tensors
from areal_like.core.config.schema import ALL_LINEAR
from areal_like.core.trainer.engine import EngineSpec, LoRA


class Adapter(NamedTuple):
    """An adapter, whole: `a` `[rank, in]` and `b` `[out, rank]`."""

    a: Tensor
    b: Tensor

    def merge(self, weight: Tensor, scale: float) -> Tensor:
        """Return a new `[out, in]` in the data type of `weight`: the weight plus the adapter, added in float32."""
        a, b = (matrix.to(weight.device, torch.float32) for matrix in self)
        return torch.addmm(weight.float(), b, a, alpha=scale).to(weight.dtype)


def initial_adapter(lora: LoRA, seed: int, layer: str, inputs: int, outputs: int) -> Adapter:
    """Return a new adapter of a layer, by its Hugging Face name: the same in every layout. It adds 0.

    B is 0 and A Kaiming-uniform with a = sqrt(5), uniform within 1 / sqrt(in), as in the authors' implementation
    (`loralib/layers.py`, https://github.com/microsoft/LoRA) and PEFT; the paper says Gaussian.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {layer}".encode()))
    bound = inputs**-0.5
    a = torch.empty(lora.rank, inputs).uniform_(-bound, bound, generator=generator)
    return Adapter(a, torch.zeros(outputs, lora.rank))


@contextmanager
def pause(modules: Iterable[torch.nn.Module], pause: bool) -> Iterator[None]:
    """Pause the hooks of these modules in the body, if `pause`; each hook reads its module's `paused`."""
    modules = list(modules) if pause else []
    for module in modules:
        module.paused = True
    try:
        yield
    finally:
        for module in modules:
            module.paused = False


def refuse_unmatched(lora: LoRA, layers: Iterable[str]) -> None:
    """Raise ValueError for a target that is not a layer with an adapter."""
    found = {layer.rpartition(".")[2] for layer in layers}
    if unmatched := [name for name in lora.targets if name not in (*found, ALL_LINEAR)]:
        raise ValueError(f"actor.target_modules: the model has no linear layer {', '.join(unmatched)}")


def save_adapters_together(path: Path, adapters: Iterator[tuple[str, Adapter]], spec: EngineSpec, lora: LoRA) -> None:
    """Write the adapters, by layer, on rank 0; all ranks of an engine gather them together. PEFT 0.21 loads them."""
    tensors: dict[str, Tensor] = {}
    for layer, adapter in adapters:
        if dist.get_rank() == 0:
            for name, matrix in (("lora_A", adapter.a), ("lora_B", adapter.b)):
                tensors[f"base_model.model.{layer}.{name}.weight"] = matrix.detach().cpu().contiguous()
    if dist.get_rank() == 0:
        layers = {name.split(".lora_")[0].rpartition(".")[2] for name in tensors}
        with complete_directory(path, spec.scratch) as partial:
            save_tensors(tensors, partial / "adapter_model.safetensors")
            config = _peft_config(lora, str(spec.path), sorted(layers))
            (partial / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    dist.barrier()


def _peft_config(lora: LoRA, base: str, layers: list[str]) -> dict[str, object]:
    """Return the fields of PEFT's LoraConfig that differ from its defaults, or that other readers look for."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": layers,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
