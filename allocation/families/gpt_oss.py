"""gpt-oss."""

from allocation.families import BIAS, Family, Megatron, ServedFamily

FAMILIES = {
    "gpt_oss": Family(
        "num_local_experts",
        "intermediate_size",
        expert_bias=True,
        bias="qkvo",
        full_every=2,
        defaults=BIAS | {"head_dim": 64, "sliding_window": 128},
        megatron=Megatron(
            {"attention_bias": (True,), "swiglu_limit": (7.0,)},  # transformers' own limit
            ("yarn", "default"),
            windows=True,
            several_experts=True,
            # The bridge would have Megatron multiply by YaRN's factor once more, except in the fused kernel
            options=lambda config: {"position_embedding_type": "rope", "yarn_rotary_scaling_factor": None},
        ),
        server=ServedFamily(on_cpus=False, windows=True, window_pool=True),
    )
}
