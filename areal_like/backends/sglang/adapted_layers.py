"""The matrices of a checkpoint that have an adapter on a server, by their names in the checkpoint.

SGLang computes some matrices as one, such as gate and up, and adds adapters to them only if an adapter file has a part
for each. It adds adapters to experts only if an adapter file has all of an expert's matrices.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from areal_like.core.config.schema import ALL_LINEAR

EXPERTS = ".experts."  # in the names of experts' layers
_NUMBERED = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}  # in checkpoints of mixtral and minimax_m2
_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")
_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))


def usual_name(layer: str) -> str:
    """Return the last name of a layer, transformers' name for experts with numbered matrices."""
    last = layer.rpartition(".")[2]
    return _NUMBERED.get(last, last)


def adapted_layers(targets: Sequence[str], model: Path) -> Mapping[str, list[int]]:
    """Return the shape of each matrix that needs an adapter, by the name of its layer."""
    found = {name: shape for name, shape in _matrices(model) if _is_linear(name)}
    wanted = {*targets}
    for group in _groups(any(EXPERTS in name for name in found)):
        if not wanted.isdisjoint(group):
            wanted |= {*group}
    return {name: shape for name, shape in found.items() if ALL_LINEAR in targets or usual_name(name) in wanted}


def _groups(experts: bool) -> Iterator[Sequence[str]]:
    """Yield the layers that need all adapters or none in SGLang."""
    yield from _JOINED
    if experts:
        yield _OF_EXPERTS


def _is_linear(layer: str) -> bool:
    """Return whether a matrix may be adapted; routers and gates of shared experts may not."""
    return usual_name(layer).endswith(("_proj", "_proj_with_mqa"))


def _matrices(model: Path) -> Iterator[tuple[str, list[int]]]:
    """Yield the name and the shape of each matrix of the decoder's layers, without layers for multi-token
    prediction."""
    from safetensors import safe_open

    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "np") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                _, inside, rest = name.partition(".layers.")
                shape = tensors.get_slice(name).get_shape()
                if inside and name.endswith(".weight") and len(shape) == 2 and int(rest.partition(".")[0]) < layers:
                    yield name.removesuffix(".weight"), shape
