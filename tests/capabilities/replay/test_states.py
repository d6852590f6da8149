"""Digests of a trainer's state: the same after a load, other ones after a step, on Megatron and FSDP."""

from __future__ import annotations

import pytest

from allocation import ParallelSizes

pytestmark = pytest.mark.filterwarnings("ignore")

LAYOUTS = [("megatron", {"dp": 2}), ("megatron", {"tp": 2}), ("fsdp", {"dp": 2})]


def setting(model, backend, sizes, **others):
    from trainer_jobs import Setting

    return Setting(model, ParallelSizes(**sizes), backend=backend, **others)


@pytest.mark.parametrize(("backend", "sizes"), LAYOUTS, ids=str)
def test_a_loaded_state_and_its_next_steps_have_the_same_digests(ranks, model, tmp_path, backend, sizes):
    import state_jobs

    own = setting(model, backend, sizes)
    went_on = ranks.run(state_jobs.save_and_go_on, 2, own, tmp_path)
    loaded = ranks.run(state_jobs.load_and_go_on, 2, own, tmp_path)
    assert went_on == loaded
    for states in went_on:
        assert {state["seed"] for state in states} == {1}
        params = [state["parts"]["params"] for state in states]
        assert all(params)
        assert params[0] != params[1] != params[2]
        others = [state["parts"]["optimizer"] for state in states]
        assert all(others)
        assert others[0] != others[1] != others[2]


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_a_loaded_checkpoint_has_the_learning_rate_of_the_configuration(ranks, model, tmp_path, backend):
    import state_jobs
    from trainer_jobs import OptimizerConfig

    ranks.run(state_jobs.save_and_go_on, 1, setting(model, backend, {}), tmp_path)
    other = setting(model, backend, {}, optimizer=OptimizerConfig(lr=0.125))
    assert ranks.run(state_jobs.rate_after_load, 1, other, tmp_path) == [0.125]


def test_torch_and_numpy_give_the_same_digest(ranks, model):
    import state_jobs

    found, names, weights, described = ranks.run(state_jobs.digest_both_ways, 1, setting(model, "fsdp", {}))[0]
    for of_torch, of_numpy in found:
        assert of_torch == of_numpy
    assert len(names) == weights == len(described["parts"]["params"])
