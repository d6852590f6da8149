"""Rank groups against megatron-core's own generator."""

import itertools
import time

import numpy as np
import pytest

import allocation
from allocation.grid import RankGrid
from allocation.plan import DENSE_GROUPS, EXPERT_GROUPS

ORDERS = ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp", "tp-pp-cp-ep-dp", "pp-tp-cp-ep-dp", "cp-tp-ep-dp-pp"]


def layouts(world):
    """All (a, b, c, d) with product `world`."""
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    for a, b, c in itertools.product(divisors, repeat=3):
        if world % (a * b * c) == 0:
            yield a, b, c, world // (a * b * c)


@pytest.fixture(scope="module")
def generator():
    return pytest.importorskip("megatron.core.parallel_state").RankGenerator


@pytest.mark.parametrize("order", ORDERS)
def test_groups_are_megatrons(generator, order):
    worlds = [*range(1, 37), 48, 64, 128] if order == ORDERS[0] else range(1, 25)
    for world in worlds:
        for tp, other, dp, pp in layouts(world):
            for axis, groups in (("cp", DENSE_GROUPS), ("ep", EXPERT_GROUPS)):
                sizes = {"tp": tp, axis: other, "dp": dp, "pp": pp}
                theirs = generator(**{"tp": 1, "ep": 1, "dp": 1, "pp": 1, "cp": 1, **sizes}, order=order)
                ours = RankGrid.from_order(order, sizes)
                for axes in groups.values():
                    assert ours.groups(*axes).tolist() == theirs.get_ranks("-".join(axes)), (sizes, order, axes)


def test_engine_groups_by_name():
    engine = allocation.compile("megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)").engine("actor")
    groups = engine.all_groups()
    assert set(groups) == {*DENSE_GROUPS, *EXPERT_GROUPS, "embedding", "position-embedding"}
    assert groups["cp"][:3].tolist() == [[0, 2], [1, 3], [4, 6]]
    assert groups["ep"][0].tolist() == [0, 1, 2, 3]
    assert groups["pp"].tolist() == engine.expert.groups("pp").tolist()
    assert groups["embedding"].tolist()[0] == [0, 12]
    assert groups["position-embedding"].shape == (4, 1)
    with pytest.raises(KeyError):
        engine.groups("xp")


def test_folded_expert_groups():
    engine = allocation.compile("megatron:(attn:d4t2|ffn:t2e2)").engine("actor")
    assert engine.groups("ep").tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert engine.groups("edp").tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_a_backend_without_experts_has_no_expert_grid():
    engine = allocation.compile("fsdp:d2t2").engine("actor")
    assert engine.expert is None
    assert "ep" not in engine.group_names


def test_coordinates_and_rank_are_inverse():
    grid = RankGrid.from_order("tp-cp-ep-dp-pp", {"tp": 2, "cp": 3, "dp": 2, "pp": 4})
    for rank in range(grid.world_size):
        here = grid.coordinates(rank)
        assert grid.rank(**here) == rank
        for axes in (("tp",), ("cp", "pp"), ("tp", "dp")):
            group = next(row for row in grid.groups(*axes).tolist() if rank in row)
            assert list(grid.group_of(rank, *axes)) == group
    for wrong in (-1, 48):
        with pytest.raises(ValueError, match="outside"):
            grid.coordinates(wrong)
    with pytest.raises(ValueError, match="outside"):
        grid.rank(tp=2)
    with pytest.raises(ValueError, match="unknown axis"):
        grid.groups("xp")


def test_coordinates_cover_both_grids():
    engine = allocation.compile("megatron:(attn:d1p4t2c2|ffn:e4)").engine("actor")
    assert engine.coordinates(13) == {"tp": 1, "cp": 0, "dp": 0, "pp": 3, "etp": 0, "ep": 1, "edp": 0}


def test_pp_not_last_needs_equal_data_parallel_sizes():
    order = "tp-cp-ep-pp-dp"
    result = allocation.check("megatron:(attn:d4t2p2|ffn:e4p2)", order=order)
    assert [finding.code for finding in result.findings] == ["ALLOC-ORDER-PIPELINE"]
    plan = allocation.compile("megatron:(attn:d4t2p2|ffn:t2p2)", order=order)
    engine = plan.engine("actor")
    assert np.array_equal(engine.dense.groups("pp"), engine.expert.groups("pp"))


def test_large_worlds_are_quick():
    engine = allocation.compile("megatron:(attn:d64p16t4c4|ffn:t1e64)").engine("actor")
    engine.all_groups()
    elapsed = []
    for _ in range(5):
        start = time.process_time()
        engine.all_groups()
        elapsed.append(time.process_time() - start)
    assert engine.world_size == 16384
    assert min(elapsed) < 0.05
