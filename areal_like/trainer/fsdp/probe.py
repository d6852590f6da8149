"""Whether a model computes packed sequences as it does each of them alone, tried with a few tokens at the start."""

from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from areal_like.config.schema import MicroBatchConfig
from areal_like.trainer import packing
from areal_like.trainer.device_batch import to_device
from areal_like.trainer.engine import EngineSpec
from areal_like.trainer.fsdp import attention, ulysses
from areal_like.types import Batch

# Nats. In bfloat16 two ways of computing one model differ; equal ones are 1e-6 apart in float32.
ROUNDING = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}
_PROMPT, _RESPONSES = 1, (31, 24)  # the first tokens of a sequence tell most: a convolution sees a few before it
_SPACE = 512  # tokens that fit into the probe's micro-batch, with any padding


def check_packing(
    model: PreTrainedModel, spec: EngineSpec, group: dist.ProcessGroup | None, device: torch.device
) -> None:
    """Compare two packed sequences with each alone in transformers' own attention; every rank has to call it.

    Raises ValueError where they differ by more than rounding: packed sequences would see each other, or the packed
    attention would leave out something of the model's own. Rounding is the same if only the other sequence of a pack
    changes, so what one sequence sees of the other is found however small it is.
    """
    batch = _two_sequences(model.get_input_embeddings().num_embeddings)
    allowed = ROUNDING[spec.config.dtype]
    with torch.no_grad():
        try:
            packed = _compute_packed(model, spec, group, batch, device)
            moved = max(_find_influence(model, spec, group, batch, device, packed, i) for i in range(len(_RESPONSES)))
        except (TypeError, LookupError, AttributeError, RuntimeError) as error:
            raise _make_refusal(
                model, spec, f"cannot compute packed sequences: {type(error).__name__}: {error}"
            ) from error
        chosen = model.config._attn_implementation
        model.eval().set_attn_implementation("eager")
        alone = _compute_alone(model, batch, device)
        model.train().set_attn_implementation(chosen)
        model.reshard()  # what only a backward pass would do
    distance = float((packed - alone).abs().mean())
    if not distance <= allowed:  # nan is not
        found = f"computes packed sequences {distance:.2g} nats on average apart from each sequence alone"
        raise _make_refusal(model, spec, f"{found}, and {allowed} is allowed for rounding")
    if not moved <= allowed:
        found = (
            f"changes the log-probs of a packed sequence by {moved:.2g} nats when another sequence of the pack changes"
        )
        raise _make_refusal(model, spec, f"{found}, and {allowed} is allowed for rounding")


def _find_influence(
    model: PreTrainedModel,
    spec: EngineSpec,
    group: dist.ProcessGroup | None,
    batch: Batch,
    device: torch.device,
    packed: Tensor,
    changed: int,
) -> float:
    """Return how far the log-probs of the other sequence move at most if the response of one is `changed`."""
    words = model.get_input_embeddings().num_embeddings
    start = int(batch.lengths[:changed].sum())
    end = start + int(batch.lengths[changed])
    tokens = batch.tokens.copy()
    tokens[start + _PROMPT : end] = (tokens[start + _PROMPT : end] + words // 2) % words
    moved = (_compute_packed(model, spec, group, replace(batch, tokens=tokens), device) - packed).abs()
    moved[start:end] = 0
    return float(moved.max())


def _make_refusal(model: PreTrainedModel, spec: EngineSpec, found: str) -> ValueError:
    return ValueError(
        f"{spec.role}.path: transformers' {model.config.model_type} (model_type) {found}. The FSDP trainer packs "
        f"sequences, so it cannot train this model. Use {spec.role}.backend=megatron:… if a bridge has the family "
        f"(docs/bridges.md), or a model of another family."
    )


def _two_sequences(words: int) -> Batch:
    """Return two made-up responses to one made-up prompt."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, words, _PROMPT)
    parts = [np.concatenate([prompt, rng.integers(0, words, response)]) for response in _RESPONSES]
    mask = [np.arange(len(part)) >= _PROMPT for part in parts]
    lengths = np.array([len(part) for part in parts], np.int32)
    return Batch(
        lengths, np.concatenate(parts).astype(np.int32), {"loss_mask": np.concatenate(mask).astype(np.float32)}
    )


def _compute_packed(
    model: PreTrainedModel, spec: EngineSpec, group: dist.ProcessGroup | None, batch: Batch, device: torch.device
) -> Tensor:
    """Return what a training step would compute for each response token, `[tokens]`; prompts are 0."""
    cp = spec.sizes.cp
    mb_spec = MicroBatchConfig(max_tokens_per_mb=_SPACE, share_prompts=spec.config.mb_spec.share_prompts)
    _, pack = packing.packs(batch, mb_spec, dp=1, dp_rank=0, alignment=cp)
    wanted = batch.fields["loss_mask"] > 0
    part = ulysses.part(pack(0), cp, dist.get_rank() % cp)
    micro_batch = to_device(part, batch, wanted, device)
    logits = model(
        input_ids=micro_batch.tokens,
        position_ids=micro_batch.positions,
        use_cache=False,
        logits_to_keep=micro_batch.rows,
        **attention.arguments(micro_batch, group),
    ).logits[0]
    found = torch.zeros(len(batch.tokens), device=device)
    selected = micro_batch.of_tokens(_select(logits, micro_batch.labels))
    found[torch.from_numpy(part.targets[wanted[part.targets]]).to(device)] = selected
    return ulysses.sum_over(group, found)


def _compute_alone(model: PreTrainedModel, batch: Batch, device: torch.device) -> Tensor:
    """Return the same of each sequence by itself, in transformers' eager attention."""
    found = []
    for tokens in torch.from_numpy(batch.tokens).long().to(device).split(batch.lengths.tolist()):
        logits = model(input_ids=tokens[None], use_cache=False).logits[0]
        said = _select(logits[_PROMPT - 1 : -1], tokens[_PROMPT:])
        found += [said.new_zeros(_PROMPT), said]
    return torch.cat(found)


def _select(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probs of labels, or a critic's values."""
    if logits.shape[-1] == 1:
        return logits[:, 0].float()
    return torch.log_softmax(logits.float(), -1).gather(-1, labels[:, None])[:, 0]
