"""Checks whether a model trains, with which backend and bridge, and where SGLang serves it (`check --model`)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import allocation
from allocation.diagnostics import Finding, Severity, has_errors
from allocation.families import TRAINED
from allocation.model_spec import ModelError, ModelSpec, known_models, read_config
from areal_like.config.findings import finding
from areal_like.config.schema import RunConfig
from areal_like.data.processor import SEES_WHOLE_IMAGES
from areal_like.preflight.counted import find_shape
from areal_like.preflight.model import check_config, config_problem, find_spec
from areal_like.preflight.view import RoleView
from areal_like.rollout.sglang.architectures import ON_GPUS_ALONE
from areal_like.trainer.fsdp.support import WITH_IMAGES, WITHOUT_SERVER
from areal_like.trainer.megatron.bridges.support import BRIDGES, architecture_of

type Backend = Literal["megatron", "fsdp"]

_KEY = "--model"
_TRAINERS = {**{f"Megatron ({bridge})": ("megatron", bridge) for bridge in BRIDGES}, "FSDP": ("fsdp", BRIDGES[0])}


@dataclass(frozen=True)
class Trainability:
    """Findings about a model's files, and about each trainer by the trainer's name.

    `servers` has a sentence for SGLang on each device. `from_table` means that only the sizes of the offline table were
    checked, `instead` is a backend that takes the model where the requested one does not. `family` is the model's.
    """

    spec: ModelSpec | None
    findings: Sequence[Finding]
    trainers: Mapping[str, Sequence[Finding]]
    servers: Mapping[str, str]
    from_table: bool = False
    instead: str | None = None
    family: str = ""

    @property
    def trains(self) -> bool:
        """Whether the model's files are right and at least one trainer takes the model."""
        return not has_errors(self.findings) and not all(map(has_errors, self.trainers.values()))


def check_trainable(model: str, backend: Backend | None = None) -> Trainability:
    """Check the model of a directory, a config.json or a name on one rank of each trainer. Uses no network."""
    spec, config, findings = _read(model)
    if spec is None or has_errors(findings):
        return Trainability(spec, findings, {}, {})
    found = {name: tuple(check_layout(model, spec, config, *how)) for name, how in _TRAINERS.items()}
    chosen = {name: found[name] for name, how in _TRAINERS.items() if backend in (None, how[0])}
    others = (how[0] for name, how in _TRAINERS.items() if name not in chosen and not has_errors(found[name]))
    instead = next(others, None) if all(map(has_errors, chosen.values())) else None
    from_table = not Path(model).expanduser().exists() and spec.name in known_models()
    family = family_of(spec, config)
    return Trainability(spec, findings, chosen, find_servers(family), from_table, instead, family)


def family_of(spec: ModelSpec, config: Mapping[str, Any]) -> str:
    """Return the family of a model: of text and images, or else of its text part."""
    return str(config["model_type"]) if "vision_config" in config else spec.family


def _read(model: str) -> tuple[ModelSpec | None, Mapping[str, Any], list[Finding]]:
    """Return the model's spec and config, and findings about its files; weights are checked if there are some."""
    directory = Path(model).expanduser()
    findings: list[Finding] = []
    if directory.is_dir():
        weights = any(directory.glob("*.safetensors*"))
        spec, findings = find_spec(str(directory), _KEY, weights=weights)
        if spec is None:
            return None, {}, findings
        if not weights:
            message = f"{model} has no weights (*.safetensors); only its config.json was checked"
            findings.append(finding("RUN-WEIGHTS", _KEY, message, severity=Severity.NOTE))
    try:
        config, name = read_config(model, download=False)
        spec, _ = find_shape(config, name)
    except ModelError as error:
        if directory.exists():
            return None, {}, [config_problem(_KEY, error)]
        return None, {}, [config_problem(_KEY, error, "name a directory with the model's config.json")]
    if not directory.exists():  # the offline table has sizes only
        config = {"architectures": [architecture_of(spec.family)], **config}
    return spec, config, findings


def check_layout(
    model: str, spec: ModelSpec, config: Mapping[str, Any], backend: str, bridge: str, sizes: str = "d1"
) -> Iterator[Finding]:
    """Yield the findings of a run with default settings, but for the layout's `sizes`, about the model `config`."""
    layout_of = f"{backend}:{sizes}"
    actor = {"path": model, "backend": layout_of, "megatron": {"bridge_type": bridge}}
    data = {"path": "data.jsonl", "batch_size": 1}
    run = RunConfig.model_validate({"experiment_name": "check", "train_dataset": data, "actor": actor})
    plan = allocation.check(layout_of).plan
    if plan is None:
        raise ValueError(f"{layout_of} is not a layout")
    (layout,) = plan.engines
    view = RoleView(run, "actor", run.actor, "cpu", spec, layout)
    yield from (_of_model(found) for found in check_config(view, spec, layout, config))


def _of_model(found: Finding) -> Finding:
    """Return a finding about `actor.path` as one about the option that names the model here."""
    return finding(
        found.code,
        _KEY if found.key == "actor.path" else found.key or _KEY,
        found.message,
        found.help,
        nearest=found.nearest,
        severity=found.severity,
    )


def find_servers(family: str) -> dict[str, str]:
    """Return whether SGLang serves a family on each device, which is known of the families in TRAINED."""
    alone = ON_GPUS_ALONE & {family, f"{family}_text"}
    on_cpu = "no: SGLang's CPU server lacks kernels of the family" if alone else "yes"
    if family in WITH_IMAGES:
        on_gpus = "yes" if family in SEES_WHOLE_IMAGES else "yes, but no test shows it"
        return {"SGLang on CPU": on_cpu, "SGLang on GPUs": on_gpus}
    if family in WITHOUT_SERVER:
        return dict.fromkeys(("SGLang on CPU", "SGLang on GPUs"), "no: it does not start with the family's rope")
    if not any(family in families for families in TRAINED.values()):
        return dict.fromkeys(("SGLang on CPU", "SGLang on GPUs"), f"not tested with a {family}")
    return {"SGLang on CPU": on_cpu, "SGLang on GPUs": "yes"}
