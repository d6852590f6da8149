"""What the memory model is told of a run: the GPU of this host, and the keys that decide how much is needed."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace

from allocation import Finding
from allocation.model_spec import ModelSpec
from allocation.settings import MemorySettings
from areal_like.config.keys import annotation_of
from areal_like.config.schema import EngineConfig, MegatronConfig, RunConfig, TrainerRole
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
    memory = MemorySettings(
        gpu_bytes=size,
        mem_fraction_static=config.sglang.mem_fraction_static,
        bucket_bytes=update.bucket_mb << 20,
        ahead_bytes=update.prefetch_mb << 20,
        offload=config.rollout.alternates,
        trained=1.0 if model is None else trained_share(config.actor, model),
    )
    return of_trainer(memory, config.actor)


def of_trainer(memory: MemorySettings, engine: EngineConfig) -> MemorySettings:
    """The settings with what each trainer has of its own."""
    checkpoints, offloads = engine.fsdp.gradient_checkpointing, engine.fsdp.offload_params
    return replace(memory, dtype=engine.dtype, gradient_checkpointing=checkpoints, offload_params=offloads)


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


def with_keys(found: Finding, config: RunConfig) -> Finding:
    """A finding about memory with options as the configuration's keys, of each role that its message begins with."""
    named = re.split(" together need| needs", found.message)[0].split(" and ")
    roles: list[TrainerRole] = [role for role in config.roles if role in named]

    def keys(match: re.Match[str]) -> str:
        section, leaf = _SECTIONS.get(match[1], "").rpartition(".")[::2]
        if section != "actor":
            return f"{leaf}.{match[0]}" if leaf else match[0]
        said = []
        for owner in dict.fromkeys(_owner(config, role, leaf) for role in roles):
            said.append(f"{owner}.{leaf}.{match[0]}")
            if match[0] == "recompute_granularity=full":
                said += [f"{owner}.{leaf}.{given}" for given in _covers(config.roles[owner].megatron)]
        return " ".join(said)

    help = re.sub(r"\boffload=true", "rollout.sharing=alternate", found.help or "")
    return replace(found, help=re.sub(r"\b(\w+)=\S+", keys, help) or None)


def _owner(config: RunConfig, role: TrainerRole, section: str) -> TrainerRole:
    """Return whose section a role uses: its own or the actor's."""
    return role if getattr(config.further_roles.get(role), section, None) is not None else "actor"


def _covers(megatron: MegatronConfig) -> Iterator[str]:
    """Keys that full recomputation is refused beside, without what is set."""
    if megatron.recompute_modules:
        yield "recompute_modules=null"
    if megatron.moe_layer_recompute:
        yield "moe_layer_recompute=false"
