"""What findings suggest works: every quoted or nearest allocation is valid by the same measure."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import allocation
from allocation import BatchSpec, Cluster

MODELS = {name: allocation.load_model(name) for name in ("qwen3-30b-a3b", "qwen3-0.6b")}
NAMED = "name its GPUs with `@`, each server's on one node"
counts = st.sampled_from(["1", "2", "3", "4", "6", "8", "16", "0", "02", "*", ""])
dims = st.lists(st.tuples(st.sampled_from("ddttpcev"), counts).map("".join), min_size=1, max_size=4).map("".join)
layouts = dims | st.tuples(dims, dims).map(lambda parts: "(attn:{}|ffn:{})".format(*parts))
members = st.tuples(
    st.sampled_from(["megatron:", "fsdp:", "sglang:", "vllm:", "megatorn:", "sglang.", ""]), layouts
).map("".join)
texts = st.lists(members, min_size=1, max_size=2).flatmap(
    lambda found: st.sampled_from("+|").map(lambda s: s.join(found))
)
known = st.fixed_dictionaries(
    {
        "cluster": st.sampled_from([None, Cluster(1, 2), Cluster(1, 8), Cluster(4, 8)]),
        "model": st.sampled_from([None, *MODELS.values()]),
        "batch": st.sampled_from([None, BatchSpec(8, 1, micro_batch=2)]),
    }
)


def suggested(finding):
    """The whole allocations that a finding suggests."""
    for text in (*finding.nearest, *re.findall(r"`([^`]+)`", finding.help or "")):
        try:
            tree = allocation.parse(text)
        except allocation.AllocationError:
            continue
        yield text, tree


@settings(max_examples=100)
@given(texts, known)
def test_suggested_allocations_are_valid(text, arguments):
    for finding in allocation.check(text, **arguments).findings:
        for suggestion, _ in suggested(finding):
            found = allocation.check(suggestion, **arguments)
            assert found.ok, f"{finding}\n\nsuggests {suggestion}:\n" + "\n".join(map(str, found.findings))


def test_suggestions_are_made():
    """The property above is about something."""
    for text in ("d4t2", "sglang.d4t2", "megatron:d1p2t2e4", "sglang:d8+megatron:d8", ""):
        findings = allocation.check(text, cluster=Cluster(1, 8)).findings
        assert [suggestion for finding in findings for suggestion in suggested(finding)], text


@pytest.mark.parametrize(
    ("text", "cluster", "help", "followed"),
    [
        ("sglang:d1t12", "2x8", "use more servers with a t that divides 8", "sglang:d2t8"),
        ("megatron:d4+sglang:d1t16", "3x8", "write this engine first", "sglang:d1t16+megatron:d4"),
        ("sglang:d3t3", "2x8", "use a t that divides the 8 GPUs of a node", "sglang:d3t4"),
        ("megatron:d6+sglang:d2t4", "2x8", "write this engine first", "sglang:d2t4+megatron:d6"),
        ("megatron:d2@0-1+sglang:d1t4", "2x4", NAMED, "megatron:d2@0-1+sglang:d1t4@4-7"),
        ("sglang:d1t4|megatron:d4@2-5", "2x4", NAMED, "sglang:d1t4@0-3|megatron:d4@2-5"),
        ("sglang:d1t4|megatron:d4@7,2-3,1", "2x4", NAMED, "sglang:d1t4@4-7|megatron:d4@7,2-3,1"),
        ("sglang:d2t3|megatron:d6@6-11", "2x8", NAMED, "sglang:d2t3@8-13|megatron:d6@6-11"),
    ],
)
def test_a_server_that_leaves_its_node_is_told_what_works(text, cluster, help, followed):
    def found(text):
        findings = allocation.check(text, cluster=Cluster.parse(cluster)).findings
        return [f for f in findings if f.severity == "error"]

    (finding,) = found(text)
    assert (finding.code, finding.help) == ("ALLOC-SERVER-NODE", help)
    assert not found(followed)
    for nearest in finding.nearest:
        assert "p" not in nearest.partition(":")[2] and nearest.count("@") == text.count("@")


def test_a_server_may_fill_several_nodes():
    result = allocation.check("sglang:d2t16+megatron:d8", cluster=Cluster.parse("5x8"))
    assert result.ok and [f.code for f in result.findings] == ["ALLOC-SERVER-NODES"]
    assert {device.node for device in result.plan.engine("rollout").servers[1].devices} == {2, 3}


@pytest.mark.parametrize(
    "text",
    [
        "megatron:d2+megatron:d2+sglang:d2+sglang:d2",
        "sglang[actor]:d1+megatron:d4",
        "megatron:d1|megatron[actor]:d1+fsdp:d1+sglang:d1",
        "sglang:d1+sglang[reward]:d1+sglang:d1+vllm:d1",
    ],
)
def test_names_that_are_suggested_can_all_be_given(text):
    findings = allocation.check(text).findings
    assert {f.code for f in findings} == {"ALLOC-NAME-NEEDED"}
    for f in sorted(findings, key=lambda f: -f.span.start):
        named = re.search(r"`(.*):…`", f.help)[1]
        text = text[: f.span.start] + named + text[f.span.end :]
    assert allocation.check(text).ok, text


def test_gpus_of_every_colocated_engine_may_be_said():
    """The help asks for those of each: with those of the smaller one alone the other has too few."""
    (finding,) = allocation.check("megatron[actor]:d4|megatron[ref]:d2").findings
    assert finding.help == "use 4 GPUs for each, or name the GPUs of each with `@`"
    assert not allocation.check("megatron[actor]:d4|megatron[ref]:d2@0-1").ok
    assert allocation.check("megatron[actor]:d4@0-3|megatron[ref]:d2@0-1").ok


def test_heads_that_three_divides_are_offered_three(tmp_path):
    """With nine heads 3 is nearer to 2 than 1 is."""
    model = {"model_type": "qwen3", "hidden_size": 576, "num_hidden_layers": 4, "num_attention_heads": 9}
    model |= {"num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(model))
    for text, offered in (("sglang:d1t2", "sglang:d1t3"), ("megatron:d1t4", "megatron:d1t3")):
        found = allocation.check(text, model=allocation.load_model(str(tmp_path / "config.json"))).findings
        assert {one for each in found for one in each.nearest[:1]} == {offered}
