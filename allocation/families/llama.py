"""Llama."""

from allocation.families.family import Family, Fsdp, Megatron, Server

FAMILIES = {
    "llama": Family(bias="qkvo", megatron=Megatron(), fsdp=Fsdp(splits=True), server=Server(adapters=True)),
}
