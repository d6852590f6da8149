import math

import pytest
import torch

from areal_like.algorithms.losses import LOSSES

PARAMETERS = {"eps_clip": 0.2, "eps_clip_higher": 0.28, "behave_imp_weight_cap": 2.0}


def fields(behaviour, advantages, **more):
    values = {"behaviour_logprobs": behaviour, "advantages": advantages, "on_policy": [1.0] * len(behaviour), **more}
    return {name: torch.tensor(value) for name, value in values.items()}


def policy(logprobs, given):
    logprobs = torch.tensor(logprobs, requires_grad=True)
    loss, stats = LOSSES["policy"](logprobs, torch.zeros_like(logprobs), given, PARAMETERS)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    return loss.detach(), gradient, stats


def test_on_policy_gradient_is_the_advantage():
    _, gradient, stats = policy([-1.0, -2.0], fields([-1.0, -2.0], [0.5, -1.5]))
    torch.testing.assert_close(gradient, torch.tensor([-0.5, 1.5]))
    assert stats["kl"].abs().max() == 0 and stats["clip_share"].sum() == 0


@pytest.mark.parametrize(("drift", "weight"), [(math.log(1.5), 1.5), (math.log(8.0), 2.0), (-1.0, math.exp(-1))])
def test_behaviour_weight_is_always_applied_and_truncated(drift, weight):
    """With and without proximal log-probs: no other option switches it on."""
    for more in ({}, {"proximal_logprobs": [-1.0]}):
        _, gradient, stats = policy([-1.0], fields([-1.0 - drift], [1.0], **more))
        torch.testing.assert_close(gradient, torch.tensor([-weight]))
        assert stats["behaviour_truncated_share"].item() == (drift > math.log(2))


def test_a_ratio_outside_the_clip_range_has_no_gradient_where_it_would_go_further():
    given = fields([-1.0] * 4, [1.0, 1.0, -1.0, -1.0], proximal_logprobs=[-1.0] * 4)
    _, gradient, stats = policy([-0.5, -1.5, -0.5, -1.5], given)
    assert (gradient != 0).tolist() == [False, True, True, False]
    assert stats["clip_share"].tolist() == [1, 0, 0, 1]


def test_sft_is_the_negative_log_likelihood():
    loss, stats = LOSSES["sft"](torch.tensor([-1.5]), torch.tensor([0.3]), {}, {})
    assert loss.item() == 1.5 and stats["entropy"].item() == pytest.approx(0.3)
