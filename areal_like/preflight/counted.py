"""Models of families that `allocation` does not know: their sizes are counted from transformers' own model."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from allocation.families import FAMILIES
from allocation.model_spec import Counted, ModelError, ModelSpec, from_config, from_counted

_COUNTING = "areal_like.backends.fsdp.counting"


class Counting(BaseModel):
    """The output of `areal_like.backends.fsdp.counting`, whose `Count` has the same fields."""

    problem: str
    shape: dict[str, int | bool]
    counted: dict[str, Any]
    tensors: dict[str, tuple[int, ...]]
    tied: list[str]
    ignored: list[str]


def find_shape(config: Any, name: str) -> tuple[ModelSpec, Counting | None]:
    """Return the spec of a config.json, and the count if its family is unknown here and transformers has it.

    Raises ModelError for a config that cannot be used.
    """
    if not _is_counted(config):
        return from_config(config, name), None
    found = _count(json.dumps(config, sort_keys=True))
    if found.problem:
        raise ModelError(f"{name}: {found.problem}")
    linear = tuple((layer, size) for layer, size in found.counted["linear"])
    counted = Counted(**{**found.counted, "linear": linear})
    return from_counted(config, name, found.shape, counted), found


def _is_counted(config: Any) -> bool:
    if not isinstance(config, Mapping) or isinstance(config.get("text_config"), Mapping):
        return False
    family = config.get("model_type")
    return isinstance(family, str) and family not in FAMILIES and family in causal_families()


@cache
def causal_families() -> frozenset[str]:
    """Return the families with a causal language model in the installed transformers; empty without it.

    The table is read as text, because every import of transformers imports torch.
    """
    package = importlib.util.find_spec("transformers")
    if package is None or package.origin is None:
        return frozenset()
    text = (Path(package.origin).parent / "models/auto/modeling_auto.py").read_text()
    table = text.partition("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = ")[2].partition("\n)\n")[0]
    return frozenset(re.findall(r'\("([\w-]+)", ', table))


@cache
def _count(config: str) -> Counting:
    """Count in a process of its own, which takes ten seconds: the checks import no torch."""
    command = [sys.executable, "-m", _COUNTING]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    offline.pop("HF_ENDPOINT", None)  # nothing is asked of it, and transformers fails to import with a wrong one
    done = subprocess.run(command, input=config, capture_output=True, text=True, env=offline)
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise ModelError(f"the model's parameters could not be counted with transformers: {last}")
    return Counting.model_validate_json(done.stdout.splitlines()[-1])
