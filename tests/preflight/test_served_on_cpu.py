"""Families that have no CPU server, and options that a CPU server of a model with images does not use."""

from dataclasses import replace

import pytest
from test_preflight import check

from allocation.vision import Tower
from areal_like.core.config.load import load
from areal_like.preflight.options import check_options
from areal_like.preflight.served_layout import check_served_layout

TOWER = Tower(layers=1, hidden=8, ffn=16, gated=False, pixels=12, merged=4, ends=8)


@pytest.mark.parametrize(("family", "warned"), [("gemma3_text", True), ("qwen3_vl_text", False)])
def test_chunks_that_could_cut_an_image_are_not_used(write, family, warned):
    job = check(write()).job
    config = load(write(), ["sglang.extra_args.chunked-prefill-size=64"]).config
    spec = replace(job.models["actor"], family=family, tower=TOWER)
    keys = [found.key for found in check_options(config, "cpu", spec, job.plan) if found.code == "RUN-UNUSED"]
    assert keys == ["sglang.extra_args.chunked-prefill-size"] * warned


@pytest.mark.parametrize("family", ["gemma2", "qwen3_next", "qwen3"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_families_with_kernels_for_gpus_only_are_refused_on_a_cpu(write, family, device):
    job = check(write()).job
    spec = replace(job.models["actor"], family=family)
    found = [found.code for found in check_options(load(write()).config, device, spec, job.plan)]
    assert ("RUN-CPU" in found) == (device == "cpu" and family != "qwen3")


def test_a_served_judge_of_such_a_family_is_refused_too(write):
    job = check(write()).job
    spec = replace(job.models["actor"], family="gemma2")
    (refusal,) = check_served_layout(load(write()).config, "judge", "sglang:d1", spec, job.plan)
    assert (refusal.code, refusal.key) == ("RUN-CPU", "reward.judge.path")
