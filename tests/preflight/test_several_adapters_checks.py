"""Several adapters of one run are checked before the start, each as a run with it alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_like.config.findings import ConfigError
from areal_like.config.load import load
from areal_like.preflight import Preflight, preflight

pytestmark = pytest.mark.covers("LoRA")

RIGHT = (
    *("actor.use_lora=true", "actor.backend=fsdp:d1", "weight_update={adapters: true, mode: disk}"),
    *("warm_start=null", "adapters={math: {}, code: {algorithm: dr_grpo}}"),
)


@pytest.fixture
def checked(write):
    def check(*overrides: str) -> Preflight:
        return preflight(load(write(), [*RIGHT, *overrides]))

    return check


def test_each_adapter_is_a_job_with_its_own_data_and_algorithm(checked):
    section = "adapters.code={train_dataset: {batch_size: 3, arithmetic: {size: 90}}, algorithm: rloo}"
    job = checked(section, "train_dataset.batch_size=2", "train_dataset.arithmetic.size=30").job
    assert [own.adapter for own in job.adapters] == ["math", "code"]
    assert [own.config.train_dataset.batch_size for own in job.adapters] == [2, 3]
    assert [own.config.algorithm for own in job.adapters] == ["grpo", "rloo"]
    assert [len(own.train_prompts) for own in job.adapters] == [30, 90]
    assert len(job.train_prompts) == 120
    assert {own.steps for own in job.adapters} == {job.steps}
    assert job.config.prompts_per_step == 5
    assert list(job.config.evaluations) == ["math", "code"]


def test_an_adapter_with_another_kind_of_reward_has_none_of_the_run(checked):
    config = checked("adapters.code={reward: {parts: {a: {type: gsm8k}}}}", "reward.timeout_s=7").job.config
    reward = config.adapted["code"].reward
    assert (list(reward.parts), reward.function, reward.timeout_s) == (["a"], None, 7)


@pytest.mark.parametrize(
    ("overrides", "code", "key"),
    [
        (["actor.use_lora=false"], "RUN-SEVERAL", "adapters"),
        (["weight_update={}"], "RUN-SEVERAL", "adapters"),
        (["adapters.code.actor={lora_rank: 3}"], "RUN-SEVERAL", "adapters.code.actor.lora_rank"),
        (["critic={}"], "RUN-SEVERAL", "critic"),
        (["ref={update_every_steps: 1}"], "RUN-SEVERAL", "ref"),
        (["adapters.code={algorithm: single_rollout}"], "RUN-SEVERAL", "algorithm"),
        (["adapters.code={algorithm: grop}"], "RUN-ALGORITHM", "adapters.code.algorithm"),
        (["adapters.code={train_dataset: {path: none.jsonl}}"], None, "adapters.code.train_dataset.path"),
        (["adapters.code={reward: {function: none.py:f}}"], "RUN-REWARD-FUNCTION", "adapters.code.reward.function"),
    ],
)
def test_a_fault_is_found_at_its_key(checked, overrides, code, key):
    found = checked(*overrides)
    assert found.job is None
    assert key in [each.key for each in found.findings if code is None or each.code == code]


@pytest.mark.parametrize("backend", ["fsdp:d1", "megatron:d1", "megatron:d1t2"])
@pytest.mark.parametrize("workflow", ["null", f"{Path(__file__).parents[1]}/run/opposite_agent.py:run"])
def test_either_trainer_and_agents_may_have_several_adapters(checked, backend, workflow):
    found = checked(f"actor.backend={backend}", f"workflow={workflow}", "cluster.n_gpus_per_node=3")
    assert [each.code for each in found.findings if each.severity == "error"] == []
    assert [own.adapter for own in found.job.adapters] == ["math", "code"]


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("adapters={'a/b': {}}", "adapters"),
        ("adapters={math: {data: {}}}", "adapters.math.data"),
        ("adapters={math: {train_dataset: {pathe: x}}}", "adapters.math.train_dataset.pathe"),
        ("adapters={math: {train_dataset: {batch_size: many}}}", "adapters.math.train_dataset.batch_size"),
        ("adapters={math: {actor: {kl_ctl: -1}}}", "adapters.math.actor.kl_ctl"),
    ],
)
def test_wrong_keys_of_an_adapter_are_refused_when_the_file_is_read(write, override, key):
    with pytest.raises(ConfigError) as refused:
        load(write(), [*RIGHT, override])
    assert key in [found.key for found in refused.value.findings]
