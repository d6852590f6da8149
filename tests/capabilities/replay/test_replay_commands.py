"""The commands `replay` and `diff`, their exit codes, and what is known of recording before the start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from recorded import batch, record, write
from typer.testing import CliRunner

from areal_like.__main__ import app
from areal_like.capabilities.replay import disk_cost, verdicts
from areal_like.capabilities.replay.comparison import rounding
from areal_like.capabilities.replay.evaluation import PromptRewards, describe_rewards, rewards_by_prompt
from areal_like.capabilities.replay.reader import open_run
from areal_like.capabilities.replay.step_file import path_of
from areal_like.capabilities.replay.verdicts import Trained, _parting
from areal_like.core.config.load import dump, load
from areal_like.core.errors import CheckpointError
from areal_like.preflight import preflight

CONFIG = Path(__file__).parents[3] / "examples/math/gsm8k_grpo_cpu.yaml"


def call(*arguments: str) -> tuple[int, str]:
    """Exit code and output of a command."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def test_a_record_without_a_fault_is_good(tmp_path):
    record(tmp_path, 3)
    code, output = call("replay", tmp_path)
    assert code == 0
    assert output.startswith("3 recorded steps have no fault")


def test_a_fault_is_the_first_line(tmp_path):
    record(tmp_path, 3)
    path = path_of(tmp_path / "recover/replay", 2)
    path.write_bytes(path.read_bytes()[:-7])
    code, output = call("replay", tmp_path)
    assert code == 1
    assert "step-000002.safetensors is torn" in output.splitlines()[0]


def test_the_first_different_quantity_of_two_runs_is_the_first_line(tmp_path):
    for name in "ab":
        record(tmp_path / name, 3)
    assert call("diff", tmp_path / "a", tmp_path / "b")[0] == 0
    other = open_run(tmp_path / "b")
    changed = batch(2)
    changed[0].logprobs[9] -= np.float32(0.5)
    write(other.folder, other.run, 2, changed)
    code, output = call("diff", tmp_path / "a", tmp_path / "b")
    assert code == 1
    assert output.startswith("the runs first differ at step 2 in trajectories/logprobs")
    assert "at token 9 of trajectory 0 (group 3, sample 0)" in output.splitlines()[0]


def test_a_parting_by_rounding_is_called_so():
    """Two orders of a sum, as with and without `use_decoupled_loss` where no token is clipped."""

    def train(loss: float, weights: str = "") -> Trained:
        return Trained(7, {"loss": loss, "grad_norm": 0.5}, weights, np.zeros(3, np.float32))

    bounds = rounding(layers=2, dtype="float32", steps=1)
    run = train(0.0745234340429306)
    assert "no more than rounding" in _parting([run], [train(0.0745234414935112)], bounds).text
    far = _parting([run], [train(0.0755234340429306)], bounds).text
    assert far.startswith("the runs part at step 7, first in loss") and "rounding" not in far
    assert _parting([run], [run], bounds).text.startswith("equal bits")
    assert "in the weights" in _parting([run], [replace(run, states="others")], bounds).text


@pytest.mark.parametrize(
    "config",
    [
        "workflow: {code}:run\ntrain_dataset: {{path: '{code}:rows'}}\nrollout: {{max_head_offpolicyness: 2}}\n",
        "rollout: !!python/object/apply:runpy.run_path ['{code}']\n",
    ],
    ids=["code", "tag"],
)
def test_a_hostile_configuration_is_not_executed(tmp_path, config):
    """By whatever reads a record; only computing a step needs the code that the configuration names."""
    for name in "ab":
        record(tmp_path / name, 2)
        (tmp_path / name / "config.yaml").write_text(config.format(code=tmp_path / "code.py"))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    codes = [call("replay", tmp_path / "a")[0], call("diff", tmp_path / "a", tmp_path / "b")[0]]
    assert codes == ([2, 0] if "!!" in config else [0, 0])
    assert open_run(tmp_path / "a").step(1).statistics
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--step", "2", "--steps", "1:2"],
        ["--steps", "2"],
        ["--steps", "3:2"],
        ["--steps", "a:b"],
        ["--log-probs"],
        ["--evaluate"],
        ["--step", "2", "--evaluate"],
        ["--step", "2", "--evaluate", "rollout.backend=sglang:d2"],
        ["--step", "2", "--evaluate", "rollout.max_head_offpolicyness=2"],
        ["--step", "2", "--log-probs", "actor.eps_clip=0.1"],
        ["--step", "2", "evaluator.temperature=1"],
        ["actor.eps_clip=0.1"],
        ["--step", "9"],
        ["--step", "2", "rollout.backend=sglang:d2"],
        ["--step", "2", "gconfig.n_samples=4"],
    ],
)
def test_a_request_that_cannot_be_met_is_one_error(tmp_path, arguments):
    record(tmp_path, 3)
    code, output = call("replay", str(tmp_path), *arguments)
    assert code == 2
    assert output.count("error:") == 1, output


def test_an_evaluation_without_prompts_is_refused_before_the_start(tmp_path, monkeypatch):
    """The suggested fix passes the check; the trainers would start next."""

    def start(*_: object, **__: object) -> None:
        raise CheckpointError("the trainers start")

    monkeypatch.setattr(verdicts, "start_trainers", start)
    record(tmp_path, 3)
    without = ("valid_dataset=null", "evaluator.freq_steps=null", "warm_start=null", "train_dataset.arithmetic.size=16")
    loaded = load(CONFIG, [*without, "train_dataset.batch_size=2", f"cluster.fileroot={tmp_path}"])
    (tmp_path / "config.yaml").write_text(dump(loaded.config))
    request = ("replay", tmp_path, "--step", "2", "--evaluate", "actor.eps_clip=0.1")
    prompts = ("valid_dataset.path=arithmetic", "valid_dataset.max_prompt_length=24", "valid_dataset.arithmetic.size=8")
    code, output = call(*request)
    assert code == 2
    assert output.count("error:") == 1 and "`valid_dataset.path`" in output, output
    assert "the trainers start" in call(*request, *prompts)[1]


def test_rewards_of_both_trainings_have_standard_errors():
    def answered(rewards: list[list[float | None]]) -> PromptRewards:
        items = [
            replace(batch(1)[0], group_id=-1 - prompt, sample=sample, reward=reward)
            for prompt, own in enumerate(rewards)
            for sample, reward in enumerate(own)
            for _ in range(1 + sample)  # turns
        ]
        return rewards_by_prompt(items)

    before = answered([[0.0, 1.0], [1.0, 1.0], [0.0, None], [None]])
    assert before == {-1: 0.5, -2: 1.0, -3: 0.0}
    after = answered([[1.0, 1.0], [1.0, 1.0], [None, None], [1.0]])
    (line,) = describe_rewards({"set": before}, {"set": after}, 7)
    assert line == (
        "set after step 7: reward 0.7500 ± 0.2500 as recorded, 1.0000 ± 0.0000 with the changes; "
        "difference 0.2500 ± 0.2500 (2 prompts)"
    )
    (line,) = describe_rewards({"set": before}, {"set": {}}, 7)
    assert "no prompt has rewards" in line


@pytest.mark.parametrize("command", [["replay"], ["replay", "--step", "1"], ["diff"]])
def test_a_directory_without_records_is_one_error(tmp_path, command):
    record(tmp_path, 2, kept=[])
    name, *options = command
    code, output = call(name, *[str(tmp_path)] * (2 if name == "diff" else 1), *options)
    assert code == 2
    assert "recover.replay=true" in output
    assert call(name, *[str(tmp_path / "x")] * (2 if name == "diff" else 1), *options)[0] == 2


def found(tmp_path, *overrides: str) -> list[str]:
    loaded = load(CONFIG, [f"cluster.fileroot={tmp_path}", "recover.replay=true", *overrides])
    return [each.code for each in preflight(loaded).findings]


def test_the_disk_space_is_known_before_the_start(tmp_path):
    assert "RUN-RECORD-SIZE" in found(tmp_path)
    assert "RUN-RECORD-DISK" in found(tmp_path, "recover.replay_keep=1000000000")
    assert "RUN-RECORD-SIZE" not in found(tmp_path, "recover.replay=false")
    off = found(tmp_path, "recover.mode=off")
    assert "RUN-UNUSED" in off
    assert "RUN-RECORD-SIZE" not in off


def test_a_file_is_not_larger_than_was_said(tmp_path, monkeypatch):
    """With every response as long as it may be; the log-probs that an algorithm needs are counted on top."""
    said = {}
    monkeypatch.setattr(disk_cost, "_size", lambda size: said.setdefault(len(said), size) and "")
    sizes = ["train_dataset.batch_size=3", "gconfig.n_samples=4", "actor.backend=megatron:d2"]
    found(tmp_path, *sizes)
    config = load(CONFIG, sizes).config
    journal = record(tmp_path / "run", 1, kept=[])
    path = write(
        tmp_path / "run/recover/replay",
        journal.run,
        1,
        [item for item in batch(1, tokens=config.longest_sequence) if item.sample == 2] * 4,
    )
    assert path.stat().st_size <= said[0]
