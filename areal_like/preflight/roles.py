"""Checks each role on trainer ranks against its model, its bridge and its training backend."""

from collections.abc import Iterator, Sequence

from allocation.diagnostics import Finding
from allocation.model_spec import ModelSpec
from areal_like.core.config.findings import finding
from areal_like.core.config.schema import RunConfig, TrainerRole
from areal_like.data.tokenizer import Tokenizer
from areal_like.preflight.megatron import check_trainer_options
from areal_like.preflight.model import check_model, find_spec
from areal_like.preflight.shared_prompts import check_shared_prompts
from areal_like.preflight.view import RoleView


def find_role_models(
    config: RunConfig, spec: ModelSpec | None, tokenizer: Tokenizer | None
) -> tuple[dict[TrainerRole, ModelSpec | None], list[Finding]]:
    """Return the model of each role; the actor's is `spec`."""
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
            message = f"the tokenizer has {entries} entries; this model's embedding has {own.vocab_size} rows"
            help = "use a model with the actor's vocabulary"
            findings.append(finding("RUN-TOKENIZER-ROLE", f"{role}.path", message, help))
    return specs, findings


def check_roles(views: Sequence[RoleView]) -> Iterator[Finding]:
    """Check each role against its bridge and Megatron-core; a setting that roles share is reported once."""
    yield from dict.fromkeys(found for view in views for found in _check_role(view))
    yield from check_shared_prompts(views)


def _check_role(view: RoleView) -> Iterator[Finding]:
    yield from check_model(view)
    yield from check_trainer_options(view)
    if view.role == "critic" and view.engine.dtype == "float16":
        message = "the critic's value head is float32, and its gradients would overflow beside those of float16"
        yield finding("RUN-CRITIC-FLOAT16", view.key("dtype"), message, "write critic.dtype=bfloat16")
    if view.role == "critic" and view.backend in ("megatron", None):
        yield from _check_value_head(view)


def _check_value_head(view: RoleView) -> Iterator[Finding]:
    """Check settings that fail in Megatron-core when one parameter of a bfloat16 model is float32.

    Its optimizer of whole states has no checkpoint of it. Transformer Engine's kernel of the norm takes all gradients
    as of the first one's data type (`clip_grads.py`, 0.19.2).
    """
    megatron, saves = view.engine.megatron, view.run.recover.mode != "off"
    if view.engine.dtype == "bfloat16" and not megatron.use_distributed_optimizer and saves:
        key = view.key("megatron.use_distributed_optimizer")
        message = (
            "checkpoints (recover.mode) cannot hold the optimizer state of the critic's float32 value head without it"
        )
        yield finding("RUN-MEGATRON-CRITIC-STATE", key, message, f"write {key}=true")
    if view.engine.dtype == "bfloat16" and megatron.main_grads_dtype == "bfloat16":
        key = view.key("megatron.main_grads_dtype")
        message = "bfloat16 conflicts with the critic's float32 value head: gradient clipping assumes one data type"
        yield finding("RUN-MEGATRON-CRITIC-GRADIENTS", key, message, f"write {key}=float32")
