"""Hosts with which no run would succeed: one message with node, key and fix, and nothing is left running."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
from host_runs import cluster_on
from namespaces import Host, reason_to_skip
from running import CONFIG, ENDLESS, writing

from areal_like.core.config.load import load
from areal_like.demo.init_model import write_init_model

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.long,
    pytest.mark.skipif(reason_to_skip() is not None, reason=str(reason_to_skip())),
]
LAYOUT = ("actor.backend=megatron:d1", "rollout.backend=sglang:d1", "cluster.n_nodes=2")


def mount(host: Host, *words: str | Path) -> None:
    assert host.start("mount", *words).wait() == 0


def test_everything_wrong_on_a_host_is_reported_at_once(tmp_path: Path) -> None:
    model, nothing = tmp_path / "models/small", tmp_path / "nothing"
    shape = load(CONFIG, list(ENDLESS)).config.actor.init_model
    assert shape
    write_init_model(shape, model, seed=1)
    nothing.mkdir()
    distribution = Path(str(importlib.metadata.distribution("mbridge")._path))  # type: ignore[attr-defined]
    with cluster_on(tmp_path, 3) as cluster:
        bad = cluster.machines[2]
        mount(bad, "--bind", nothing, distribution)
        mount(bad, "-t", "tmpfs", "tmpfs", model.parent)
        mount(bad, "-o", "remount,size=200m", "/tmp")
        run = cluster.run(*LAYOUT, *ENDLESS, "actor.init_model=null", f"actor.path={model}")
        assert run.end() == 1
        (software,) = [line for line in run.errors.splitlines() if "different versions of mbridge: " in line]
        assert f"{importlib.metadata.version('mbridge')} on {cluster.machines[1].address}" in software
        assert f"none on {bad.address}" in software
        assert f"node {bad.address} has " in run.errors and "MiB for temporary files" in run.errors
        assert f"node {bad.address} does not have {model} (actor.path), which every node reads" in run.errors
        assert not writing(run.directory / "logs")
