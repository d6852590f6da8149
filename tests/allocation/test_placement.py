"""Which GPUs each engine gets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import allocation
from allocation import Cluster


def gpus(plan, role):
    return [node * plan.cluster.n_gpus_per_node + gpu for node, gpu in plan.engine(role).devices]


def test_groups_follow_each_other_and_colocated_members_share():
    plan = allocation.compile("sglang[rollout]:d2t2+megatron[actor]:d4|megatron[critic]:d2t2")
    assert gpus(plan, "rollout") == [0, 1, 2, 3]
    assert gpus(plan, "actor") == gpus(plan, "critic") == [4, 5, 6, 7]
    assert plan.n_gpus == len(plan.devices) == 8
    assert plan.groups == (("rollout",), ("actor", "critic"))


def test_servers_know_their_gpus():
    plan = allocation.compile("sglang:d2t4p1", cluster=Cluster(2, 4))
    assert [server.devices[0] for server in plan.engine("rollout").servers] == [(0, 0), (1, 0)]
    assert allocation.compile("megatron:d2").engine("actor").servers == ()


def test_fields_are_placed_in_role_order():
    plan = allocation.compile({"ref": "megatron:d1", "actor": "megatron:d2", "rollout": "sglang:d1"})
    assert [engine.role for engine in plan.engines] == ["rollout", "actor", "ref"]
    assert gpus(plan, "rollout") + gpus(plan, "actor") + gpus(plan, "ref") == [0, 1, 2, 3]
    assert plan.allocation == "sglang[rollout]:d1+megatron[actor]:d2+megatron[ref]:d1"
    assert allocation.compile(plan.allocation).engines == plan.engines


def test_fields_with_the_same_ids_are_colocated():
    plan = allocation.compile({"actor": "megatron:d2@0-1", "ref": "megatron:t2@0-1", "rollout": "sglang:d2"})
    assert plan.groups == (("rollout",), ("actor", "ref"))
    assert gpus(plan, "rollout") == [2, 3]


def test_explicit_ids_keep_their_order_and_are_set_aside():
    plan = allocation.compile("sglang:d4+megatron:d4@6-7,0-1", cluster=Cluster(1, 8))
    assert gpus(plan, "actor") == [6, 7, 0, 1]
    assert gpus(plan, "rollout") == [2, 3, 4, 5]


def test_ids_allow_colocated_engines_of_different_size():
    plan = allocation.compile("megatron[actor]:d4@0-3|megatron[ref]:d2@2-3", cluster=Cluster(1, 4))
    assert gpus(plan, "ref") == [2, 3]
    assert plan.n_gpus == 4


@pytest.mark.parametrize(
    ("text", "cluster", "compiled"),
    [
        ("sglang:d*+megatron:d4", (1, 8), "sglang:d4+megatron:d4"),
        ("sglang:d*t2+megatron:d3", (1, 8), "sglang:d2t2+megatron:d3"),
        ("sglang:d4|megatron:d*t2", None, "sglang:d4|megatron:d2t2"),
        ("megatron:(attn:d*t2c3|ffn:e4)", (3, 8), "megatron:(attn:d4t2c3|ffn:e4)"),
        ("megatron:(attn:d*t2c3|ffn:e4)", (2, 8), "megatron:(attn:d2t2c3|ffn:e4)"),
        ("megatron:d*@0-5", None, "megatron:d6@0-5"),
        ("sglang:d*t2|megatron:d*", (1, 7), "sglang:d3t2|megatron:d6"),
        ("sglang[a]:d4|fsdp[b]:d*t2+fsdp[c]:d*", (1, 8), "sglang[a]:d4|fsdp[b]:d2t2+fsdp[c]:d4"),
        ("fsdp[c]:d*+sglang[a]:d4|fsdp[b]:d*t2", (1, 8), "fsdp[c]:d4+sglang[a]:d4|fsdp[b]:d2t2"),
        ("megatron:d*+sglang:d*@0-1", (1, 8), "megatron:d6+sglang:d2@0-1"),
    ],
)
def test_star_takes_what_is_left(text, cluster, compiled):
    plan = allocation.compile(text, cluster=Cluster(*cluster) if cluster else None)
    assert plan.allocation == compiled


members = st.tuples(st.sampled_from(["d*", "d*t2", "d2", "d4"]), st.sampled_from(["", "", "", "@0-1"]))
groups = st.lists(st.lists(members, min_size=1, max_size=3), min_size=1, max_size=3)


@given(groups, st.sampled_from([None, Cluster(1, 8), Cluster(2, 8)]))
def test_stars_in_any_groups_become_a_plan_or_an_error(groups, cluster):
    texts = [[f"megatron[r{i}x{j}]:{''.join(m)}" for j, m in enumerate(group)] for i, group in enumerate(groups)]
    text = "+".join(map("|".join, texts))
    found = allocation.check(text, cluster=cluster)
    assert found.ok == all(finding.severity != "error" for finding in found.findings)
    if found.plan is not None:
        assert "*" not in found.plan.allocation
        assert allocation.compile(found.plan.allocation, cluster=cluster).engines == found.plan.engines


def test_smallest_folded_world_is_the_lcm():
    # max(t·c, etp·e) would say 6 GPUs; EP 4 does not divide 6.
    assert not allocation.check("megatron:(attn:d1t2c3|ffn:e4)").ok
    assert allocation.compile("megatron:(attn:d2t2c3|ffn:e4)").n_gpus == 12


def test_cluster_is_parsed():
    assert Cluster.parse("4x8") == Cluster(4, 8)
    for text in ("4", "x8", "4x", "0x8", "-1x8", "4x8x2"):
        with pytest.raises(ValueError, match="cluster"):
            Cluster.parse(text)
