"""A server on a machine without GPUs, with PyTorch in the place of kernels that SGLang has for GPUs only."""

from __future__ import annotations

import sys
from pathlib import Path

from areal_like.rollout.sglang import LAUNCHER, launcher
from areal_like.rollout.sglang.architectures import ON_GPUS_ALONE, read_config
from areal_like.rollout.sglang.patches import cpu

ROOT = Path(__file__).parents[2]
FAMILY_LAUNCHER = "support.family_launcher"
PLACES = [str(ROOT), str(ROOT / "tests")]  # where Python finds both


def launcher_of(model: Path) -> str:
    """Return the launcher with which the family of a model runs on a CPU."""
    config = read_config(model)
    family = (config.get("text_config") or config).get("model_type")
    return FAMILY_LAUNCHER if family in ON_GPUS_ALONE else LAUNCHER


def serve_family(arguments: list[str]) -> None:
    """Serve until the process is ended."""
    launcher.prepare_imports(cuda=False)
    from support import family_kernels

    cpu.prepare_cpu = family_kernels.prepare_cpu
    launcher.serve(family_kernels.adapt_arguments(arguments), cuda=False)


if __name__ == "__main__":
    serve_family(sys.argv[1:])
