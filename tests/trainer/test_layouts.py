"""Loss equality as the proof of a layout: every one trains as one rank does, and one rank as Hugging Face does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tolerance import BACKWARD, assert_close, assert_gradient, close_to
from trainer_jobs import TEMPERATURE, Outcome, Setting, Valued, make_batch, step_with_trees, three_steps, weighted
from transformers import AutoModelForCausalLM

from allocation import ParallelSizes
from areal_like.core.types import LossSpec

pytestmark = pytest.mark.covers("TP", "PP", "VPP", "CP", "EP", "ETP", "folded attention and expert grids")


LAYOUTS = [
    ("tied", ParallelSizes(dp=2, edp=2)),
    ("tied", ParallelSizes(tp=2, etp=2)),
    ("tied", ParallelSizes(pp=2)),
    ("tied", ParallelSizes(pp=2, vpp=2)),
    ("tied", ParallelSizes(cp=2, edp=2)),
    ("moe", ParallelSizes(dp=2, ep=2)),
    ("moe", ParallelSizes(tp=2, dp=2, ep=2, etp=2)),
]

# Up to 16 ranks, every dimension alone and with others: the dense layers' grid, the experts', and both bridges.
MORE_LAYOUTS = [
    ("tied", ParallelSizes(dp=4, edp=4), "mbridge"),
    ("tied", ParallelSizes(cp=4, edp=4), "mbridge"),
    ("tied", ParallelSizes(pp=4), "mbridge"),
    ("tied", ParallelSizes(tp=2, pp=2, etp=2), "mbridge"),
    ("tied", ParallelSizes(tp=2, cp=2, etp=2, edp=2), "mbridge"),
    ("tied", ParallelSizes(tp=2, dp=2, etp=2, edp=2), "megatron-bridge"),
    ("tied", ParallelSizes(pp=2, cp=2, edp=2), "mbridge"),
    ("tied", ParallelSizes(tp=2, pp=2, vpp=2, etp=2), "mbridge"),
    ("untied", ParallelSizes(pp=2, vpp=2, cp=2, edp=2), "megatron-bridge"),
    ("untied", ParallelSizes(tp=2, pp=2, cp=2, etp=2, edp=2), "mbridge"),
    ("untied", ParallelSizes(tp=2, pp=2, dp=2, etp=2, edp=2), "megatron-bridge"),
    ("tied", ParallelSizes(tp=2, pp=2, cp=2, dp=2, etp=2, edp=4), "mbridge"),
    ("moe", ParallelSizes(dp=4, ep=4), "mbridge"),
    ("moe", ParallelSizes(tp=2, cp=2, ep=4), "mbridge"),
    ("moe", ParallelSizes(pp=2, dp=2, ep=2), "mbridge"),
    ("moe", ParallelSizes(pp=2, vpp=2), "mbridge"),
    ("moe", ParallelSizes(pp=2, vpp=2, dp=2, ep=2), "mbridge"),
    ("moe", ParallelSizes(pp=2, cp=2, ep=2), "megatron-bridge"),
    ("moe", ParallelSizes(tp=2, dp=2, ep=4), "mbridge"),
    ("moe", ParallelSizes(dp=4, ep=2, etp=2), "megatron-bridge"),
    ("moe", ParallelSizes(tp=2, dp=2, ep=2, edp=2), "megatron-bridge"),
    ("moe", ParallelSizes(tp=2, pp=2, dp=2, ep=2, etp=2), "mbridge"),
    ("moe", ParallelSizes(tp=2, pp=2, cp=2, ep=4), "mbridge"),
    ("moe", ParallelSizes(tp=2, pp=2, vpp=2, dp=2, ep=4), "mbridge"),
    ("moe", ParallelSizes(tp=2, pp=4, cp=2, ep=4), "mbridge"),  # megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)
]


def world(sizes: ParallelSizes) -> int:
    return sizes.tp * sizes.cp * sizes.dp * sizes.pp


def assembled(outcomes: list[Outcome]) -> np.ndarray:
    """The log-probs of all ranks, each place set exactly once."""
    values = np.full(len(make_batch().tokens), np.nan)
    for places, part in (o.log_probs for o in outcomes if o.log_probs is not None):
        assert np.isnan(values[places]).all()
        values[places] = part
    return values


def log_probs_of(model: torch.nn.Module) -> torch.Tensor:
    """What a model of transformers says of the batch, a sequence at a time; nan where the engine says nothing."""
    batch, found = make_batch(), []
    for tokens in torch.from_numpy(batch.tokens).long().split(batch.lengths.tolist()):
        predicted = torch.log_softmax(model(tokens[None]).logits[0] / TEMPERATURE, -1)[:-1]
        found += [predicted.new_full((1,), torch.nan), predicted.gather(1, tokens[1:, None])[:, 0]]
    return torch.cat(found).masked_fill(torch.from_numpy(batch.fields["loss_mask"]) == 0, torch.nan)


@pytest.fixture(scope="module")
def one_rank(ranks, models):
    return lambda model, bridge="mbridge": ranks.once(three_steps, 1, Setting(models[model], bridge=bridge))


@pytest.mark.parametrize(
    ("model", "sizes", "bridge"),
    [
        *((*row, "mbridge") for row in LAYOUTS),
        *(pytest.param(*row, marks=pytest.mark.long) for row in MORE_LAYOUTS),
    ],
    ids=lambda x: x if isinstance(x, str) else str(x).removeprefix("ParallelSizes"),
)
def test_layout_trains_as_one_rank_does(ranks, models, one_rank, model, sizes, bridge):
    (reference,) = one_rank(model)
    setting = Setting(models[model], sizes, bridge=bridge)
    alike(ranks.run(three_steps, world(sizes), setting), reference)
    same_gradients(ranks, setting)


def alike(outcomes: list[Outcome], expected: Outcome) -> None:
    assert_close(assembled(outcomes), assembled([expected]))
    same_training(outcomes, expected)


def same_gradients(ranks, setting: Setting) -> None:
    """Compare each weight's gradient with one rank's: 1e-4 of it moves the weight by less than rounding does."""
    step = make_batch(), LossSpec(weighted)
    (expected,) = ranks.once(step_with_trees, 1, Setting(setting.model), *step)
    found = ranks.run(step_with_trees, world(setting.sizes), setting, *step)[0].weights
    assert found.keys() == expected.weights.keys()
    for name, gradient in expected.weights.items():
        assert_gradient(found[name], gradient, err_msg=name)


def same_training(outcomes: list, expected: Outcome | Valued) -> None:
    for outcome in outcomes:
        for step, wanted in zip(outcome.steps, expected.steps, strict=True):
            assert step == close_to(wanted)
    assert outcomes[0].weights.keys() == expected.weights.keys()
    for name, weight in outcomes[0].weights.items():
        assert_close(weight, expected.weights[name], depth=BACKWARD, err_msg=name)


@pytest.mark.parametrize("bridge", ["mbridge", "megatron-bridge"])
@pytest.mark.parametrize("model", ["tied", pytest.param("untied", marks=pytest.mark.long), "moe"])
def test_one_rank_computes_what_hugging_face_does(models, one_rank, model, bridge):
    batch, outcome = make_batch(), one_rank(model, bridge)
    hf = AutoModelForCausalLM.from_pretrained(models[model], dtype=torch.float32)
    expected = log_probs_of(hf)
    assert_close(assembled(outcome), expected.detach().numpy())

    trained_on = torch.from_numpy(batch.fields["loss_mask"] > 0) & ~expected.isnan()
    loss = -expected[trained_on].mean()
    loss.backward()
    gradient = torch.stack([p.grad.norm() for p in hf.parameters() if p.grad is not None]).norm()
    first = outcome[0].steps[0]
    assert first["loss_tokens"] == trained_on.sum()
    assert first["loss"] == close_to(loss.item())
    assert first["grad_norm"] == close_to(gradient.item())


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("tied", ParallelSizes(tp=2, etp=2)),
        ("moe", ParallelSizes(tp=2, edp=2)),
        pytest.param("tied", ParallelSizes(tp=2, pp=2, etp=2), marks=pytest.mark.long),
        pytest.param("moe", ParallelSizes(tp=2, dp=2, ep=2, etp=2), marks=pytest.mark.long),
    ],
    ids=["tied", "moe-etp1", "tied-tp2pp2", "moe"],
)
def test_both_bridges_give_the_same_run(ranks, models, one_rank, model, sizes):
    setting = Setting(models[model], sizes, bridge="megatron-bridge")
    (reference,) = one_rank(model)
    same_training(ranks.run(three_steps, world(sizes), setting), reference)


@pytest.mark.parametrize(
    "megatron",
    [
        pytest.param({"use_deterministic_algorithms": True}, marks=pytest.mark.long),
        {"use_distributed_optimizer": False},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        pytest.param({"recompute_granularity": "selective"}, marks=pytest.mark.long),
        pytest.param(
            {"override_transformer_config": {"num_layers_in_first_pipeline_stage": 1}}, marks=pytest.mark.long
        ),
        {"override_transformer_config": {"pipeline_model_parallel_layout": "Et|t*3L"}},
    ],
    ids=lambda megatron: next(iter(megatron)) + "=" + str(next(iter(megatron.values()))),
)
@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.long)])
def test_settings_change_how_it_is_computed_but_not_what(ranks, models, one_rank, tp, megatron):
    setting = Setting(models["tied"], ParallelSizes(tp=tp, pp=2, etp=tp), megatron=megatron)
    for outcome in ranks.run(three_steps, 2 * tp, setting):
        for step, expected in zip(outcome.steps, one_rank("tied")[0].steps, strict=True):
            assert step == close_to(expected)


def test_interleaving_takes_larger_groups_of_micro_batches(ranks, models, one_rank):
    groups = {"override_transformer_config": {"microbatch_group_size_per_vp_stage": 3}}
    for outcome in ranks.run(three_steps, 2, Setting(models["tied"], ParallelSizes(pp=2, vpp=2), megatron=groups)):
        for step, expected in zip(outcome.steps, one_rank("tied")[0].steps, strict=True):
            assert step == close_to(expected)
