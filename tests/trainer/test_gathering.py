"""The ranks of a layout gather the weights together, bucket by bucket, whatever each of them holds."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file
from test_layouts import world
from trainer_jobs import Setting, gathered, messages

from allocation import ParallelSizes

TP2_PP2, TP2_EP2 = ParallelSizes(tp=2, pp=2, etp=2), ParallelSizes(tp=2, dp=2, ep=2, etp=2)


@pytest.mark.parametrize(
    ("model", "sizes", "bridge"),
    [
        ("tied", TP2_PP2, "megatron-bridge"),
        ("moe", TP2_EP2, "mbridge"),
        pytest.param("tied", TP2_PP2, "mbridge", marks=pytest.mark.long),
        pytest.param("moe", TP2_EP2, "megatron-bridge", marks=pytest.mark.long),
    ],
    ids=["tied-megatron-bridge", "moe-mbridge", "tied-mbridge", "moe-megatron-bridge"],
)
def test_every_rank_takes_part_in_every_bucket_and_rank_0_holds_it(ranks, models, model, sizes, bridge):
    outcomes = ranks.run(gathered, world(sizes), Setting(models[model], sizes, bridge=bridge))
    buckets, held, whole = outcomes[0]
    assert all(other == buckets for other, _, _ in outcomes[1:])
    assert not any(any(other) for _, other, _ in outcomes[1:])
    assert all(other == whole for _, _, other in outcomes[1:]), "a rank could not export its weights to servers"
    expected = load_file(models[model] / "model.safetensors")
    assert {spec.name for (spec,) in buckets} == expected.keys()
    for (spec,), content in zip(buckets, held, strict=True):
        np.testing.assert_array_equal(np.frombuffer(content, np.float32).reshape(spec.shape), expected[spec.name])


@pytest.mark.parametrize("bridge", ["mbridge", "megatron-bridge"])
def test_a_pipeline_of_one_stage_tells_itself_nothing_of_each_weight(ranks, models, bridge):
    setting = Setting(models["tied"], ParallelSizes(dp=2, edp=2), bridge=bridge)
    for first, second in ranks.run(messages, 2, setting):
        assert first <= 2  # which weights there are; on a GPU each one waits for it
        assert second <= 2


def test_stages_of_a_pipeline_tell_each_other_once(ranks, models):
    for first, second in ranks.run(messages, 2, Setting(models["tied"], ParallelSizes(pp=2))):
        assert first > 20
        assert second <= 2
