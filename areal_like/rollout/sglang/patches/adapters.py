"""A server of adapters: SGLang keeps the weights of the model, and an update replaces adapters (LoRA) in place.

SGLang 0.5.17 serves adapters by name, and an adapter with a name never changes. Here the matrices of an adapter are
replaced while generation is paused, as the weights of a model are in the other weight updates. So requests continue,
every token has its version, and versions have prefixes of their own (`versions.py`); SGLang keeps those of adapters
apart. A single adapter belongs to all requests; of several, each request names its own.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from areal_like.config.schema import RunConfig
from areal_like.rollout.sglang.adapted_layers import EXPERTS, adapted_layers, usual_name
from areal_like.rollout.sglang.patch import Launch, Patch
from areal_like.transfer import ONLY_ADAPTER

FLAG = "--served-adapter"  # of our launcher alone
_TENSORS = "adapter_model.safetensors"


@dataclass(frozen=True)
class ServedAdapter:
    """Rank and scale of a run's adapters, the last names of their layers (`actor.target_modules`), and their names."""

    rank: int
    alpha: float
    targets: Sequence[str]
    names: Sequence[str]


def served_adapter(config: RunConfig) -> str | None:
    """Return the value after FLAG of a run that sends adapters."""
    actor = config.actor
    if not config.weight_update.adapters:
        return None
    names = list(config.adapters) or [ONLY_ADAPTER]
    return json.dumps(asdict(ServedAdapter(actor.lora_rank, actor.lora_alpha, actor.target_modules, names)))


def serve_adapters(launch: Launch) -> Sequence[str]:
    """Return SGLang's arguments for adapters that add nothing yet, if a run sends adapters."""
    if FLAG not in launch.own:
        return ()
    adapter = ServedAdapter(**json.loads(launch.own[FLAG]))
    if len(adapter.names) == 1:
        _serve_to_all(*adapter.names)
    if not launch.cuda:
        _leave_memory_pageable()
    arguments = launch.arguments
    layers = adapted_layers(adapter.targets, Path(arguments[arguments.index("--model-path") + 1]))
    backend = [] if launch.cuda else ["--lora-backend", "torch_native"]
    empty = _write_empty(adapter, layers)
    paths = [f"{name}={empty}" for name in adapter.names]
    most = len(paths) + 1  # in a batch: beside these, none
    served = ["--enable-lora", "--lora-paths", *paths, "--max-loras-per-batch", str(most)]
    return [*served, *backend, *_serve_experts(layers)]


def _serve_experts(layers: Collection[str]) -> list[str]:
    """Return the arguments with which SGLang adds adapters to experts: it has one kernel for them.

    A shared expert that is computed as one of the others would have no memory for its adapter.
    """
    if not any(EXPERTS in layer for layer in layers):
        return []
    return ["--moe-runner-backend", "triton", "--disable-shared-experts-fusion"]


def _write_empty(adapter: ServedAdapter, layers: Mapping[str, Sequence[int]]) -> Path:
    """Write an adapter of zeros as PEFT does. SGLang sizes its memory by it."""
    import numpy as np
    from safetensors.numpy import save_file

    folder, tensors = Path(tempfile.mkdtemp()), {}
    for layer, (outputs, inputs) in layers.items():
        tensors[f"base_model.model.{layer}.lora_A.weight"] = np.zeros((adapter.rank, inputs), np.int8)
        tensors[f"base_model.model.{layer}.lora_B.weight"] = np.zeros((outputs, adapter.rank), np.int8)
    save_file(tensors, folder / _TENSORS)
    targets = sorted({usual_name(layer) for layer in layers})
    config = {"peft_type": "LORA", "r": adapter.rank, "lora_alpha": adapter.alpha, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"bias": "none", "lora_dropout": 0.0}))
    return folder


def _serve_to_all(name: str) -> None:
    """Use one adapter for every request."""
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    generate = TokenizerManager.generate_request

    def generate_with_adapter(self: Any, obj: Any, *arguments: Any) -> Any:
        obj.lora_path = name
        return generate(self, obj, *arguments)

    TokenizerManager.generate_request = generate_with_adapter


def _leave_memory_pageable() -> None:
    """Ignore torch's requests for pinned memory, which fail without a GPU driver, as in SGLang's adapters."""
    import torch

    def without_pinning(make: Any) -> Any:
        def make_pageable(*arguments: Any, pin_memory: bool = False, **options: Any) -> Any:
            return make(*arguments, **options)

        return make_pageable

    for name in ("tensor", "zeros", "empty", "arange"):
        setattr(torch, name, without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self


def replace_adapters(runner: Any, paths: str, group: Any) -> tuple[bool, str]:
    """Replace adapters of all ranks by the files at `paths`, a JSON object by name; generation is paused."""
    from areal_like.rollout.sglang.receiving import on_each

    def replace() -> None:
        for name, path in json.loads(paths).items():
            _replace(runner.lora_manager, name, path)

    return on_each(group, replace)


def _replace(manager: Any, name: str, path: str) -> None:
    import torch
    from sglang.srt.lora.lora import LoRAAdapter
    from sglang.srt.lora.lora_config import LoRAConfig

    (key,) = (key for key, ref in manager.lora_refs.items() if ref.lora_name == name)
    config = LoRAConfig(path, base_vocab_size=manager.base_hf_config.vocab_size)
    if (config.r, config.lora_alpha) != (manager.configs[key].r, manager.configs[key].lora_alpha):
        raise ValueError(f"{path} has rank {config.r} and alpha {config.lora_alpha}, other than the server's adapter")
    settings = (config, manager.base_hf_config, manager.load_config, manager.lora_backend)
    adapter = LoRAAdapter(key, *settings, base_model=manager.base_model)
    with torch.inference_mode():
        adapter.initialize_weights_from_tensors(_complete(path, manager.lora_refs[key].lora_path))
        pool = manager.memory_pool
        slot = pool.uid_to_buffer_id.get(key)
        if slot is not None:
            ends = (manager.embed_tokens_module, manager.lm_head_module)
            pool.load_lora_weight_to_buffer(key, slot, adapter, manager.lora_modules, *ends)
            manager._notify_lora_slots_updated({slot})
    manager.configs[key], manager.loras[key] = config, adapter


def _complete(path: str, empty: str) -> dict[str, Any]:
    """Return the tensors of an adapter file, and zeros for layers that the trainer does not adapt and SGLang needs."""
    from safetensors import safe_open
    from safetensors.torch import load_file

    found = load_file(Path(path, _TENSORS))
    with safe_open(Path(empty, _TENSORS), "pt") as zeros:
        return found | {name: zeros.get_tensor(name) for name in zeros.keys() - found.keys()}


def adapter_tensors(runner: Any) -> dict[str, Any]:
    """Return the matrices of this rank's adapters in use, by adapter and place; none without adapters."""
    manager = getattr(runner, "lora_manager", None)
    if manager is None:
        return {}
    pool, tensors = manager.memory_pool, dict[str, Any]()
    for key, ref in manager.lora_refs.items():
        if (slot := pool.uid_to_buffer_id.get(key)) is not None:
            for kind, buffers in (("lora_A", pool.A_buffer), ("lora_B", pool.B_buffer)):
                for place, layers in buffers.items():
                    tensors |= {f"{ref.lora_name}.{i}.{place}.{kind}": layer[slot] for i, layer in enumerate(layers)}
    return tensors


PATCH = Patch(
    options=lambda config, columns: {FLAG.removeprefix("--"): served_adapter(config)},
    flags=(FLAG,),
    prepare=serve_adapters,
    commands={"adapters": replace_adapters},
)
