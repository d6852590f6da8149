"""Wrong computations, to see which tests notice: `MUTATION=logprobs|loss|gradient|layout|engine python -m pytest …`.

Each makes one quantity wrong by 1e-4 in every engine and in every process of the tests: the log-probs of the forward
pass, the loss, or the gradient of the last hidden states and logits. `layout` makes the first wrong in engines of
several ranks only, so that an engine of one rank is right. `engine` makes log-probs, entropies and values wrong in each
engine of a process, and in each rank, by another multiple of 1e-4, so that no two engines agree. Without the variable
nothing is changed. Importing this module makes the change, which must come before the import of the engines.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

VARIABLE, ERROR = "MUTATION", 1e-4
KINDS = ("logprobs", "loss", "gradient", "layout", "engine")


def mutate() -> None:
    """Make the computation wrong that the environment names."""
    if not (kind := os.environ.get(VARIABLE)):
        return
    if kind not in KINDS:
        raise ValueError(f"{VARIABLE}={kind} is not one of {', '.join(KINDS)}")
    import torch.distributed as dist

    from areal_like.core.trainer import logprobs

    def several() -> bool:
        return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1

    if kind in ("logprobs", "layout"):
        for name in ("log_probs_and_entropy", "log_probs_and_entropy_of_hidden"):
            when = several if kind == "layout" else lambda: True
            setattr(logprobs, name, _first_wrong(getattr(logprobs, name), when))
    if kind == "gradient":
        for function in (logprobs._OfLogits, logprobs._OfHidden):
            function.backward = staticmethod(_first_wrong(function.backward, lambda: True))
    if kind == "loss":
        from areal_like.backends.training import base

        base.of_tokens = _first_wrong(base.of_tokens, lambda: True)  # type: ignore[attr-defined]
    if kind == "engine":
        tell_engines_apart()


def tell_engines_apart() -> None:
    """Make the outputs of each engine wrong by another multiple of 1e-4."""
    from areal_like.backends.training import rank
    from areal_like.core.trainer.device_batch import DeviceBatch
    from areal_like.core.trainer.engine import EngineSpec, Rendezvous, TrainEngine

    make_engine, of_tokens, errors = rank.make_engine, DeviceBatch.of_tokens, 0

    def counted(spec: EngineSpec, rendezvous: Rendezvous) -> TrainEngine:
        nonlocal errors
        errors = 4 * (errors // 4 + 1) + rendezvous.rank % 4
        return make_engine(spec, rendezvous)

    rank.make_engine = counted
    DeviceBatch.of_tokens = lambda self, rows: of_tokens(self, rows) * (1 + ERROR * errors)  # type: ignore[method-assign]


def _first_wrong(function: Callable[..., Any], when: Callable[[], bool]) -> Callable[..., Any]:
    def wrong(*args: Any, **more: Any) -> Any:
        first, *others = function(*args, **more)
        return (first * (1 + ERROR) if when() and first is not None else first, *others)

    return wrong


mutate()
