"""Models that SGLang's CPU server does not start or computes otherwise are refused where `device=cpu`."""

from dataclasses import replace

import pytest
from test_preflight import check

from allocation.vision import Tower
from areal_like.config.load import load
from areal_like.preflight.options import check_options

TOWER = Tower(layers=1, hidden=8, ffn=16, gated=False, pixels=12, merged=4, ends=8)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"family": "exaone4"}, "has no attention for it"),
        ({"family": "gemma2"}, None),
        *(({"family": name}, None) for name in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")),
        ({"family": "qwen3_5_text", "tower": TOWER}, None),
        ({"family": "qwen3_vl_text", "tower": TOWER}, None),
        ({"family": "glm"}, "no code of its own"),
        ({"family": "gpt_oss"}, None),
        *(({"family": name}, None) for name in ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite")),
        ({"sliding_layers": (0,), "window": 8}, None),
        ({"family": "qwen2_moe"}, None),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_model_is_refused_on_a_cpu_alone(write, shape, words, device):
    job = check(write()).job
    spec = replace(job.models["actor"], **shape)
    found = list(check_options(load(write()).config, device, spec, job.plan))
    refused = [finding.message for finding in found if finding.code == "RUN-CPU-FAMILY"]
    assert [words in message for message in refused] == ([True] if words and device == "cpu" else [])


@pytest.mark.parametrize(("family", "warned"), [("gemma3_text", True), ("qwen3_vl_text", False)])
def test_chunks_that_could_cut_an_image_are_not_used(write, family, warned):
    job = check(write()).job
    config = load(write(), ["sglang.extra_args.chunked-prefill-size=64"]).config
    spec = replace(job.models["actor"], family=family, tower=TOWER)
    keys = [found.key for found in check_options(config, "cpu", spec, job.plan) if found.code == "RUN-UNUSED"]
    assert keys == ["sglang.extra_args.chunked-prefill-size"] * warned
