from __future__ import annotations

import pytest
from trainer_jobs import Setting, complaints, learning_rates, store_addresses, three_steps

from allocation import ParallelSizes
from areal_like.config.schema import OptimizerConfig


def test_batches_that_cannot_be_trained_on_are_refused(ranks, models):
    setting = Setting(models["tied"], ParallelSizes(pp=2))
    for said in ranks.run(complaints, 2, setting, ("no loss token", "too long", "infinite loss")):
        assert "no token of the batch is trained on" in said["no loss token"]
        assert "max_tokens_per_mb" in said["too long"]
        assert said["infinite loss"] in ("the loss is inf", "the loss is -inf")
    for said in ranks.run(complaints, 2, setting, ("infinite gradient",)):
        assert said["infinite gradient"] in ("the gradient norm is nan", "the gradient norm is inf")


def test_learning_rate_warms_up_decays_and_can_be_replaced_for_a_step(ranks, models):
    optimizer = OptimizerConfig(lr=1.0, warmup_steps=2, lr_scheduler_type="linear", min_lr_ratio=0.2)
    setting = Setting(models["tied"], optimizer=optimizer, total_steps=6)
    rates = ranks.run(learning_rates, 1, setting, 3)[0]
    assert rates == pytest.approx([0.5, 1.0, 0.8, 0.5, 0.6, 0.4])


@pytest.mark.parametrize(
    ("optimizer", "steps", "words"),
    [
        (OptimizerConfig(lr_scheduler_type="cosine"), None, "needs the number of training steps"),
        (OptimizerConfig(warmup_steps=5), 5, "warmup_steps is 5, but the run has only 5"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(ranks, models, optimizer, steps, words):
    with pytest.raises(AssertionError, match=words):
        ranks.run(three_steps, 1, Setting(models["tied"], optimizer=optimizer, total_steps=steps))


def test_more_ranks_than_the_layout_has_are_refused(ranks, models):
    with pytest.raises(AssertionError, match="the layout takes 1 ranks, but 2 were started"):
        ranks.run(three_steps, 2, Setting(models["tied"]))


def test_ranks_listen_on_loopback_alone(ranks, models):
    for addresses in ranks.run(store_addresses, 2, Setting(models["tied"], ParallelSizes(dp=2, edp=2))):
        assert addresses
        assert set(addresses) == {"127.0.0.1"}


def test_mbridge_names_the_layout_that_it_cannot_export(ranks, models):
    with pytest.raises(AssertionError, match="bridge_type to megatron-bridge"):
        ranks.run(three_steps, 2, Setting(models["moe"], ParallelSizes(tp=2, edp=2)))
