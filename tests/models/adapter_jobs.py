"""Training steps of adapters on a rank, and the same steps with merged weights by transformers and autograd."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from tolerance import THOUSAND
from torch import Tensor
from torch.nn.functional import linear
from torch.nn.utils.parametrize import register_parametrization
from trainer_jobs import THOUSANDFOLD, LossSpec, Setting, engine, exported, make_batch, sft

from areal_like.core.trainer.engine import Rendezvous

# A step of this Adam subtracts 1000 times the gradient, and one at the learning rate `FIRST` a hundredth of it
GRADIENTS = THOUSANDFOLD.model_copy(update={"beta1": 0.0, "beta2": 0.0})
FIRST = THOUSANDFOLD.lr / THOUSAND / 100


@dataclass(frozen=True)
class Trained:
    """Adapters before and after a second step, by the names in PEFT's files; log-probs and weights between them."""

    before: dict[str, Tensor]
    after: dict[str, Tensor]
    log_probs: tuple[np.ndarray, np.ndarray] | None
    weights: dict[str, np.ndarray]


def two_steps(
    rendezvous: Rendezvous,
    listener: socket.socket | None,
    setting: Setting,
    lengths: tuple[int, ...],
    rate: float | None = None,
) -> Trained:
    """Adapters that train twice on a batch, first at `rate`: both matrices have a gradient in the second step."""
    with engine(rendezvous, listener, setting) as made, tempfile.TemporaryDirectory() as scratch:
        made.train(make_batch(lengths=lengths), LossSpec(sft), learning_rate=rate)
        made.save_adapters(Path(scratch, "before"))
        log_probs, weights = made.log_probs(make_batch(lengths=lengths), 1.0), exported(made)
        made.train(make_batch(lengths=lengths), LossSpec(sft))
        made.save_adapters(Path(scratch, "after"))
        if rendezvous.rank:
            return Trained({}, {}, log_probs, {})
        files = (load_file(Path(scratch, name, "adapter_model.safetensors")) for name in ("before", "after"))
        return Trained(*files, log_probs, weights)


def peak_of_a_step(
    rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting, lengths: tuple[int, ...]
) -> int:
    """Most bytes that torch had on the GPU in a training step, beyond those that it has between steps."""
    with engine(rendezvous, listener, setting) as made:
        made.train(make_batch(lengths=lengths), LossSpec(sft))
        between = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        made.train(make_batch(lengths=lengths), LossSpec(sft))
        return torch.cuda.max_memory_allocated() - between


def merge(model: torch.nn.Module, adapters: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Have layers compute with merged weights; returns the adapters as parameters."""
    parameters = {name: tensor.clone().requires_grad_() for name, tensor in adapters.items()}
    for name in [name for name in parameters if ".lora_A." in name and ".experts." not in name]:
        layer = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
        pair = parameters[name], parameters[name.replace("lora_A", "lora_B")]
        layer.forward = lambda x, layer=layer, pair=pair: linear(
            x, layer.weight + scale * pair[1] @ pair[0], layer.bias
        )
    for name, experts in model.named_modules():
        if name.endswith(".experts"):
            for packed, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
                register_parametrization(experts, packed, Merged(parameters, name, parts, scale), unsafe=True)
    return parameters


class Merged(torch.nn.Module):
    """The packed weights of experts with the adapters of each expert, as far as there are adapters."""

    def __init__(self, parameters: dict[str, Tensor], experts: str, parts: tuple[str, ...], scale: float) -> None:
        super().__init__()
        self.about = parameters, experts, parts, scale

    def forward(self, packed: Tensor) -> Tensor:
        parameters, experts, parts, scale = self.about
        merged = []
        for number, weight in enumerate(packed):
            for part, rows in zip(parts, weight.chunk(len(parts)), strict=True):
                usual = f"base_model.model.{experts}.{number}.{part}"
                name = usual if f"{usual}.lora_A.weight" in parameters else in_mixtral(usual)
                a, b = (parameters.get(f"{name}.{matrix}.weight") for matrix in ("lora_A", "lora_B"))
                merged.append(rows if a is None else rows + scale * b @ a)
        return torch.cat(merged).view_as(packed)


def in_mixtral(name: str) -> str:
    """Return the name of an expert's layer in checkpoints of mixtral and minimax_m2."""
    layer, _, part = name.replace(".mlp.", ".block_sparse_moe.").rpartition(".")
    numbers = {"gate_proj": 1, "down_proj": 2, "up_proj": 3}
    return f"{layer}.w{numbers[part]}"


def sequences(lengths: tuple[int, ...]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the tokens of each sequence of a batch, and which of them are trained."""
    batch = make_batch(lengths=lengths)
    trained = torch.from_numpy(batch.fields["loss_mask"] > 0)
    yield from zip(torch.from_numpy(batch.tokens).long().split(lengths), trained.split(lengths), strict=True)


def log_probs_and_gradients(
    model: torch.nn.Module, parameters: dict[str, Tensor], lengths: tuple[int, ...]
) -> tuple[np.ndarray, dict[str, Tensor]]:
    """Log-probs of a batch, each sequence alone, and autograd's gradients of the mean loss of trained tokens."""
    found, losses, count = [], [], 0
    for tokens, trained in sequences(lengths):
        predicted = torch.log_softmax(model(tokens[None], use_cache=False).logits[0], -1)[:-1]
        values = predicted.gather(1, tokens[1:, None])[:, 0]
        found += [values.new_full((1,), torch.nan), values.detach()]
        losses.append(-values[trained[1:]].sum())
        count += int(trained[1:].sum())
    (torch.stack(losses).sum() / count).backward()
    gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
    return torch.cat(found).numpy(), gradients
