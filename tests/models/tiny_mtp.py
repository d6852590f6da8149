"""A small model with a layer for multi-token prediction, and what transformers' layers and autograd make of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tiny_models import VARIANTS, Variant, write_tiny
from trainer_jobs import make_batch
from transformers import AutoConfig, AutoModelForCausalLM

LAYERS = 2
PREFIX = f"model.layers.{LAYERS}."
PLAIN = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float32}


def write_mtp(name: str, folder: Path, **fields: int) -> None:
    """Write a model whose last layer, with two norms, a projection and a norm behind it, is that of prediction."""
    variant = VARIANTS[name]
    model = write_tiny(Variant(variant.family, {**variant.fields, **fields, "num_hidden_layers": LAYERS + 1}), folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    for field in ("layer_types", "mlp_layer_types"):  # of transformers' own
        if config.get(field):
            config[field] = config[field][:LAYERS]
    (folder / "config.json").write_text(json.dumps(config))
    size, tensors = model.config.hidden_size, load_file(folder / "model.safetensors")
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{PREFIX}{norm}.weight"] = torch.rand(size) + 0.5
    tensors[f"{PREFIX}eh_proj.weight"] = torch.randn(size, 2 * size) * 0.15
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "tokenizer.json").write_text("{}")


def with_layer(folder: Path) -> torch.nn.Module:
    """Return transformers' model with the layer for prediction as one more of its own."""
    config = AutoConfig.from_pretrained(folder)
    kinds = getattr(config, "mlp_layer_types", None)
    more = {"mlp_layer_types": [*kinds, kinds[-1]]} if kinds else {}
    return AutoModelForCausalLM.from_pretrained(folder, num_hidden_layers=LAYERS + 1, **more, **PLAIN)


def expected_of_mtp(folder: Path, lengths: tuple[int, ...]) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and its gradients, each sequence alone: DeepSeek-V3, arXiv:2412.19437, equations 21 to 25.

    Gradients are by the names of transformers' model of one layer more, and of the tensors beside it.
    """
    policy = AutoModelForCausalLM.from_pretrained(folder, **PLAIN).eval()
    longer = with_layer(folder).eval()
    own = {name: t for name, t in load_file(folder / "model.safetensors").items() if name.startswith(PREFIX)}
    names = [PREFIX + name + ".weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")]
    enorm, hnorm, projection, last_norm = (own[name].requires_grad_() for name in names)
    layer, batch = longer.model.layers[LAYERS], make_batch(lengths=lengths)
    mask = torch.from_numpy(batch.fields["loss_mask"] > 0)
    starts = np.cumsum(batch.lengths) - batch.lengths
    mask[starts.tolist()] = False
    total = 0.0
    for start, length in zip(starts.tolist(), batch.lengths.tolist(), strict=True):
        if length < 3:
            continue
        tokens = torch.from_numpy(batch.tokens[start : start + length]).long()
        with torch.no_grad():
            hidden = policy.model(tokens[None], use_cache=False).last_hidden_state[0, :-2]
            following = policy.model.embed_tokens(tokens[1:-1])
        eps = policy.config.rms_norm_eps
        both = torch.cat([rms_norm(following, enorm, eps), rms_norm(hidden, hnorm, eps)], -1)
        positions = torch.arange(length - 2)[None]
        states = (both @ projection.T)[None]
        causal = torch.full((length - 2, length - 2), torch.finfo(torch.float32).min).triu(1)[None, None]
        rotary = longer.model.rotary_emb(states, positions)
        made = layer(states, attention_mask=causal, position_ids=positions, position_embeddings=rotary)
        made = made[0] if isinstance(made, tuple) else made
        logits = rms_norm(made[0], last_norm, eps) @ policy.lm_head.weight.detach().T
        missed = torch.nn.functional.cross_entropy(logits, tokens[2:], reduction="none")
        loss = (missed * mask[start + 2 : start + length]).sum() / int(mask.sum())
        loss.backward()
        total += loss.item()
    gradients = {PREFIX + name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    beside = dict(zip(names, (enorm.grad, hnorm.grad, projection.grad, last_norm.grad), strict=True))
    return total, {**gradients, **beside}


def rms_norm(states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return states * torch.rsqrt(states.square().mean(-1, keepdim=True) + eps) * weight
