"""Changes of a run whose trainer ranks make their weights: a host needs minutes to write and read 30B parameters.

Servers start without weights and get them from the first update, as with every Megatron checkpoint. Names modules for
`changed/sitecustomize.py`. PEAKS names a folder for the memory peaks of the ranks.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.report import ROOT

MADE = {
    "areal_like.preflight.start": "benchmarks.made_weights:skip_check",
    "areal_like.backends.megatron.dist_weights": "benchmarks.made_weights:fill_weights",
}


def environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which every process of a run makes the changes."""
    path = f"{ROOT / 'benchmarks/changed'}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    return {"PYTHONPATH": path, "CHANGES": json.dumps(dict(changes))}


def skip_check(module: ModuleType) -> None:
    """Leave out the check of `actor.megatron.dist_checkpointing_path`."""
    module.check_start = lambda view, model: iter(())  # type: ignore[attr-defined]


def fill_weights(module: ModuleType) -> None:
    """Fill the weights of a Megatron engine instead of reading them."""

    def load(self: Any, models: list[Any], path: Any) -> None:
        from benchmarks.random_weights import fill

        for model in models:
            fill(model)
        if folder := os.environ.get("PEAKS"):
            threading.Thread(target=_note_peaks, args=(Path(folder),), daemon=True).start()

    module.WeightsFrom.load = load  # type: ignore[attr-defined]


def _note_peaks(folder: Path) -> None:
    """Write the largest bytes of tensors and of the allocator's segments of this rank, every two seconds."""
    import torch

    while torch.cuda.is_available():
        peaks = {"tensors": torch.cuda.max_memory_allocated(), "segments": torch.cuda.max_memory_reserved()}
        (folder / f"peak-{torch.distributed.get_rank()}.json").write_text(json.dumps(peaks))
        time.sleep(2.0)
