"""From scored trajectories to the trainer's batches.

Every array is created once, by concatenating the trajectories' arrays; with 512 groups of 16 responses, an index of
all tokens would be too expensive.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_like.core.algorithms.types import Algorithm, Experience
from areal_like.core.columns import join as join_columns
from areal_like.core.types import Batch, FinishReason, Floats, Images, Ints, Trajectory


def join(trajectories: Sequence[Trajectory], version: int) -> Experience | None:
    """Join the trajectories with a reward, for training policy version `version`; return None without any."""
    scored = [item for item in trajectories if item.reward is not None]
    if not scored:
        return None
    return Experience(
        rewards=np.array([item.reward for item in scored], np.float32),
        groups=np.array([item.group_id for item in scored], np.int32),
        samples=number_samples([item.group_id for item in scored], [item.sample for item in scored]),
        batch=batch_of(scored, version),
        truncated=np.array([item.finish_reason is FinishReason.LENGTH for item in scored]),
        nodes=[item.nodes for item in scored] if any(item.nodes for item in scored) else (),
    )


def number_samples(groups: Sequence[int], samples: Sequence[int]) -> Ints:
    """Return the rank of each pair among the distinct pairs.

    Encodes a pair as one number, which numpy sorts without the GIL; sorting 50,000 pairs held the GIL for 100 ms.
    """
    group, sample = np.array(groups, np.int64), np.array(samples, np.int64)
    pairs = group * (sample.max() - sample.min() + 1) + sample
    return np.unique(pairs, return_inverse=True)[1].astype(np.int32)


def batch_of(trajectories: Sequence[Trajectory], version: int) -> Batch:
    """Concatenate trajectories for training policy version `version`."""
    versions = np.concatenate([item.versions for item in trajectories])
    fields: dict[str, Any] = {
        "loss_mask": (versions >= 0).astype(np.float32),
        "behaviour_logprobs": np.concatenate([item.logprobs for item in trajectories]),
        "on_policy": (versions == version).astype(np.float32),
    }
    fields |= join_columns([(len(item.tokens), item.columns) for item in trajectories])
    lengths = np.array([len(item.tokens) for item in trajectories], np.int32)
    tokens = np.concatenate([item.tokens for item in trajectories])
    return Batch(lengths, tokens, fields, _join_images(trajectories))


def _join_images(trajectories: Sequence[Trajectory]) -> tuple[Images, ...] | None:
    """Return the images of each trajectory; equal images are one object, which is sent to the ranks once."""
    known: dict[bytes, bytes] = {}
    images = tuple(tuple(known.setdefault(image, image) for image in item.images) for item in trajectories)
    return images if any(images) else None


def with_field(experience: Experience, name: str, values: Floats) -> Experience:
    """Return the batch with one more field, `[tokens]`."""
    return replace(experience, batch=experience.batch.with_field(name, values))


def policy_batches(algorithm: Algorithm, experience: Experience, n: int = 1) -> list[Batch]:
    """Return at most `n` batches, one optimizer step each, with the fields that the algorithm adds to the experience's.

    Trajectories are assigned to the batches in turn, which spreads groups over them. Trajectories without trained
    tokens are left out; if none remain, the result is []. An algorithm with its own temperature trains all tokens at
    this temperature and over the whole vocabulary, however they were sampled.
    """
    batch = experience.batch if algorithm.temperature is None else experience.batch.drop("sampling")
    fields = dict(batch.fields)
    mask = fields["loss_mask"]
    for name, values in algorithm.targets(experience).items():
        per_token = values if len(values) == len(batch.tokens) else np.repeat(values, batch.lengths)
        fields[name] = (per_token * mask).astype(np.float32)
    wanted = np.flatnonzero(_per_sequence(fields["loss_mask"], batch.lengths))
    turns = [wanted[i::n] for i in range(min(n, len(wanted)))]
    batches = [_add_weights(algorithm, _part(replace(batch, fields=fields), turn)) for turn in turns]
    return [_without_zero_advantages(part) for part in batches] if algorithm.skips_zero_advantages else batches


def minibatches(batch: Batch, n: int, turns: int | None) -> int:
    """Return the number of mini-batches: `n`, or as many as have about this number of turns each."""
    if turns is None:
        return n
    return max(1, -(-int(_turn_starts(batch.fields["loss_mask"], batch.lengths).sum()) // turns))


def _without_zero_advantages(batch: Batch) -> Batch:
    """Return the trajectories with nonzero advantages, at least one, with weights that keep the mean over all."""
    wanted = np.flatnonzero(_per_sequence(np.abs(batch.fields["advantages"]), batch.lengths))
    part = _part(batch, wanted if len(wanted) else np.zeros(1, np.int64))
    mask = part.fields["loss_mask"]
    weights = part.fields.get("loss_weights", mask) * np.float32(mask.sum() / batch.fields["loss_mask"].sum())
    return part.with_field("loss_weights", weights)


def _part(batch: Batch, sequences: NDArray[np.int64]) -> Batch:
    """Return some of the sequences, in their order."""
    if len(sequences) == len(batch.lengths):
        return batch
    chosen = np.zeros(len(batch.lengths), bool)
    chosen[sequences] = True
    tokens = np.repeat(chosen, batch.lengths)
    fields = {name: values[tokens] for name, values in batch.fields.items()}
    images = None if batch.images is None else tuple(compress(batch.images, chosen))
    return Batch(batch.lengths[chosen], batch.tokens[tokens], fields, images)


def _add_weights(algorithm: Algorithm, batch: Batch) -> Batch:
    if algorithm.weights is None:
        return batch
    mask = batch.fields["loss_mask"]
    weights = (algorithm.weights(mask, batch.lengths) * mask).astype(np.float32)
    return batch.with_field("loss_weights", weights)


def sequence_mean(mask: Floats, lengths: Ints) -> Floats:
    """Return weights that make the loss a mean over sequences of the means over their tokens.

    Source: DeepSeekMath (arXiv 2402.03300), eq. 3: 1/G sum over i of 1/|o_i| sum over t.
    """
    generated = _per_sequence(mask, lengths)
    per_token = np.repeat(1 / np.maximum(generated, 1), lengths)
    return (per_token * (mask.sum() / np.count_nonzero(generated))).astype(np.float32)


def turn_mean(mask: Floats, lengths: Ints) -> Floats:
    """Return weights that make the loss a mean over turns (runs of trained tokens) of their tokens' means.

    Source: GiGPO (arXiv 2505.10978), eq. 9.
    """
    first = _turn_starts(mask, lengths)
    turn = np.cumsum(first) - 1
    sizes = np.bincount(turn[mask > 0])
    weights = np.zeros(len(mask), np.float32)
    weights[mask > 0] = (mask.sum() / len(sizes)) / sizes[turn[mask > 0]]
    return weights


def _turn_starts(mask: Floats, lengths: Ints) -> NDArray[np.bool]:
    """Return where a run of trained tokens starts, `[tokens]`; a sequence ends a run."""
    trained = mask > 0
    before = np.append(False, trained[:-1])
    before[np.cumsum(lengths) - lengths] = False
    return np.asarray(trained & ~before)


def constant_length(mask: Floats, lengths: Ints, *, length: int) -> Floats:
    """Return weights that make the loss a mean over sequences of the sums over their tokens, divided by `length`.

    Source: Dr. GRPO (arXiv 2503.20783), listing 1: `masked_mean` with MAX_TOKENS.
    """
    sequences = np.count_nonzero(_per_sequence(mask, lengths))
    return np.full(len(mask), mask.sum() / (sequences * length), np.float32)


def _per_sequence(mask: Floats, lengths: Ints) -> NDArray[np.float64]:
    """Return the number of trained tokens of each sequence, `[sequences]`."""
    return np.add.reduceat(mask, np.cumsum(lengths) - lengths, dtype=np.float64)


def supervised_batch(
    examples: Sequence[tuple[Sequence[int], Sequence[int] | Ints]], images: Sequence[Images] = ()
) -> Batch:
    """Return a batch of (prompt, response) pairs to imitate, with the images of each prompt."""
    parts = [part for example in examples for part in example]
    sizes = np.array([len(part) for part in parts], np.int32)
    mask = np.repeat(np.tile(np.array([0, 1], np.float32), len(examples)), sizes)
    tokens = np.concatenate([np.asarray(part, np.int32) for part in parts])
    shown = tuple(images) if any(images) else None
    return Batch(sizes[0::2] + sizes[1::2], tokens, {"loss_mask": mask}, images=shown)
