"""What the checks before a start say of a model, its layout and Megatron's options, and of nothing else."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

from areal_like.backends.megatron.refusals import Asked, judge
from areal_like.core.config.load import load
from areal_like.core.config.schema import InitModelConfig
from areal_like.demo.init_model import write_init_model
from areal_like.preflight import overrides as tried
from areal_like.preflight.layout import find_plan
from areal_like.preflight.model import find_model
from areal_like.preflight.overrides import try_overrides
from areal_like.preflight.roles import check_roles, find_role_models
from areal_like.preflight.view import view_roles

_DATA = {"path": "arithmetic", "max_prompt_length": 30, "arithmetic": {"size": 16}}


class ModelChecks:
    """Errors of a run that trains one model; the files of the run lie in `folder`."""

    def __init__(self, folder: Path) -> None:
        write_init_model(InitModelConfig(), folder / "tokenizer", seed=0)
        self._run = {
            "experiment_name": "sweep",
            "trial_name": "first",
            "tokenizer_path": str(folder / "tokenizer"),
            "cluster": {"n_gpus_per_node": 8, "fileroot": str(folder / "runs")},
            "train_dataset": {**_DATA, "batch_size": 4},
            "valid_dataset": _DATA,
            "gconfig": {"n_samples": 2, "max_new_tokens": 8},
            "actor": {"backend": "megatron:d1", "dtype": "float32"},
            "rollout": {"backend": "sglang:d1"},
        }

    def errors(self, model: Path, *settings: str, device: str = "cpu") -> list[str]:
        """What is wrong, [] where the run may start."""
        config = load(self._run, [f"actor.path={model}", f"device={device}", *settings]).config
        spec, tokenizer, of_model = find_model(config)
        specs, of_roles = find_role_models(config, spec, tokenizer)
        plan, of_layout = find_plan(config, spec, specs)
        views = list(view_roles(config, specs, plan, device=device))
        found = [*of_model, *of_roles, *of_layout, *check_roles(views)]
        if plan is not None and not any(finding.severity == "error" for finding in found):
            with mock.patch.object(tried, "_answer", _answer):
                found += try_overrides(views)
        return [f"{finding.code} {finding.key}: {finding.message}" for finding in found if finding.severity == "error"]


def _answer(asked: str) -> tuple[int, str, str]:
    return 0, judge(Asked.model_validate_json(asked)).model_dump_json(), ""
