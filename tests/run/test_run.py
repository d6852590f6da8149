"""A run from its command line to what it leaves: real Megatron ranks, a real SGLang server, a few steps."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from limits import HUNG_S
from running import Run, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM

from areal_like.core.config.load import load
from areal_like.core.config.schema import InitModelConfig
from areal_like.demo.init_model import write_init_model
from areal_like.preflight import preflight
from areal_like.rewards.gsm8k import verify

STEPS = 3
CONTENTS = {"config.yaml", "logs", "initial_model", "checkpoints", "tensorboard", "rewards.png", "summary.json"}
CONTENTS |= {"run.json", "metrics.jsonl", "events.jsonl", "samples", "report.html"}
LEARN = (f"total_train_steps={STEPS}", "warm_start.target_reward=0.3", "actor.optimizer.lr=1e-4")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run that ended well, observed to the end."""
    with run(tmp_path_factory.mktemp("finished"), *LEARN, "saver.freq_steps=2") as started:
        assert started.end() == 0, started.errors
        yield started


@pytest.fixture(scope="module")
def scalars(finished: Run) -> dict[str, dict[int, float]]:
    return read_scalars(finished)


def read_scalars(finished: Run) -> dict[str, dict[int, float]]:
    """The TensorBoard events: value by step, by name."""
    events = EventAccumulator(str(finished.directory / "tensorboard"))
    events.Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_it_prints_every_step_on_one_line_and_where_everything_lies(finished: Run) -> None:
    assert re.search(
        r"^ready: (trainer after \d+ s, servers|servers after \d+ s, trainer) after \d+ s$", finished.output, re.M
    )
    assert finished.steps() == [1, 2, 3]
    lines = finished.output.splitlines()
    (header,) = [line for line in lines if line.lstrip().startswith("step ")]
    assert header.split()[-2:] == ["tok/s", "s"]
    assert lines.index(header) > next(i for i, line in enumerate(lines) if "a data-parallel rank packs its" in line)
    for what in ("checkpoint", "reward curve", "report", "TensorBoard", "configuration", "summary"):
        (line,) = [line for line in lines if line.startswith(f"  {what} ")]
        assert Path(line.split(maxsplit=len(what.split()))[-1]).exists()


def test_nothing_else_stays(finished: Run) -> None:
    assert finished.remains() == []
    assert contents(finished) == CONTENTS


def test_the_checkpoint_reproduces_the_held_out_reward(finished: Run) -> None:
    """Greedy generation by transformers and the same verifier: the servers had these very weights at the end."""
    checkpoints = finished.directory / "checkpoints"
    assert {path.name for path in checkpoints.iterdir()} == {"step-2", "step-3"}
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "step-3", dtype=torch.float32)
    tokenizer, problems, limit = held_out(finished)
    rewards = []
    for prompt in problems:
        tokens = model.generate(torch.tensor([prompt.tokens]), max_new_tokens=limit, do_sample=False)[0]
        rewards.append(verify(tokenizer.decode(tokens[len(prompt.tokens) :].tolist()), prompt.answer))
    reward = sum(rewards) / len(rewards)
    assert reward == summary(finished)["held_out"][str(STEPS)]
    assert 0 < reward < 1  # neither would prove much


def test_training_changed_the_weights(finished: Run) -> None:
    folders = [finished.directory / "initial_model", *sorted((finished.directory / "checkpoints").iterdir())]
    tensors = [AutoModelForCausalLM.from_pretrained(folder).model.norm.weight for folder in folders]
    assert not torch.equal(tensors[0], tensors[1])
    assert not torch.equal(tensors[1], tensors[2])


def test_tensorboard_has_what_a_run_is_judged_by(scalars: dict[str, dict[int, float]]) -> None:
    names = (
        *("reward/mean", "train/loss", "train/kl", "train/entropy", "train/clip_share", "train/grad_norm", "train/lr"),
        *("staleness/mean", "staleness/max", "rollout/response_length", "rollout/truncated_share"),
        *("throughput/train_tokens_per_second", "throughput/rollout_tokens_per_second"),
        *(
            "rollout/pause_seconds",
            "rollout/queue_seconds_mean",
            "rollout/queue_seconds_max",
            "rollout/longest_seconds",
            "rollout/servers",
        ),
        *("seconds/step", "seconds/training", "seconds/weight_update", "seconds/wait_for_rollouts"),
    )
    for name in names:
        assert sorted(scalars[name]) == [1, 2, 3], name
    assert sorted(scalars["reward/held_out"]) == [0, STEPS]
    assert sorted(scalars["seconds/saving"]) == [2, 3]
    assert min(scalars["train/entropy"].values()) > 0
    assert min(scalars["throughput/train_tokens_per_second"].values()) > 0
    phases = [name for name in scalars if name.startswith("seconds/") and name != "seconds/step"]
    for step, seconds in scalars["seconds/step"].items():
        assert sum(scalars[name].get(step, 0) for name in phases) <= seconds + 1e-3


def test_servers_and_trainer_agree_on_log_probs(scalars: dict[str, dict[int, float]]) -> None:
    differences = scalars["rollout/logprob_diff_server_trainer"]
    assert 1 in differences  # the first batch is all of the version that it trains
    assert max(differences.values()) < 1e-4
    probed = scalars["rollout/logprob_diff_probe"]
    assert sorted(probed) == [1, 2, 3]
    assert max(probed.values()) < 1e-4


def test_no_trajectory_is_staler_than_the_bound(scalars: dict[str, dict[int, float]]) -> None:
    assert max(scalars["staleness/max"].values()) == 1  # rollouts do overlap training, and no further


def test_the_resolved_configuration_gives_the_same_run(finished: Run) -> None:
    file = finished.directory / "config.yaml"
    config = load(file).config
    assert config.model_dump() == yaml.safe_load(file.read_text())
    assert (config.trial_name, config.total_train_steps, config.valid_dataset.max_prompt_length) == ("run", STEPS, 24)


def test_events_and_samples_of_every_step_are_there(finished: Run) -> None:
    events = [json.loads(line) for line in (finished.directory / "events.jsonl").read_text().splitlines()]
    lanes = {"controller", "actor 0", "actor 1", "server 0", "weights", "evaluation", "groups", "run"}
    assert lanes <= {event["lane"] for event in events}
    assert all(event["start"] <= event["end"] for event in events)
    assert [event["name"] for event in events if event["lane"] == "run"] == ["finished"]
    for step in (1, 2, 3):
        rows = (finished.directory / f"samples/step-{step:06}.jsonl").read_text().splitlines()
        assert len(rows) == 4 * 4
        assert "?" in json.loads(rows[0])["prompt"]
    assert len((finished.directory / "samples/evaluation-000003-valid_dataset.jsonl").read_text().splitlines()) == 64
    assert finished.output.count("  valid_dataset at step 0, reward ") == 2


def test_idle_shares_are_shares(scalars: dict[str, dict[int, float]]) -> None:
    for name in ("idle/trainer", "idle/servers"):
        assert sorted(scalars[name]) == [1, 2, 3]
        assert all(0 <= share <= 1 for share in scalars[name].values())


def test_the_picture_is_a_picture(finished: Run) -> None:
    assert (finished.directory / "rewards.png").read_bytes().startswith(b"\x89PNG")


def test_the_directory_is_not_another_runs(finished: Run) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.directory.rglob("*")}
    with run(finished.directory.parents[2], *LEARN) as second:
        assert second.process.wait(HUNG_S) == 2
        assert "holds the results of another run" in second.errors
    assert {path: path.stat().st_mtime_ns for path in finished.directory.rglob("*")} == before


@pytest.mark.long
def test_without_staleness_training_is_synchronous(tmp_path: Path) -> None:
    """η = 0, with the other bridge, downloaded deltas, a range of ports, and a tokenizer from elsewhere."""
    tokenizer = tmp_path / "tokenizer"
    write_init_model(InitModelConfig(), tokenizer, seed=0)
    (tokenizer / "special_tokens_map.json").write_text("{}")
    others = ("actor.megatron.bridge_type=megatron-bridge", "weight_update.mode=disk", f"tokenizer_path={tokenizer}")
    others += (
        "weight_update.full_every=2",
        "weight_update.url=auto",
        "weight_update.checksum=true",
        "cluster.ports=21000-21999",
    )
    with run(tmp_path, *LEARN, *others, "rollout.max_head_offpolicyness=0") as started:
        assert started.end() == 0, started.errors
        assert started.remains() == []
    assert contents(started) == CONTENTS
    assert (started.directory / f"checkpoints/step-{STEPS}/special_tokens_map.json").exists()
    scalars = read_scalars(started)
    assert set(scalars["staleness/max"].values()) == {0}
    assert set(scalars["rollout/on_policy_share"].values()) == {1}
    assert sorted(scalars["rollout/logprob_diff_server_trainer"]) == [1, 2, 3]
    assert max(scalars["rollout/logprob_diff_server_trainer"].values()) < 1e-4


@pytest.mark.long
def test_several_servers_of_several_ranks_hold_the_weights_of_a_folded_trainer(tmp_path: Path) -> None:
    """Every server's log-probs are the trainer's: attention and experts in different groups, shards on the servers."""
    experts = ("num_experts=4", "moe_intermediate_size=64", "tie_word_embeddings=false")
    layout = ("actor.backend=megatron:(attn:d2|ffn:e2)", "rollout.backend=sglang:d2t2", "cluster.n_gpus_per_node=6")
    model = [f"actor.init_model.{setting}" for setting in experts]
    short = ("total_train_steps=2", "warm_start.steps=4", "rollout.max_head_offpolicyness=0")
    with run(tmp_path, *layout, *model, *short) as started:
        assert started.end() == 0, started.errors
        assert started.remains() == []
        assert {log.name for log in (started.directory / "logs").glob("server-*")} == {"server-0.log", "server-1.log"}
    differences = read_scalars(started)["rollout/logprob_diff_server_trainer"]
    assert sorted(differences) == [1, 2]
    assert max(differences.values()) < 1e-4


def contents(finished: Run) -> set[str]:
    return {path.name for path in finished.directory.iterdir()}


def held_out(finished: Run):
    """Tokenizer, held-out problems and longest response of a run."""
    loaded = load(finished.directory / "config.yaml", ["trial_name=other"])
    job = preflight(loaded).job
    return job.tokenizer, job.valid_prompts, loaded.config.gconfig.max_new_tokens


def summary(finished: Run) -> dict:
    return json.loads((finished.directory / "summary.json").read_text())
