"""Models beside the actor: `ref` and `critic`."""

from typing import Annotated, Literal

from pydantic import Field

from areal_like.core.config.ignored import CPU, Ignored, ignored_if
from areal_like.core.config.schema.backends import FSDPConfig, MegatronConfig
from areal_like.core.config.schema.trainer import (
    NOT_FSDP,
    NOT_MEGATRON,
    TEXTS,
    DType,
    MicroBatchConfig,
    OptimizerConfig,
)
from areal_like.core.config.section import PATH, Section

_PLACED = Ignored(
    "`backend` is null or names GPUs with `@`",
    lambda at: (backend := getattr(at.run, at.role).backend) is None or "@" in backend,
)
_SEPARATE = Ignored("`type` is `separation`", lambda at: at.section.type == "separation")


class SchedulingStrategyConfig(Section):
    """Placement of a role."""

    type: Annotated[Literal["colocation", "separation"], _PLACED] = "colocation"
    """`colocation`: on the GPUs of `target`; `separation`: on GPUs of its own."""
    target: Annotated[Literal["actor", "rollout"], _SEPARATE] = "actor"
    """Role whose GPUs are shared."""


class RoleConfig(Section):
    """A model beside the actor, on trainer ranks of its own. null means the actor's value."""

    backend: str | None = None
    """Layout, such as `megatron:t2`; null: from `allocation_mode`, else the actor's layout on the actor's GPUs."""
    scheduling_strategy: SchedulingStrategyConfig = SchedulingStrategyConfig()
    """Placement of `backend`, unless it names GPUs with `@`."""
    path: Annotated[str | None, PATH] = None
    """Model in Hugging Face form: a directory or a name on the hub; null: the actor's."""
    dtype: DType | None = None
    """Data type of weights and activations; null: the actor's."""
    mb_spec: MicroBatchConfig | None = None
    """Micro-batches; null: the actor's."""
    megatron: Annotated[MegatronConfig | None, NOT_MEGATRON] = None
    """Megatron settings; null: the actor's."""
    fsdp: Annotated[FSDPConfig | None, NOT_FSDP] = None
    """FSDP settings; null: the actor's."""
    offload: Annotated[bool | None, CPU] = None
    """Keep the model in host memory between calls; null: the actor's setting."""
    env_vars: Annotated[dict[str, str] | None, TEXTS] = None
    """Environment variables of the ranks; null: the actor's."""
    timeout_s: float | None = Field(None, gt=0)
    """Maximum seconds of one call; null: the actor's."""


class ReferenceConfig(RoleConfig):
    """The reference policy: computes log-probs and is not trained."""

    fp32_head: bool | None = None
    """Compute logits in float32; null: as the actor."""
    update_every_steps: int | None = Field(None, ge=1)
    """Training steps between updates of the reference from the actor; null: the reference is fixed."""
    ema_decay: Annotated[float, ignored_if("ref.update_every_steps", None)] = Field(0.0, ge=0, lt=1)
    """Share of the reference that an update keeps (exponential moving average); 0: the reference becomes the actor. In
    bfloat16, changes below 1/256 of a weight are lost."""


class CriticConfig(RoleConfig):
    """The critic: the model with a value head and an optimizer of its own."""

    optimizer: OptimizerConfig | None = None
    """The optimizer; null: the actor's settings."""
    eps_clip: float | None = Field(0.5, gt=0)
    """Clip range of a value around its value before the step, in units of reward; null: no clip."""
    warmup_steps: int = Field(0, ge=0)
    """Training steps that train only the critic, before the actor is trained too."""
