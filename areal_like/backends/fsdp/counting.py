"""Counts the sizes of a language model as transformers builds it, without memory for weights.

``python -m areal_like.backends.fsdp.counting`` reads a config.json from standard input and prints a `Count` as JSON:
the checks before a run ask a process of its own, because they do not import torch.
"""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import BaseModel, JsonValue
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from areal_like.backends.fsdp.checkpoint_names import decoder_layers, empty_model, in_checkpoint, kept_tensors

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk")


class Count(BaseModel):
    """Result of a count; `problem` is a sentence if nothing could be counted.

    `shape` has fields of a ModelSpec, `counted` fields of a Counted. `tensors` are the shapes of a checkpoint's
    tensors, `ignored` regular expressions of further ones that transformers leaves out when it loads a checkpoint.
    """

    problem: str = ""
    shape: dict[str, int | bool] = {}
    counted: dict[str, Any] = {}
    tensors: dict[str, tuple[int, ...]] = {}
    tied: list[str] = []
    ignored: list[str] = []


def count(config: Mapping[str, JsonValue]) -> Count:
    """Count the model of a config.json, whose family is one of transformers' causal language models."""
    try:
        of_model = CONFIG_MAPPING[str(config["model_type"])].from_dict(dict(config))
        model = empty_model(of_model)
    except Exception as error:  # noqa: BLE001  of any kind: only the family's own code knows the meaning of its fields
        return Count(problem=f"transformers cannot build the model: {type(error).__name__}: {_first_line(error)}")
    layers = decoder_layers(model)
    if not layers or not _first_whole(of_model, ("num_attention_heads",)):
        return Count(problem="transformers' model has no list of decoder layers with attention heads")
    tensors = {
        name: tuple(part.shape)
        for kept, tensor in kept_tensors(model)
        for name, part in in_checkpoint(model, kept, tensor).items()
    }
    ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
    tied = [name for name in model.all_tied_weights_keys if name not in tensors]
    return Count(shape=_shape(model), counted=_count(model), tensors=tensors, tied=tied, ignored=ignored)


def _shape(model: PreTrainedModel) -> dict[str, int | bool]:
    config, layers = model.config, decoder_layers(model)
    embedding = model.get_input_embeddings()
    heads = config.num_attention_heads
    experts, chosen = (_first_whole(config, names) for names in (_EXPERTS, _CHOSEN))
    in_experts = _in_experts(model)
    shape: dict[str, int | bool] = {
        "hidden_size": config.hidden_size,
        "layers": len(layers),
        "heads": heads,
        "kv_heads": _first_whole(config, ("num_key_value_heads",)) or heads,
        "head_dim": _first_whole(config, ("head_dim",)) or config.hidden_size // heads,
        "ffn": _widest(layers, config.hidden_size),
        "vocab_size": embedding.num_embeddings,
        "max_positions": _first_whole(config, ("max_position_embeddings",)),
        "tied_embeddings": bool(model.all_tied_weights_keys),
        "mtp_layers": _first_whole(config, ("num_nextn_predict_layers",)),
    }
    if in_experts and chosen:
        each = in_experts // (len(layers) * experts)
        shape |= {
            "experts": experts,
            "experts_per_token": chosen,
            "expert_ffn": max(1, each // (3 * config.hidden_size)),
        }
    return shape


def _count(model: PreTrainedModel) -> dict[str, Any]:
    layers = decoder_layers(model)
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    linear: Counter[str] = Counter()
    for name, module in layers.named_modules():
        if isinstance(module, torch.nn.Linear):
            linear[name.rpartition(".")[2]] += module.in_features + module.out_features
    return {
        "total": sum(p.numel() for p in model.parameters()),
        "layers": sum(sizes),
        "largest": max(sizes),
        "experts": _in_experts(model),
        "linear": sorted(linear.items()),
    }


def _in_experts(model: PreTrainedModel) -> int:
    """Return the parameters of the tensors that hold all experts of a layer."""
    experts, parameters = _first_whole(model.config, _EXPERTS), decoder_layers(model).parameters()
    return sum(p.numel() for p in parameters if p.ndim == 3 and p.shape[0] == experts)


def _widest(layers: torch.nn.ModuleList, hidden: int) -> int:
    """Return the inner size of the feed-forward part: the longest input of a matrix that ends at the hidden size."""
    sizes = [module.in_features for module in layers.modules() if isinstance(module, torch.nn.Linear)]
    return max(sizes, default=4 * hidden)


def _first_whole(config: PreTrainedConfig, names: Sequence[str]) -> int:
    """Return the first of the fields that is a positive number, else 0."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


if __name__ == "__main__":
    import json

    print(count(json.load(sys.stdin)).model_dump_json())
