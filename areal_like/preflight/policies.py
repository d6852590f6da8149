"""Data, reward and algorithm of a run, or of each of its adapters (`adapters`), as a run with it alone."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from allocation.diagnostics import Finding
from allocation.model_spec import ModelSpec
from allocation.plan import Plan
from areal_like.core.algorithms.settings import PRESETS, settings_of
from areal_like.core.algorithms.types import Algorithm
from areal_like.core.config.findings import warn_ignored
from areal_like.core.config.schema import Ignored, Place, RunConfig, Section
from areal_like.core.config.validate import at_adapter
from areal_like.core.types import Device, Prompt
from areal_like.data.dataset import training_steps
from areal_like.data.tokenizer import Tokenizer
from areal_like.preflight.algorithm import find_algorithm
from areal_like.preflight.data import Prompts, check_data, find_prompts
from areal_like.preflight.rewards import check_rewards


def check_unused(config: RunConfig, device: Device, plan: Plan | None) -> Iterator[Finding]:
    """Yield a warning for each key without effect, unless it has its default, as in a resolved configuration."""
    preset = PRESETS.get(config.algorithm)
    settings = settings_of(preset, config.actor) if preset else None
    yield from _find_ignored(Place(config, config, "", device, plan, settings), ())
    if device == "cuda":
        yield from _hidden_gpus(config)


def _find_ignored(place: Place, outer: tuple[Ignored, ...]) -> Iterator[Finding]:
    """Yield warnings for the keys of a section and of those below; `outer` are the conditions of the section."""
    for name, field in type(place.section).model_fields.items():
        value = getattr(place.section, name)
        marks = tuple(mark for mark in field.metadata if isinstance(mark, Ignored))
        reason = next((mark.why for mark in marks if mark.holds(place)), None)
        below = tuple(replace(mark, holds=lambda _: True) for mark in marks if mark.holds(place))
        reason = reason or next((mark.why for mark in outer if name not in mark.but), None)
        key = f"{place.key}.{name}".lstrip(".")
        if sections := dict(_sections(value, key)):
            for inner, section in sections.items():
                yield from _find_ignored(replace(place, section=section, key=inner), (*outer, *below))
        elif reason and value != field.default:
            yield warn_ignored(key, reason)


def _sections(value: Any, key: str) -> Iterator[tuple[str, Section]]:
    """Yield the sections that a value is or holds by name, each with its key."""
    if isinstance(value, Section):
        yield key, value
    elif isinstance(value, Mapping):
        yield from ((f"{key}.{name}", entry) for name, entry in value.items() if isinstance(entry, Section))


def _hidden_gpus(config: RunConfig) -> Iterator[Finding]:
    """Warn of GPUs named in a role's variables, which CUDA reads before they are set."""
    own = {role: section.env_vars or {} for role, section in config.further_roles.items()}
    for role, variables in {"actor": config.actor.env_vars, **own}.items():
        if "CUDA_VISIBLE_DEVICES" in variables:
            why = "a rank uses the GPU of its place in the layout"
            yield warn_ignored(f"{role}.env_vars.CUDA_VISIBLE_DEVICES", why, "name GPUs with `@` in the layout")


@dataclass(frozen=True)
class PolicyView:
    """A run, or one of its adapters, with the findings about its data and its algorithm; `name` is "" for the run."""

    name: str
    config: RunConfig
    prompts: Prompts
    algorithm: Algorithm | None
    findings: Sequence[Finding]

    @property
    def trained(self) -> Sequence[Prompt]:
        """Training prompts."""
        return self.prompts["train_dataset"]

    @property
    def steps(self) -> int:
        """Training steps over these prompts."""
        return training_steps(self.config, len(self.trained))


@dataclass(frozen=True)
class PolicyViews:
    """The adapters of a run, or the run itself."""

    config: RunConfig
    each: Sequence[PolicyView]

    @classmethod
    def find(cls, config: RunConfig, tokenizer: Tokenizer | None) -> Self:
        """Read the data and build the algorithms."""
        alone = config.adapted or {"": config}
        return cls(config, [_view(name, own, tokenizer) for name, own in alone.items()])

    @property
    def trained(self) -> Sequence[Prompt]:
        """Training prompts of all adapters."""
        return self.each[0].trained if len(self.each) == 1 else [it for view in self.each for it in view.trained]

    @property
    def steps(self) -> int:
        """Training steps of the run: the largest number of an adapter."""
        return max(view.steps for view in self.each)

    def findings(self) -> Iterator[Finding]:
        """Yield the findings from reading the data and building the algorithms."""
        for view in self.each:
            yield from at_adapter(self.config, view.name, view.findings)

    def check(self, spec: ModelSpec | None, tokenizer: Tokenizer | None, plan: Plan | None) -> Iterator[Finding]:
        """Check the data, and try the reward functions."""
        for view in self.each:
            of_data = check_data(view.config, spec, tokenizer, plan, view.prompts, view.algorithm)
            of_rewards = check_rewards(view.config, view.trained, plan)
            yield from at_adapter(self.config, view.name, [*of_data, *of_rewards])

    def check_unused(self, device: Device, plan: Plan | None) -> Iterator[Finding]:
        """Yield a warning for each key without effect; a key that all adapters share has none for all of them."""
        alone = [(view.name, check_unused(view.config, device, plan)) for view in self.each]
        ignored = [list(at_adapter(self.config, name, findings)) for name, findings in alone]
        for found in (found for own in ignored for found in own):
            if (found.key or "").startswith("adapters.") or all(found in own for own in ignored):
                yield found


def _view(name: str, config: RunConfig, tokenizer: Tokenizer | None) -> PolicyView:
    prompts, of_prompts = find_prompts(config, tokenizer)
    algorithm, of_algorithm = find_algorithm(config)
    return PolicyView(name, config, prompts, algorithm, [*of_algorithm, *of_prompts])
