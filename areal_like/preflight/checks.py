"""The checks of a whole run; checks of its data and algorithm, or each adapter's, are in `policies.py`."""

from collections.abc import Iterator, Sequence

from allocation.diagnostics import Finding
from areal_like.capability import check_capabilities, served_forms
from areal_like.exclusions import find_excluded
from areal_like.known import Known
from areal_like.preflight.exclusions import RUN
from areal_like.preflight.host_memory import check_host_memory
from areal_like.preflight.machine import check_machine
from areal_like.preflight.options import check_options, check_several_adapters
from areal_like.preflight.resume import check_resume
from areal_like.preflight.roles import check_roles
from areal_like.preflight.sharing import check_sharing
from areal_like.preflight.teacher import check_teacher
from areal_like.preflight.view import RoleView


def run_checks(known: Known, views: Sequence[RoleView]) -> Iterator[Finding]:
    """Check machine, model, layout and options, and run the checks of capabilities."""
    config, device, plan, spec, tokenizer = known.config, known.device, known.plan, known.model, known.tokenizer
    algorithms, trained = list(known.algorithms.values()), [it for own in known.prompts.values() for it in own]
    yield from check_machine(config, device, plan, dry_run=known.dry_run)
    yield from check_several_adapters(config)
    yield from check_teacher(config, algorithms[0], tokenizer, trained, plan)
    yield from check_options(config, device, spec, plan)
    yield from check_roles(views)
    yield from check_sharing(config, device, plan)
    token_bytes = sum(form.token_bytes for form in served_forms(known).values())
    yield from check_host_memory(config, device, plan, known.models, token_bytes)
    yield from check_resume(config, trained, plan, known.steps)
    yield from find_excluded(RUN, known)
    yield from check_capabilities(known)
