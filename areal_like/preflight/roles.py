"""Checks each role on trainer ranks against its model, its bridge and its training backend."""

from collections.abc import Iterator, Sequence

from allocation.diagnostics import Finding
from allocation.model_spec import ModelSpec
from areal_like.core.config.findings import finding
from areal_like.core.config.schema import RunConfig, TrainerRole
from areal_like.data.tokenizer import Tokenizer
from areal_like.exclusions import find_excluded
from areal_like.preflight.megatron import check_trainer_options
from areal_like.preflight.model import check_model, find_spec
from areal_like.preflight.role_exclusions import ROLE
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
            findings.append(finding("RUN-TOKENIZER", f"{role}.path", message, help))
    return specs, findings


def check_roles(views: Sequence[RoleView]) -> Iterator[Finding]:
    """Check each role against its bridge and Megatron-core; a setting that roles share is reported once."""
    yield from dict.fromkeys(found for view in views for found in _check_role(view))


def _check_role(view: RoleView) -> Iterator[Finding]:
    yield from check_model(view)
    yield from check_trainer_options(view)
    yield from find_excluded(ROLE, view, view.key)
