"""The section `train_dataset.curriculum`."""

from pydantic import Field

from areal_like.core.config.section import Section


class CurriculumConfig(Section):
    """Prompts are preferred whose mean reward, the success rate for rewards of 0 and 1, is between two bounds."""

    low: float = 0.1
    """Minimum mean reward of a preferred prompt."""
    high: float = 0.9
    """Maximum mean reward of a preferred prompt."""
    revisit: float = Field(0.1, ge=0, le=1)
    """Probability with which a prompt outside the bounds is trained when its turn comes."""
    decay: float = Field(0.5, ge=0, lt=1)
    """Weight of a prompt's earlier results when there is a new one; 0: the last one."""
    field: str | None = None
    """Column whose rows share one mean reward by its value, such as a level; null: rows with equal prompts share it."""


class CurriculumKeys(Section):
    """The section of the curriculum."""

    curriculum: CurriculumConfig | None = None
    """Preference for prompts of a middle success rate; null: none."""


KEYS = {"train_dataset": CurriculumKeys}
