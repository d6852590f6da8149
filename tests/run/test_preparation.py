"""What goes wrong after the checks and before the first process is told in one line, like every other failure."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from limits import HUNG_S
from running import CONFIG, ROOT, SCRIPT

from areal_like.core.config.load import load
from areal_like.core.errors import DirectoryTaken, PreparationError
from areal_like.metrics.console import View
from areal_like.preflight import preflight
from areal_like.run.assemble import run
from areal_like.run.model_files import model_directory


@pytest.mark.parametrize(
    ("largest_file", "message"),
    [(100, r"runs/e/t (in cluster.fileroot) cannot be used"), (1 << 16, "runs/e/t/initial_model: ")],
    ids=["configuration", "model"],
)
def test_a_disk_that_takes_no_more(tmp_path: Path, largest_file: int, message: str) -> None:
    result = subprocess.run(
        [
            *(sys.executable, str(SCRIPT), "--config", str(CONFIG), f"cluster.fileroot={tmp_path / 'runs'}"),
            *("experiment_name=e", "trial_name=t", "recover.mode=off"),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file)),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 1
    assert result.stderr.startswith("The run failed: ")
    assert message in result.stderr
    assert "File too large" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_of_runs_that_start_together_one_has_the_directory(tmp_path: Path) -> None:
    loaded = load(CONFIG, [f"cluster.fileroot={tmp_path}", "trial_name=t", "recover.mode=off"])
    job = preflight(loaded).job
    assert job
    loaded.config.run_dir.mkdir(parents=True)
    (loaded.config.run_dir / "config.yaml").write_text("of the other run")
    with pytest.raises(DirectoryTaken, match="set trial_name to another name"):
        asyncio.run(run(job, View(False)))
    assert [file.name for file in loaded.config.run_dir.iterdir()] == ["config.yaml"]
    assert (loaded.config.run_dir / "config.yaml").read_text() == "of the other run"


def hub(folder: Path, body: str) -> dict[str, str]:
    """An environment with another huggingface_hub, whose `snapshot_download(name)` does this."""
    (folder / "huggingface_hub").mkdir()
    (folder / "huggingface_hub/__init__.py").write_text(f"def snapshot_download(name):\n    {body}\n")
    return {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise OSError('the wire is cut')", "the wire is cut"),
        ("import httpx; raise httpx.ReadTimeout('the wire is slow')", "the wire is slow"),
        ("import os; os._exit(9)", "exit code 9"),
    ],
    ids=["hub", "http", "crash"],
)
def test_a_model_that_cannot_be_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str
) -> None:
    monkeypatch.setattr(os, "environ", hub(tmp_path, body))
    config = load(CONFIG, ["actor.init_model=null", "actor.path=owner/name"]).config
    with pytest.raises(PreparationError, match=rf"^owner/name \(actor.path\) cannot be downloaded: {message}$"):
        asyncio.run(model_directory(config, tmp_path))


def test_a_downloaded_model_lies_where_the_hub_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", hub(tmp_path, "print('a word first'); return f'/cache/{name}'"))
    config = load(CONFIG, ["actor.init_model=null", "actor.path=owner/name"]).config
    assert asyncio.run(model_directory(config, tmp_path)) == Path("/cache/owner/name")


DOWNLOADS_THEN_RUNS = """
import asyncio, sys
from pathlib import Path
from areal_like.core.config.load import load
from areal_like.run.model_files import model_directory

try:
    asyncio.run(model_directory(load(sys.argv[1], ["actor.init_model=null", "actor.path=owner/name"]).config, Path()))
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_ctrl_c_does_not_wait_for_a_download(tmp_path: Path) -> None:
    """Not for its threads either: the hub's client downloads in such as an interpreter joins at its end."""
    body = (
        "import pathlib, os, threading, time; "
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid())); "
        "threading.Thread(target=time.sleep, args=(600,)).start(); time.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", DOWNLOADS_THEN_RUNS, str(CONFIG)], env=hub(tmp_path, body), stderr=subprocess.PIPE
    )
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(HUNG_S) == 130
    assert process.stderr and process.stderr.read() == b""
    child = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(child)
