"""The shipped rewards: `REWARDS` maps `reward.type` to its verifier."""

from collections.abc import Callable
from dataclasses import dataclass

from areal_like.core.types import AnswerCheck
from areal_like.rewards import gsm8k


@dataclass(frozen=True)
class Verifier:
    """The functions that judge responses for one reward type.

    `check` takes a reference answer and returns its fault and the fix, None if there is none. `quick` and `verify` take
    (response, reference answer). `quick` returns immediately: the result of `verify`, or None if `verify` has to run.
    `verify` is a module's own function, so that a worker process can import it; `preload` is the module that imports
    all its dependencies.
    """

    check: AnswerCheck
    quick: Callable[[str, str], float | None]
    verify: Callable[[str, str], float]
    preload: str


REWARDS = {
    "gsm8k": Verifier(check=gsm8k.check, quick=gsm8k.quick, verify=gsm8k.verify, preload="areal_like.rewards.symbolic")
}
