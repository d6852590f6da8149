"""Options that a CPU server of a model with images does not use."""

from dataclasses import replace

import pytest
from test_preflight import check

from allocation.vision import Tower
from areal_like.config.load import load
from areal_like.preflight.options import check_options

TOWER = Tower(layers=1, hidden=8, ffn=16, gated=False, pixels=12, merged=4, ends=8)


@pytest.mark.parametrize(("family", "warned"), [("gemma3_text", True), ("qwen3_vl_text", False)])
def test_chunks_that_could_cut_an_image_are_not_used(write, family, warned):
    job = check(write()).job
    config = load(write(), ["sglang.extra_args.chunked-prefill-size=64"]).config
    spec = replace(job.models["actor"], family=family, tower=TOWER)
    keys = [found.key for found in check_options(config, "cpu", spec, job.plan) if found.code == "RUN-UNUSED"]
    assert keys == ["sglang.extra_args.chunked-prefill-size"] * warned
