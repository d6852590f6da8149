"""GLM-4 without experts."""

from dataclasses import replace

from allocation.families import Family, Fsdp

_GLM = Family(bias="qkv", defaults={"head_dim": 128}, fsdp=Fsdp(splits=True, fused=("gate_up_proj",)))
FAMILIES = {"glm": _GLM, "glm4": replace(_GLM, norms=4)}
