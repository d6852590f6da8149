"""What the memory model is told of a run: the GPU of this host, and the keys that decide how much is needed."""

import re
import shutil
import subprocess

from allocation.model_spec import ModelSpec
from allocation.settings import MemorySettings
from areal_like.config.keys import annotation_of
from areal_like.config.schema import RunConfig
from areal_like.preflight.lora import trained_share
from areal_like.preflight.machine import device_of

_SECTIONS = {
    name: section
    for section in ("actor.mb_spec", "actor.megatron", "actor.fsdp", "sglang")
    for name in annotation_of(section).model_fields  # type: ignore[union-attr]
}


def memory_settings(config: RunConfig, model: ModelSpec | None) -> MemorySettings | None:
    """None on CPU, and where this host has no GPU to ask: then nothing is refused."""
    if device_of(config.device) == "cpu" or (size := gpu_bytes()) is None:
        return None
    update = config.weight_update
    return MemorySettings(
        gpu_bytes=size,
        dtype=config.actor.dtype,
        mem_fraction_static=config.sglang.mem_fraction_static,
        bucket_bytes=update.bucket_mb << 20,
        ahead_bytes=update.ahead_mb << 20,
        offload=config.rollout.alternates,
        trained=1.0 if model is None else trained_share(config.actor, model),
        gradient_checkpointing=config.actor.fsdp.gradient_checkpointing,
        offload_params=config.actor.fsdp.offload_params,
    )


def gpu_bytes() -> int | None:
    """The memory of this host's smallest GPU, as its driver says it."""
    if (program := shutil.which("nvidia-smi")) is None:
        return None
    command = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    sizes = [int(line) for line in asked.stdout.split() if line.isdecimal()]
    return min(sizes) << 20 if sizes else None


def with_keys(help: str) -> str:
    """A help whose options are named as the configuration's keys."""
    help = re.sub(r"\boffload=true", "rollout.sharing=alternate", help)
    return re.sub(
        r"\b(\w+)=", lambda match: f"{_SECTIONS[match[1]]}.{match[0]}" if match[1] in _SECTIONS else match[0], help
    )
