"""Trees over the sequences of a batch: their paths are the sequences, and a pack computes the same along a path."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_like.capabilities.router_replay.columns import ROUTES
from areal_like.trainer import packing
from areal_like.trainer.packing import MicroBatch
from areal_like.trainer.prefix_trees import KEYS_PER_TOKEN, PrefixTrees, find_trees, separate
from areal_like.types import Batch

pytestmark = pytest.mark.covers("shared prompts")

EVERYTHING = 1 << 30

# Few words, so that sequences begin alike; a prompt, and then what may be trained on.
words = st.lists(st.integers(0, 2), max_size=12)
batches = st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=4), words, st.randoms()), min_size=1, max_size=12)


def batch_of(drawn, routed: bool = False) -> Batch:
    tokens, masks = [], []
    for prompt, rest, random in drawn:
        tokens.append([*prompt, *rest, 2])
        masks.append([0] * len(prompt) + [random.randint(0, 1) for _ in rest] + [1])
    flat = np.concatenate(tokens).astype(np.int32)
    routes = np.random.default_rng(len(flat)).integers(0, 2, (len(flat), 1, 1)).astype(np.uint8)
    mask = np.concatenate(masks).astype(np.float32)
    batch = Batch(np.array([len(each) for each in tokens], np.int32), flat, {"loss_mask": mask})
    return batch.with_field(ROUTES, routes if routed else None)


def batch_of_lists(*sequences: list[int], prompt: int = 1) -> Batch:
    mask = np.concatenate([np.arange(len(each)) >= prompt for each in sequences]).astype(np.float32)
    tokens = np.concatenate(sequences).astype(np.int32)
    return Batch(np.array([len(each) for each in sequences], np.int32), tokens, {"loss_mask": mask})


def path_of(trees: PrefixTrees, batch: Batch, sequence: int) -> list[int]:
    """The tokens along a sequence's path."""
    starts = np.cumsum(batch.lengths) - batch.lengths
    _, path = trees.paths(trees.leaves[[sequence]])
    assert trees.parents[path].tolist() == [-1, *path[:-1]]
    assert trees.starts[path].tolist() == [0, *trees.ends[path[:-1]]]
    parts = [batch.tokens[starts[trees.sources[n]] :][trees.starts[n] : trees.ends[n]] for n in path]
    return np.concatenate(parts).tolist()


def sequences_of(batch: Batch) -> list[list[int]]:
    return [each.tolist() for each in np.split(batch.tokens, np.cumsum(batch.lengths)[:-1])]


@given(batches, st.sampled_from([20, 60, EVERYTHING]), st.sampled_from([1, 4]), st.booleans())
def test_the_paths_of_a_tree_are_the_sequences(drawn, max_tokens, alignment, routed):
    batch = batch_of(drawn, routed)
    trees = find_trees(batch, max_tokens=max_tokens, alignment=alignment)
    sequences = sequences_of(batch)
    assert [path_of(trees, batch, i) for i in range(len(sequences))] == sequences
    sizes = np.bincount(trees.families[trees.sources], -(-trees.lengths // alignment) * alignment)
    assert len(sizes) == trees.families.max() + 1
    assert sizes.max() <= max_tokens
    assert (trees.lengths > 0).all()
    assert (np.diff(trees.families[trees.sources]) >= 0).all()


@given(st.lists(words, min_size=1, max_size=12))
def test_every_prefix_of_a_group_is_there_once(drawn):
    sequences = [[7, *each, 8] for each in drawn]
    trees = find_trees(batch_of_lists(*sequences), max_tokens=EVERYTHING, alignment=1)
    assert trees.lengths.sum() == len({tuple(each[: i + 1]) for each in sequences for i in range(len(each))})
    assert (trees.families == 0).all()


@given(batches, st.integers(1, 3), st.sampled_from([20, 60]), st.sampled_from([1, 4]), st.booleans())
def test_every_token_is_predicted_once_for_each_sequence_from_its_own_past(drawn, dp, max_tokens, alignment, routed):
    batch = batch_of(drawn, routed)
    trees = find_trees(batch, max_tokens=max_tokens, alignment=alignment)
    schedule = packing.make_schedule(batch.lengths, dp=dp, max_tokens=max_tokens, alignment=alignment, trees=trees)
    ends, seen = np.cumsum(batch.lengths), []
    for members in (bin_ for rank in schedule for bin_ in rank):
        pack = packing.pack(batch.tokens, batch.lengths, members, alignment, trees=trees)
        assert len(pack.tokens) <= max_tokens
        assert len(pack.tokens) % alignment == 0
        seen += pack.targets.tolist()
        for row, target in zip(pack.rows, pack.targets, strict=True):
            start = (ends - batch.lengths)[np.searchsorted(ends, target, side="right")]
            places = attended(pack, row)
            assert pack.positions[places].tolist() == list(range(target - start))
            assert pack.tokens[places].tolist() == batch.tokens[start:target].tolist()
            if routed:  # a prompt's are those of one of its sequences
                begin = start + np.argmax(batch.fields["loss_mask"][start:] > 0)
                routes = batch.fields[ROUTES]
                computed, own = routes[pack.places[places]][begin - start :], routes[begin:target]
                assert (computed == own).all()
    assert sorted(seen) == sorted(set(range(len(batch.tokens))) - set((ends - batch.lengths).tolist()))


def attended(pack: MicroBatch, row: int) -> np.ndarray:
    """The places that a place attends to, the last is its own."""
    piece = int(np.searchsorted(pack.cu_seqlens, row, side="right")) - 1
    if pack.keys is None:
        return np.arange(pack.cu_seqlens[piece], row + 1)
    keys = pack.keys.places[pack.keys.cu_seqlens[piece] : pack.keys.cu_seqlens[piece + 1]]
    assert len(keys) <= pack.keys.max_seqlen
    return keys[: len(keys) - (pack.cu_seqlens[piece + 1] - 1 - row)]


def test_turns_that_another_sequence_trains_are_prompts_that_are_shared_too():
    one, other = [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8, 9]
    batch = batch_of_lists(one, other)
    batch.fields["loss_mask"][len(one) : len(one) + 5] = 0  # as of a branch whose first turn the first one trains
    trees = find_trees(batch, max_tokens=EVERYTHING, alignment=1)
    assert sorted(trees.lengths.tolist()) == [2, 3, 4]


def test_prompts_of_different_groups_that_begin_alike_are_not_shared():
    batch = batch_of_lists([1, 2, 3, 8], [1, 2, 4, 8], prompt=3)
    assert find_trees(batch, max_tokens=EVERYTHING, alignment=1).families.tolist() == [0, 1]


def test_equal_sequences_are_one_node():
    trees = find_trees(batch_of_lists([1, 2, 3], [1, 2, 3], [1, 2]), max_tokens=EVERYTHING, alignment=1)
    assert trees.lengths.tolist() == [2, 1]
    assert trees.leaves.tolist() == [1, 1, 0]


@pytest.mark.parametrize(("common", "shared"), [(1, False), (20, True)])
def test_a_few_tokens_behind_a_long_prompt_are_not_worth_their_keys(common, shared):
    prompt = [1] * (4 * KEYS_PER_TOKEN)
    pair = [prompt + [2] * common + [last] * 30 for last in (3, 4)]
    for alone in (0, 9):  # before and after the pair in the order of tokens
        batch = batch_of_lists(*pair, prompt + [alone] * 30, prompt=len(prompt))
        trees = find_trees(batch, max_tokens=EVERYTHING, alignment=1)
        assert trees.lengths.sum() == len(prompt) + 90 + common * (1 if shared else 2)


def test_padding_may_cost_more_than_sharing_saves():
    batch = batch_of_lists([1, 2, 3, 4], [1, 2, 3, 5], prompt=3)
    assert find_trees(batch, max_tokens=EVERYTHING, alignment=4).families.tolist() == [0, 0]
    assert find_trees(batch, max_tokens=EVERYTHING, alignment=8).families.tolist() == [0, 1]


def test_a_tree_that_is_too_large_is_cut_where_sequences_differ_early():
    sequences = [[1, first, *([5] * 10), last] for first in (2, 3) for last in (6, 7)]
    trees = find_trees(batch_of_lists(*sequences[::2], *sequences[1::2]), max_tokens=20, alignment=1)
    assert trees.families.tolist() == [0, 1, 0, 1]


def test_paths_lead_from_the_root():
    parents = np.array([2, -1, 1, 1])
    trees = PrefixTrees(parents, *np.zeros((3, 4), np.int64), *np.zeros((2, 1), np.int64))
    assert [part.tolist() for part in trees.paths(np.array([0, 3, 1]))] == [[0, 0, 0, 1, 1, 2], [1, 2, 0, 1, 3, 1]]


def test_separate_sequences_are_roots():
    trees = separate([3, 2])
    assert trees.lengths.tolist() == [3, 2]
    assert all(a < b for a, b in pairwise(trees.families.tolist()))
