"""The teacher's servers load the weights of the policy or the reference when a step is due, and after a resume."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_like.capabilities.moving_teacher.hook import make_hook
from areal_like.core.config.schema import RunConfig
from areal_like.core.hooks import TrainingStep

pytestmark = pytest.mark.covers("distillation")


def started(folder: Path, resumed: int | None = None, **teacher: Any) -> tuple[Any, list[str]]:
    """A run whose trainers and teacher note what they do."""
    did: list[str] = []

    def trainer(role: str) -> Any:
        async def save_hf(path: Path, *, phase: str) -> None:
            path.mkdir()
            (path / role).touch()

        return SimpleNamespace(save_hf=save_hf)

    async def load(path: Path, timeout_s: float) -> None:
        did.append("".join(file.name for file in path.iterdir()))

    values = {"experiment_name": "a", "train_dataset": {"path": "b"}, "actor": {}, "teacher": teacher}
    return SimpleNamespace(
        job=SimpleNamespace(config=RunConfig.model_validate(values)),
        trainers={role: trainer(role) for role in ("actor", "ref")},
        teacher=SimpleNamespace(load=load),
        shared_dir=folder,
        resumed=resumed,
        record=SimpleNamespace(phase=lambda name: nullcontext()),
    ), did


@pytest.mark.parametrize("follows", ["actor", "ref"])
def test_it_takes_the_weights_of_what_it_follows_every_few_steps(tmp_path: Path, follows: Any) -> None:
    run, did = started(tmp_path, path="model", update_every_steps=3, follows=follows)
    hook = make_hook(run)

    async def steps() -> list[int]:
        assert hook
        await hook.start()
        seen = []
        for version in range(7):
            await hook.after_publish(TrainingStep(version, [], {}))
            seen.append(len(did))
        return seen

    assert asyncio.run(steps()) == [0, 0, 1, 1, 1, 2, 2]
    assert did == [follows] * 2
    assert not [*tmp_path.iterdir()]


def test_a_resumed_run_begins_with_an_update(tmp_path: Path) -> None:
    run, did = started(tmp_path, resumed=4, path="model", update_every_steps=3)
    hook = make_hook(run)
    assert hook
    asyncio.run(hook.start())
    assert did == ["actor"]


@pytest.mark.parametrize("teacher", [{"path": "model"}, {"url": "http://teacher:1"}, {"from_policy": True}])
def test_other_teachers_stay_as_they_are(tmp_path: Path, teacher: dict[str, Any]) -> None:
    assert make_hook(started(tmp_path, **teacher)[0]) is None
