"""Two adapters of one base learn opposite things in one run, also in one that is killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from running import ROOT, Run, run
from safetensors.numpy import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from areal_like.core.checkpoint.journal import Journal, read_header
from areal_like.core.checkpoint.store import DIRECTORY, JOURNAL, newest
from areal_like.core.config.schema import InitModelConfig
from areal_like.demo.arithmetic import generate
from areal_like.demo.init_model import write_init_model

pytestmark = [pytest.mark.long, pytest.mark.covers("LoRA")]

REWARDS = ROOT / "tests/run/opposite_rewards.py"
STEPS = 16
BATCH = {"digits": 4, "others": 6}
ADAPTERS = {
    "digits": {
        "train_dataset": {"batch_size": BATCH["digits"]},
        "reward": {"function": f"{REWARDS}:digits"},
    },
    "others": {
        "train_dataset": {"batch_size": BATCH["others"], "arithmetic": {"max_number": 4}},
        "valid_dataset": {"max_samples": 8},
        "reward": {"function": f"{REWARDS}:others"},
        "algorithm": "dr_grpo",
        "actor": {"entropy_coeff": 0.001},
    },
}
SETTINGS = (
    *("actor.use_lora=true", "actor.lora_rank=8", "actor.backend=fsdp:d2", "actor.optimizer.lr=2e-2"),
    *("weight_update={adapters: true, mode: disk}", "warm_start=null"),
    *(
        "actor.ppo_n_minibatches=1",
        "gconfig.n_samples=8",
        f"total_train_steps={STEPS}",
        "recover.mode=fault",
        "recover.freq_steps=2",
    ),
    *("valid_dataset.max_samples=16", "evaluator.freq_steps=null", "evaluator.temperature=1.0"),
    f"adapters={json.dumps(ADAPTERS)}",
)


def make_base(folder: Path) -> Path:
    """Write a random model whose frozen output layer is large enough for adapters to decide what it says."""
    write_init_model(InitModelConfig(num_hidden_layers=2, hidden_size=64, tie_word_embeddings=False), folder, seed=0)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] *= 8
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def assert_learned(ended: Run) -> None:
    """Each adapter says what is wanted of it, and servers and trainer agree on it."""
    events = EventAccumulator(str(ended.directory / "tensorboard"))
    events.Reload()
    scalars = {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
    evaluated = {name: scalars[f"evaluation/{name}/mean@1"] for name in ADAPTERS}
    assert evaluated["digits"][STEPS] > evaluated["digits"][0] + 0.25  # few characters are digits
    assert 1 - evaluated["others"][STEPS] < (1 - evaluated["others"][0]) / 2
    assert max(scalars["staleness/max"].values()) <= 1
    for tag in ("logprob_diff_server_trainer", "logprob_diff_probe"):
        assert max(scalars[f"rollout/{tag}"].values()) < 1e-3, tag


def write_rows(folder: Path, wanted: str) -> str:
    """Write problems whose rows say what an answer is to have; return their file."""
    rows = [row | {"wanted": wanted} for row in generate(512, 5, seed=0, split="train")]
    (file := folder / f"{wanted}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_agents_train_the_adapter_of_their_row_on_megatron(tmp_path: Path) -> None:
    adapters = {
        name: {
            "train_dataset": {"path": (rows := write_rows(tmp_path, name)), "batch_size": BATCH[name]},
            "valid_dataset": {"path": rows},
        }
        for name in ADAPTERS
    }
    played = ("actor.backend=megatron:d1p2", f"workflow={ROOT / 'tests/run/opposite_agent.py'}:run")
    settings = (*SETTINGS, *played, "episode.max_tokens=120", f"adapters={json.dumps(adapters)}")
    with run(tmp_path, *settings, f"actor.path={make_base(tmp_path / 'base')}") as started:
        assert started.end() == 0, started.errors
        assert started.remains() == []
    assert_learned(started)


def test_two_adapters_learn_opposite_things_in_one_run_that_is_killed(tmp_path: Path) -> None:
    settings = (*SETTINGS, f"actor.path={make_base(tmp_path / 'base')}")
    with run(tmp_path, *settings) as first:
        first.wait_for_step(5)
        os.killpg(first.process.pid, signal.SIGKILL)
        assert first.end() == -signal.SIGKILL
    with run(tmp_path, *settings) as second:
        assert second.end() == 0, second.errors
        assert [*first.remains(), *second.remains()] == []
    assert_learned(second)
    state = newest(second.directory / DIRECTORY)[0].state
    assert state.started_by_adapter == {name: STEPS * batch for name, batch in BATCH.items()}
    assert state.untrained == ()
    file = second.directory / DIRECTORY / JOURNAL
    trained = sorted(group for step in Journal(file, read_header(file)["data"]).steps() for group in step.groups)
    assert trained == sorted(
        place + 2 * number for place, batch in enumerate(BATCH.values()) for number in range(STEPS * batch)
    )
    saved = [
        load_file(second.directory / f"checkpoints/step-{STEPS}/{name}/adapter_model.safetensors") for name in BATCH
    ]
    assert saved[0].keys() == saved[1].keys()
    assert all((saved[0][name] != saved[1][name]).any() for name in saved[0])
