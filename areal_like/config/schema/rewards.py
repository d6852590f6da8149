"""Judging: `reward`."""

from typing import Annotated, Literal

from pydantic import Field

from areal_like.config.schema.section import PATH, Section


class JudgeConfig(Section):
    """What scores a response: your own function, a shipped verifier, or the reward model."""

    type: Literal["gsm8k", "model"] = Field(
        "gsm8k",
        description=(
            "`gsm8k`: 1 if the final answer equals the reference, else 0. `model`: the score of `reward.model`. "
            "Ignored if `function` is set."
        ),
    )
    function: str | None = Field(
        None,
        description=(
            "Your own function, `my_rewards.py:score` or `package.module:score`, with parameters (response, row)."
        ),
    )


class RewardPartConfig(JudgeConfig):
    """One of several rewards."""

    weight: float = Field(1.0, description="Weight of this part in the sum.")


class RewardModelConfig(Section):
    """A reward model: a Hugging Face sequence classifier with one label, on SGLang servers of its own."""

    path: Annotated[str, PATH] = Field(description="Classifier: a directory or a name on the hub.")
    backend: str | None = Field(
        None, description="Layout of its servers, such as `sglang:d2`; null: `reward` in `allocation_mode`."
    )
    dtype: Literal["float32", "bfloat16"] | None = Field(
        None, description="Data type of weights and activations; null: the actor's."
    )
    timeout_s: float = Field(
        300.0, gt=0, description="Maximum seconds to score one response; a slower one has no reward."
    )


class RewardConfig(JudgeConfig):
    """How a response is scored."""

    parts: dict[str, RewardPartConfig] = Field(
        {},
        description=(
            "Several rewards by name, instead of `type` and `function`: each has one of these and a `weight`; the"
            " reward is the weighted sum."
        ),
    )
    model: RewardModelConfig | None = Field(None, description="Model for `type: model`.")
    timeout_s: float = Field(
        10.0, gt=0, description="Maximum seconds to score one response; a slower one has no reward."
    )
    workers: int | None = Field(None, ge=1, le=256, description="Reward worker processes; null: one per core.")
    memory_mb: int | None = Field(
        8192,
        ge=64,
        description=(
            "Maximum memory of a reward worker and its children in MiB; a response that needs more has no reward."
            " null: no limit."
        ),
    )
    max_missing_batches: int = Field(
        3,
        ge=0,
        description=(
            "Maximum consecutive batches that are skipped because no response has a reward; the next one ends the run."
        ),
    )
