"""Families of models by `model_type`: how configs differ, and what trainers and servers compute of them.

Each file of this folder has the FAMILIES of one maker or kind; nothing else names them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

NONE_OF_IT: tuple[Any, ...] = (False, None, [], 0)  # values of a field that asks for nothing


@dataclass(frozen=True, slots=True)
class Megatron:
    """A family that the Megatron trainer computes as transformers and SGLang do, as `tests/models` shows.

    `fields` are the values that config.json may have, beside those of every family; `ropes` the types of its rotary
    embedding, () for all. `one_tensor_rank`: attention cannot be split; `several_experts`: a token needs more than one;
    `divided_heads`: SGLang computes the dimension of heads itself; `trains_mtp`: the layer for multi-token prediction
    is trained as transformers' layers would be; `router_biases`: Megatron can move biases of its routers;
    `named_experts`: Megatron Bridge names experts one by one. `unusable` are the bridges that cannot build it.
    `options` returns, from transformers' configuration, the options of Megatron that bridges lack or set otherwise.
    """

    fields: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ropes: tuple[str, ...] = ()
    windows: bool = False
    one_tensor_rank: bool = False
    several_experts: bool = False
    divided_heads: bool = False
    trains_mtp: bool = False
    router_biases: bool = False
    named_experts: bool = False
    unusable: tuple[str, ...] = ()
    options: Callable[[Any], Mapping[str, Any]] = lambda config: {}


@dataclass(frozen=True, slots=True)
class Fsdp:
    """A family in the FSDP trainer.

    `has_model`: transformers has a language model of it; `splits`: by a plan for tensor parallelism that tests compare;
    `not_packed` is the reason why a pack computes something else than its sequences alone. `fused` are the matrices
    that transformers keeps in one; `packs_experts`: its experts' matrices, so that they can have adapters;
    `sees_images`: with the tower of its vision-language model.
    """

    has_model: bool = True
    splits: bool = False
    not_packed: str = ""
    fused: tuple[str, ...] = ()
    packs_experts: bool = False
    sees_images: bool = False


@dataclass(frozen=True, slots=True)
class ServedFamily:
    """A family in SGLang 0.5.17.

    `starts`: its configuration is complete; `on_cpus`: there are kernels; `tied`: the embedding is always the output
    layer; `windows`: attention slides on GPUs; `window_pool`: sliding layers have a pool of their own in the KV cache;
    `adapters`: adapters on servers equal merged weights.
    """

    starts: bool = True
    on_cpus: bool = True
    tied: bool = False
    windows: bool = False
    window_pool: bool = False
    adapters: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """A family's names of the config fields about experts; `experts` is empty for a dense one.

    `bias` are the attention projections that `attention_bias` covers, `norms` the norms of a layer, `defaults` the
    values that transformers' configuration class uses for keys that a config omits. If the config does not list the
    kinds of layers, all but every `full_every`-th attend to a window; 0: none do, 1: all do, if there is a window.
    Without `megatron` the Megatron trainer refuses it.
    """

    experts: str = ""
    expert_ffn: str = ""
    shared_ffn: str = ""
    shared_experts: str = ""
    expert_bias: bool = False
    latent_attention: bool = False
    linear_attention: bool = False
    qk_norm: str = ""
    bias: str = ""
    norms: int = 2
    full_every: int = 0
    defaults: Mapping[str, Any] = field(default_factory=dict)
    megatron: Megatron | None = None
    fsdp: Fsdp = field(default_factory=Fsdp)
    server: ServedFamily = field(default_factory=ServedFamily)

    @property
    def under_fsdp(self) -> bool:
        """Whether the FSDP trainer trains it."""
        return self.fsdp.has_model and self.server.starts and not self.fsdp.not_packed


USUAL = Family(bias="qkvo")  # of an unknown dense model
BIAS = {"attention_bias": True}  # a default
ONE_ROPE = ("default",)


def softmax_order(config: Any) -> dict[str, Any]:
    """Return whether routers apply the softmax before they choose experts: then the chosen are not normalised."""
    return {"moe_router_pre_softmax": not config.norm_topk_prob}


GATED_SHARED_EXPERT = {"moe_shared_expert_gate": True, "moe_shared_expert_overlap": False}


FAMILIES: dict[str, Family] = {
    name: family
    for file in sorted(each.name for each in iter_modules(__path__))
    for name, family in import_module(f"{__name__}.{file}").FAMILIES.items()
}


def families_with(has: Callable[[Family], object]) -> tuple[str, ...]:
    """Return the names of the families for which `has` is true."""
    return tuple(name for name, family in FAMILIES.items() if has(family))


# Families whose models runs of areal-like train, by backend
TRAINED = {
    "megatron": families_with(lambda family: family.megatron),
    "fsdp": families_with(lambda family: family.under_fsdp),
}
