"""Whole runs whose servers choose experts by noise, or sample from some of the vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launched_otherwise import EXPERTS, FOLDED, launched
from running import Run

from areal_like.rollout.sglang import LAUNCHER

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
