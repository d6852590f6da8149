"""A prompt that is computed once for its responses: the same numbers as one for each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_layouts import world
from tolerance import assert_close, assert_gradient, close_to
from trainer_jobs import Outcome, Setting, make_groups, squared, step_with_trees, weighted

from allocation import ParallelSizes
from areal_like.core.config.schema import MicroBatchConfig
from areal_like.core.trainer import packing
from areal_like.core.trainer.prefix_trees import find_trees
from areal_like.core.types import Batch, LossSpec

pytestmark = pytest.mark.covers("shared prompts")

RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CORE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
LOSSES = {"actor": LossSpec(weighted), "critic": LossSpec(squared)}


def by_place(outcomes: list[Outcome]) -> np.ndarray:
    values = np.full(len(make_groups().tokens), np.nan)
    for places, part in (outcome.log_probs for outcome in outcomes if outcome.log_probs is not None):
        values[places] = part
    return values


@pytest.mark.parametrize(
    ("model", "sizes", "more"),
    [
        pytest.param("tied", ParallelSizes(), {}, marks=pytest.mark.long),
        ("untied", ParallelSizes(dp=2, edp=2), {"bridge": "megatron-bridge"}),
        pytest.param("untied", ParallelSizes(tp=2, etp=2), {"megatron": RECOMPUTED}, marks=pytest.mark.long),
        pytest.param("untied", ParallelSizes(tp=2, pp=2, etp=2), {"megatron": RECOMPUTED}, marks=pytest.mark.long),
        ("tied", ParallelSizes(pp=2, vpp=2), {"megatron": CORE}),
        ("moe", ParallelSizes(dp=2, ep=2), {"max_tokens_per_mb": 100}),
        pytest.param("tied", ParallelSizes(), {"role": "critic"}, marks=pytest.mark.long),
        pytest.param("tied", ParallelSizes(dp=2, edp=2), {"backend": "fsdp"}, marks=pytest.mark.long),
        ("sliding", ParallelSizes(), {"backend": "fsdp", "fsdp": {"gradient_checkpointing": True}}),
        ("untied", ParallelSizes(cp=2, edp=2), {"backend": "fsdp", "role": "critic"}),
        ("tied", ParallelSizes(tp=2), {"backend": "fsdp"}),
    ],
    ids=str,
)
def test_responses_train_alike(ranks, models, model, sizes, more):
    setting, step = Setting(models[model], sizes, **more), (make_groups(), LOSSES[more.get("role", "actor")])
    whole, shared = (
        ranks.run(step_with_trees, world(sizes), replace(setting, share_prompts=it), *step) for it in (False, True)
    )
    assert_close(by_place(shared), by_place(whole))
    assert np.isfinite(by_place(whole)[make_groups().fields["loss_mask"] > 0]).all()
    for outcome in shared:
        assert outcome.steps == [close_to(step) for step in whole[0].steps]
    assert shared[0].weights.keys() == whole[0].weights.keys()
    for name, gradient in whole[0].weights.items():
        assert_gradient(shared[0].weights[name], gradient, err_msg=name)


groups = st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(1, 9), min_size=1, max_size=5)), min_size=1)


@given(groups, st.integers(1, 4), st.sampled_from([(1, 1), (4, 1), (4, 2), (12, 2), (6, 3)]), st.booleans())
def test_every_token_is_predicted_once_from_what_comes_before_it(groups, dp, cut, alike):
    """`alike`: prompts of neighbours are of the same words, so that longer and shorter ones begin alike."""
    lengths = np.array([prompt + n for prompt, own in groups for n in own], np.int32)
    ends = np.cumsum(lengths)
    tokens, mask = np.arange(ends[-1], dtype=np.int32) + 1000, np.ones(ends[-1], np.float32)
    prompts = [prompt for prompt, own in groups for _ in own]
    numbers = [i for i, (_, own) in enumerate(groups) for _ in own]
    for prompt, end, length, number in zip(prompts, ends, lengths, numbers, strict=True):
        start = end - length
        tokens[start : start + prompt] = np.arange(prompt) + (0 if alike else 10 * number)
        mask[start : start + prompt] = 0
    batch = Batch(lengths, tokens, {"loss_mask": mask})
    alignment, cp = cut
    trees = find_trees(batch, max_tokens=40, alignment=alignment)
    schedule = packing.make_schedule(lengths, dp=dp, max_tokens=40, alignment=alignment, trees=trees)
    assert len({len(rank) for rank in schedule}) == 1
    seen = []
    for members in (bin_ for rank in schedule for bin_ in rank):
        shares = [
            packing.pack(tokens, lengths, members, alignment, trees=trees, cp=cp, cp_rank=rank) for rank in range(cp)
        ]
        assert len({len(pack.tokens) for pack in shares}) == 1
        assert cp * len(shares[0].tokens) <= 40
        assert cp * len(shares[0].tokens) % alignment == 0
        everything = np.concatenate([pack.tokens for pack in shares])
        for pack in shares:
            seen += pack.targets.tolist()
            owner = np.searchsorted(ends, pack.targets, side="right")
            for row, target, sequence in zip(pack.rows, pack.targets, owner, strict=True):
                start = ends[sequence] - lengths[sequence]
                assert pack.positions[row] == target - 1 - start
                assert attended(pack, row, everything) == tokens[start:target].tolist()
    assert sorted(seen) == sorted(set(range(int(ends[-1]))) - set((ends - lengths).tolist()))


def attended(pack: packing.MicroBatch, row: int, everything: np.ndarray) -> list[int]:
    """The tokens that a place of a rank's share attends to, the last is its own; `everything` is of all ranks."""
    piece = int(np.searchsorted(pack.cu_seqlens, row, side="right")) - 1
    if pack.keys is None:
        return pack.tokens[pack.cu_seqlens[piece] : row + 1].tolist()
    keys = pack.keys.places[pack.keys.cu_seqlens[piece] : pack.keys.cu_seqlens[piece + 1]]
    later = pack.cu_seqlens[piece + 1] - 1 - row
    return everything[keys[: len(keys) - later]].tolist()


def test_a_prompt_is_there_once():
    batch = make_groups()
    trees = find_trees(batch, max_tokens=200, alignment=1)
    assert trees.families.tolist() == [0] * 3 + [1] * 2 + [2] * 4 + [3]
    roots = trees.parents == -1
    assert trees.ends[roots].tolist() == [9, 1, 14, 11]
    assert trees.lengths.sum() == len(batch.tokens) - (2 * 9 + 1 + 3 * 14)
    for shares in (True, False):
        section = MicroBatchConfig(max_tokens_per_mb=200, share_prompts=shares)
        count, pack = packing.packs(batch, section, dp=1, dp_rank=0, alignment=1)
        assert count == 1
        assert len(pack(0).tokens) == (trees.lengths.sum() if shares else len(batch.tokens))


def test_a_group_that_is_too_large_for_a_micro_batch_is_cut():
    batch = make_groups()
    trees = find_trees(batch, max_tokens=40, alignment=1)
    sizes = np.bincount(trees.families[trees.sources], trees.lengths)
    assert sizes.max() <= 40
    assert np.bincount(trees.families).tolist() == [3, 2, 2, 1, 1, 1]
