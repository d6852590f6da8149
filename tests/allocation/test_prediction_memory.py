"""Memory of a layer for multi-token prediction that the actor trains: it lies on the last stage of a pipeline."""

from dataclasses import replace

import pytest

import allocation
from allocation import BatchSpec, MegatronSettings, MemorySettings, ParallelSizes
from allocation.memory import footprint_of
from allocation.memory.activations import layer_activations
from allocation.memory.megatron import _logits, phases_of_stage
from allocation.parameters import LayerKind, prediction_layer, stage_chunks, vocabulary
from allocation.settings import Workload

MODEL = allocation.load_model("deepseek-v3")
SIZES = ParallelSizes(tp=4, pp=2, dp=8, ep=16, edp=2)
FULL = MegatronSettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
TOKENS, ITEM = 4096, 2


def items(stage: int, settings: MegatronSettings, phase: str, *, trained: bool) -> dict[str, int]:
    ends = {"num_layers_in_first_pipeline_stage": 31}
    work = Workload(
        MODEL,
        replace(settings, **ends),
        MemorySettings(mtp_trained=trained),
        BatchSpec(512, max_length=2048, max_tokens_per_mb=TOKENS),
    )
    phases = phases_of_stage(SIZES, work, stage_chunks(MODEL, SIZES, work.megatron)[stage], stage, trains=True)
    return {item.name: item.bytes for item in next(each for each in phases if each.name == phase).items}


def added(stage: int, settings: MegatronSettings, phase: str) -> dict[str, int]:
    """The bytes of items that the layer changes."""
    with_it, without = (items(stage, settings, phase, trained=it) for it in (True, False))
    every = with_it | without
    return {it: more for it in every if (more := with_it.get(it, 0) - without.get(it, 0)) and "reserve" not in it}


def test_the_layer_of_deepseek_v3_has_as_many_parameters_as_published():
    """11.5 billion of its own, beside the embedding and output layer that it shares with the policy."""
    assert MODEL.mtp_layers == 1
    assert prediction_layer(MODEL).total == pytest.approx(11.5e9, rel=0.01)


def test_only_the_last_stage_has_it_and_the_embedding_that_it_reads():
    assert added(0, MegatronSettings(), "optimizer step") == {}
    own = prediction_layer(MODEL)
    dense = own.split // 4 + own.copied + vocabulary(MODEL, 4) // 4
    expert = own.experts // 16
    found = added(1, MegatronSettings(), "optimizer step")
    assert found["weights"] == 2 * (dense + expert)
    assert found["gradients (float32)"] == 4 * (dense + expert)
    assert found["main weights (float32)"] == pytest.approx(4 * (dense / 8 + expert / 2), rel=1e-6)
    assert found["Adam's moments"] == pytest.approx(8 * (dense / 8 + expert / 2), rel=1e-6)


def test_its_activations_are_those_of_a_layer_and_of_its_projection_or_are_recomputed():
    entry = MODEL.hidden_size * ITEM // 4 * TOKENS
    of_layer = layer_activations(MODEL, SIZES, LayerKind(False, True), Workload(MODEL)) * TOKENS
    assert added(1, MegatronSettings(), "forward and backward")["activations"] == of_layer + 4 * entry
    found = added(1, FULL, "forward and backward")
    assert found["activations"] == entry
    assert found["recomputed layers"] == 4 * entry
    assert added(0, FULL, "forward and backward") == {}


def test_logits_of_both_heads_exist_at_once_unless_they_are_made_slice_by_slice():
    words, work = vocabulary(MODEL, 4) // MODEL.hidden_size // 4, Workload(MODEL)
    assert [_logits(SIZES, work, 4096, heads) for heads in (1, 2)] == [4096 * words * ITEM, 2 * 4096 * words * ITEM]
    assert {_logits(SIZES, work, 16384, heads) for heads in (1, 2)} == {2**28 * ITEM}
    assert "logits" not in added(1, MegatronSettings(), "log-probs")


def test_no_role_but_the_actor_has_it_nor_a_model_without_one():
    plain, predicting = (Workload(MODEL, FULL, MemorySettings(mtp_trained=it)) for it in (False, True))
    more = [
        footprint_of(role, "megatron", SIZES, predicting) != footprint_of(role, "megatron", SIZES, plain)
        for role in ("actor", "critic", "ref")
    ]
    assert more == [True, False, False]
    without = replace(MODEL, mtp_layers=0)
    assert not replace(predicting, model=without).predicts
