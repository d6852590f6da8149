"""Judging: `reward`."""

from typing import Annotated, Literal

from pydantic import Field

from areal_like.config.schema.section import PATH, Section


class JudgeConfig(Section):
    """What judges a response: a function of the user's, a shipped verifier, or the reward model."""

    type: Literal["gsm8k", "model"] = Field(
        "gsm8k",
        description="`gsm8k`: 1 if the final answer equals the reference, else 0. `model`: the score of `reward.model`. "
        "Counts without `function`.",
    )
    function: str | None = Field(
        None, description="Own function, `my_rewards.py:score` or `package.module:score`, which takes (response, row)."
    )


class RewardPartConfig(JudgeConfig):
    """One of several rewards."""

    weight: float = Field(1.0, description="Factor of this part in the sum.")


class RewardModelConfig(Section):
    """A reward model: a Hugging Face sequence classifier with one label, on SGLang servers of its own."""

    path: Annotated[str, PATH] = Field(description="The classifier: a directory or a name on the hub.")
    backend: str | None = Field(
        None, description="Layout of its servers, such as `sglang:d2`; null: that of `reward` in `allocation_mode`."
    )
    dtype: Literal["float32", "bfloat16"] | None = Field(
        None, description="Data type of weights and activations; null: the actor's."
    )
    timeout_s: float = Field(
        300.0, gt=0, description="Longest time to score one response, in seconds; then it is missing."
    )


class RewardConfig(JudgeConfig):
    """How a response is judged."""

    parts: dict[str, RewardPartConfig] = Field(
        {},
        description="Several rewards by name, in place of `type` and `function`: each has one of these and a `weight`, "
        "and the reward is their weighted sum.",
    )
    model: RewardModelConfig | None = Field(None, description="The model of `type: model`.")
    timeout_s: float = Field(
        10.0, gt=0, description="Longest time to judge one response, in seconds; then it is missing."
    )
    workers: int | None = Field(
        None, ge=1, le=256, description="Processes that judge, each one response at a time; null: one per core."
    )
    memory_mb: int | None = Field(
        8192,
        ge=64,
        description="Memory of a process that judges, with those that it starts, in MiB; the reward of a response that takes more is missing. null: no limit.",
    )
    max_missing_batches: int = Field(
        3,
        ge=0,
        description="Batches in a row that may be skipped because none of their responses could be judged; one more ends "
        "the run.",
    )
