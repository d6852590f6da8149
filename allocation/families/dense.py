"""Dense families of one model each."""

from allocation.families import BIAS, Family, Fsdp, ServedFamily

FAMILIES = {
    "smollm3": Family(bias="qkvo", defaults={"tie_word_embeddings": True}, fsdp=Fsdp(splits=True)),
    "seed_oss": Family(bias="qkv", defaults=BIAS | {"head_dim": 128}, fsdp=Fsdp(splits=True)),
    "phi3": Family(full_every=1, fsdp=Fsdp(splits=True, fused=("qkv_proj", "gate_up_proj"))),
    "exaone4": Family(
        qk_norm="head", full_every=4, fsdp=Fsdp(splits=True), server=ServedFamily(on_cpus=False, windows=True)
    ),
}
