"""A probe at the start: whether a model computes packed sequences as it computes each sequence alone."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from areal_like.backends.fsdp import attention
from areal_like.backends.fsdp.grid import Grid
from areal_like.backends.fsdp.vision import Vision
from areal_like.core.config.schema import MicroBatchConfig
from areal_like.core.trainer import packing
from areal_like.core.trainer.device_batch import to_device
from areal_like.core.trainer.engine import EngineSpec
from areal_like.core.types import Batch, Images, Ints
from areal_like.data.images import draw, read_size

# Nats. In bfloat16 two ways of computing one model differ; equal ones are 1e-6 apart in float32.
ROUNDING = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}
_RESPONSES = (31, 24)  # the first tokens of a sequence tell most: a convolution sees a few before it
_SIZES = ((96, 64), (64, 160))  # width and height of the images of a model that takes any
_PADDING = 512  # tokens that fit into the probe's micro-batch beside its own


def check_packing(
    model: PreTrainedModel, vision: Vision | None, spec: EngineSpec, grid: Grid, device: torch.device
) -> None:
    """Compare two packed sequences with each alone in transformers' own attention; every rank has to call it.

    Raises ValueError where they differ by more than rounding: packed sequences would see each other, or the packed
    attention would leave out something of the model's own. Rounding is the same if only the other sequence of a pack
    changes, so even small influences between sequences are found.
    """
    words = _words(model)
    batch, allowed = _two_sequences(words, vision), ROUNDING[spec.config.dtype]
    compute = partial(_compute_packed, model, vision, spec, grid, device)
    with torch.no_grad():
        try:
            packed = compute(batch)
            moved = max(_find_influence(compute, batch, words, packed, i) for i in range(len(_RESPONSES)))
        except (TypeError, LookupError, AttributeError, RuntimeError) as error:
            raise _make_refusal(
                model, spec, f"cannot compute packed sequences: {type(error).__name__}: {error}"
            ) from error
        chosen = _attention_of(model)
        model.eval().set_attn_implementation("eager")
        alone = _compute_alone(model, vision, batch, device)
        model.train().set_attn_implementation(chosen)
        model.reshard()  # otherwise only a backward pass does
    distance = float((packed - alone).abs().mean())
    if not distance <= allowed:  # nan is not
        found = f"computes packed sequences {distance:.2g} nats on average apart from each sequence alone"
        raise _make_refusal(model, spec, f"{found}, and {allowed} is allowed for rounding")
    if not moved <= allowed:
        found = (
            f"changes the log-probs of a packed sequence by {moved:.2g} nats when another sequence of the pack changes"
        )
        raise _make_refusal(model, spec, f"{found}, and {allowed} is allowed for rounding")


def _attention_of(model: PreTrainedModel) -> str | dict[str, str]:
    """Return the attention implementations of a model or its parts."""
    parts = {name: getattr(model.config, name) for name in model.config.sub_configs}
    own = {name: part._attn_implementation for name, part in parts.items() if part is not None}
    return {"": model.config._attn_implementation, **own} if own else model.config._attn_implementation


def _words(model: PreTrainedModel) -> Ints:
    """Return the tokens of a model that do not stand for parts of images or videos, in ascending order."""
    names = ("image_token_id", "video_token_id")
    others = [number for name in names if isinstance(number := getattr(model.config, name, None), int)]
    return np.setdiff1d(np.arange(model.get_input_embeddings().num_embeddings, dtype=np.int32), others)


def _find_influence(
    compute: Callable[[Batch], Tensor], batch: Batch, words: Ints, packed: Tensor, changed: int
) -> float:
    """Return how far the log-probs of the other sequence move at most if response and images of one are `changed`."""
    start = int(batch.lengths[:changed].sum())
    end = start + int(batch.lengths[changed])
    tokens, images = batch.tokens.copy(), batch.images
    response = np.arange(len(tokens)) >= end - _RESPONSES[changed]
    response[end:] = False
    tokens[response] = words[(np.searchsorted(words, tokens[response]) + len(words) // 2) % len(words)]
    if images is not None:
        others = [draw(*read_size(image), seed=1) for image in images[changed]]
        images = tuple(tuple(others) if i == changed else own for i, own in enumerate(images))
    moved = (compute(replace(batch, tokens=tokens, images=images)) - packed).abs()
    moved[start:end] = 0
    return float(moved.max())


def _make_refusal(model: PreTrainedModel, spec: EngineSpec, found: str) -> ValueError:
    return ValueError(
        f"{spec.role}.path: transformers' {model.config.model_type} (model_type) {found}. The FSDP trainer packs "
        f"sequences, so it cannot train this model. Use {spec.role}.backend=megatron:… if a bridge has the family "
        f"(docs/bridges.md), or a model of another family."
    )


def _two_sequences(words: Ints, vision: Vision | None) -> Batch:
    """Return two made-up responses, to one word and, in a model that takes images, to one and to two images."""
    rng = np.random.default_rng(0)
    first = rng.choice(words, 1)
    images: list[Images] = []
    parts, masks = [], []
    for number, response in enumerate(_RESPONSES):
        prompt = [first]
        if vision is not None:
            images.append(tuple(draw(*size) for size in _SIZES[: number + 1]))
            prompt += [part for image in images[-1] for part in (vision.reader.tokens(image), rng.choice(words, 2))]
        parts += [*prompt, rng.choice(words, response)]
        masks += [np.zeros(sum(map(len, prompt))), np.ones(response)]
    lengths = np.array([len(a) + len(b) for a, b in pairwise(masks)][::2], np.int32)
    mask = np.concatenate(masks).astype(np.float32)
    return Batch(lengths, np.concatenate(parts).astype(np.int32), {"loss_mask": mask}, images=tuple(images) or None)


def _compute_packed(
    model: PreTrainedModel, vision: Vision | None, spec: EngineSpec, grid: Grid, device: torch.device, batch: Batch
) -> Tensor:
    """Return a training step's log-prob of each response token, `[tokens]`; prompts are 0."""
    space = len(batch.tokens) + _PADDING
    mb_spec = MicroBatchConfig(max_tokens_per_mb=space, share_prompts=spec.config.mb_spec.share_prompts)
    _, pack = packing.packs(batch, mb_spec, dp=1, dp_rank=0, alignment=spec.sizes.cp)
    wanted = batch.fields["loss_mask"] > 0
    part = grid.part(pack(0))
    micro_batch = to_device(part, batch, wanted, device, None if vision is None else vision.reader.inputs)
    logits = model(
        input_ids=micro_batch.tokens,
        position_ids=micro_batch.positions,
        use_cache=False,
        logits_to_keep=micro_batch.rows,
        **attention.arguments(micro_batch, grid.context),
        **({} if vision is None else vision.arguments(micro_batch)),
    ).logits[0]
    found = torch.zeros(len(batch.tokens), device=device)
    selected = micro_batch.of_tokens(_select(logits, micro_batch.labels))
    found[torch.from_numpy(part.targets[wanted[part.targets]]).to(device)] = selected
    return grid.sum_over_sequences(found)


def _compute_alone(model: PreTrainedModel, vision: Vision | None, batch: Batch, device: torch.device) -> Tensor:
    """Return the same of each sequence by itself, in transformers' eager attention."""
    found = []
    parts = np.split(batch.tokens, np.cumsum(batch.lengths)[:-1])
    for number, (tokens, response) in enumerate(zip(parts, _RESPONSES, strict=True)):
        images = {} if vision is None or not batch.images else vision.alone(tokens, batch.images[number], device)
        ids, prompt = torch.from_numpy(tokens).long().to(device), len(tokens) - response
        logits = model(input_ids=ids[None], use_cache=False, **images).logits[0]
        said = _select(logits[prompt - 1 : -1], ids[prompt:])
        found += [said.new_zeros(prompt), said]
    return torch.cat(found)


def _select(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probs of labels, or a critic's values."""
    if logits.shape[-1] == 1:
        return logits[:, 0].float()
    return torch.log_softmax(logits.float(), -1).gather(-1, labels[:, None])[:, 0]
