"""Numbers reach every logger by the calls that it documents. Stand-ins have the real functions' parameters."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from areal_like.core.config.load import load
from areal_like.core.errors import RecordError
from areal_like.metrics.sinks import make_sinks
from areal_like.preflight import preflight


class Calls(list[tuple[str, dict[str, Any]]]):
    """What was called with which arguments; `refuse` makes `init` raise."""

    refuse: Exception | None = None

    def note(self, what: str, /, **arguments: Any) -> None:
        self.append((what, arguments))

    def run(self) -> Any:
        def log(data: dict[str, Any], step: int | None = None) -> None:
            self.note("log", data=data, step=step)

        return SimpleNamespace(log=log, finish=lambda: self.note("finish"))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    made = Calls()
    wandb, swanlab, mlflow = ModuleType("wandb"), ModuleType("swanlab"), ModuleType("mlflow")

    def init_wandb(
        *, entity=None, project=None, dir=None, name=None, config=None, group=None, mode=None, settings=None
    ):
        made.note(
            "wandb", entity=entity, project=project, dir=dir, name=name, group=group, mode=mode, seed=config["seed"]
        )
        if made.refuse:
            raise made.refuse
        return made.run()

    def init_swanlab(*, project=None, workspace=None, experiment_name=None, config=None, logdir=None, mode=None):
        made.note("swanlab", project=project, workspace=workspace, name=experiment_name, logdir=logdir, mode=mode)
        return made.run()

    wandb.init, wandb.Settings, wandb.Error = init_wandb, SimpleNamespace, type("Error", (Exception,), {})
    swanlab.init = init_swanlab
    mlflow.exceptions = SimpleNamespace(MlflowException=type("MlflowException", (Exception,), {}))
    mlflow.set_tracking_uri = lambda uri: made.note("uri", uri=uri)
    mlflow.set_experiment = lambda experiment_name: made.note("experiment", name=experiment_name)
    mlflow.start_run = lambda *, run_name: made.note("start", name=run_name)
    mlflow.log_dict = lambda dictionary, artifact_file: made.note("dict", file=artifact_file, seed=dictionary["seed"])
    mlflow.log_metrics = lambda metrics, step=None, synchronous=None: made.note("log", data=metrics, step=step)
    mlflow.end_run = lambda: made.note("end")
    for module in (wandb, swanlab, mlflow):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return made


def logged(write: Any, tmp_path: Path, *overrides: str) -> None:
    config = load(write(), ["stats_logger.tensorboard=false", *overrides]).config
    sinks = make_sinks(config, tmp_path)
    for sink in sinks:
        sink.log(3, {"reward/mean": 0.5, "evaluation/math/pass@4": 0.25})
        sink.close()


NUMBERS = {"reward/mean": 0.5, "evaluation/math/pass@4": 0.25}


def test_lines_are_always_there(write, tmp_path: Path, calls: Calls) -> None:
    logged(write, tmp_path)
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 3} | NUMBERS
    assert calls == []


def test_weights_and_biases(write, tmp_path: Path, calls: Calls) -> None:
    logged(write, tmp_path, "stats_logger.wandb.mode=offline", "stats_logger.wandb.group=g")
    about = {"entity": None, "project": "demo", "dir": str(tmp_path), "name": "first", "group": "g", "mode": "offline"}
    assert calls == [("wandb", about | {"seed": 1}), ("log", {"data": NUMBERS, "step": 3}), ("finish", {})]


def test_swanlab(write, tmp_path: Path, calls: Calls) -> None:
    logged(write, tmp_path, "stats_logger.swanlab.mode=local", "stats_logger.swanlab.project=p")
    about = {"project": "p", "workspace": None, "name": "first", "logdir": f"{tmp_path}/swanlab", "mode": "local"}
    assert calls == [("swanlab", about), ("log", {"data": NUMBERS, "step": 3}), ("finish", {})]


def test_mlflow(write, tmp_path: Path, calls: Calls) -> None:
    logged(write, tmp_path, "stats_logger.mlflow.tracking_uri=sqlite:///m.db")
    assert calls == [
        ("uri", {"uri": "sqlite:///m.db"}),
        ("experiment", {"name": "demo"}),
        ("start", {"name": "first"}),
        ("dict", {"file": "config.json", "seed": 1}),
        ("log", {"data": {"reward/mean": 0.5, "evaluation/math/pass_at_4": 0.25}, "step": 3}),
        ("end", {}),
    ]


def test_names_of_a_users_parts_are_such_as_mlflow_takes(write, tmp_path: Path, calls: Calls) -> None:
    config = load(write(), ["stats_logger.tensorboard=false", "stats_logger.mlflow.tracking_uri=sqlite:///m.db"]).config
    make_sinks(config, tmp_path)[-1].log(1, {"reward_parts/form & length (%)": 1.0, "reward_parts/größe": 2.0})
    assert calls[-1] == ("log", {"data": {"reward_parts/form _ length ___": 1.0, "reward_parts/größe": 2.0}, "step": 1})


def test_a_logger_that_refuses_is_named(write, tmp_path: Path, calls: Calls) -> None:
    calls.refuse = sys.modules["wandb"].Error("no API key")
    with pytest.raises(RecordError, match=r"Weights & Biases \(stats_logger\.wandb\) cannot be used: no API key"):
        logged(write, tmp_path, "stats_logger.wandb.mode=online")


@pytest.mark.parametrize(
    ("setting", "package"),
    [("wandb.mode=offline", "wandb"), ("swanlab.mode=local", "swanlab"), ("mlflow.tracking_uri=x", "mlflow")],
)
def test_a_logger_that_is_not_installed_is_named_before_the_start(write, setting: str, package: str) -> None:
    checked = preflight(load(write(), [f"stats_logger.{setting}"]))
    (found,) = [found for found in checked.findings if found.code == "RUN-PACKAGE"]
    assert f"the package {package} is not installed" in found.message
    assert not checked.ok
