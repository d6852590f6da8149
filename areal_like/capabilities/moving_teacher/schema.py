"""Keys of a teacher that follows the policy, in `teacher`."""

from typing import Annotated, Literal

from pydantic import Field

from areal_like.core.config.ignored import Ignored
from areal_like.core.config.section import Section

_ELSEWHERE = Ignored("`teacher.path` is null", lambda at: at.section.path is None)
_FIXED = Ignored("`teacher.update_every_steps` is null", lambda at: at.section.update_every_steps is None)


class MovingKeys(Section):
    """When the teacher takes weights, and whose."""

    update_every_steps: Annotated[int | None, _ELSEWHERE] = Field(None, ge=1)
    """Training steps between updates of the teacher at `path` to the weights of `follows`; null: the teacher is
    fixed."""
    follows: Annotated[Literal["actor", "ref"], _ELSEWHERE, _FIXED] = "actor"
    """Model whose weights the teacher takes: the policy, or the reference, which is an average of the policy with
    `ref.ema_decay`."""


KEYS = {"teacher": MovingKeys}
