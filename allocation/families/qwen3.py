"""Qwen3, and its language models with images and with experts."""

from dataclasses import replace

from allocation.families import NONE_OF_IT, Family, Fsdp, Megatron, ServedFamily, softmax_order

_QWEN3 = Family(
    bias="qkvo",
    qk_norm="head",
    defaults={"head_dim": 128},
    megatron=Megatron(windows=True),
    fsdp=Fsdp(splits=True),
    server=ServedFamily(adapters=True),
)
_MOE = Family(
    "num_experts",
    "moe_intermediate_size",
    bias="qkvo",
    qk_norm="head",
    defaults={"decoder_sparse_step": 1},
    # its attention would slide in every layer, and its config has another value
    megatron=Megatron(
        {"use_sliding_window": NONE_OF_IT}, several_experts=True, named_experts=True, options=softmax_order
    ),
    fsdp=Fsdp(packs_experts=True),
    server=ServedFamily(adapters=True),
)
_OF_IMAGES = Fsdp(has_model=False, sees_images=True)
FAMILIES = {
    "qwen3": _QWEN3,
    "qwen3_vl_text": replace(_QWEN3, megatron=None, fsdp=_OF_IMAGES, server=ServedFamily()),
    "qwen3_moe": _MOE,
    "qwen3_vl_moe_text": replace(_MOE, megatron=None, fsdp=_OF_IMAGES, server=ServedFamily()),
}
