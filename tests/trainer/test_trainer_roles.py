"""Reference and critic in every layout as on one rank, and as transformers has them."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_layouts import MORE_LAYOUTS, same_training, world
from tolerance import BACKWARD, assert_close, close_to
from trainer_jobs import (
    Machine,
    Setting,
    Valued,
    critic_steps,
    make_batch,
    moved_reference,
    reference_updates,
    resumed_critic,
    resumed_reference,
)
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from allocation import ParallelSizes

pytestmark = pytest.mark.covers("PPO with critic")

DP2 = ParallelSizes(dp=2, edp=2)
LAYOUTS = [
    ("tied", ParallelSizes(pp=2), "mbridge"),
    ("moe", ParallelSizes(cp=2, ep=2), "mbridge"),
]
UNTIED = [
    ("untied", ParallelSizes(tp=2, etp=2), "megatron-bridge"),
    ("untied", ParallelSizes(tp=2, dp=2, etp=2, edp=2), "megatron-bridge"),
]


def gathered(parts: list[tuple[np.ndarray, np.ndarray] | None]) -> np.ndarray:
    """What the ranks say of the batch, each place set exactly once."""
    values = np.full(len(make_batch().tokens), np.nan)
    for places, part in filter(None, parts):
        assert np.isnan(values[places]).all()
        values[places] = part
    return values


@pytest.fixture(scope="module")
def one_critic(ranks, models, tmp_path_factory):
    def run(model: str) -> tuple[Valued, torch.nn.Module]:
        folder = tmp_path_factory.mktemp("critic") / model
        (outcome,) = ranks.run(critic_steps, 1, Setting(models[model]), folder)
        return outcome, folder

    return cache(run)


@pytest.mark.parametrize(
    ("model", "sizes", "bridge"),
    [*LAYOUTS, *(pytest.param(*row, marks=pytest.mark.long) for row in (*MORE_LAYOUTS, *UNTIED))],
)
def test_a_critic_trains_as_on_one_rank(ranks, models, one_critic, model, sizes, bridge):
    expected, _ = one_critic(model)
    outcomes = ranks.run(critic_steps, world(sizes), Setting(models[model], sizes, bridge=bridge))
    for moment in ("before", "after"):
        values = gathered([getattr(outcome, moment) for outcome in outcomes])
        assert_close(values, gathered([getattr(expected, moment)]))
    same_training(outcomes, expected)


@pytest.mark.parametrize("model", [pytest.param("tied", marks=pytest.mark.long), "moe"])
def test_a_saved_critic_is_a_sequence_classifier_of_transformers(ranks, models, one_critic, model):
    """A value is what that gives at the token before; and another critic goes on from it."""
    trained, folder = one_critic(model)
    batch, expected = make_batch(), []
    hf = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    for tokens in torch.from_numpy(batch.tokens).long().split(batch.lengths.tolist()):
        hidden = hf.model(tokens[None]).last_hidden_state
        expected += [np.nan, *hf.score(hidden)[0, :-1, 0].tolist()]
    assert_close(gathered([trained.after]), expected)
    assert np.nanstd(expected) > 0.01  # it learnt something
    (again,) = ranks.run(critic_steps, 1, Setting(folder))
    assert_close(gathered([again.before]), gathered([trained.after]))


def test_a_critic_goes_on_in_another_layout(ranks, models, one_critic, tmp_path):
    setting = Setting(models["tied"], ParallelSizes(tp=2, pp=2, etp=2))
    ranks.run(critic_steps, 4, setting, None, tmp_path / "state")
    (resumed,) = ranks.run(resumed_critic, 1, Setting(models["tied"]), tmp_path / "state")
    (straight,) = ranks.once(resumed_critic, 1, Setting(models["tied"]), None)
    for step, right in zip(resumed, straight, strict=True):
        assert step == close_to(right)


def test_a_critic_in_bfloat16_goes_on(ranks, models, tmp_path):
    """Its head is float32, and comes before the other weights in the optimizer."""
    setting = Setting(models["tied"], DP2, machine=Machine("cpu", "bfloat16"))
    ranks.run(critic_steps, 2, setting, None, tmp_path / "state")
    (resumed, _), (straight, _) = (ranks.run(resumed_critic, 2, setting, at) for at in (tmp_path / "state", None))
    assert resumed == [close_to(step) for step in straight]


@pytest.mark.parametrize(
    ("sizes", "backend"),
    [
        (ParallelSizes(tp=2, etp=2), "megatron"),
        pytest.param(ParallelSizes(cp=2, edp=2), "fsdp", marks=pytest.mark.long),
        (ParallelSizes(tp=2), "fsdp"),
    ],
)
def test_a_head_stays_float32_beside_a_model_in_bfloat16(ranks, models, tmp_path, sizes, backend):
    setting = Setting(models["tied"], sizes, backend=backend, machine=Machine("cpu", "bfloat16"))
    for outcome in ranks.run(critic_steps, 2, setting, tmp_path / "critic"):
        assert all(step["skipped"] == 0 for step in outcome.steps)
    saved = load_file(tmp_path / "critic/model.safetensors")
    assert saved["score.weight"].dtype == torch.float32
    assert {tensor.dtype for name, tensor in saved.items() if name != "score.weight"} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("model", "sizes", "bridge"),
    [
        ("tied", ParallelSizes(pp=2), "mbridge"),
        pytest.param("tied", ParallelSizes(tp=2, pp=2, etp=2), "mbridge", marks=pytest.mark.long),
        pytest.param("untied", ParallelSizes(cp=2, dp=2, edp=4), "megatron-bridge", marks=pytest.mark.long),
        pytest.param("moe", ParallelSizes(pp=2, dp=2, ep=2), "mbridge", marks=pytest.mark.long),
    ],
)
def test_a_reference_follows_by_checkpoints_and_has_no_memory_of_an_optimizer(
    ranks, models, tmp_path, model, sizes, bridge
):
    hf = AutoModelForCausalLM.from_pretrained(models[model], dtype=torch.float32)
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    hf.save_pretrained(tmp_path / "new")
    updates = [(tmp_path / "new", 0.75), (tmp_path / "new", 0.0)]
    (one,) = ranks.run(reference_updates, 1, Setting(models[model]), updates)
    outcomes = ranks.run(reference_updates, world(sizes), Setting(models[model], sizes, bridge=bridge), updates)
    for i, weights in enumerate(outcomes[0].weights):
        values = gathered([outcome.log_probs[i] for outcome in outcomes])
        assert_close(values, gathered([one.log_probs[i]]))
        assert weights.keys() == one.weights[i].keys()
    before, mixed, after = outcomes[0].weights
    for name, weight in mixed.items():
        assert_close(weight, 0.75 * before[name] + 0.25 * after[name], depth=BACKWARD, err_msg=name)
        assert not np.array_equal(before[name], after[name])
    for outcome in outcomes:
        assert outcome.trainable == 0
        assert outcome.refused == [
            "the ref has no optimizer",
            "a critic has values, the ref has log-probs",
        ]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"sizes": ParallelSizes(tp=2, etp=2)}, {"sizes": DP2}),
        (
            {"sizes": ParallelSizes(cp=2, edp=2), "backend": "fsdp", "offload": True, "max_tokens_per_mb": 32},
            {"backend": "fsdp"},
        ),
        pytest.param(
            {"sizes": ParallelSizes(dp=2, tp=2), "backend": "fsdp"}, {"backend": "fsdp"}, marks=pytest.mark.long
        ),
    ],
    ids=["megatron", "fsdp", "fsdp-d2t2"],
)
def test_a_reference_that_moves_is_saved_and_goes_on(ranks, models, tmp_path, before, after):
    hf = AutoModelForCausalLM.from_pretrained(models["tied"], dtype=torch.float32)
    old = {name: parameter.detach().clone().numpy() for name, parameter in hf.named_parameters()}
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    hf.save_pretrained(tmp_path / "new")
    before, after = (Setting(models["tied"], **settings) for settings in (before, after))
    saved = ranks.run(moved_reference, world(before.sizes), before, tmp_path / "new", tmp_path / "state")
    resumed = ranks.run(resumed_reference, world(after.sizes), after, tmp_path / "state")
    new = {name: parameter.detach().numpy() for name, parameter in hf.named_parameters()}
    for name, weight in resumed[0][0].items():
        assert_close(weight, (old[name] + new[name]) / 2, depth=BACKWARD, err_msg=name)
        np.testing.assert_array_equal(weight, saved[0][0][name], err_msg=name)
    values = [gathered([part[1] for part in outcome]) for outcome in (saved, resumed)]
    assert_close(*values)
