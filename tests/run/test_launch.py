"""`train` from Python: in a script, in a notebook's running loop, with objects instead of names."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from limits import HUNG_S
from running import CONFIG, ROOT, SMALL

from areal_like import launch, train
from areal_like.core.config.findings import ConfigError
from areal_like.core.config.load import load
from areal_like.core.errors import ServerError
from areal_like.core.types import Reward
from areal_like.job import Job
from areal_like.metrics.console import View

QUIET = {"trial_name": "t", "stats_logger.console": False}


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """What would have been run, and in which thread."""
    started: list[Job] = []

    async def run(job: Job, view: View) -> None:
        await asyncio.sleep(0)
        started.append(job)

    monkeypatch.setattr(launch, "run", run)
    return started


def test_a_configuration_comes_in_every_form(jobs: list[Job], tmp_path: Path) -> None:
    overrides = QUIET | {"cluster.fileroot": str(tmp_path), "gconfig.n_samples": 4, "tokenizer_path": None}
    from_file = load(CONFIG)
    directory = train(CONFIG, overrides)
    assert directory == tmp_path / "gsm8k-grpo-cpu/t"
    for config in (str(CONFIG), from_file, from_file.config, from_file.config.model_dump()):
        train(config, overrides)
    assert len({job.config.model_dump_json() for job in jobs}) == 1
    assert jobs[0].config.gconfig.n_samples == 4
    assert len(jobs) == 5


def test_a_path_may_be_one_of_pathlib(jobs: list[Job], tmp_path: Path) -> None:
    values = load(CONFIG).config.model_dump()
    train(CONFIG, QUIET | {"cluster.fileroot": tmp_path})
    train(values | {"cluster": values["cluster"] | {"fileroot": tmp_path}}, QUIET)
    assert [job.config.cluster.fileroot for job in jobs] == [str(tmp_path)] * 2


def test_what_is_wrong_says_where_it_came_from(jobs: list[Job]) -> None:
    values = load(CONFIG).config.model_dump() | {"seeed": 1}
    with pytest.raises(ConfigError, match=r"seeed \(given from Python\)"):
        train(values)
    with pytest.raises(ConfigError, match="n_samples"):
        train(values, ["gconfig.n_samples=no"])
    assert jobs == []


def test_a_workflow_is_given_as_if_the_key_named_it(jobs: list[Job]) -> None:
    async def act(row, client):
        return 1.0

    train(CONFIG, QUIET, workflow=act)
    assert jobs[0].config.workflow == "given:workflow.act"
    with pytest.raises(ConfigError, match=r"workflow .*it takes 1 parameters \(row\)"):
        train(CONFIG, QUIET, workflow=score_alone)


async def score_alone(row):
    return 1.0


def test_in_a_notebook_the_run_has_a_loop_of_its_own(jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    pretended = launch.run

    async def run(job: Job, view: View) -> None:
        threads.append(threading.current_thread())
        await pretended(job, view)

    monkeypatch.setattr(launch, "run", run)

    async def cell() -> Path:
        return train(CONFIG, QUIET)

    assert asyncio.run(cell()).name == "t"
    assert threads[0] is not threading.main_thread()


def test_a_failure_in_a_notebook_is_the_first_of_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(job: Job, view: View) -> None:
        raise ExceptionGroup("tasks", [ServerError("server 0 is gone")])

    async def cell() -> None:
        train(CONFIG, QUIET)

    monkeypatch.setattr(launch, "run", run)
    with pytest.raises(ServerError, match="server 0 is gone"):
        asyncio.run(cell())


def test_an_interrupt_of_a_notebook_s_cell_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, main = [], threading.main_thread().ident

    async def run(job: Job, view: View) -> None:
        try:
            asyncio.get_running_loop().call_later(0.1, signal.pthread_kill, main, signal.SIGINT)
            await asyncio.sleep(HUNG_S)
        finally:
            await asyncio.sleep(0.1)  # as clean-up takes its time
            ended.append(job)

    async def cell() -> None:
        with pytest.raises(KeyboardInterrupt):
            train(CONFIG, QUIET)

    monkeypatch.setattr(launch, "run", run)
    asyncio.run(cell())
    assert len(ended) == 1


SCRIPT = """
from areal_like import launch, train
from areal_like.rewards.scoring import Rewards
from areal_like.core.types import Prompt

factor = 2.0

def score(response, row):
    return factor * len(response)

class Rows:
    def __len__(self):
        return 8

    def __getitem__(self, place):
        return {"question": "Tom has 2 cards and finds 2 more. How many cards does Tom have now?", "answer": "#### 4"}

async def run(job, view):
    async with Rewards(job.config.reward, job.tokenizer) as rewards:
        print(len(job.train_prompts), await rewards.score_texts(job.train_prompts[0], ["abc", ""]))

launch.run = run
train(CONFIG, {"trial_name": "t", "train_dataset.batch_size": 4}, reward=score, dataset=Rows())  # not guarded by `if __name__ == "__main__"`
print(__file__)
"""


def test_a_script_gives_a_function_of_its_own_and_is_not_run_again_by_workers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("CONFIG", repr(str(CONFIG))))
    environment = {"PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=900)
    rewards = [Reward(6.0), Reward(0.0)]
    assert (result.stdout, result.returncode) == (f"8 {rewards}\n{script}\n", 0), result.stderr


IN_A_LOOP = """
import asyncio, runpy, sys

async def cell():
    runpy.run_path(sys.argv[0], run_name="__main__")

sys.argv = sys.argv[1:]
asyncio.run(cell())
"""


@pytest.mark.long
@pytest.mark.parametrize("starter", [[], ["-c", IN_A_LOOP]], ids=["script", "running loop"])
def test_the_example_trains_with_its_own_reward(tmp_path: Path, starter: list[str]) -> None:
    example, short = str(ROOT / "examples/python/own_reward.py"), ["total_train_steps=2", "warm_start.steps=4"]
    command = [sys.executable, *starter, example, *SMALL, f"cluster.fileroot={tmp_path}", *short]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500)
    assert result.returncode == 0, result.stdout + result.stderr
    directory = tmp_path / "test/run"
    assert result.stdout.splitlines()[-1] == f"everything is in {directory}"
    first = (directory / "samples/step-000001.jsonl").read_text().splitlines()[0]
    assert json.loads(first)["parts"].keys() == {"is_a_number"}


@pytest.mark.long
def test_the_python_example_of_the_readme_trains(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    keys = [*SMALL, f"cluster.fileroot={tmp_path}", "total_train_steps=2", "warm_start.steps=4"]
    short = code.replace('{"total_train_steps": 20}', json.dumps(keys))
    assert short != code
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", short]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == str(tmp_path / "test/run")


def test_importing_the_package_imports_nothing_else() -> None:
    code = (
        "import areal_like, sys; print(*sorted(n for n in sys.modules if n.startswith('areal_like') or n == 'numpy'))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "areal_like\n"
