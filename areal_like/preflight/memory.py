"""The run as the memory model sees it: the GPU of this host, and the settings that decide how much is needed."""

import shutil
import subprocess
from dataclasses import replace

from allocation.model_spec import ModelSpec
from allocation.settings import MemorySettings
from areal_like.config.schema import EngineConfig, RunConfig
from areal_like.preflight.lora import merged_experts, served_parameters, trained_share
from areal_like.preflight.machine import device_of
from areal_like.served_form import served_form


def memory_settings(config: RunConfig, model: ModelSpec | None) -> MemorySettings | None:
    """Return None on CPU, and where this host has no GPU to ask: then nothing is refused."""
    if device_of(config.device) == "cpu" or (size := gpu_bytes()) is None:
        return None
    update = config.weight_update
    memory = MemorySettings(
        gpu_bytes=size,
        mem_fraction_static=config.sglang.mem_fraction_static,
        bucket_bytes=update.bucket_mb << 20,
        ahead_bytes=update.prefetch_mb << 20,
        offload=config.rollout.alternates,
        trained=1.0 if model is None else trained_share(config, model),
        merged_experts=0 if model is None else merged_experts(config, model),
        served_adapters=0 if model is None else served_parameters(config, model),
    )
    form = served_form(config)
    return of_trainer(replace(memory, **form.memory) if form else memory, config.actor)


def of_trainer(memory: MemorySettings, engine: EngineConfig) -> MemorySettings:
    """Return the settings with each trainer's own."""
    return replace(
        memory,
        dtype=engine.dtype,
        gradient_checkpointing=engine.fsdp.gradient_checkpointing,
        offload_params=engine.fsdp.offload_params,
        tower_trained=not engine.freeze_vision_tower,
        mtp_trained=engine.megatron.train_mtp_layers,
    )


def gpu_bytes() -> int | None:
    """Return the memory of this host's smallest GPU, as its driver reports it."""
    if (program := shutil.which("nvidia-smi")) is None:
        return None
    command = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    sizes = [int(line) for line in asked.stdout.split() if line.isdecimal()]
    return min(sizes) << 20 if sizes else None
