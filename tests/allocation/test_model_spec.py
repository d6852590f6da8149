"""Model shapes from Hugging Face configs."""

import json
import re

import pytest

from allocation.families import FAMILIES
from allocation.model_spec import ModelError, from_config, known_models, load_model
from allocation.parameters import total_parameters

EXPERTS = ("num_experts", "n_routed_experts", "moe_intermediate_size")
DENSE = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128, "vocab_size": 100,
}  # fmt: skip


@pytest.mark.parametrize("name", known_models())
def test_known_models_are_complete(name):
    model = load_model(name.rpartition("/")[2].lower())
    assert model.name == name
    assert model.layers and model.heads % model.kv_heads == 0
    assert bool(model.experts) == bool(FAMILIES[model.family].experts) == bool(model.expert_ffn)


def test_a_config_is_read_from_a_folder_or_a_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    assert load_model(tmp_path) == load_model(str(tmp_path))
    assert load_model(tmp_path / "config.json").kv_heads == 4


def test_a_name_is_found_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "models--someone--tiny" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(DENSE))
    assert load_model("someone/tiny").hidden_size == 64
    with pytest.raises(ModelError, match="offline"):
        load_model("someone/else")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
        ("[]", "JSON object"),
        ("{}", "unknown model_type None"),
        ('{"model_type": "lama"}', "did you mean 'llama'"),
        ('{"hidden_size": ' + "1" * 5000 + "}", "cannot be read as JSON"),
    ],
)
def test_a_bad_file_is_named(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("qwen3_moe", "decoder_sparse_step", 0),
        ("qwen3_moe", "decoder_sparse_step", None),
        ("qwen3_moe", "mlp_only_layers", 3),
        ("deepseek_v3", "first_k_dense_replace", None),
        ("deepseek_v3", "first_k_dense_replace", "3"),
        ("glm4_moe", "first_k_dense_replace", -1),
        ("qwen3_next", "full_attention_interval", 0),
        ("qwen3_next", "layer_types", ["linear_attention"]),
        ("qwen3_next", "layer_types", 3),
    ],
)
def test_a_field_about_kinds_of_layers_that_makes_no_sense_is_named(family, field, value):
    sizes = dict.fromkeys((*EXPERTS, "linear_num_key_heads", "linear_num_value_heads"), 8)
    with pytest.raises(ModelError, match=f"config.json: {field} must be"):
        from_config({**DENSE, **sizes, "model_type": family, field: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 8}, "num_key_value_heads = 8 does not divide num_attention_heads = 4"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3 does not divide num_attention_heads = 4"),
        ({"num_attention_heads": 128}, "num_attention_heads = 128 is more than hidden_size = 64"),
        ({"hidden_size": 10**30}, "hidden_size must be at most 1,000,000,000, not 1e"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers must be at most 10,000"),
        ({"vocab_size": 10**400}, "vocab_size must be at most"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings must be at most"),
        ({"model_type": "qwen3_moe", "num_experts_per_tok": 9}, "num_experts_per_tok = 9 is more than num_experts = 8"),
        ({"model_type": "gpt_oss", "num_experts_per_tok": 9}, "9 is more than num_local_experts = 8"),
    ],
)
def test_absurd_fields_are_refused_by_name(changes, message):
    sizes = dict.fromkeys((*EXPERTS, "num_local_experts"), 8)
    with pytest.raises(ModelError, match=f"config.json: .*{re.escape(message)}"):
        from_config({**DENSE, **sizes, **changes})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, not 'false'"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object, not 'yarn'"),
        ({"rope_theta": "1e6"}, "rope_theta must be a positive number, not '1e6'"),
        ({"sliding_window": "4k"}, "sliding_window must be a positive integer, not '4k'"),
        ({"architectures": "Qwen3ForCausalLM"}, "architectures must be a list of names, not 'Qwen3ForCausalLM'"),
        ({"layer_types": [["full_attention"]]}, "layer_types must be a list of"),
        ({"layer_types": ["full_attention"] * 9}, "kinds of layers, not 9"),
        ({"max_position_embedding": 64}, "max_position_embedding is an unknown field"),
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "yarn"}},
            "rope_parameters ('default') and rope_scaling ('yarn') have different types",
        ),
    ],
)
def test_fields_that_would_be_read_otherwise_than_meant_are_refused_by_name(fields, message):
    with pytest.raises(ModelError, match=f"config.json: .*{re.escape(message)}"):
        from_config({**DENSE, "model_type": "qwen3", **fields})


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_moe", "deepseek_v3"])
def test_two_different_numbers_of_experts_are_refused(family):
    sizes = dict.fromkeys(EXPERTS, 8) | {"n_routed_experts": 8, "num_experts": 8, "model_type": family}
    assert from_config({**DENSE, **sizes}).experts == 8
    with pytest.raises(ModelError, match=r"num_experts = 4 and n_routed_experts = 8 contradict each other"):
        from_config({**DENSE, **sizes, "num_experts": 4})


@pytest.mark.parametrize("endpoint", ["hf-mirror.example", "http://[", "http://127.0.0.1:9"])
def test_a_hub_that_cannot_be_asked_is_one_message(endpoint, monkeypatch, tmp_path):
    for name, value in (("HF_ENDPOINT", endpoint), ("HF_HUB_OFFLINE", "0"), ("HF_HUB_CACHE", str(tmp_path))):
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ModelError, match=r"someone/tiny is neither in the offline table nor in the cache, and .* returned no config"
    ):
        load_model("someone/tiny")


def test_experts_of_each_kind():
    moe = {**DENSE, "num_experts": 8, "moe_intermediate_size": 32, "n_shared_experts": 2}
    assert from_config({**moe, "model_type": "qwen3_moe"}).experts == 8
    deepseek = from_config({**moe, "model_type": "deepseek_v3"})
    assert (deepseek.experts, deepseek.shared_ffn, deepseek.latent_attention) == (8, 64, True)
    shared = from_config({**moe, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 48})
    assert shared.shared_ffn == 48


def test_the_text_part_of_a_multimodal_config():
    assert from_config({"model_type": "qwen3_vl", "text_config": {**DENSE, "model_type": "qwen3_vl_text"}}).heads == 4


@pytest.mark.parametrize(
    ("outer", "inner", "tied"),
    [
        ({}, {}, True), ({"tie_word_embeddings": True}, {"tie_word_embeddings": False}, True),
        ({"tie_word_embeddings": False}, {}, False), ({}, {"tie_word_embeddings": False}, False),
    ],
)  # fmt: skip
def test_the_whole_model_says_whether_the_embedding_of_its_text_part_is_tied(outer, inner, tied):
    text = {**DENSE, **inner, "model_type": "gemma3_text"}
    assert from_config({"model_type": "gemma3", **outer, "text_config": text}).tied_embeddings == tied


def test_what_the_checkpoint_of_gemma_3_leaves_out():
    """google/gemma-3-4b-it as it is published: 3.88 B parameters in its text part."""
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    model = from_config(
        {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    )
    assert (model.heads, model.kv_heads, model.head_dim, model.vocab_size) == (8, 4, 256, 262208)
    assert total_parameters(model) == pytest.approx(3.88e9, rel=0.002)
    assert model.window == 1024 and set(range(34)) - {*model.sliding_layers} == {5, 11, 17, 23, 29}


def test_the_sliding_layers_are_those_of_transformers():
    mapping = pytest.importorskip("transformers").CONFIG_MAPPING
    for name in ("gemma2", "gemma3_text", "olmo3", "exaone4", "gpt_oss", "qwen2", "qwen3", "smollm3"):
        for changes in ({}, {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3}):
            theirs = mapping[name](num_hidden_layers=8, **changes).to_dict()
            listed = [i for i, kind in enumerate(theirs["layer_types"]) if kind == "sliding_attention"]
            short = {key: value for key, value in theirs.items() if key != "layer_types"}
            for config in (theirs, short) if name != "smollm3" else (theirs,):  # which derives them from another list
                model = from_config(config)
                assert [*model.sliding_layers] == (listed if model.window else []), (name, changes)
                assert bool(listed) == bool(model.sliding_layers), (name, changes)


def test_an_unknown_dense_family_is_counted_by_the_usual_fields():
    usual = {**DENSE, "model_type": "granite", "num_key_value_heads": 2}
    model = from_config(usual)
    assert not model.known_family and model.family == "granite"
    assert total_parameters(model) == total_parameters(from_config({**usual, "model_type": "llama"}))
    for unusual in ({"num_experts": 8}, {"kv_lora_rank": 4}, {"mamba_d_state": 2}, {"layer_types": ["conv", "conv"]}):
        with pytest.raises(ModelError, match="unknown model_type 'granite'"):
            from_config({**usual, **unusual})


def test_configs_that_the_pinned_transformers_writes(tmp_path):
    """Every known family that transformers has a class for, saved with a small shape by that class."""
    mapping = pytest.importorskip("transformers").CONFIG_MAPPING
    shape = {k: v for k, v in DENSE.items() if k != "model_type"} | {
        "num_key_value_heads": 2, "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "n_shared_experts": 2,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, "num_experts_per_tok": 2,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    }  # fmt: skip
    outside = {name for name in FAMILIES if name not in mapping} | {"kimi_k2"}
    assert outside == {"mimo", "kimi_k2"}  # their configs come with the models' own code
    for name in FAMILIES.keys() - outside:
        fields = {**mapping[name]().to_dict(), **dict.fromkeys(mapping[name].attribute_map)}
        config = mapping[name](**{k: v for k, v in shape.items() if k in fields}, pad_token_id=None)
        config.save_pretrained(tmp_path / name)
        spec = load_model(tmp_path / name)
        assert (spec.family, spec.heads, spec.kv_heads, spec.layers) == (name, 4, 2, 2)
        assert spec.experts == (8 if FAMILIES[name].experts else 0), name
        assert bool(spec.shared_ffn) == bool(FAMILIES[name].shared_ffn or FAMILIES[name].shared_experts), name
