"""Everything about a run that can be known before a process starts. Imports no torch.

Checks come in two rounds. `load` is the first: keys, types, references and overrides. `preflight` is the second and
takes the configuration that the first let through: algorithm, machine, model, data, layout, options, and keys that do
nothing.
Within a round all checks are made, so that the first finding never hides the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from allocation.diagnostics import Finding, has_errors
from areal_like.capability import served_forms
from areal_like.core.config.load import LoadedConfig
from areal_like.job import Job
from areal_like.known import Known
from areal_like.preflight.checks import run_checks
from areal_like.preflight.data import Prompts, image_share
from areal_like.preflight.layout import find_plan
from areal_like.preflight.machine import device_of
from areal_like.preflight.model import find_model
from areal_like.preflight.overrides import try_overrides
from areal_like.preflight.policies import PolicyView, PolicyViews
from areal_like.preflight.resume import find_layouts
from areal_like.preflight.roles import find_role_models
from areal_like.preflight.sharing import describe_sharing
from areal_like.preflight.step_time import describe_step
from areal_like.preflight.unnamed import name_unfinished
from areal_like.preflight.view import view_roles


@dataclass(frozen=True)
class Preflight:
    """Findings of the checks, and the run if none is an error."""

    findings: tuple[Finding, ...]
    job: Job | None

    @property
    def ok(self) -> bool:
        """Whether the run may start: there may be warnings, but no errors."""
        return self.job is not None


def preflight(loaded: LoadedConfig, *, dry_run: bool = False) -> Preflight:
    """Check a configuration against the machine, the model and the data; starts nothing and writes nothing.

    A dry run is only warned where the environment names no cluster, as it may be made in another one than the run's.
    """
    config = name_unfinished(loaded)
    device = device_of(config.device)
    spec, tokenizer, of_model = find_model(config)
    models, of_roles = find_role_models(config, spec, tokenizer)
    policies = PolicyViews.find(config, tokenizer)
    images = image_share(policies.trained, tokenizer)
    plan, of_layout = find_plan(config, spec, models, images)
    layouts, of_restarts = find_layouts(config, models, plan, images)
    known = Known(
        config=config,
        device=device,
        plan=plan,
        models=models,
        tokenizer=tokenizer,
        algorithms={view.name: view.algorithm for view in policies.each},
        prompts={view.name: view.trained for view in policies.each},
        steps=policies.steps,
        dry_run=dry_run,
    )
    views = tuple(view_roles(config, models, plan, device=device))
    findings = [*loaded.warnings, *policies.findings(), *of_model, *of_roles, *of_layout, *of_restarts]
    findings += [
        *policies.check(spec, tokenizer, plan),
        *run_checks(known, views),
        *policies.check_unused(device, plan),
    ]
    if config.adapters:  # whose checks repeat findings about shared settings
        findings = list(dict.fromkeys(findings))
    if plan is not None and not has_errors(findings):
        findings += try_overrides(views)
    located = tuple(map(loaded.origins.locate, findings))
    if has_errors(findings):
        return Preflight(located, None)
    sharing = describe_sharing(config, plan, models, images) if plan and device == "cuda" else None
    job = _make_job(known, policies, located, sharing)
    if job and plan and dry_run and device == "cuda":
        job = replace(job, step_time=describe_step(config, plan, models, images))
    others = [replace(job, config=changed, plan=other) for changed, other in layouts] if job else ()
    return Preflight(located, job and replace(job, layouts=others))


def _make_job(known: Known, policies: PolicyViews, findings: Sequence[Finding], sharing: str | None) -> Job | None:
    """Return the run, None where a part of it is missing."""
    config, plan, tokenizer, first = known.config, known.plan, known.tokenizer, policies.each[0]
    if plan is None or tokenizer is None or first.algorithm is None:
        return None
    models = {role: spec for role, spec in known.models.items() if spec is not None}
    decided = (known.steps, findings, sharing, models, served_forms(known))
    evaluated = _name_evaluations(first.prompts)
    job = Job(config, known.device, plan, first.algorithm, tokenizer, policies.trained, evaluated, *decided)
    return replace(job, adapters=[_of_adapter(job, view) for view in policies.each]) if config.adapters else job


def _of_adapter(job: Job, view: PolicyView) -> Job:
    """Return the part of one of several adapters."""
    if view.algorithm is None:
        raise ValueError(f"the adapter {view.name} has no algorithm")
    evaluated = _name_evaluations(view.prompts)
    own = replace(job, config=view.config, algorithm=view.algorithm, train_prompts=view.trained, evaluated=evaluated)
    return replace(own, adapter=view.name)


def _name_evaluations(prompts: Prompts) -> Prompts:
    """Return the prompts of each evaluation by the name of its dataset."""
    keys = [key for key in prompts if key != "train_dataset" and prompts[key]]
    return {key.removeprefix("evaluator.datasets."): prompts[key] for key in keys}
