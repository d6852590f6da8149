"""Models beside the actor: `ref` and `critic`."""

from typing import Annotated, Literal

from pydantic import Field

from areal_like.config.schema.backends import FSDPConfig, MegatronConfig
from areal_like.config.schema.ignored import CPU, Ignored, ignored_if
from areal_like.config.schema.section import PATH, Section
from areal_like.config.schema.trainer import NOT_FSDP, NOT_MEGATRON, TEXTS, DType, MicroBatchConfig, OptimizerConfig

_PLACED = Ignored(
    "`backend` is null or names GPUs with `@`",
    lambda at: (backend := getattr(at.run, at.role).backend) is None or "@" in backend,
)
_SEPARATE = Ignored("`type` is `separation`", lambda at: at.section.type == "separation")


class SchedulingStrategyConfig(Section):
    """Placement of a role."""

    type: Annotated[Literal["colocation", "separation"], _PLACED] = Field(
        "colocation", description="`colocation`: on the GPUs of `target`; `separation`: on GPUs of its own."
    )
    target: Annotated[Literal["actor", "rollout"], _SEPARATE] = Field(
        "actor", description="Role whose GPUs are shared."
    )


class RoleConfig(Section):
    """A model beside the actor, on trainer ranks of its own. null means the actor's value."""

    backend: str | None = Field(
        None,
        description=(
            "Layout, such as `megatron:t2`; null: from `allocation_mode`, else the actor's layout on the actor's GPUs."
        ),
    )
    scheduling_strategy: SchedulingStrategyConfig = Field(
        SchedulingStrategyConfig(), description="Placement of `backend`, unless it names GPUs with `@`."
    )
    path: Annotated[str | None, PATH] = Field(
        None, description="Model in Hugging Face form: a directory or a name on the hub; null: the actor's."
    )
    dtype: DType | None = Field(None, description="Data type of weights and activations; null: the actor's.")
    mb_spec: MicroBatchConfig | None = Field(None, description="Micro-batches; null: the actor's.")
    megatron: Annotated[MegatronConfig | None, NOT_MEGATRON] = Field(
        None, description="Megatron settings; null: the actor's."
    )
    fsdp: Annotated[FSDPConfig | None, NOT_FSDP] = Field(None, description="FSDP settings; null: the actor's.")
    offload: Annotated[bool | None, CPU] = Field(
        None, description="Keep the model in host memory between calls; null: the actor's setting."
    )
    env_vars: Annotated[dict[str, str] | None, TEXTS] = Field(
        None, description="Environment variables of the ranks; null: the actor's."
    )
    timeout_s: float | None = Field(None, gt=0, description="Maximum seconds of one call; null: the actor's.")


class ReferenceConfig(RoleConfig):
    """The reference policy: computes log-probs and is not trained."""

    fp32_head: bool | None = Field(None, description="Compute logits in float32; null: as the actor.")
    update_every_steps: int | None = Field(
        None,
        ge=1,
        description="Training steps between updates of the reference from the actor; null: the reference is fixed.",
    )
    ema_decay: Annotated[float, ignored_if("ref.update_every_steps", None)] = Field(
        0.0,
        ge=0,
        lt=1,
        description=(
            "Share of the reference that an update keeps (exponential moving average); 0: the reference becomes "
            "the actor. In bfloat16, changes below 1/256 of a weight are lost."
        ),
    )


class CriticConfig(RoleConfig):
    """The critic: the model with a value head and an optimizer of its own."""

    optimizer: OptimizerConfig | None = Field(None, description="The optimizer; null: the actor's settings.")
    eps_clip: float | None = Field(
        0.5,
        gt=0,
        description="Clip range of a value around its value before the step, in units of reward; null: no clip.",
    )
    warmup_steps: int = Field(
        0,
        ge=0,
        description="Training steps that train only the critic, before the actor is trained too.",
    )
