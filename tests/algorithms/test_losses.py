"""Losses on numbers that can be checked by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tolerance import close_to, rounding

from areal_like.core.algorithms.losses import (
    LossInputs,
    Sequences,
    ValueLoss,
    cispo,
    cpgd,
    decoupled_ppo,
    dpo,
    gmpo,
    of_tokens,
    sapo,
    sft,
    topr,
    value_loss,
)
from areal_like.core.algorithms.settings import PRESETS, Settings
from areal_like.core.types import LossSpec

SETTINGS = Settings(eps_clip=0.2, eps_clip_higher=0.28, behave_imp_weight_cap=2.0)


def inputs(logprobs, entropy=None, numbers=None, **fields):
    logprobs = torch.tensor(logprobs, requires_grad=True)
    entropy = torch.zeros_like(logprobs) if entropy is None else torch.tensor(entropy)
    fields = {name: torch.tensor(value) for name, value in fields.items()}
    numbers = torch.tensor(numbers or [0] * len(logprobs))
    return LossInputs(logprobs, entropy, fields, Sequences(numbers, int(numbers.max()) + 1))


def policy(logprobs, behaviour, advantages, settings=SETTINGS, loss=decoupled_ppo, **more):
    fields = {"behaviour_logprobs": behaviour, "advantages": advantages, "on_policy": [1.0] * len(behaviour), **more}
    given = inputs(logprobs, **fields)
    loss, stats = loss(given, settings)
    (gradient,) = torch.autograd.grad(loss.sum(), given.logprobs)
    return loss.detach(), gradient, stats


def test_a_loss_is_of_every_token():
    def right(given, parameters):
        return -given.logprobs, {"entropy": given.entropy}

    def averaged(given, parameters):
        return -given.logprobs.mean(), {}

    def crossed(given, parameters):
        return -given.logprobs[:, None] * given.entropy, {}

    def told(given, parameters):
        return -given.logprobs, {"spread": given.logprobs.std()}

    given = inputs([-1.0, -2.0, -3.0])
    assert of_tokens(LossSpec(right), given)[0].tolist() == [1, 2, 3]
    for loss, words in (
        (averaged, r"averaged returned a loss of shape \[\], not \[3\]"),
        (crossed, r"crossed returned a loss of shape \[3, 3\]"),
        (told, r"told returned the statistic spread of shape \[\]"),
    ):
        with pytest.raises(ValueError, match=words):
            of_tokens(LossSpec(loss), given)


def test_a_worked_example():
    """Current, proximal and behaviour probability of one token: 0.3, 0.25, 0.2; advantage 2.

    The ratio 0.3 / 0.25 = 1.2 is within the clip range, the behaviour weight is 0.25 / 0.2 = 1.25: the loss is
    -1.25 * 1.2 * 2 = -3. kl: with r = 0.3 / 0.2 = 1.5, r - 1 - log r.
    """
    log = math.log
    loss, gradient, stats = policy([log(0.3)], [log(0.2)], [2.0], proximal_logprobs=[log(0.25)])
    assert loss.item() == pytest.approx(-3)
    assert gradient.item() == pytest.approx(-3)  # d exp(x) = exp(x)
    assert stats["kl"].item() == pytest.approx(0.5 - log(1.5))
    assert stats["behaviour_weight"].item() == pytest.approx(1.25)
    assert stats["on_policy_logprob_diff"].item() == pytest.approx(log(1.25))


def test_on_policy_gradient_is_the_advantage():
    _, gradient, stats = policy([-1.0, -2.0], [-1.0, -2.0], [0.5, -1.5])
    torch.testing.assert_close(gradient, torch.tensor([-0.5, 1.5]))
    assert stats["kl"].abs().max() == 0 and stats["clip_share"].sum() == 0


@pytest.mark.parametrize(("drift", "weight"), [(math.log(1.5), 1.5), (math.log(8.0), 2.0), (-1.0, math.exp(-1))])
def test_behaviour_weight_is_always_applied_and_truncated(drift, weight):
    """With and without proximal log-probs: no other option switches it on."""
    for more in ({}, {"proximal_logprobs": [-1.0]}):
        _, gradient, stats = policy([-1.0], [-1.0 - drift], [1.0], **more)
        torch.testing.assert_close(gradient, torch.tensor([-weight]))
        assert stats["behaviour_truncated_share"].item() == (drift > math.log(2))


def test_a_ratio_outside_the_clip_range_has_no_gradient_where_it_would_go_further():
    before = [-1.0] * 4
    _, gradient, stats = policy([-0.5, -1.5, -0.5, -1.5], before, [1.0, 1.0, -1.0, -1.0], proximal_logprobs=before)
    assert (gradient != 0).tolist() == [False, True, True, False]
    assert stats["clip_share"].tolist() == [1, 0, 0, 1]


def test_sft_is_the_negative_log_likelihood():
    loss, stats = sft(inputs([-1.5], [0.3]), None)
    assert loss.item() == 1.5 and stats["entropy"].item() == pytest.approx(0.3)


def test_what_is_not_decoupled_is_clipped_against_the_behaviour_policy():
    """Current 0.3, behaviour 0.2: the ratio 1.5 is clipped to 1.28; no gradient is left."""
    settings = replace(SETTINGS, use_decoupled_loss=False)
    loss, gradient, _ = policy([math.log(0.3)], [math.log(0.2)], [2.0], settings, proximal_logprobs=[0.0])
    assert loss.item() == pytest.approx(-2.56)
    assert gradient.item() == 0


def test_dual_clip_bounds_what_a_negative_advantage_counts():
    """The ratio e makes a loss of e without it, 2 with it; a positive advantage is not touched."""
    before = [-2.0, -2.0]
    settings = replace(SETTINGS, c_clip=2.0)
    loss, gradient, _ = policy([-1.0, -1.0], before, [-1.0, 1.0], settings, proximal_logprobs=before)
    torch.testing.assert_close(loss, torch.tensor([2.0, -1.28]))
    assert gradient.tolist() == [0, 0]


def test_gspo_clips_the_geometric_mean_of_a_sequence():
    """Ratios 1.5 and 1 of one sequence: sqrt(1.5) is 1.2247, within 1.28; token by token 1.5 would be clipped.

    Each token's gradient is the mean's: 1.2247 / 2, for both terms of the loss.
    """
    before = [-1.0, -1.0, -1.0]
    settings = replace(SETTINGS, importance_sampling_level="sequence")
    now = [-1 + math.log(1.5), -1.0, -1.0]
    loss, gradient, _ = policy(now, before, [1.0, 1.0, 1.0], settings, proximal_logprobs=before, numbers=[0, 0, 1])
    root = math.sqrt(1.5)
    torch.testing.assert_close(loss, torch.tensor([-root, -root, -1.0]))
    torch.testing.assert_close(gradient, torch.tensor([-root, -root, -1.0]))


def test_gspo_weighs_all_tokens_of_a_sequence_alike():
    """Its ratio is the sequence's, and so is its behaviour weight: their product is the ratio to the behaviour."""
    gspo = PRESETS["gspo"]
    behaviour, proximal, current = [-1.0, -1.51, -2.2], [-1.5, -1.0, -2.2], [-1.5, -1.00003, -2.2]
    _, gradient, _ = policy(current, behaviour, [1.0] * 3, gspo, proximal_logprobs=proximal)
    weight = math.exp(sum(c - b for c, b in zip(current, behaviour, strict=True)) / 3)
    assert gradient.tolist() == close_to([-weight] * 3)
    assert 1 < weight < gspo.weight_bounds[1] == 1.01


@pytest.mark.parametrize("loss", [decoupled_ppo, cispo, cpgd, gmpo, sapo])
@pytest.mark.parametrize("distance", [200.0, -200.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(
    "settings",
    [
        SETTINGS,
        replace(SETTINGS, use_decoupled_loss=False),
        replace(SETTINGS, behave_imp_weight_mode="sequence_truncate", behave_imp_weight_floor=0.5),
        replace(SETTINGS, behave_imp_weight_mode="geometric_mask", behave_imp_weight_veto=1e-4),
        PRESETS["gspo"],
    ],
)
def test_a_policy_that_is_far_away_makes_no_infinite_loss(loss, distance, advantage, settings):
    """e^200 is more than a float32 holds; 0 times infinity would be the whole step's loss."""
    settings = replace(settings, kl_loss_coef=0.1)
    start, others = [-1.0, -1.0], {"proximal_logprobs": [-1.0, -1.0 - distance], "reference_logprobs": [-1.0, -1.0]}
    result = policy([-1.0, -1.0 - distance], start, [advantage, 0.0], settings, loss, **others)
    moved = policy([-1.0, -1.0 - distance], start, [advantage] * 2, settings, loss, reference_logprobs=start)
    for value, gradient, stats in (result, moved):
        assert all(torch.isfinite(each).all() for each in (value, gradient, *stats.values()))


def test_cispo_keeps_the_gradient_of_what_is_clipped():
    """Ratios 8 and 1/8, at most 5: the gradient is -weight * advantage, where PPO has none."""
    log = math.log
    settings = Settings(eps_clip=1.0, eps_clip_higher=4.0, use_decoupled_loss=False)
    now = [-1.0, -1.0]
    loss, gradient, stats = policy(now, [-1 - log(8), -1 + log(8)], [2.0, -1.0], settings, cispo)
    torch.testing.assert_close(gradient, torch.tensor([-10.0, 0.125]))
    torch.testing.assert_close(loss, torch.tensor([10.0, -0.125]))
    assert stats["clip_share"].tolist() == [1, 0]


OFF = Settings(eps_clip=0.2, eps_clip_higher=0.28, behave_imp_weight_mode="disabled", policy_drift_coeff=0.5)
RATIOS = [1.1, 2.0, 0.5, 5.0]


def moved(advantages, settings, loss):
    """A sequence of tokens with the ratios above to the weights at the start of the step."""
    start = [-1 - math.log(ratio) for ratio in RATIOS]
    return policy([-1.0] * 4, start, advantages, settings, loss, proximal_logprobs=start)


def test_cpgd_has_no_ratio_but_the_drift():
    """Gains of ratios above 1.28 and losses of ratios below 0.8 are clipped; the drift's ratio is at most 3."""
    _, gradient, stats = moved([2.0, 2.0, -3.0, -3.0], OFF, cpgd)
    drift = [0.5 * 0.1, 0.5 * 1.0, 0.5 * -0.5, 0.5 * 2.0]
    torch.testing.assert_close(gradient, torch.tensor([-2.0 + drift[0], drift[1], drift[2], 3.0 + drift[3]]))
    assert stats["clip_share"].tolist() == [0, 1, 1, 0]
    plain, _, _ = moved([2.0, 2.0, -3.0, -3.0], replace(OFF, policy_drift_coeff=0.0), cpgd)
    clipped = [-1.0, -1 - math.log(2) + math.log(1.28), -1 + math.log(2) + math.log(0.8), -1.0]
    torch.testing.assert_close(plain, torch.tensor([-2 * clipped[0], -2 * clipped[1], 3 * clipped[2], 3 * clipped[3]]))


@pytest.mark.parametrize(("advantage", "clipped"), [(2.0, [0, 1, 0, 1]), (-3.0, [0, 0, 1, 0])])
def test_gmpo_takes_the_geometric_mean_of_ratios_that_are_clipped_in_log_space(advantage, clipped):
    settings = replace(PRESETS["gmpo"], behave_imp_weight_mode="disabled")
    loss, gradient, stats = moved([advantage] * 4, settings, gmpo)
    logs = [math.log(ratio) for ratio in RATIOS]
    logs = [(0.4 if advantage > 0 else -0.4) if out else log for log, out in zip(logs, clipped, strict=True)]
    mean = math.exp(sum(logs) / 4)
    torch.testing.assert_close(loss, torch.full((4,), -advantage * mean))
    torch.testing.assert_close(gradient, -advantage * mean * (1 - torch.tensor(clipped, dtype=torch.float32)))
    assert stats["clip_share"].tolist() == clipped


def test_sapo_replaces_the_clip_by_a_gate():
    """The gate is 4 / tau times the sigmoid, so that at ratio 1 it has PPO's gradient."""
    settings = replace(PRESETS["sapo"], behave_imp_weight_mode="disabled", sapo_tau_pos=2.0, sapo_tau_neg=3.0)
    loss, gradient, _ = moved([2.0, 2.0, -3.0, -3.0], settings, sapo)
    for place, (ratio, advantage, tau) in enumerate(zip(RATIOS, [2.0, 2.0, -3.0, -3.0], [2, 2, 3, 3], strict=True)):
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        assert loss[place].item() == pytest.approx(-advantage * gate * 4 / tau)
        expected = -advantage * 4 * gate * (1 - gate) * ratio  # a gate near 1 has few bits
        assert gradient[place].item() == pytest.approx(expected, rel=rounding(), abs=rounding(5.0, depth=0))
    _, at_one, _ = policy([-1.0], [-1.0], [2.0], settings, sapo, proximal_logprobs=[-1.0])
    assert at_one.item() == pytest.approx(-2.0)


def test_topr_imitates_what_has_a_reward_and_tapers_the_rest():
    """Responses with a positive reward have weight 1, the others their ratio to the behaviour policy, at most 1."""
    for positive, weights in ((1.0, [1, 1, 1, 1]), (0.0, [1, 1, 0.5, 1])):
        start, own = [-1 - math.log(ratio) for ratio in RATIOS], [2.0, 2.0, -3.0, -3.0]
        _, gradient, stats = policy([-1.0] * 4, start, own, PRESETS["topr"], topr, positive=[positive] * 4)
        wanted = [-advantage * weight for advantage, weight in zip(own, weights, strict=True)]
        torch.testing.assert_close(gradient, torch.tensor(wanted))
        assert stats["clip_share"].tolist() == ([0] * 4 if positive else [1, 1, 0, 1])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_truncate", [2.0, 0.5, 1.5]),
        ("token_mask", [0.0, 0.5, 1.5]),
        ("sequence_truncate", [2.0, 2.0, 1.5]),
        ("sequence_mask", [0.0, 0.0, 1.5]),
        ("geometric_truncate", [math.sqrt(3), math.sqrt(3), 1.5]),
        ("geometric_mask", [math.sqrt(3), math.sqrt(3), 1.5]),
        ("disabled", [1.0, 1.0, 1.0]),
    ],
)
def test_behaviour_weights_of_tokens_and_sequences(mode, expected):
    """Weights 6 and 0.5 of one sequence, together 3, and 1.5 of another one; the cap is 2."""
    behaviour = [-1 - math.log(6), -1 - math.log(0.5), -1 - math.log(1.5)]
    settings = replace(SETTINGS, behave_imp_weight_mode=mode)
    _, gradient, stats = policy([-1.0] * 3, behaviour, [1.0] * 3, settings, numbers=[0, 0, 1])
    torch.testing.assert_close(stats["behaviour_weight"], torch.tensor(expected))
    torch.testing.assert_close(gradient, -torch.tensor(expected))


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_truncate", [4.0, 0.8, 0.8, 1.5]),
        ("token_mask", [0.0, 0.0, 0.0, 1.5]),
        ("sequence_truncate", [3.0, 3.0, 0.8, 1.5]),
        ("sequence_mask", [3.0, 3.0, 0.0, 1.5]),
        ("geometric_truncate", [math.sqrt(3), math.sqrt(3), 0.8, 1.5]),
        ("geometric_mask", [math.sqrt(3), math.sqrt(3), 0.0, 1.5]),
    ],
)
def test_a_floor_limits_behaviour_weights_from_below(mode, expected):
    """Weights 6 and 0.5 of one sequence, 0.25 and 1.5 of two others, between 0.8 and 4; the gradient is the weight."""
    behaviour = [-1 - math.log(weight) for weight in (6, 0.5, 0.25, 1.5)]
    settings = Settings(behave_imp_weight_mode=mode, behave_imp_weight_cap=4.0, behave_imp_weight_floor=0.8)
    _, gradient, stats = policy([-1.0] * 4, behaviour, [1.0, -2.0, 3.0, 1.0], settings, numbers=[0, 0, 1, 2])
    torch.testing.assert_close(stats["behaviour_weight"], torch.tensor(expected))
    torch.testing.assert_close(gradient, -torch.tensor(expected) * torch.tensor([1.0, -2.0, 3.0, 1.0]))


def test_icepop_trains_the_tokens_within_its_two_bounds():
    """The gradient is that of the written-out sum of M(k) r A, where M(k) is k within 0.5 ... 5 and 0 elsewhere."""
    probabilities = {"trainer": [0.2, 0.3, 0.9, 0.01], "server": [0.5, 0.2, 0.1, 0.02]}
    advantages = torch.tensor([1.0, -2.0, 0.5, 3.0])
    trainer, server = (torch.tensor(each) for each in probabilities.values())
    settings = Settings(behave_imp_weight_mode="token_mask", behave_imp_weight_floor=0.5, behave_imp_weight_cap=5.0)
    log = trainer.log().tolist()
    _, gradient, stats = policy(log, server.log().tolist(), advantages.tolist(), settings, proximal_logprobs=log)

    current = trainer.log().requires_grad_()
    kept = trainer / server * torch.tensor([0.0, 1.0, 0.0, 1.0])  # 0.4 and 9 are outside
    (expected,) = torch.autograd.grad(-(kept * (current - trainer.log()).exp() * advantages).sum(), current)
    torch.testing.assert_close(gradient, expected)
    assert stats["behaviour_truncated_share"].tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask", "geometric_truncate", "disabled"])
def test_the_worst_token_vetoes_its_sequence(mode):
    """One weight of 1e-5, between two others of 1: without the veto the sequence keeps a gradient."""
    behaviour = [-1.0, -1 - math.log(1e-5), -1.0, -1.0]
    settings = Settings(behave_imp_weight_mode=mode, behave_imp_weight_floor=0.0, behave_imp_weight_veto=1e-4)
    for veto, expected in ((1e-4, [0, 0, 0, 1]), (1e-6, None)):
        settings = replace(settings, behave_imp_weight_veto=veto)
        _, gradient, stats = policy([-1.0] * 4, behaviour, [-1.0] * 4, settings, numbers=[0, 0, 0, 1])
        if expected:
            torch.testing.assert_close(gradient, torch.tensor(expected, dtype=torch.float32))
            assert stats["behaviour_vetoed_share"].tolist() == [1, 1, 1, 0]
        else:
            assert (gradient[:3] > 0).any() and not stats["behaviour_vetoed_share"].any()


def test_a_geometric_mean_has_bounds_near_one_in_both_directions():
    """Sequences whose means are 1.02, 1 / 1.02 and 1.005: two are beyond 1.01 and its inverse."""
    settings = Settings(behave_imp_weight_mode="geometric_mask")
    behaviour = [-1 - math.log(mean) for mean in (1.02, 1 / 1.02, 1.005)]
    _, gradient, _ = policy([-1.0] * 3, behaviour, [1.0] * 3, settings, numbers=[0, 1, 2])
    assert gradient.tolist() == pytest.approx([0, 0, -1.005])
    assert Settings().weight_bounds == (0, 5.0)
    assert replace(settings, behave_imp_weight_floor=0.0, behave_imp_weight_cap=1.1).weight_bounds == (0, 1.1)


def test_entropy_and_divergence_in_the_loss():
    """The loss of advantage 0 is that of the regularisers; k3's slope is 1 - exp(-x), k2's is x."""
    log, advantages, behaviour = math.log, [0.0], [-1.0]
    both = replace(SETTINGS, entropy_coeff=0.1, kl_loss_coef=0.5)
    reference = [-1 - log(2)]
    loss, gradient, stats = policy([-1.0], behaviour, advantages, both, reference_logprobs=reference, entropy=[3.0])
    assert loss.item() == pytest.approx(0.5 * (log(2) - 0.5) - 0.3)
    assert gradient.item() == pytest.approx(0.5 * 0.5)
    assert stats["reference_kl"].item() == pytest.approx(log(2) - 0.5)
    squared = replace(SETTINGS, kl_loss_coef=0.5, kl_estimator="k2")
    _, gradient, _ = policy([-1.0], behaviour, advantages, squared, reference_logprobs=reference)
    assert gradient.item() == pytest.approx(0.5 * log(2))


def test_the_divergence_from_a_teachers_likeliest_tokens_in_the_loss():
    """Of a teacher that gives two tokens 0.5 and 0.25, and a policy that gives them 0.25 and 0.5."""
    choices = torch.tensor([[0.25, 0.5]]).log().requires_grad_()
    taught = np.log([[0.5, 0.25]]).tolist()
    given = inputs([-1.0], behaviour_logprobs=[-1.0], advantages=[0.0], on_policy=[1.0], teacher_top_logprobs=taught)
    loss, stats = decoupled_ppo(replace(given, choices=choices), replace(SETTINGS, teacher_coef=2.0))
    assert stats["teacher_kl"].item() == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2))
    assert loss.item() == pytest.approx(2 * stats["teacher_kl"].item())
    (gradient,) = torch.autograd.grad(loss.sum(), choices)
    assert gradient.tolist() == [[-1.0, -0.5]]


def test_a_token_that_a_teacher_excludes_adds_nothing_to_the_divergence():
    """0 log 0 is 0: the loss and its gradient are those of the other token."""
    choices = torch.tensor([[0.25, 0.5]]).log().requires_grad_()
    taught = [[math.log(0.5), -math.inf]]
    given = inputs([-1.0], behaviour_logprobs=[-1.0], advantages=[0.0], on_policy=[1.0], teacher_top_logprobs=taught)
    loss, stats = decoupled_ppo(replace(given, choices=choices), replace(SETTINGS, teacher_coef=2.0))
    assert stats["teacher_kl"].item() == pytest.approx(0.5 * math.log(2))
    assert loss.item() == pytest.approx(math.log(2))
    (gradient,) = torch.autograd.grad(loss.sum(), choices)
    assert gradient.tolist() == [[pytest.approx(-1.0), pytest.approx(0.0, abs=1e-30)]]


def test_a_value_that_moved_beyond_the_clip_is_not_pulled_on():
    """Values 1, 0.4 and 1 from 0; returns 2, 2 and 0; clip 0.5: (1 - 2)^2 and (0.5 - 2)^2, the larger counts."""
    values = torch.tensor([1.0, 0.4, 1.0], requires_grad=True)
    fields = {"values": torch.zeros(3), "returns": torch.tensor([2.0, 2.0, 0.0])}
    nothing = torch.zeros(0)
    given = LossInputs(nothing, nothing, fields, Sequences(torch.zeros(3, dtype=torch.int64), 1), values)
    loss, stats = value_loss(given, ValueLoss(0.5))
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    torch.testing.assert_close(loss.detach(), torch.tensor([1.125, 1.28, 0.5]))
    torch.testing.assert_close(gradient, torch.tensor([0.0, -1.6, 1.0]))
    assert stats["clip_share"].tolist() == [1, 0, 0]
    loss, stats = value_loss(given, ValueLoss(None))
    torch.testing.assert_close(loss.detach(), torch.tensor([0.5, 1.28, 0.5]))
    assert stats["clip_share"].tolist() == [0, 0, 0]


def test_a_value_loss_without_values_names_the_mistake():
    """An algorithm of a user's own may pair it with the policy, which has no values."""
    nothing = torch.zeros(0)
    given = LossInputs(nothing, nothing, {}, Sequences(torch.zeros(0, dtype=torch.int64), 1))
    with pytest.raises(ValueError, match="value_loss needs a critic's values"):
        value_loss(given, ValueLoss(None))


def test_dpo_has_the_value_and_the_slope_that_it_is_given():
    """A mean over each sequence's tokens, summed, has the slope at each of its tokens."""
    fields = {
        "pair_loss": [0.7, 0.7, 0.5],
        "slope": [-0.2, -0.2, 0.3],
        "margin": [1, 1, 2],
        "preferred_share": [1, 1, 1],
    }
    given = inputs([-1.0, -1.0, -2.0], numbers=[0, 0, 1], **fields)
    loss, stats = dpo(given, None)
    torch.testing.assert_close(loss.detach(), torch.tensor([0.7, 0.7, 0.5]))
    (gradient,) = torch.autograd.grad(loss[:2].mean() + loss[2], given.logprobs)
    torch.testing.assert_close(gradient, torch.tensor([-0.2, -0.2, 0.3]))
    assert stats["margin"].tolist() == [1, 1, 2]
