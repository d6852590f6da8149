"""What goes wrong after the checks and before the first process is told in one line, like every other failure."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from running import CONFIG, ROOT, SCRIPT

from areal_like.config.load import load
from areal_like.errors import DirectoryTaken, PreparationError
from areal_like.metrics.console import View
from areal_like.preflight.checks import preflight
from areal_like.train import Job, _model_directory, run


@pytest.mark.parametrize(
    ("largest_file", "message"),
    [(100, r"runs/e/t (cluster.fileroot) cannot be written"), (1 << 16, "runs/e/t/initial_model: ")],
    ids=["configuration", "model"],
)
def test_a_disk_that_takes_no_more(tmp_path: Path, largest_file: int, message: str) -> None:
    result = subprocess.run(
        [
            *(sys.executable, str(SCRIPT), "--config", str(CONFIG), f"cluster.fileroot={tmp_path / 'runs'}"),
            *("experiment_name=e", "trial_name=t"),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file)),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 1
    assert result.stderr.startswith("the run failed: ")
    assert message in result.stderr
    assert "File too large" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_of_runs_that_start_together_one_has_the_directory(tmp_path: Path) -> None:
    loaded = load(CONFIG, [f"cluster.fileroot={tmp_path}", "trial_name=t"])
    checked = preflight(loaded)
    assert checked.ok and checked.plan and checked.tokenizer and checked.device
    job = Job(loaded.config, checked.device, checked.plan, checked.tokenizer, (), (), checked.steps)
    loaded.config.run_dir.mkdir(parents=True)
    (loaded.config.run_dir / "config.yaml").write_text("of the other run")
    with pytest.raises(DirectoryTaken, match="set trial_name to another name"):
        asyncio.run(run(job, View(False)))
    assert [file.name for file in loaded.config.run_dir.iterdir()] == ["config.yaml"]
    assert (loaded.config.run_dir / "config.yaml").read_text() == "of the other run"


@pytest.mark.parametrize("error", [LocalEntryNotFoundError, httpx.ReadTimeout, OSError])
def test_a_model_that_cannot_be_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Callable[[str], Exception]
) -> None:
    def fail(name: str) -> str:
        raise error("the wire is cut")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    config = load(CONFIG, ["actor.init_model=null", "actor.path=owner/name"]).config
    with pytest.raises(PreparationError, match=r"owner/name \(actor.path\) cannot be downloaded: the wire is cut"):
        _model_directory(config, tmp_path)
