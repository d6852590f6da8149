"""Strings that are valid: what they come to, and that printing never loses a part."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import allocation
from allocation.language.spelling import spell
from allocation.language.syntax import Allocation, Dim, GpuRange, Group, Layout, Member, Word

PUBLISHED = [
    # string, GPUs, sizes of the first trainer or server
    ("megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)", 16, {"tp": 2, "pp": 4, "cp": 2, "dp": 1, "ep": 4, "etp": 1, "edp": 1}),
    ("megatron:(attn:d4p2t2c2|ffn:d2p2t4e2)", 32, {"tp": 2, "pp": 2, "cp": 2, "dp": 4, "ep": 2, "etp": 4, "edp": 2}),
    ("megatron:(attn:d1p4t2c2|ffn:e4)", 16, {"tp": 2, "pp": 4, "cp": 2, "dp": 1, "ep": 4, "etp": 1, "edp": 1}),
    ("megatron:attn:d1p4t2c2/ffn:d1p4t1e4", 16, {"tp": 2, "pp": 4, "cp": 2, "ep": 4}),
    ("megatron:d4t2e8", 8, {"dp": 4, "tp": 2, "ep": 8, "etp": 1, "edp": 1}),
    ("megatron:d2p2v3", 4, {"dp": 2, "pp": 2, "vpp": 3}),
    ("sglang:d4t4", 16, {"dp": 4, "tp": 4}),
    ("sglang:d2+fsdp:d4", 6, {"dp": 2}),
    ("megatron:attn:d1p4t2c2|ffn:d1p4t1e4", 16, {"tp": 2, "pp": 4, "cp": 2, "ep": 4}),
    ("megatron[actor]:attn:d2|ffn:e2|fsdp[ref]:d2", 2, {"ep": 2}),
    ("fsdp:d4p1t1e1", 4, {"dp": 4, "pp": 1, "ep": 1}),
    ("sglang:d4p1t1c1+fsdp:d4p1t1", 8, {"dp": 4}),
    (" sglang : d2 t2 + fsdp : d4 ", 8, {"dp": 2, "tp": 2}),
    ("vllm:d2t2p2", 8, {"dp": 2, "tp": 2, "pp": 2}),
    ("sglang:d1t4e4", 4, {"tp": 4, "ep": 4}),
    ("sglang[rollout]:d4t2+megatron[actor]:(attn:d2t2c2|ffn:e4)|megatron[critic]:d2t4", 16, {"dp": 4, "tp": 2}),
]


@pytest.mark.parametrize(("text", "n_gpus", "sizes"), PUBLISHED)
def test_published_strings(text, n_gpus, sizes):
    plan = allocation.compile(text)
    assert plan.n_gpus == n_gpus
    got = {name: getattr(plan.engines[0].sizes, name) for name in sizes}
    assert got == sizes


@pytest.mark.parametrize("text", [text for text, _, _ in PUBLISHED])
def test_plan_survives_json(text):
    plan = allocation.compile(text)
    assert allocation.Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_plan_of_another_version_is_refused():
    data = allocation.compile("megatron:d1").to_json()
    with pytest.raises(ValueError, match="version 99"):
        allocation.Plan.from_json({**data, "version": 99})
    del data["engines"]
    with pytest.raises(ValueError, match="engines"):
        allocation.Plan.from_json(data)


counts = st.integers(1, 64).map(str)
names = st.text("abcxyz_019", min_size=1, max_size=5).filter(lambda s: not s[0].isdigit())


def dims(letters, *, star=False):
    def build(chosen):
        return st.tuples(
            *(st.builds(Dim, st.just(c), counts | st.just("*") if star and c == "d" else counts) for c in chosen)
        )

    return st.lists(st.sampled_from(letters), min_size=1, max_size=4, unique=True).flatmap(build)


layouts = st.builds(Layout, dims("dptcev", star=True)) | st.builds(Layout, dims("dptcv"), dims("dpte"))
ranges = st.tuples(st.integers(0, 99), st.integers(0, 9)).map(lambda r: GpuRange(str(r[0]), str(r[0] + r[1])))
members = st.builds(
    Member,
    st.builds(Word, st.sampled_from(["megatron", "fsdp", "sglang", "vllm"])),
    layouts,
    st.none() | st.builds(Word, names),
    st.lists(ranges, max_size=3).map(tuple),
)
groups = st.builds(Group, st.lists(members, min_size=1, max_size=3).map(tuple))
allocations = st.builds(Allocation, st.lists(groups, min_size=1, max_size=3).map(tuple))


@settings(max_examples=150)
@given(allocations)
def test_printing_loses_nothing(tree):
    assert allocation.parse(spell(tree)) == tree
    assert allocation.parse(spell(tree, shell=True)) == tree


@settings(max_examples=100)
@given(allocations)
def test_format_is_stable_and_says_the_same(tree):
    normal = allocation.format(spell(tree))
    assert allocation.format(normal) == normal
    assert allocation.format(spell(tree, shell=True)) == normal
    assert sorted(normal) == sorted(spell(tree))


def test_format_orders_letters_and_spells_for_a_shell():
    assert allocation.format(" megatron : ( attn: c2t2p4d1 | ffn: e4 p04 ) @ 0-15") == (
        "megatron:(attn:d1p4t2c2|ffn:p4e4)@0-15"
    )
    assert allocation.format("megatron:(attn:d1t2|ffn:e2)", shell=True) == "megatron:attn:d1t2/ffn:e2"


def test_spans_point_at_the_words():
    text = "sglang[a]:d2 t4 + megatron:(attn:d1|ffn:e1)@0,2-3"
    tree = allocation.parse(text)
    first, second = tree.members
    assert [text[slice(*dim.span)] for dim in first.layout.attn] == ["d2", "t4"]
    assert text[slice(*first.name.span)] == "a"
    assert [text[slice(*r.span)] for r in second.gpus] == ["0", "2-3"]
    assert text[slice(*second.span)] == "megatron:(attn:d1|ffn:e1)@0,2-3"


def test_a_folded_layout_without_parentheses_is_spelt_with_them():
    text = "sglang[a]:d4 | megatron[b]: attn:d2t2|ffn:e4 @4-7 + fsdp[c]:d1"
    assert allocation.format(text) == "sglang[a]:d4|megatron[b]:(attn:d2t2|ffn:e4)@4-7+fsdp[c]:d1"
    findings = allocation.check("megatron:attn:d2|ffn:e2+sglang:").findings
    assert [f.code for f in findings if f.severity == "error"] == ["ALLOC-SYNTAX"]


def test_a_size_of_1_is_kept_as_it_was_written():
    assert allocation.format("fsdp:t1p1d4") == "fsdp:d4p1t1"
    assert allocation.compile("fsdp:d4p1t1").engines[0].sizes == allocation.compile("fsdp:d4").engines[0].sizes


def test_what_lark_made_of_the_grammar_is_renewed(tmp_path, monkeypatch):
    """A file of another grammar in the place where Lark keeps its own is not believed."""
    from allocation.language import parser

    monkeypatch.setattr(parser, "cache_from_source", lambda file: str(tmp_path / "parser.pyc"))
    kept = tmp_path / "grammar.lark.cache"
    for content in (None, b"", b"not a pickle", b"0" * 64 + b"\n"):
        if content is not None:
            kept.write_bytes(content)
        parser._lark.cache_clear()
        assert allocation.parse("megatron:d4")
        assert kept.stat().st_size > 1000
    parser._lark.cache_clear()
