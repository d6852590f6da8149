"""Faults of real servers, which begin with version 1, end the run, and its message names each."""

from __future__ import annotations

from pathlib import Path

import pytest
from launched_otherwise import EXPERTS, FOLDED, launched

COMPUTES = "Likely cause: the computation of server 0, whose weights are the trainer's. "
# In so small a model other experts change every later token, so replay is named as one remedy of two.
NAMED = {
    "stale cache": ((), (), "Likely cause: the prefix cache of server 0. Recomputed prompts agree"),
    "wrong rope": ((), (), f"{COMPUTES}Log-probs after a single token agree, so the difference is in the attention"),
    "flipped route": (EXPERTS, FOLDED, f"{COMPUTES}The experts that the servers return for layer 1 are not those that"),
    "other experts": (
        EXPERTS,
        (*FOLDED, "rollout.router_replay=off"),
        "rollout.router_replay=on",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("fault", NAMED)
def test_a_fault_of_a_real_server_is_named(tmp_path: Path, fault: str) -> None:
    shape, layout, words = NAMED[fault]
    long = ("gconfig.max_new_tokens=48", "gconfig.n_samples=8")
    settings = ("total_train_steps=12", *long, "rollout.drift_patience=1", *layout)
    with launched(tmp_path, "faulty_launcher", *settings, shape=shape, fault=fault) as started:
        assert started.end() == 1, started.errors
        assert started.steps()[:1] == [1]
        assert started.remains() == []
    assert words in started.errors, started.errors
