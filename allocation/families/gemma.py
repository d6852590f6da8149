"""Gemma 1, 2 and 3."""

from typing import Any

from allocation.families import ONE_ROPE, Family, Fsdp, Megatron, ServedFamily

_DEFAULTS = {"head_dim": 256, "tie_word_embeddings": True}
# Fields that Google's checkpoints omit
_GEMMA_2 = {
    **_DEFAULTS, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 256_000,
    "max_position_embeddings": 8192, "sliding_window": 4096,
}  # fmt: skip
_GEMMA_3 = _GEMMA_2 | {"vocab_size": 262_208, "max_position_embeddings": 131_072}
_ACTIVATION = ("gelu_pytorch_tanh",)
_FIELDS = {"tie_word_embeddings": (True,), "hidden_activation": _ACTIVATION}  # SGLang shares the embedding
_NO_CAPS = {"attn_logit_softcapping": (None,), "final_logit_softcapping": (None,)}
_SLIDING = ServedFamily(on_cpus=False, tied=True, windows=True)


def _options(config: Any) -> dict[str, Any]:
    """Return options with the kernel of attention that exists; a bridge of theirs asks for flash attention."""
    return {"softmax_scale": config.query_pre_attn_scalar**-0.5, "attention_backend": "auto"}


FAMILIES = {
    "gemma": Family(
        bias="qkvo", defaults=_DEFAULTS, fsdp=Fsdp(splits=True), server=ServedFamily(on_cpus=False, tied=True)
    ),
    "gemma2": Family(
        bias="qkvo",
        norms=4,
        full_every=2,
        defaults=_GEMMA_2 | {"attn_logit_softcapping": 50.0},
        megatron=Megatron(
            _FIELDS | {"hidden_act": _ACTIVATION}, ONE_ROPE, windows=True, options=_options
        ),  # checkpoints name it twice
        fsdp=Fsdp(splits=True),
        server=_SLIDING,
    ),
    "gemma3_text": Family(
        bias="qkvo",
        norms=4,
        qk_norm="head",
        full_every=6,
        defaults=_GEMMA_3,
        megatron=Megatron(_FIELDS | _NO_CAPS, ("default", "linear"), windows=True, options=_options),
        fsdp=Fsdp(splits=True, sees_images=True),
        server=_SLIDING,
    ),
}
