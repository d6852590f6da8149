"""The form in which servers hold the actor's weights, where a capability gives them another than the trainer's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from allocation.model_spec import ModelSpec
from allocation.plan import ParallelSizes
from areal_like.config.schema import RunConfig
from areal_like.registry import find_modules

if TYPE_CHECKING:
    from torch import Tensor

type Weights = Iterator[tuple[str, Tensor]]  # by Hugging Face names
type Convert = Callable[[Weights], Weights]


@dataclass(frozen=True, kw_only=True)
class ServedForm:
    """Another form of the actor's weights on its servers.

    `logprob_diff` is the default of `rollout.max_logprob_diff`, and `memory` has fields of MemorySettings. For a model
    and a server's layout, `options` are SGLang's, and `convert` returns the function that trainer ranks apply to the
    weights that they send.
    """

    logprob_diff: float
    memory: Mapping[str, Any]
    options: Callable[[ModelSpec, ParallelSizes], Mapping[str, object]]
    convert: Callable[[ModelSpec, ParallelSizes], Convert]


def served_form(config: RunConfig) -> ServedForm | None:
    """Return the form that a capability makes (`make_form` of its `served.py`), None where it is the trainer's."""
    forms = (module.make_form(config) for _, module in find_modules("served"))
    return next((form for form in forms if form is not None), None)
