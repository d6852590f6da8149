"""GPUs by name: memory, arithmetic and links, from the vendors' data sheets."""

import re
from dataclasses import dataclass, replace
from difflib import get_close_matches

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU.

    `memory` are the bytes available to a process, slightly less than the nominal size. `flops` are dense bfloat16
    operations per second; `bandwidth` and `link` are bytes per second of its memory, and of its links to the other GPUs
    of a node in one direction. `network` is its share of the node's network, in bytes per second. With `groups_experts`
    one kernel computes all experts of a layer, as from Hopper on.
    """

    name: str
    memory: int
    flops: float
    bandwidth: float
    link: float
    network: float = 50e9  # 400 Gbit/s
    groups_experts: bool = True


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h200", int(139.7 * GIB), 989e12, 4.8e12, 450e9),
        Gpu("h100", int(79.1 * GIB), 989e12, 3.35e12, 450e9),
        Gpu("h20", int(95.0 * GIB), 148e12, 4.0e12, 450e9),
        Gpu("h800", int(79.1 * GIB), 989e12, 3.35e12, 200e9),
        Gpu("b200", int(178.3 * GIB), 2250e12, 8.0e12, 900e9),
        Gpu("a100-80", int(79.1 * GIB), 312e12, 2.04e12, 300e9, 25e9, groups_experts=False),
        Gpu("a100-40", int(39.4 * GIB), 312e12, 1.56e12, 300e9, 25e9, groups_experts=False),
        Gpu("a800", int(79.1 * GIB), 312e12, 2.04e12, 200e9, 25e9, groups_experts=False),
        Gpu("l40s", int(44.4 * GIB), 362e12, 0.86e12, 32e9, 25e9, groups_experts=False),
        Gpu("rtx4090", int(23.5 * GIB), 165e12, 1.01e12, 32e9, 12.5e9, groups_experts=False),
    )
}
_SIZE = re.compile(r"(\d{1,5}(?:\.\d{1,3})?)\s*(GiB|GB|G|MiB)", re.IGNORECASE)
_UNITS = {"gib": GIB, "g": GIB, "gb": 10**9, "mib": 1 << 20}


def find_gpu(text: str) -> Gpu:
    """Return the GPU of a name, or one with a size of memory (`24GiB`) and an H100's speed. Raises `ValueError`."""
    name = text.strip().lower().replace("_", "-")
    name = {"a100": "a100-80", "h100-80": "h100", "4090": "rtx4090"}.get(name, name)
    if name in GPUS:
        return GPUS[name]
    if match := _SIZE.fullmatch(text.strip()):
        memory = int(float(match[1]) * _UNITS[match[2].lower()])
        if memory:
            return replace(GPUS["h100"], name=text.strip(), memory=memory)
    close = get_close_matches(name, GPUS, n=1)
    hint = f"did you mean {close[0]}?" if close else f"use one of {', '.join(GPUS)}, or a memory size such as 24GiB"
    raise ValueError(f"unknown GPU {text!r}; {hint}")
