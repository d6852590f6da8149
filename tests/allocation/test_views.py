"""What the views show of a plan: facts first, then each way of showing them."""

import re
from xml.etree import ElementTree

import pytest

import allocation
from allocation.views.facts import groups_of, links, plan_maps, rank_maps, sizes
from allocation.views.svg import plan_svg
from allocation.views.words import gpu_ids, ranges

FOLDED = "megatron:(attn:d1p4t2c2|ffn:e4)"
SVG = "{http://www.w3.org/2000/svg}"


def engine(text, **arguments):
    return allocation.compile(text, **arguments).engines[0]


def test_sizes_say_what_etp_is_when_it_is_not_written():
    notes = {size.short: size.note for size in sizes(engine(FOLDED))}
    assert notes["etp"] == "parts of each expert; not written: 1, where Megatron's own default is TP (2)"
    assert notes["edp"] == "copies of the experts: 16/(1·4·4)"
    written = {size.short: size.note for size in sizes(engine("megatron:(attn:d4t2|ffn:t1e4)"))}
    assert written["etp"] == "parts of each expert"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("megatron:d2", "dp pp tp cp"),
        ("megatron:d2e2", "dp pp tp cp ep etp edp"),
        ("megatron:d2p2v2", "dp pp tp cp vpp"),
        ("fsdp:d2", "dp tp cp"),
        ("sglang:d2", "dp tp"),
        ("sglang:d2p2", "dp tp pp"),
    ],
)
def test_sizes_that_an_engine_has(text, shown):
    assert " ".join(size.short for size in sizes(engine(text))) == shown


def test_links_follow_the_nodes():
    words = {link.name: link.words for link in links(engine(FOLDED))}
    assert (words["tp"], words["pp"], words["ep"]) == ("same node", "across nodes", "same node")
    mixed = {link.name: link.words for link in links(engine("megatron:t2d3@6-11"))}
    assert mixed["tp"] == "same node"
    uneven = {link.name: link.words for link in links(engine("megatron:d3p2c2", cluster=allocation.Cluster(2, 9)))}
    assert uneven["dp-cp"] == "1 same node, 1 across"


def test_links_leave_out_what_nothing_uses():
    assert [link.name for link in links(engine("fsdp:d2t2"))] == ["tp", "dp-cp"]
    assert not {"ep", "edp"} & {link.name for link in links(engine("megatron:d4"))}
    assert [(link.name, link.groups, link.size) for link in links(engine("sglang:d3t2"))] == [("server", 3, 2)]
    assert links(engine("megatron:d1")) == []


def test_rank_maps_agree_with_the_grids():
    plan = engine(FOLDED)
    dense, expert = rank_maps(plan)
    assert (dense.by, expert.by) == ("tp", "ep")
    for rank in range(plan.world_size):
        at = plan.coordinates(rank)
        assert dense.labels[rank] == f"t{at['tp']}c{at['cp']}p{at['pp']}"
        assert expert.labels[rank] == f"e{at['ep']}p{at['pp']}"
        for rank_map, name in ((dense, "tp"), (expert, "ep")):
            assert rank in plan.groups(name)[rank_map.groups[rank]]


def test_colours_by_a_group_that_one_engine_has():
    plan = allocation.compile("sglang:d2+megatron:d2t2")
    assert [maps[0].by for _, maps in plan_maps(plan, "dp")] == ["server", "dp"]
    with pytest.raises(KeyError, match="unknown group xp; the groups are server, tp, cp"):
        plan_maps(plan, "xp")


def test_ranks_outside_a_group_have_no_colour():
    (dense,) = rank_maps(engine("megatron:p3"), "embedding")
    assert dense.groups == (0, -1, 0)


def test_groups_of_a_rank():
    found = groups_of(engine(FOLDED), 13)
    assert (found["tp"], found["cp"], found["pp"]) == ([12, 13], [13, 15], [1, 5, 9, 13])
    assert groups_of(engine("sglang:d2t2"), 3) == {"server": [2, 3]}


def test_words():
    assert ranges([0, 1, 2, 3, 5, 7, 8]) == "0-3 5 7 8"
    assert gpu_ids(engine("megatron:d4@0-1,5,7")) == "0-1,5,7"


def cells(svg):
    """Rank numbers and their fill, panel after panel."""
    shapes = list(ElementTree.fromstring(svg).iter())
    found = []
    for shape in shapes:
        title = shape.find(f"{SVG}title")
        if title is not None and (match := re.match(r"rank (\d+),", title.text)):
            found.append((int(match[1]), shape.get("fill")))
    return found


def test_svg_has_a_cell_per_rank_and_grid_and_a_colour_per_group():
    plan = allocation.compile(FOLDED)
    drawn = cells(plan_svg(plan))
    assert [rank for rank, _ in drawn] == [*range(16), *range(16)]
    for (_, colour), (_, partner) in zip(drawn[0:16:2], drawn[1:16:2], strict=True):
        assert colour == partner
    assert len({colour for _, colour in drawn[16:]}) == 4


def test_svg_is_xml_whatever_the_plan_says():
    plan = allocation.compile("sglang[rollout]:d1+megatron[actor]:(attn:d2|ffn:e2)|megatron[critic]:d2")
    text = plan_svg(plan)
    assert "(attn:d2|ffn:e2)" in "".join(ElementTree.fromstring(text).itertext())
    assert len(cells(text)) == 1 + 2 * 2 + 2


def test_a_large_picture_stops():
    text = plan_svg(allocation.compile("megatron:d1024"))
    assert len(cells(text)) == 64 * 8
    assert "… and 64 more nodes" in text


def test_notebooks_show_plans_and_engines():
    plan = allocation.compile("sglang:d2+megatron:(attn:d2t2|ffn:e4)")
    html = plan._repr_html_()
    ElementTree.fromstring(html.replace("<br>", "<br/>"))
    assert "6 GPUs of 1 node" in html and html.count("<svg") == 2 and "<style" not in html
    assert plan.engine("actor")._repr_html_() in html


def test_a_plan_too_large_to_draw_still_shows_its_numbers():
    html = allocation.compile("megatron:d100000t8")._repr_html_()
    assert "800,000 ranks" in html and "<svg" not in html
