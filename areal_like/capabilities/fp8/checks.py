"""Checks of FP8 rollouts: hardware, weights and losses for which they are right."""

import shutil
import subprocess
from collections.abc import Iterator

from allocation.diagnostics import Finding, Severity
from allocation.memory.fp8 import BLOCK, FAMILIES, fp8_layers
from areal_like.capabilities.fp8.schema import Fp8Keys
from areal_like.core.algorithms.settings import PRESETS, Settings, settings_of
from areal_like.core.config.findings import finding
from areal_like.core.config.keys import with_keys
from areal_like.core.config.schema import RunConfig
from areal_like.known import Known

_KEY = "rollout.dtype"
_HOPPER = "9.0"  # on other GPUs SGLang computes with weights or scales that it derives after loading


def check_fp8(known: Known) -> Iterator[Finding]:
    """Check everything that FP8 rollouts need."""
    if with_keys(known.config.rollout, Fp8Keys).dtype != "fp8":
        return
    yield from _check_device(known)
    yield from _check_settings(known.config)
    yield from _check_layers(known)


def _check_device(known: Known) -> Iterator[Finding]:
    if known.device == "cpu":
        message = "rollout.dtype=fp8 needs GPUs: SGLang computes in FP8 on a CPU only with AMX, from reordered weights"
        yield finding("RUN-FP8-CPU", _KEY, message, "write rollout.dtype=null")
    elif others := sorted(set(_compute_capabilities()) - {_HOPPER}):
        message = (
            f"rollout.dtype=fp8 needs Hopper GPUs (compute capability {_HOPPER}); this host has {', '.join(others)}"
        )
        yield finding("RUN-FP8-GPU", _KEY, message, "write rollout.dtype=null")


def _compute_capabilities() -> list[str]:
    """Return the compute capability of each GPU of this host, [] where no driver reports one."""
    if (program := shutil.which("nvidia-smi")) is None:
        return []
    command = [program, "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return []


def _check_settings(config: RunConfig) -> Iterator[Finding]:
    if config.actor.dtype != "bfloat16":
        message = f"rollout.dtype=fp8 needs bfloat16 beside FP8, and actor.dtype is {config.actor.dtype}"
        yield finding("RUN-FP8-DTYPE", _KEY, message, "write actor.dtype=bfloat16")
    if config.weight_update.mode == "disk":
        message = (
            "rollout.dtype=fp8 rounds weights on their way to the servers, and weight_update.mode=disk writes files"
        )
        yield finding("RUN-FP8-MODE", _KEY, message, "write weight_update.mode=collective, or weight_update.mode=ipc")
    preset = PRESETS.get(config.algorithm)
    if preset is not None:
        yield from _check_weights(settings_of(preset, config.actor))


def _check_weights(settings: Settings) -> Iterator[Finding]:
    """Check that importance weights correct for the distribution that servers in FP8 sample from."""
    message = "servers in FP8 sample from another distribution than the trainer's, and "
    if not settings.use_decoupled_loss:
        message += "with use_decoupled_loss=false the clip range counts this difference as a step of training"
        help = "write actor.use_decoupled_loss=true"
        yield finding("RUN-FP8-CLIP", "actor.use_decoupled_loss", message, help, severity=Severity.WARNING)
    elif settings.behave_imp_weight_mode == "disabled":
        message += "no importance weight corrects for it"
        help = "write actor.behave_imp_weight_mode=token_truncate"
        yield finding("RUN-FP8-WEIGHTS", "actor.behave_imp_weight_mode", message, help)


def _check_layers(known: Known) -> Iterator[Finding]:
    model, plan = known.model, known.plan
    if model is None or plan is None:
        return
    sizes = plan.engine("rollout").sizes
    if model.family not in FAMILIES or model.tower:
        message = (
            f"rollout.dtype=fp8 is supported for {', '.join(FAMILIES)} without images, and the model is {model.family}"
        )
        yield finding("RUN-FP8-FAMILY", _KEY, message, "write rollout.dtype=null")
    elif not fp8_layers(model, sizes):
        message = (
            f"no linear layer of a server has parts of {BLOCK} rows and columns with tensor parallelism {sizes.tp}"
        )
        help = "write rollout.dtype=null" if sizes.tp == 1 else "lower the tensor parallelism in rollout.backend"
        yield finding("RUN-FP8-LAYERS", _KEY, message, help)
