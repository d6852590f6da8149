"""The numbers of evaluations."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import numpy as np
import pytest
from fake_server import FakeServer, open_pool, output

from areal_like.core.config.findings import ConfigError
from areal_like.core.config.load import load
from areal_like.core.config.schema import EvaluatorConfig
from areal_like.core.loop.evaluation import EvaluationSet, Evaluator, pass_at
from areal_like.core.types import FinishReason, Prompt, Trajectory
from areal_like.preflight import preflight
from areal_like.run.collecting import make_evaluator


def test_pass_at_k_is_the_share_of_k_draws_that_hold_one_that_passed():
    """By counting: of all ways to draw k of 5 responses, of which 2 passed."""
    outcomes = [True, True, False, False, False]
    for k, share in pass_at([(5, 2)], 5).items():
        draws = list(itertools.combinations(outcomes, k))
        assert share == pytest.approx(sum(map(any, draws)) / len(draws)), k


def test_pass_at_k_is_averaged_over_the_prompts_that_have_k_rewards():
    assert pass_at([(4, 4), (4, 0), (1, 1)], 4) == {1: pytest.approx(2 / 3), 2: 0.5, 4: 0.5}
    assert list(pass_at([(6, 1)], 6)) == [1, 2, 4, 6]
    assert pass_at([(1, 1)], 2) == {1: 1.0}


def answering(rewards):
    """A workflow that gives each prompt the rewards of its sample_id."""

    async def run(prompt, group_id):
        array = np.zeros(1, np.int32)
        return [
            Trajectory(prompt.sample_id, group_id, array, array, array, FinishReason.STOP, reward, {}, sample)
            for sample, reward in enumerate(rewards[prompt.sample_id])
        ]

    return run


def evaluate(rewards, n_samples, **settings):
    part = EvaluationSet([Prompt(number, [1]) for number in range(len(rewards))], answering(rewards), n_samples)
    return asyncio.run(Evaluator(EvaluatorConfig(**settings), {"some": part}).evaluate())["some"]


def test_sets_that_are_evaluated_side_by_side_all_count():
    rewards = [[1.0, 0.0]] * 3
    sets = {name: EvaluationSet([Prompt(n, [1]) for n in range(3)], answering(rewards), 2) for name in ("a", "b")}
    evaluator = Evaluator(EvaluatorConfig(), sets)
    asyncio.run(evaluator.evaluate())
    assert evaluator.tokens == 2 * 3 * 2  # one token each


def test_missing_rewards_do_not_count():
    result = evaluate([[1.0, 0.0], [None, 1.0], [None, None]], 2)
    assert result.scalars() == {"mean@2": 0.75, "pass@1": 0.75, "pass@2": 1.0}
    assert len(result.trajectories) == 6


def test_what_passes_is_a_setting():
    assert evaluate([[0.5, 0.2]], 2, pass_reward=0.5).scalars() == {"mean@2": 0.35, "pass@1": 0.5, "pass@2": 1.0}


def test_a_set_without_any_reward_has_no_numbers():
    result = evaluate([[None]], 1)
    assert result.scalars() == {}
    assert len(result.trajectories) == 1


SETS = ["evaluator.n_samples=4", "evaluator.temperature=0.6", "evaluator.datasets.hard.path=arithmetic"]
HARD = [*SETS, "evaluator.datasets.hard.max_prompt_length=40", "evaluator.datasets.hard.arithmetic.size=3"]


def test_sets_have_the_evaluator_s_settings_or_their_own(write):
    settings = [*HARD, "evaluator.datasets.hard.max_new_tokens=12", "evaluator.datasets.hard.temperature=0"]
    config = load(write(), [*settings, "evaluator.datasets.hard.n_samples=1"]).config
    valid, hard = config.evaluations["valid_dataset"], config.evaluations["hard"]
    assert (valid.n_samples, valid.temperature, valid.max_new_tokens) == (4, 0.6, 8)
    assert (hard.n_samples, hard.temperature, hard.max_new_tokens, hard.split) == (1, 0, 12, "test")
    assert config.context_length == 40 + 12 + 8  # what SGLang keeps


CUT = [
    *HARD,
    "evaluator.top_p=0.9",
    "evaluator.top_k=7",
    "evaluator.datasets.hard.top_k=1",
    "sglang.context_length=null",
]


def test_servers_are_asked_for_the_sampling_of_each_set(write):
    """What arrives at a server, without the ids of each token, which only the trainer needs."""
    job = preflight(load(write(), [*CUT, "evaluator.datasets.hard.n_samples=1"])).job
    asked = {}

    class Workflows:
        def evaluate(self, workflow, sampling, n_samples):
            asked[sampling.top_k] = sampling
            return answering([])

    async def answer(_, body):
        return [output([3], reason="length") for _ in body["input_ids"]]

    async def run(sampling):
        server = FakeServer(answer)
        async with open_pool(server) as pool:
            await pool.sample([1, 2], sampling)
        (body,) = server.bodies("/generate")
        return body

    assert set(make_evaluator(job, {"": Workflows()}).sets) == {"valid_dataset", "hard"}
    for top_k in (7, 1):
        body = asyncio.run(run(replace(asked[top_k], max_new_tokens=1)))
        (params,) = body["sampling_params"]
        assert (params["temperature"], params["top_p"], params["top_k"]) == (0.6, 0.9, top_k)
        assert "return_sampling_mask" not in body


def test_the_prompts_of_every_set_are_read(write):
    checked = preflight(load(write(), [*HARD, "sglang.context_length=null"]))
    assert checked.job, checked.findings
    assert {name: len(prompts) for name, prompts in checked.job.evaluated.items()} == {"valid_dataset": 4, "hard": 3}


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["evaluator.n_samples=4"], "evaluator.n_samples"),
        ([*HARD, "evaluator.datasets.hard.n_samples=2", "evaluator.datasets.hard.temperature=0"], "hard.n_samples"),
        ([*HARD, "evaluator.datasets.hard.top_k=1"], "evaluator.n_samples"),
        ([*SETS, "evaluator.datasets.hard.split=dev"], "evaluator.datasets.hard.split"),
    ],
)
def test_sets_that_cannot_be_evaluated_are_refused(write, overrides, key):
    checked = preflight(load(write(), overrides))
    assert any(key in str(found.source) for found in checked.findings), checked.findings
    assert not checked.ok


def test_keys_of_a_set_that_do_not_exist_are_refused(write):
    with pytest.raises(ConfigError, match=r"evaluator\.datasets\.hard\.pathh"):
        load(write(), ["evaluator.datasets.hard.pathh=x"])
    file = write()
    file.write_text(file.read_text() + "evaluator: {datasets: {hard: {path: arithmetic, sedd: 3}}}\n")
    with pytest.raises(ConfigError, match=r"evaluator\.datasets\.hard\.sedd"):
        load(file)
