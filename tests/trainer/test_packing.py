from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocation import load_model
from allocation.parameters import sequence_products
from areal_like.core.trainer import packing
from areal_like.core.trainer.prefix_trees import PrefixTrees

sizes = st.fixed_dictionaries(
    {"tp": st.integers(1, 4), "cp": st.integers(1, 4), "dp": st.integers(1, 8), "multiple": st.integers(1, 4)}
)
lengths_of = st.lists(st.integers(1, 200), min_size=1, max_size=60)
MODEL = load_model("qwen3-0.6b")


def costs(schedule, lengths, alignment=1):
    """Multiplications of each micro-batch, `[ranks, micro-batches]`."""
    padded = [-(-length // alignment) * alignment for length in lengths]
    return np.array([[sum(sequence_products(MODEL, padded[i]) for i in part) for part in rank] for rank in schedule])


@given(lengths_of, sizes, st.integers(256, 2048), st.booleans())
def test_schedule_keeps_its_invariants(lengths, sizes, max_tokens, balances):
    dp, multiple = sizes["dp"], sizes["multiple"]
    alignment = packing.sequence_alignment(sizes["tp"], sizes["cp"])
    limits = {"dp": dp, "max_tokens": max_tokens, "alignment": alignment, "multiple": multiple}
    schedule = packing.make_schedule(lengths, **limits, model=MODEL if balances else None)

    members = [i for rank in schedule for bin_ in rank for i in bin_]
    assert sorted(members) == list(range(len(lengths)))
    assert len(schedule) == dp
    assert {len(rank) for rank in schedule} == {len(schedule[0])}
    assert len(schedule[0]) % multiple == 0
    for rank in schedule:
        for bin_ in rank:
            assert sum(-(-lengths[i] // alignment) * alignment for i in bin_) <= max_tokens


@given(lengths_of, st.integers(1, 8))
def test_ranks_differ_by_no_more_than_the_longest_sequence_per_micro_batch(lengths, dp):
    schedule = packing.make_schedule(lengths, dp=dp, max_tokens=512, alignment=1)
    loads = [sum(lengths[i] for bin_ in rank for i in bin_) for rank in schedule]
    assert max(loads) - min(loads) <= max(lengths) * len(schedule[0])


@given(st.lists(st.integers(1, 40000), min_size=1, max_size=60), st.integers(1, 8), st.integers(1, 4), st.booleans())
def test_equal_costs_need_no_further_micro_batches_and_spread_by_no_more_than_a_sequence(lengths, dp, multiple, meet):
    limits = {"dp": dp, "max_tokens": 40960, "alignment": 1, "multiple": multiple}
    balanced = costs(packing.make_schedule(lengths, **limits, model=MODEL, meet=meet), lengths)
    assert balanced.sum() == pytest.approx(sum(sequence_products(MODEL, length) for length in lengths))
    assert balanced.shape[1] <= len(packing.make_schedule(lengths, **limits)[0])
    if sum(lengths) <= 40960:  # room everywhere, so the rule alone decides
        longest = sequence_products(MODEL, max(lengths)) * (1 + 1e-9)
        loads = balanced.ravel() if meet else balanced.sum(axis=1)
        assert loads.max() - loads.min() <= longest
        assert np.ptp(balanced.sum(axis=1)) <= longest


def test_a_tree_costs_the_tokens_and_scores_of_its_nodes():
    nodes = {"parents": [-1, 0, 0, -1], "sources": [0, 0, 1, 2], "starts": [0, 8, 8, 0], "ends": [8, 20, 12, 24]}
    trees = PrefixTrees(
        **{name: np.array(each) for name, each in nodes.items()},
        leaves=np.array([1, 2, 3]),
        families=np.array([0, 0, 1]),
    )
    whole = [sequence_products(MODEL, n) for n in (8, 20, 12, 24)]
    assert packing._costs(trees, 4, MODEL) == pytest.approx([whole[1] + whole[2] - whole[0], whole[3]])


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([1, 16, 32]),
    st.randoms(),
)
def test_context_parallel_shares_together_hold_every_prediction_once(lengths, tp, cp, rows, random):
    lengths = np.array(lengths, np.int32)
    tokens = np.arange(lengths.sum(), dtype=np.int32) + 7
    members = random.sample(range(len(lengths)), k=random.randint(1, len(lengths)))
    alignment = packing.sequence_alignment(tp, cp, rows)
    shares = [packing.pack(tokens, lengths, members, alignment, cp=cp, cp_rank=r) for r in range(cp)]

    starts = np.concatenate(([0], np.cumsum(lengths)))
    expected = [t for i in members for t in range(starts[i] + 1, starts[i + 1])]
    assert sorted(np.concatenate([share.targets for share in shares])) == sorted(expected)
    for share in shares:
        assert len(share.tokens) % (tp * rows) == 0
        assert len({len(other.tokens) for other in shares}) == 1
        assert (share.tokens[share.rows] == tokens[share.targets - 1]).all()
        owner = np.searchsorted(starts, share.targets, side="right") - 1
        assert (share.positions[share.rows] == share.targets - 1 - starts[owner]).all()


def test_chunks_are_cut_from_both_ends():
    tokens = np.arange(16, dtype=np.int32)
    shares = [packing.pack(tokens, np.array([16]), [0], 8, cp=4, cp_rank=r).tokens.tolist() for r in range(4)]
    assert shares == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]


def test_a_rank_without_sequences_gets_a_dummy_that_is_trained_on_nowhere():
    lengths = np.array([3], np.int32)
    schedule = packing.make_schedule(lengths, dp=2, max_tokens=16, alignment=4)
    assert sorted(rank[0] for rank in schedule) == [(), (0,)]
    dummy = packing.pack(np.arange(3, dtype=np.int32), lengths, (), 4)
    assert len(dummy.tokens) == 4
    assert not len(dummy.rows)


def test_as_few_micro_batches_as_the_limit_allows():
    schedule = packing.make_schedule([25] * 512, dp=2, max_tokens=16384, alignment=1)
    assert len(schedule[0]) == 1
    schedule = packing.make_schedule([600] * 8, dp=1, max_tokens=1024, alignment=1)
    assert len(schedule[0]) == 8


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ([10, 300], ["300", "max_tokens_per_mb", "256"]),
        ([], ["at least one sequence"]),
        ([4, 0], ["at least one token"]),
    ],
)
def test_what_cannot_be_packed_is_named(lengths, words):
    with pytest.raises(packing.PackingError) as error:
        packing.make_schedule(lengths, dp=1, max_tokens=256, alignment=1)
    assert all(word in str(error.value) for word in words)
