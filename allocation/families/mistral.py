"""Mistral and Mixtral."""

from allocation.families import ONE_ROPE, Family, Fsdp, Megatron, ServedFamily

FAMILIES = {
    "mistral": Family(
        full_every=1, megatron=Megatron(windows=True), fsdp=Fsdp(splits=True), server=ServedFamily(adapters=True)
    ),
    "mixtral": Family(
        "num_local_experts",
        "intermediate_size",
        full_every=1,
        megatron=Megatron(
            ropes=ONE_ROPE,
            windows=True,
            several_experts=True,
            divided_heads=True,
            # softmax of all, renormalised, is the softmax of the chosen
            options=lambda config: {"moe_router_pre_softmax": False},
        ),
        fsdp=Fsdp(packs_experts=True),
        server=ServedFamily(adapters=True),
    ),
}
