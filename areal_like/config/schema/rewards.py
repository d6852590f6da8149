"""Judging: `reward`."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from areal_like.config.added import takes_keys
from areal_like.config.ignored import Ignored
from areal_like.config.schema.chat_judge import ChatJudgeConfig
from areal_like.config.section import PATH, Section

_ONLY_MODELS = Ignored(
    "only models score; `reward.model.timeout_s` and `reward.judge.timeout_s` apply",
    lambda at: all(part.function is None and part.type in ("model", "judge") for part in at.section.judges.values()),
)
_PARTS = Ignored("`reward.parts` is set", lambda at: bool(getattr(at.section, "parts", None)), reads="parts")
_FUNCTION = Ignored("`function` is set", lambda at: at.section.function is not None)
_NO_FUNCTION = Ignored("only a `function` receives special tokens", lambda at: at.section.function is None)


class JudgeConfig(Section):
    """Judge of a response: your own function, a shipped verifier, the reward model, or a language model."""

    type: Annotated[Literal["gsm8k", "model", "judge"], _PARTS, _FUNCTION] = "gsm8k"
    """`gsm8k`: 1 if the final answer equals the reference, else 0. `model`: the score of `reward.model`. `judge`: the
    score in the answer of `reward.judge`."""
    function: Annotated[str | None, _PARTS] = None
    """Your own function, `my_rewards.py:score` or `package.module:score`, with parameters (response, row)."""
    special_tokens: Annotated[bool, _PARTS, _NO_FUNCTION] = False
    """The function receives responses with their special tokens, such as `<|channel|>`."""


class RewardPartConfig(JudgeConfig):
    """One of several rewards."""

    weight: float = 1.0
    """Weight of this part in the sum."""


class RewardModelConfig(Section):
    """A reward model: a Hugging Face sequence classifier with one label, on SGLang servers of its own."""

    path: Annotated[str, PATH]
    """Classifier: a directory or a name on the hub."""
    backend: str | None = None
    """Layout of its servers, such as `sglang:d2`; null: `reward` in `allocation_mode`."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Data type of weights and activations; null: the actor's."""
    timeout_s: float = Field(300.0, gt=0)
    """Maximum seconds to score one response; a slower one has no reward."""


@takes_keys("reward")
class RewardConfig(JudgeConfig):
    """Scoring of responses."""

    parts: dict[str, RewardPartConfig] = Field({})
    """Several rewards by name, instead of `type` and `function`: each has one of these and a `weight`; the reward is
    the weighted sum."""
    model: RewardModelConfig | None = None
    """Model for `type: model`."""
    judge: ChatJudgeConfig | None = None
    """Language model for `type: judge`."""
    timeout_s: Annotated[float, _ONLY_MODELS] = Field(10.0, gt=0)
    """Maximum seconds to score one response; a slower one has no reward."""
    workers: Annotated[int | None, _ONLY_MODELS] = Field(None, ge=1, le=256)
    """Reward worker processes; null: one per core."""
    memory_mb: Annotated[int | None, _ONLY_MODELS] = Field(8192, ge=64)
    """Maximum memory of a reward worker and its children in MiB; a response that needs more has no reward. null: no
    limit."""
    max_missing_batches: int = Field(3, ge=0)
    """Maximum consecutive batches that are skipped because no response has a reward; the next one ends the run."""

    @property
    def judges(self) -> Mapping[str, JudgeConfig]:
        """Judges of the responses, by the key of their section."""
        parts = {f"reward.parts.{name}": part for name, part in self.parts.items()}
        return parts or {"reward": self}
