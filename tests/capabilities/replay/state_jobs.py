"""What ranks do in tests of digests of their state."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trainer_jobs
from trainer_jobs import Setting, engine

from areal_like.capabilities.replay.digests import digest
from areal_like.capabilities.replay.rank import describe_state, digest_tensor, name_weights
from areal_like.core.algorithms.losses import sft
from areal_like.core.trainer.engine import Rendezvous
from areal_like.core.types import Batch, LossSpec

trainer_jobs.VOCABULARY = 13  # of the demo's tokenizer


def batch(seed: int) -> Batch:
    """A batch of the demo's tokens."""
    made = trainer_jobs.make_batch(seed)
    return replace(made, tokens=made.tokens % 13)


def save_and_go_on(rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting, folder: Path) -> list[Any]:
    """Two steps, a checkpoint, and the state then and after each of two more steps."""
    with engine(rendezvous, listener, setting) as made:
        for seed in (0, 1):
            made.train(batch(seed), LossSpec(sft))
        made.save(folder / "state")
        made.finish_save()
        states = [describe_state(made)]
        for seed in (2, 3):
            made.train(batch(seed), LossSpec(sft))
            states.append(describe_state(made))
        return states


def load_and_go_on(rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting, folder: Path) -> list[Any]:
    """The state of the checkpoint, and after each of two more steps."""
    with engine(rendezvous, listener, setting) as made:
        made.load(folder / "state")
        states = [describe_state(made)]
        for seed in (2, 3):
            made.train(batch(seed), LossSpec(sft))
            states.append(describe_state(made))
        return states


def rate_after_load(rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting, folder: Path) -> float:
    """The learning rate of the first step after the checkpoint."""
    with engine(rendezvous, listener, setting) as made:
        made.load(folder / "state")
        return made.train(batch(2), LossSpec(sft))["lr"]


def digest_both_ways(rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting) -> list[Any]:
    """Digests of tensors of every type by torch and by NumPy, and names of weights."""
    with engine(rendezvous, listener, setting) as made:
        names, weights = name_weights(made), list(made.models[0].parameters())
        described = describe_state(made)
    rng = np.random.default_rng(0)
    found = []
    for kind in ("uint8", "int16", "int32", "int64", "float32", "float64"):
        array = rng.integers(0, 256, (70, 90)).astype(kind) - np.array(100, kind)
        sums, words = digest_tensor(torch.from_numpy(array))
        found.append(([*map(int, sums), words], list(digest(array))))
    return [found, names, len(weights), described]
