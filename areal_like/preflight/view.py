"""A role on trainer ranks as the checks see it: its settings, its model, its layout, and the keys that set them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from allocation.model_spec import ModelSpec
from allocation.plan import EnginePlan, Plan
from allocation.settings import BatchSpec
from areal_like.config.schema import EngineConfig, InitModelConfig, RunConfig, TrainerRole
from areal_like.types import Device

Models = Mapping[TrainerRole, ModelSpec | None]


@dataclass(frozen=True)
class RoleView:
    """A role on trainer ranks; `engine` has the actor's settings where the role has none of its own.

    `model` is None where its files cannot be read, `layout` where the run's layout has an error. `image_share` is the
    share of images in the tokens of the prompt that has the most, `description` the config.json where that is checked.
    """

    run: RunConfig
    role: TrainerRole
    engine: EngineConfig
    device: Device
    model: ModelSpec | None = None
    layout: EnginePlan | None = None
    image_share: float = 0.0
    description: Mapping[str, Any] = field(default_factory=dict)

    def key(self, setting: str) -> str:
        """Return the dotted key of a setting: in the role's section if it sets the setting, else in the actor's."""
        section = self.run.further_roles.get(self.role)
        owns = section is not None and getattr(section, setting.partition(".")[0], None) is not None
        return f"{self.role if owns else 'actor'}.{setting}"

    @property
    def backend(self) -> str | None:
        """Training backend of the layout."""
        return self.layout.backend if self.layout else None

    @property
    def path(self) -> str | None:
        """Path of the model: the role's own, else the actor's."""
        return self.engine.path or self.run.actor.path

    @property
    def init_model(self) -> InitModelConfig | None:
        """Shape of a model with random weights, if the role's model is one."""
        return None if self.engine.path else self.run.actor.init_model

    @property
    def batch(self) -> BatchSpec:
        """Batch of one training step; a role without an optimizer computes it in one call."""
        run = self.run
        return BatchSpec(
            n_prompts=min(each.train_dataset.batch_size for each in run.adapted.values() or (run,)),
            n_samples=run.gconfig.n_samples,
            n_minibatches=run.actor.ppo_n_minibatches if run.optimizer(self.role) else 1,
            max_length=run.longest_sequence,
            max_tokens_per_mb=self.engine.mb_spec.max_tokens_per_mb,
            image_share=self.image_share,
        )


def view_roles(
    config: RunConfig,
    models: Models | None = None,
    plan: Plan | None = None,
    image_share: float = 0.0,
    *,
    device: Device,
) -> Iterator[RoleView]:
    """Yield a view of each role on trainer ranks, the actor first."""
    for role, engine in config.roles.items():
        layout = plan.engine(role) if plan else None
        yield RoleView(config, role, engine, device, (models or {}).get(role), layout, image_share)
