"""Supervised training before reinforcement learning, with a trainer that notes what it is asked."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from running import CONFIG

from areal_like.core.config.load import load
from areal_like.core.types import Batch, LossSpec
from areal_like.preflight import preflight
from areal_like.run.warmup import warm_start


def test_answers_are_fitted_at_temperature_one_and_judged_at_that_of_sampling(tmp_path) -> None:
    trained, judged = [], []

    class Trainer:
        async def train(self, batch: Batch, loss: LossSpec, temperature: float, *, learning_rate: float) -> None:
            trained.append(temperature)

        async def log_probs(self, batch: Batch, temperature: float) -> np.ndarray:
            judged.append(temperature)
            return np.zeros(len(batch.tokens), np.float32)

    @contextmanager
    def doing(*_: Any):
        yield lambda: None

    view = SimpleNamespace(doing=doing, say=lambda text: None)
    settings = ["gconfig.temperature=0.6", "warm_start.steps=1", f"cluster.fileroot={tmp_path}"]
    job = preflight(load(CONFIG, settings)).job
    asyncio.run(warm_start(cast(Any, job), cast(Any, Trainer()), cast(Any, view)))
    assert (trained, judged) == ([1.0], [0.6])
