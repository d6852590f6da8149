"""OLMo 2, OLMo 3 and OLMoE."""

from allocation.families import Family, Fsdp, Megatron, ServedFamily, softmax_order

FAMILIES = {
    "olmo2": Family(bias="qkvo", qk_norm="full", fsdp=Fsdp(splits=True)),
    "olmo3": Family(
        bias="qkvo",
        qk_norm="full",
        full_every=4,
        defaults={"sliding_window": 4096},
        server=ServedFamily(starts=False),  # SGLang's configuration leaves out `rope_parameters`, which its model reads
    ),
    "olmoe": Family(
        "num_experts",
        "intermediate_size",
        bias="qkvo",
        qk_norm="full",
        # SGLang never normalises there; bridges normalise queries and keys of each rank alone
        megatron=Megatron(
            {"norm_topk_prob": (False,)}, one_tensor_rank=True, divided_heads=True, options=softmax_order
        ),
        fsdp=Fsdp(packs_experts=True),
        server=ServedFamily(adapters=True),
    ),
}
