"""What every test gets: one thread per process, CUDA tests only where there is CUDA, one SGLang server."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError

os.environ["OMP_NUM_THREADS"] = "1"  # before numpy or torch is imported
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

import psutil
import pytest
from hypothesis import HealthCheck, settings
from left_processes import session_processes
from limits import HUNG_S

settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")


MINIMAL = """
experiment_name: demo
trial_name: first
device: cpu
cluster: {n_gpus_per_node: 3, fileroot: FILEROOT}
train_dataset:
  path: arithmetic
  batch_size: 4
  max_prompt_length: 32
  arithmetic: {size: 16}
valid_dataset: {path: arithmetic, max_prompt_length: 32, arithmetic: {size: 4}}
gconfig: {n_samples: 2, max_new_tokens: 8}
actor:
  backend: megatron:d2
  dtype: float32
  init_model: {max_position_embeddings: 64}
rollout: {backend: "sglang:d1"}
"""


def pytest_configure() -> None:
    """A session that is told to end takes what it has started along, as after Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


@dataclass(frozen=True)
class RunningServer:
    """A server of the session; who changes its weights loads `model`'s again (POST /update_weights_from_disk)."""

    url: str
    token: str
    model: Path  # Hugging Face directory: Qwen3 with random weights and the arithmetic tokenizer
    log_file: Path

    @property
    def headers(self) -> dict[str, str]:
        """What a request has to send to be let in."""
        return {"Authorization": f"Bearer {self.token}"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that need CUDA."""
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            for item in items:
                if item.get_closest_marker("gpu"):
                    item.add_marker(pytest.mark.skip(reason="no CUDA here"))


@pytest.fixture(scope="session", autouse=True)
def nothing_left() -> Iterator[None]:
    """Fails the session that leaves processes behind; torn down after every other fixture."""
    yield
    deadline = time.monotonic() + HUNG_S
    while (left := session_processes()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == [], "the tests left processes behind"


@pytest.fixture(scope="session")
def sglang_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One real SGLang server on loopback, as a run on CPU starts it; version and weights are its last user's."""
    from allocation import ParallelSizes
    from areal_like.cluster.lifetime import reserve_port
    from areal_like.config.load import load
    from areal_like.demo.init_model import write_init_model
    from areal_like.rollout.sglang import LAUNCHER, TOKEN_VARIABLE
    from areal_like.rollout.sglang.options import server_arguments

    folder = tmp_path_factory.mktemp("sglang")
    model, log_file, tmp = folder / "model", folder / "server.log", folder / "tmp"
    tmp.mkdir()
    demo = Path(__file__).parents[1] / "examples/math/gsm8k_grpo_cpu.yaml"
    config = load(demo, ["sglang.context_length=128"]).config  # room for responses that updates can interrupt
    write_init_model(config.actor.init_model, model, seed=0)
    reserved, token = reserve_port("127.0.0.1"), secrets.token_hex(16)
    port = reserved.getsockname()[1]
    options = server_arguments(config, model, ParallelSizes(), "cpu")
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", LAUNCHER, *options, "--host", "127.0.0.1", "--port", str(port)],
            env={**os.environ, TOKEN_VARIABLE: token, "TMPDIR": str(tmp), "SPT_NOENV": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = RunningServer(f"http://127.0.0.1:{port}", token, model, log_file)
    try:
        _wait_until_healthy(server, process)
        yield server
    finally:
        reserved.close()
        shared = _shared_memory(process.pid)
        process.kill()  # its children notice and go with it
        process.wait()
        for file in shared:
            file.unlink(missing_ok=True)


def _shared_memory(pid: int) -> set[Path]:
    """Files of /dev/shm that a process and its children map; who is killed leaves them."""
    try:
        tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        maps = "".join(Path(f"/proc/{process.pid}/maps").read_text() for process in tree)
    except (psutil.Error, OSError):  # it has ended
        return set()
    return {Path(name) for name in re.findall(r"/dev/shm/\S+", maps)}


def _wait_until_healthy(server: RunningServer, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + HUNG_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(server.url + "/health", timeout=HUNG_S):
                return
        except (URLError, TimeoutError, ConnectionError):
            time.sleep(0.2)
    pytest.fail(f"SGLang did not start; {server.log_file} ends:\n{server.log_file.read_text()[-3000:]}")


@pytest.fixture
def write(tmp_path):
    """Writes YAML to a file and returns its path; without text a run that passes every check."""

    def write(text: str = MINIMAL):
        file = tmp_path / "run.yaml"
        file.write_text(textwrap.dedent(text).replace("FILEROOT", str(tmp_path / "runs")))
        return file

    return write
