"""Jobs of ranks in the tests of vision-language models."""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from trainer_jobs import THOUSANDFOLD, Setting, engine, exported

from areal_like.core.algorithms.losses import sft
from areal_like.core.trainer.engine import Rendezvous
from areal_like.core.types import Batch, LossSpec


@dataclass(frozen=True)
class Seen:
    """What a rank saw of a model: log-probs, gradients by transformers' names and weights, these of rank 0 alone."""

    log_probs: tuple[np.ndarray, np.ndarray] | None
    gradients: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]


def look(rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting, batch: Batch) -> Seen:
    """Compute log-probs of what is trained, gradients of a supervised loss, and gather the weights."""
    with engine(rendezvous, listener, setting) as made:
        log_probs = made.log_probs(batch)
        made._gradients(batch, LossSpec(sft), 1.0)
        whole = {name: p.grad.full_tensor().numpy() for name, p in made._model.named_parameters() if p.grad is not None}
        weights = exported(made)
    return Seen(log_probs, whole, weights) if rendezvous.rank == 0 else Seen(log_probs, {}, {})


def log_probs(
    rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting, batch: Batch
) -> tuple[np.ndarray, np.ndarray] | None:
    """Compute log-probs of what is trained."""
    with engine(rendezvous, listener, setting) as made:
        return made.log_probs(batch)


def values(
    rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting, batch: Batch
) -> tuple[np.ndarray, np.ndarray] | None:
    """Compute a critic's values."""
    with engine(rendezvous, listener, setting) as made:
        return made.values(batch)


def step(rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting, batch: Batch) -> Seen:
    """Compute log-probs of what is trained, and the gradients of a supervised loss from the weights around a step."""
    with engine(rendezvous, listener, replace(setting, optimizer=THOUSANDFOLD)) as made:
        log_probs = made.log_probs(batch)
        before = exported(made)
        made.train(batch, LossSpec(sft))
        after = exported(made)
    gradients = {name: (weight - after[name].astype(np.float64)) / 1000 for name, weight in before.items()}
    return Seen(log_probs, gradients, before) if rendezvous.rank == 0 else Seen(log_probs, {}, {})


def train_on_images(
    rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting, batch: Batch
) -> tuple[tuple[np.ndarray, np.ndarray] | None, list[dict[str, float]], dict[str, np.ndarray]]:
    """Return log-probs of what is trained, three supervised steps, and the weights before them."""
    with engine(rendezvous, listener, setting) as made:
        read, weights = made.log_probs(batch), exported(made)
        return read, [made.train(batch, LossSpec(sft)) for _ in range(3)], weights


def save_and_go_on(
    rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting, batch: Batch, folder: Path
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Return the second of two steps, the first of which is saved, and the weights after it."""
    with engine(rendezvous, listener, setting) as made:
        made.train(batch, LossSpec(sft))
        made.save(folder)
        made.finish_save()
        return made.train(batch, LossSpec(sft)), exported(made)


def load_and_go_on(
    rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting, batch: Batch, folder: Path
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Return the step that follows the saved one, and the weights after it."""
    with engine(rendezvous, listener, setting) as made:
        made.load(folder)
        return made.train(batch, LossSpec(sft)), exported(made)


def follow(
    rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting, batch: Batch, other: Path
) -> dict[str, np.ndarray]:
    """Return the weights of a reference that takes a third of another checkpoint's."""
    with engine(rendezvous, listener, setting) as made:
        made.load_hf(other, 2 / 3)
        made.log_probs(batch)
        return exported(made)
