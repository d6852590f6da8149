"""When the reference follows the actor, and by which way."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from areal_like.core.config.schema import ReferenceConfig
from areal_like.core.trainer.remote import Reference
from areal_like.core.types import Batch


class Actor:
    async def save_hf(self, path: Path, *, phase: str) -> None:
        path.mkdir(parents=True)


class Model:
    def __init__(self) -> None:
        self.decays: list[float] = []

    async def load_hf(self, path: Path, decay: float) -> None:
        assert path.is_dir()
        self.decays.append(decay)


def reference(folder: Path, model: Model, **settings: Any) -> Reference:
    return Reference(ReferenceConfig(**settings), cast(Any, model), cast(Any, Actor()), folder / ".weights")


def test_an_update_goes_through_a_checkpoint_that_is_removed(tmp_path: Path) -> None:
    model = Model()
    made = reference(tmp_path, model, update_every_steps=2, ema_decay=0.9)
    asyncio.run(made.update())
    asyncio.run(made.update(decay=0.0))
    assert model.decays == [0.9, 0.0]
    assert list((tmp_path / ".weights").iterdir()) == []


@pytest.mark.parametrize(("every", "due"), [(None, []), (1, [1, 2, 3, 4, 5]), (2, [2, 4])])
def test_it_is_due_every_so_many_steps(tmp_path: Path, every: int | None, due: list[int]) -> None:
    made = reference(tmp_path, Model(), update_every_steps=every)
    assert [step for step in range(1, 6) if made.due(step)] == due


class Adapted:
    async def log_probs(self, batch: Batch, temperature: float, *, adapted: bool = True) -> tuple[Batch, float, bool]:
        return batch, temperature, adapted


def test_the_actors_own_trainer_is_asked_without_adapters(tmp_path: Path) -> None:
    actor, other = cast(Any, Adapted()), cast(Any, Adapted())
    for trainer, adapted in ((actor, False), (other, True)):
        made = Reference(ReferenceConfig(), trainer, actor, tmp_path)
        batch = Batch(np.array([1], np.int32), np.array([5], np.int32))
        assert asyncio.run(cast(Any, made.log_probs)(batch, 0.7)) == (batch, 0.7, adapted)
        assert not made.due(1)
