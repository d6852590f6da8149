"""The reference and the critic, judged as the actor is: each is put in its place, and findings get its keys."""

import re
from collections.abc import Iterator
from dataclasses import replace

from allocation import Finding, Plan, Source
from allocation.model_spec import ModelSpec
from areal_like.config.findings import finding
from areal_like.config.schema import ActorConfig, RoleConfig, RunConfig, TrainerRole
from areal_like.data.tokenizer import Tokenizer
from areal_like.preflight.megatron import check_trainer_options
from areal_like.preflight.model import check_model, find_spec
from areal_like.types import Device

_ACTORS_KEY = re.compile(r"\bactor\.(\w+)")


def as_actor(config: RunConfig, role: TrainerRole) -> RunConfig:
    """The run with a role in the actor's place."""
    engine, actor = config.roles[role], config.actor
    fields = {name: getattr(engine, name) for name in type(engine).model_fields}
    made = None if engine.path else actor.init_model
    played = {**fields, "path": engine.path or actor.path, "init_model": made}
    return config.model_copy(
        update={"actor": ActorConfig(**played, optimizer=config.optimizer(role) or actor.optimizer)}
    )


def of_role(found: Finding, role: TrainerRole, section: RoleConfig) -> Finding:
    """A finding about the actor's keys as one about the role's, as far as these are the role's own."""

    def own(match: re.Match[str]) -> str:
        return f"{role}.{match[1]}" if getattr(section, match[1], None) is not None else match[0]

    def renamed(text: str) -> str:
        return _ACTORS_KEY.sub(own, text)

    return replace(
        found,
        message=renamed(found.message),
        source=Source(found.source.text, found.key and renamed(found.key)),
        help=found.help and renamed(found.help),
        nearest=tuple(map(renamed, found.nearest)),
    )


def find_role_models(
    config: RunConfig, spec: ModelSpec | None, tokenizer: Tokenizer | None
) -> tuple[dict[TrainerRole, ModelSpec | None], list[Finding]]:
    """The model of each role; the actor's is `spec`."""
    specs: dict[TrainerRole, ModelSpec | None] = {"actor": spec}
    findings: list[Finding] = []
    for role, section in config.further_roles.items():
        specs[role] = spec
        if section.path is not None:
            weights = not config.roles[role].megatron.use_dist_checkpointing
            specs[role], found = find_spec(section.path, f"{role}.path", weights=weights)
            findings += found
        own, entries = specs[role], tokenizer.vocab_size if tokenizer else 0
        if section.path is not None and own is not None and own.vocab_size < entries:
            message = f"the tokenizer has {entries} entries, this model's embedding {own.vocab_size} rows"
            help = "use a model with the actor's vocabulary"
            findings.append(finding("RUN-TOKENIZER-ROLE", f"{role}.path", message, help))
    return specs, findings


def check_roles(
    config: RunConfig, device: Device, specs: dict[TrainerRole, ModelSpec | None], plan: Plan | None
) -> Iterator[Finding]:
    """Check each role against bridge and Megatron-core, without repeating findings about the actor."""

    def judged(played: RunConfig, role: TrainerRole) -> list[Finding]:
        own_plan = plan and replace(plan, engines=(replace(plan.engine(role), role="actor"),))
        options = check_trainer_options(played, device, specs[role], own_plan)
        return [*check_model(played, specs[role], own_plan), *options]

    said = judged(config, "actor")
    for role, section in config.further_roles.items():
        found = [of_role(other, role, section) for other in judged(as_actor(config, role), role)]
        yield from (other for other in found if other not in said)
    if "critic" in config.further_roles and (plan is None or plan.engine("critic").backend == "megatron"):
        yield from (of_role(found, "critic", config.further_roles["critic"]) for found in _head(config))


def _head(config: RunConfig) -> Iterator[Finding]:
    """Check settings that fail in Megatron-core when one parameter of a bfloat16 model is float32.

    Its optimizer of whole states has no checkpoint of it. Transformer Engine's kernel of the norm takes all gradients
    as of the first one's data type (`clip_grads.py`, 0.19.2).
    """
    critic, key = config.roles["critic"], "actor.megatron.use_distributed_optimizer"
    if critic.dtype == "bfloat16" and not critic.megatron.use_distributed_optimizer and config.recover.mode != "off":
        message = "a checkpoint (recover.mode) cannot have the optimizer's state of the critic's head, which is float32"
        yield finding("RUN-MEGATRON-CRITIC-STATE", key, message, f"write {key}=true")
    if critic.dtype == "bfloat16" and critic.megatron.main_grads_dtype == "bfloat16":
        key = "actor.megatron.main_grads_dtype"
        message = "gradients are clipped as of one data type, and that of the critic's head is float32"
        yield finding("RUN-MEGATRON-CRITIC-GRADIENTS", key, message, f"write {key}=float32")
