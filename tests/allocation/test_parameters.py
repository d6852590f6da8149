"""Parameter counts against models that transformers builds without memory."""

import pytest

from allocation.model_spec import FAMILIES, from_config, known_models
from allocation.parameters import total_parameters

# transformers 5.12 has no class of these; their checkpoints bring code of their own, written after these families.
SAME_AS = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
SMALL = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 200, "head_dim": 24, "num_experts_per_tok": 2, "max_position_embeddings": 64,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48, "n_shared_experts": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 10, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "index_n_heads": 3, "index_head_dim": 6,
    "linear_key_head_dim": 6, "linear_value_head_dim": 10, "pad_token_id": 0, "decoder_sparse_step": 2,
}  # fmt: skip
DERIVED = {
    "llama", "mistral", "mixtral", "phi3", "olmo2", "olmoe", "exaone4", "qwen2", "mimo", "qwen2_vl_text",
    "qwen2_5_vl_text", "qwen2_moe",
}  # fmt: skip


def counted(config):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    kind = config["model_type"]
    config = {**config, "model_type": SAME_AS.get(kind, kind)}
    if kind == "glm4_moe_lite":
        config.pop("head_dim", None)  # to which it is another name of qk_rope_head_dim
    made = AutoConfig.for_model(**config)
    with torch.device("meta"):
        if type(made) in MODEL_FOR_CAUSAL_LM_MAPPING:
            model = AutoModelForCausalLM.from_config(made)
            return sum(parameter.numel() for parameter in model.parameters())
        return text_model(made)


def text_model(config):
    """Parameters of the text part of a model of pictures, with the head that its wrapper gives it."""
    from importlib import import_module

    import transformers

    module = import_module(f"transformers.models.{config.model_type.removesuffix('_text')}")
    name = next(n for n in dir(module) if n.endswith("TextModel"))
    model = getattr(transformers, name)._from_config(config)
    head = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return sum(parameter.numel() for parameter in model.parameters()) + head


@pytest.mark.parametrize("name", known_models())
def test_models_of_the_table(name):
    config = known_models()[name]
    assert total_parameters(from_config(config, name)) == counted(config)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family, tied, bias):
    config = {**SMALL, "model_type": family, "tie_word_embeddings": tied}
    if family in DERIVED:
        del config["head_dim"]
    if family != "deepseek_v32":  # no other family has an indexer
        del config["index_n_heads"], config["index_head_dim"]
    if "q" in FAMILIES[family].bias and "attention_bias" not in FAMILIES[family].defaults:
        config["attention_bias"] = bias
    assert total_parameters(from_config(config)) == counted(config)
