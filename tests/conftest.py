"""What every test gets: one thread per process, CUDA tests only where there is CUDA, one SGLang server."""

from __future__ import annotations

import compileall
import os
import signal
import textwrap
import time
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before numpy or torch is imported
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

import mutations  # noqa: F401  # before the engines
import pytest
import sensitivity
from cpu_server import RunningServer, server_on_cpu
from hypothesis import HealthCheck, settings
from left_processes import session_processes
from limits import HUNG_S

from areal_like.core.gc_tuning import pause_gc

settings.register_profile("any speed", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")


# Folders whose files take longest; with `--no-loadscope-reorder` workers take files in this order
LONGEST = (
    "run",
    "setup",
    "cluster",
    "trainer",
    "models",
    "agents",
    "checkpoint",
    "rewards",
    "weights",
    "rollout",
    "preflight",
)
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


def pytest_configure(config: pytest.Config) -> None:
    """Compile our modules once for all processes that tests start, and end a session on SIGTERM as after Ctrl-C."""
    if not hasattr(config, "workerinput"):  # else each process would, where PYTHONDONTWRITEBYTECODE is set
        for package in ("allocation", "areal_like"):
            compileall.compile_dir(Path(__file__).parents[1] / package, quiet=2)
    if file := os.environ.get(sensitivity.VARIABLE):
        sensitivity.watch_comparisons(file)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage among the modules that stay, now or later: this took a sixth of the time."""
    with pause_gc():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files, so that no worker waits for another's at the end; skip tests that need CUDA."""
    items.sort(key=lambda item: _place(item.path.parent.name))
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            for item in items:
                if item.get_closest_marker("gpu"):
                    item.add_marker(pytest.mark.skip(reason="no CUDA here"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Give the files that use the session's SGLang server to one worker, so that one server starts."""
    from xdist.scheduler import LoadFileScheduling

    class ByFileOrServer(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "sglang server" if _uses_server(config.rootpath / file) else file

    return ByFileOrServer(config, log) if config.getoption("dist") == "loadfile" else None


@cache
def _uses_server(file: Path) -> bool:
    return file.exists() and "sglang_server" in file.read_text()


def _place(folder: str) -> int:
    return LONGEST.index(folder) if folder in LONGEST else len(LONGEST)


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
    from areal_like.core.config.load import load
    from areal_like.demo.init_model import write_init_model

    folder = tmp_path_factory.mktemp("sglang")
    demo = Path(__file__).parents[1] / "examples/math/gsm8k_grpo_cpu.yaml"
    config = load(demo, ["sglang.context_length=128"]).config  # room for responses that updates can interrupt
    write_init_model(config.actor.init_model, folder / "model", seed=0)
    with server_on_cpu(config, folder / "model", folder) as server:
        yield server


@pytest.fixture
def write(tmp_path):
    """Writes YAML to a file and returns its path; without text a run that passes every check."""

    def write(text: str = MINIMAL):
        file = tmp_path / "run.yaml"
        file.write_text(textwrap.dedent(text).replace("FILEROOT", str(tmp_path / "runs")))
        return file

    return write
