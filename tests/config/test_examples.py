from pathlib import Path

import published
import pytest

from areal_like.core.config.load import load
from areal_like.preflight import preflight
from areal_like.preflight.layout import find_plan
from areal_like.preflight.model import find_model

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(set((ROOT / "examples").rglob("*.yaml")) - set((ROOT / "examples/clusters").iterdir()))


def test_there_are_examples():
    assert len(EXAMPLES) >= 4


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_loads_and_its_layout_compiles(file):
    loaded = load(file)
    shape = find_model(loaded.config)[0] if loaded.config.actor.init_model else None
    plan, findings = find_plan(loaded.config, shape)
    assert plan is not None, list(map(str, findings))
    assert plan.n_gpus == loaded.config.cluster.n_nodes * loaded.config.cluster.n_gpus_per_node


def test_the_cpu_example_passes_every_check(tmp_path):
    checked = preflight(load(ROOT / "examples/math/gsm8k_grpo_cpu.yaml", [f"cluster.fileroot={tmp_path}"]))
    assert checked.ok, list(map(str, checked.findings))


@pytest.mark.parametrize("name", ["gsm8k_grpo.yaml", "gsm8k_grpo_moe.yaml"])
def test_the_published_command_line_works_as_printed(name):
    loaded = load(ROOT / "examples/math" / name, published.OVERRIDES)
    plan, findings = find_plan(loaded.config, None)
    assert plan is not None, list(map(str, findings))
    config = loaded.config
    assert (config.scheduler.type, config.experiment_name, config.trial_name) == ("ray", "moe", "first")
    assert (config.actor.path, config.actor.init_model) == ("Qwen/Qwen3-30B-A3B", None)
    assert config.actor.megatron.use_deterministic_algorithms is True
    actor, rollout = plan.engine("actor"), plan.engine("rollout")
    assert (actor.sizes.tp, actor.sizes.cp, actor.sizes.pp, actor.sizes.ep, actor.sizes.etp) == (2, 2, 4, 4, 1)
    assert (rollout.sizes.dp, rollout.sizes.tp) == (4, 4)
    assert plan.n_gpus == 32
