"""Whole runs whose servers choose experts by noise, or sample from some of the vocabulary."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from launched_otherwise import EXPERTS, FOLDED, launched
from running import Run

from areal_like.backends.sglang import LAUNCHER

SERVED, PROBE = "rollout/logprob_diff_server_trainer", "rollout/logprob_diff_probe"
ANY_DISTANCE = ("rollout.max_logprob_diff=10", "rollout.drift_patience=100")


def metrics(started: Run) -> list[dict[str, Any]]:
    lines = (started.directory / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if PROBE in row]


def distances(started: Run, steps: int) -> list[float]:
    """The distances of every step's probe, and those of generated tokens where a step had tokens of its version."""
    rows = metrics(started)
    assert len(rows) == steps, started.output
    served = [row[SERVED] for row in rows if SERVED in row]
    assert served
    return [row[PROBE] for row in rows] + served


@pytest.mark.long
def test_a_run_replays_what_servers_choose_by_noise(tmp_path: Path) -> None:
    with launched(tmp_path, "noisy_launcher", "total_train_steps=2", *FOLDED, shape=EXPERTS) as started:
        assert started.end() == 0, started.errors
        assert started.remains() == []
    assert "expert routes: 2 of 8 experts in 3 layers, 6 bytes per token; the actor replays them" in started.output
    assert max(distances(started, 2)) <= 1e-5
    assert [row["rollout/routed_share"] for row in metrics(started)] == [1.0, 1.0]


@pytest.mark.long
@pytest.mark.parametrize("backend", ["megatron:d2", "fsdp:d2"])
def test_a_run_without_replay_is_far_from_its_servers_and_one_with_replay_is_not(tmp_path: Path, backend: str) -> None:
    for replay in ("on", "off"):
        (folder := tmp_path / replay).mkdir()
        settings = ("total_train_steps=3", f"actor.backend={backend}", f"rollout.router_replay={replay}", *ANY_DISTANCE)
        with launched(folder, "noisy_launcher", *settings, shape=EXPERTS) as started:
            assert started.end() == 0, started.errors
        found = distances(started, 3)
        assert max(found) <= 1e-5 if replay == "on" else min(found) >= 1e-2, found


@pytest.mark.long
@pytest.mark.parametrize("backend", ["megatron:t2", "fsdp:d2"])
def test_a_run_trains_with_the_ids_that_servers_sampled_from(tmp_path: Path, backend: str) -> None:
    cut = ("gconfig.top_p=0.8", "gconfig.top_k=12", "rollout.max_head_offpolicyness=0")
    settings = ("total_train_steps=3", f"actor.backend={backend}", "gconfig.max_new_tokens=24", *cut)
    with launched(tmp_path, LAUNCHER, *settings) as started:
        assert started.end() == 0, started.errors
        assert started.remains() == []
    assert max(distances(started, 3)) <= 1e-5
    assert all(row["train/grad_norm"] > 0 and 1 < row["rollout/kept_ids"] <= 12 for row in metrics(started))


@pytest.mark.long
@pytest.mark.parametrize("workflow", ["run", "play"])
def test_an_agents_turns_are_trained_with_the_experts_and_ids_that_they_were_sampled_with(
    tmp_path: Path, workflow: str
) -> None:
    """Turns branch and have their own temperature, top_p and top_k."""
    agent = Path(__file__).with_name("branching_agent.py")
    played = (f"workflow={agent}:{workflow}", "episode.max_tokens=120")
    settings = ("total_train_steps=3", "rollout.max_head_offpolicyness=0", *played, *FOLDED)
    with launched(tmp_path, "noisy_launcher", *settings, shape=EXPERTS) as started:
        assert started.end() == 0, started.errors
        assert started.remains() == []
    found = distances(started, 3)
    print(found)
    assert len(found) == 6 and max(found) <= 1e-5
    assert [row["rollout/routed_share"] for row in metrics(started)] == [1.0] * 3
    assert all(row["rollout/kept_ids"] > 1 for row in metrics(started))


@pytest.mark.long
def test_a_resumed_run_has_experts_and_ids_of_groups_that_were_in_flight(tmp_path: Path) -> None:
    cut = ("gconfig.top_p=0.8", "gconfig.top_k=12", "gconfig.max_new_tokens=24", "rollout.max_head_offpolicyness=2")
    settings = ("recover.mode=fault", "recover.freq_steps=1", "total_train_steps=6", *cut, *FOLDED)
    with launched(tmp_path, "noisy_launcher", *settings, shape=EXPERTS) as first:
        first.wait_for_step(3)
        os.killpg(first.process.pid, signal.SIGKILL)
        assert first.end() == -signal.SIGKILL
    with launched(tmp_path, "noisy_launcher", *settings, shape=EXPERTS) as second:
        assert second.end() == 0, second.errors
        assert [*first.remains(), *second.remains()] == []
    assert "resuming from" in second.output
    rows = metrics(second)
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert min(second.steps()) > 1
    for row in rows:
        assert row[PROBE] <= 1e-5 and row.get(SERVED, 0.0) <= 1e-5
        assert row["rollout/routed_share"] == 1.0
        assert 1 < row["rollout/kept_ids"] <= 12
    optional = {
        SERVED,
        "rollout/kv_use",
        "rollout/running",
    }  # of tokens of the version, and of servers that were busy long enough
    fields = [{name for name in row if name.startswith(("rollout/", "train/"))} - optional for row in rows]
    assert all(each == fields[0] for each in fields)


@pytest.mark.long
def test_a_run_with_time_shared_gpus_replays_and_scores_its_probe(tmp_path: Path) -> None:
    """The servers lose what their memory holds in the trainer's time slices."""
    turns = (
        *("rollout.sharing=alternate", "weight_update.mode=ipc", "weight_update.requests=in_place"),
        *("actor.backend=null", "rollout.backend=null", "allocation_mode=sglang:d1|megatron:d1"),
        *("rollout.max_head_offpolicyness=2", "gconfig.max_new_tokens=48", "total_train_steps=3"),
    )
    with launched(tmp_path, "noisy_forgetful_launcher", *turns, shape=EXPERTS) as started:
        assert started.end() == 0, started.errors
        assert started.remains() == []
    rows = metrics(started)
    print([row[PROBE] for row in rows])
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert max(row[PROBE] for row in rows) <= 1e-5
    assert [row["rollout/routed_share"] for row in rows] == [1.0] * 3
