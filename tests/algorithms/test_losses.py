"""Losses on numbers that can be checked by hand."""

import math
import pickle

import pytest
import torch

from areal_like.algorithms.losses import DecoupledPPO, LossInputs, decoupled_ppo, sft
from areal_like.algorithms.presets import grpo
from areal_like.config.schema import ActorConfig

PARAMETERS = DecoupledPPO(clip_low=0.2, clip_high=0.28, behaviour_cap=2.0)


def inputs(logprobs, entropy=None, **fields):
    logprobs = torch.tensor(logprobs, requires_grad=True)
    entropy = torch.zeros_like(logprobs) if entropy is None else torch.tensor(entropy)
    fields = {name: torch.tensor(value) for name, value in fields.items()}
    return LossInputs(logprobs, entropy, fields, torch.zeros(len(logprobs), dtype=torch.int64))


def policy(logprobs, behaviour, advantages, **more):
    fields = {"behaviour_logprobs": behaviour, "advantages": advantages, "on_policy": [1.0] * len(behaviour), **more}
    given = inputs(logprobs, **fields)
    loss, stats = decoupled_ppo(given, PARAMETERS)
    (gradient,) = torch.autograd.grad(loss.sum(), given.logprobs)
    return loss.detach(), gradient, stats


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


@pytest.mark.parametrize(("higher", "expected"), [(None, 0.2), (0.28, 0.28)])
def test_grpo_takes_the_actor_s_settings_and_travels_to_the_ranks_by_reference(higher, expected):
    actor = ActorConfig(eps_clip=0.2, eps_clip_higher=higher, behave_imp_weight_cap=3.0)
    sent = pickle.loads(pickle.dumps(grpo(actor).loss))  # noqa: S301
    assert sent.function is decoupled_ppo
    assert sent.parameters == DecoupledPPO(0.2, expected, 3.0)
