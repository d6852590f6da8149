"""Llama."""

from allocation.families import Family, Fsdp, Megatron, ServedFamily

FAMILIES = {
    "llama": Family(bias="qkvo", megatron=Megatron(), fsdp=Fsdp(splits=True), server=ServedFamily(adapters=True))
}
