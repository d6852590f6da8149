"""Everything about a run that can be known before a process starts. Imports no torch.

Checks come in two rounds. `load` is the first: keys, types, references and overrides. `preflight` is the second and
takes the configuration that the first let through: algorithm, machine, model, data, layout, options, and keys that do
nothing.
Within a round all checks are made, so that the first finding never hides the rest.
"""

from dataclasses import dataclass, replace

from allocation.diagnostics import Finding, has_errors
from areal_like.config.load import LoadedConfig
from areal_like.job import Job
from areal_like.preflight.data import Prompts, image_share
from areal_like.preflight.host_memory import check_host_memory
from areal_like.preflight.layout import find_plan
from areal_like.preflight.machine import check_machine, device_of
from areal_like.preflight.model import find_model
from areal_like.preflight.options import check_options
from areal_like.preflight.overrides import try_overrides
from areal_like.preflight.policies import PolicyView, PolicyViews
from areal_like.preflight.resume import check_resume, find_layouts
from areal_like.preflight.roles import check_roles, find_role_models
from areal_like.preflight.router_replay import check_router_replay, find_routes
from areal_like.preflight.several_adapters import check_several_adapters
from areal_like.preflight.sharing import check_sharing, describe_sharing
from areal_like.preflight.step_time import describe_step
from areal_like.preflight.teacher import check_teacher
from areal_like.preflight.unnamed import name_unfinished
from areal_like.preflight.view import view_roles
from areal_like.preflight.workflow import check_workflow


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
    role_specs, of_roles = find_role_models(config, spec, tokenizer)
    policies = PolicyViews.find(config, tokenizer)
    train = policies.trained
    images = image_share(train, tokenizer)
    plan, of_layout = find_plan(config, spec, role_specs, images)
    layouts, of_restarts = find_layouts(config, {**role_specs, "actor": spec}, plan, images)
    algorithm = policies.each[0].algorithm
    views = tuple(view_roles(config, role_specs, plan, device))
    findings = [
        *loaded.warnings,
        *policies.findings(),
        *of_model,
        *of_roles,
        *of_layout,
        *of_restarts,
        *check_machine(config, device, plan, dry_run=dry_run),
        *policies.check(spec, tokenizer, plan),
        *check_several_adapters(config, [each.algorithm for each in policies.each]),
        *check_teacher(config, algorithm, tokenizer, train, plan, spec),
        *check_options(config, device, spec, plan),
        *check_roles(views),
        *check_router_replay(config, spec, plan),
        *check_sharing(config, device, plan),
        *check_host_memory(config, device, plan, {**role_specs, "actor": spec}),
        *check_workflow(config, dry_run=dry_run),
        *check_resume(config, train, plan, policies.steps),
        *policies.check_unused(device, plan),
    ]
    if config.adapters:  # which have checks of what they share in common
        findings = list(dict.fromkeys(findings))
    if plan is not None and not has_errors(findings):
        findings += try_overrides(views)
    located = tuple(map(loaded.origins.locate, findings))
    if plan is None or algorithm is None or tokenizer is None or has_errors(findings):
        return Preflight(located, None)
    models = {role: found for role, found in role_specs.items() if found is not None}
    sharing = describe_sharing(config, plan, role_specs, images) if device == "cuda" else None
    decided = (policies.steps, located, sharing, models, *find_routes(config, spec, plan))
    job = Job(config, device, plan, algorithm, tokenizer, train, _name_evaluations(policies.each[0].prompts), *decided)
    if dry_run and device == "cuda":
        job = replace(job, step_time=describe_step(config, plan, role_specs, images))
    if config.adapters:
        job = replace(job, adapters=[_of_adapter(job, view) for view in policies.each])
    others = [replace(job, config=changed, plan=other) for changed, other in layouts]
    return Preflight(located, replace(job, layouts=others))


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
