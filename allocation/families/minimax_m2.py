"""MiniMax M2."""

from allocation.families import ONE_ROPE, Family, Fsdp, Megatron, ServedFamily

FAMILIES = {
    "minimax_m2": Family(
        "num_local_experts",
        "intermediate_size",
        qk_norm="full",
        defaults={"head_dim": 128},
        megatron=Megatron(
            {"scoring_func": ("sigmoid",), "partial_rotary_factor": (None, 1, 0.5)},
            ONE_ROPE,
            one_tensor_rank=True,  # split, bridges lose a part of the gradient of the norm of queries and keys
            several_experts=True,
            router_biases=True,
            options=lambda config: {"rotary_percent": config.rope_parameters.get("partial_rotary_factor", 1.0)},
        ),
        fsdp=Fsdp(packs_experts=True),
        server=ServedFamily(on_cpus=False, adapters=True),
    )
}
