"""Every family runs on every backend that trains it: servers, two steps and updates, with default keys."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import SERVED, VARIANTS
from tiny_runs import PROBE, ROUTED, STEPS, metric, run_family
from tolerance import BACKWARD, rounding

from allocation.families import FAMILIES, TRAINED
from areal_like.capabilities.router_replay.decision import FSDP_FAMILIES

pytestmark = pytest.mark.long

CASES = [
    *(("fsdp", family, "") for family in TRAINED["fsdp"]),
    *(("megatron", family, bridge) for family in TRAINED["megatron"] for bridge in VARIANTS[family].bridges),
]


@pytest.mark.parametrize(("backend", "family", "bridge"), CASES)
def test_a_family_runs_with_default_keys(tmp_path: Path, backend: str, family: str, bridge: str) -> None:
    bridges = [f"actor.megatron.bridge_type={bridge}"] if bridge else []
    finished = run_family(tmp_path, family, f"actor.backend={backend}:d1", *bridges)
    assert finished.steps() == list(range(1, STEPS + 1))
    distances = metric(finished, PROBE)
    assert len(distances) == STEPS and max(distances) <= rounding(depth=BACKWARD), distances
    replays = FAMILIES[family].experts and (backend == "megatron" or family in FSDP_FAMILIES)
    assert metric(finished, ROUTED) == ([1.0] * STEPS if replays else [])


def test_every_trained_family_has_a_run() -> None:
    assert {family for _, family, _ in CASES} == set(SERVED) <= FAMILIES.keys()
