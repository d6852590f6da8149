"""The check of reference answers that a run's rewards need."""

from areal_like.core.config.schema import RewardConfig
from areal_like.core.types import AnswerCheck
from areal_like.rewards.verifiers import REWARDS


def answer_check(config: RewardConfig) -> AnswerCheck | None:
    """Return the check of reference answers, or None if only the user's own code judges."""
    types = [judge.type for judge in config.judges.values() if judge.function is None and judge.type in REWARDS]
    return REWARDS[types[0]].check if types else None
