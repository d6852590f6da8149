"""What the FSDP trainer cannot do is said before start."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from allocation.families import FAMILIES, TRAINED
from allocation.model_spec import Counted, ModelError, from_config, load_model
from allocation.parameters import total_parameters
from areal_like.config.load import load
from areal_like.config.schema import InitModelConfig
from areal_like.demo.init_model import write_init_model
from areal_like.preflight import model as preflight_model
from areal_like.preflight import preflight
from areal_like.preflight.counted import causal_families
from areal_like.preflight.role_exclusions import MODEL
from areal_like.preflight.view import RoleView
from areal_like.rollout.sglang.architectures import served_architectures
from areal_like.trainer.fsdp.support import NOT_PACKED, WITHOUT_MODEL, WITHOUT_SERVER, field_apart

FSDP = "actor.backend=fsdp:d2"


def said(write, *overrides):
    return [(f.code, f.key.split(" ")[0], f.help) for f in preflight(load(write(), overrides)).findings]


@pytest.mark.parametrize("layout", ["fsdp:d2", "fsdp:d1c2", "fsdp:d1t2"])
def test_it_may_start(write, layout):
    assert said(write, f"actor.backend={layout}") == []


EXPERTS = ("actor.init_model.num_experts=4", "actor.init_model.tie_word_embeddings=false")


@pytest.mark.parametrize(
    ("layout", "n_gpus", "instead", "model"),
    [
        ("fsdp:d1t2", 2, "fsdp:d2", EXPERTS),
        ("fsdp:t2c2", 4, "fsdp:d2c2", EXPERTS),
        ("fsdp:d1t4", 4, "fsdp:d4", ()),  # of 2 key heads
    ],
)
def test_matrices_that_ranks_cannot_split_are_refused(write, layout, n_gpus, instead, model):
    gpus = f"cluster.n_gpus_per_node={n_gpus + 1}"
    ((code, key, help),) = [
        found for found in said(write, f"actor.backend={layout}", gpus, *model) if found[0] != "ALLOC-KV-COPIES"
    ]
    assert (code, key) == ("RUN-FSDP", "actor.path")
    assert help.startswith(f"use the layout {instead},")
    assert said(write, f"actor.backend={instead}", gpus, *model) == []


def test_heads_that_ranks_cannot_share_are_refused_with_layouts_that_will_do(write):
    def findings(layout):
        return preflight(load(write(), [f"actor.backend={layout}", "cluster.n_gpus_per_node=5"])).findings

    (found,) = [f for f in findings("fsdp:c3") if f.severity == "error"]
    assert (found.code, found.key.split(" ")[0]) == ("ALLOC-SEQUENCE-HEADS", "actor.backend")
    assert found.nearest
    for layout in found.nearest:
        assert "error" not in {str(f.severity) for f in findings(layout)}


@pytest.mark.parametrize("attention", [{"layer_types": ["chunked_attention"] * 3}])
def test_sequences_of_attention_that_ranks_cannot_share_are_refused(write, tmp_path, attention):
    write_init_model(InitModelConfig(), tmp_path / "model", seed=0)
    file = tmp_path / "model/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | attention))
    model = ["actor.init_model=null", f"actor.path={tmp_path / 'model'}"]
    assert said(write, "actor.backend=fsdp:d1c2", *model) == [("RUN-FSDP", "actor.path", "use the layout fsdp:d2")]
    assert said(write, "actor.backend=fsdp:d2", *model) == []


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("layout", ["fsdp:d2", "fsdp:d1c2"])
def test_rope_that_depends_on_the_longest_sequence_of_a_pack_is_refused(write, tmp_path, kind, layout):
    write_init_model(InitModelConfig(), tmp_path / "model", seed=0)
    file, rope = tmp_path / "model/config.json", {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    for each in (rope, {"full_attention": {"rope_type": "default"}, "sliding_attention": rope}):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_parameters": each}))
        model = ["actor.init_model=null", f"actor.path={tmp_path / 'model'}"]
        assert ("RUN-FSDP", "actor.path") in [found[:2] for found in said(write, f"actor.backend={layout}", *model)]


def test_float32_is_refused_on_gpus(write):
    on_gpus = [FSDP, "device=cuda", "cluster.n_gpus_per_node=3"]
    found = [found for found in said(write, *on_gpus) if found[1] == "actor.dtype"]
    assert found == [("RUN-FSDP", "actor.dtype", "set `actor.dtype=bfloat16`")]
    assert "actor.dtype" not in [key for _, key, _ in said(write, *on_gpus, "actor.dtype=bfloat16")]


@pytest.mark.parametrize("layout", ["fsdp:d2", "fsdp:d1c2"])
def test_chunked_attention_shares_no_prompts(write, tmp_path, layout):
    write_init_model(InitModelConfig(), tmp_path / "model", seed=0)
    file = tmp_path / "model/config.json"
    made = json.loads(file.read_text())
    kinds = ["chunked_attention"] * made["num_hidden_layers"]
    file.write_text(json.dumps(made | {"layer_types": kinds}))
    capped = ["actor.init_model=null", f"actor.path={tmp_path / 'model'}", f"actor.backend={layout}"]
    found = said(write, *capped, "actor.mb_spec.share_prompts=true")
    assert (
        "RUN-SHARED-PROMPTS",
        "actor.mb_spec.share_prompts",
        "set `actor.mb_spec.share_prompts=false`",
    ) in found
    assert "RUN-SHARED-PROMPTS" not in [code for code, *_ in said(write, *capped)]


def test_it_takes_experts(write):
    assert said(write, FSDP, "actor.init_model.num_experts=4", "actor.init_model.tie_word_embeddings=false") == []


def test_a_family_whose_sequences_see_each_other_in_a_pack_is_refused(write, tmp_path):
    write_init_model(InitModelConfig(), tmp_path / "model", seed=0)
    file = tmp_path / "model/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "phimoe"}))
    model = ["actor.init_model=null", f"actor.path={tmp_path / 'model'}"]
    assert ("RUN-FSDP", "actor.path") in [found[:2] for found in said(write, FSDP, *model)]


@pytest.mark.parametrize("critic", ["critic.backend=fsdp:d1c2", "critic.timeout_s=60", "critic.backend=megatron:d2"])
def test_a_critic_has_either_backend(write, critic):
    assert "error" not in {str(f.severity) for f in preflight(load(write(), [FSDP, critic])).findings}


def save_tiny(folder, model_type, **fields):
    """A checkpoint of a small model of some family that transformers has, with the tokenizer of a made model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    write_init_model(InitModelConfig(), folder, seed=0)
    made = json.loads((folder / "config.json").read_text())
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), made["eos_token_id"])
    shape = {name: made[name] for name in (*names, "vocab_size", "max_position_embeddings")} | fields
    for file in folder.glob("*.safetensors"):
        file.unlink()
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **shape, **ends))
    model.to(torch.float32).save_pretrained(folder)


@pytest.mark.parametrize(("family", "codes"), [("smollm3", []), ("seed_oss", []), ("olmo3", ["RUN-FSDP"])])
def test_further_dense_families_may_start_if_the_servers_can(write, tmp_path, family, codes):
    save_tiny(tmp_path / "model", family)
    model = ["actor.init_model=null", f"actor.path={tmp_path / 'model'}"]
    assert [code for code, *_ in said(write, FSDP, *model)] == codes


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3_text"])
def test_an_output_layer_that_servers_would_not_load_is_refused(write, tmp_path, family):
    model = [FSDP, "actor.init_model=null", f"actor.path={tmp_path / 'model'}"]
    save_tiny(tmp_path / "model", family, tie_word_embeddings=True)
    assert "RUN-FSDP" not in [code for code, *_ in said(write, *model)]
    save_tiny(tmp_path / "model", family, tie_word_embeddings=False)
    assert ("RUN-FSDP", "actor.path") in [found[:2] for found in said(write, *model)]


def test_a_family_that_only_transformers_knows_may_start_with_its_own_weights(write, tmp_path):
    """Its parameters are counted: a starcoder2's feed-forward part has no gate."""
    model = [FSDP, "actor.init_model=null", f"actor.path={tmp_path / 'model'}"]
    save_tiny(tmp_path / "model", "starcoder2", tie_word_embeddings=False)
    checked = preflight(load(write(), model))
    assert [found.code for found in checked.findings] == []
    tensors = load_file(tmp_path / "model/model.safetensors")
    spec = checked.job.models["actor"]
    assert total_parameters(spec) == sum(tensor.numel() for tensor in tensors.values())
    assert spec.ffn == json.loads((tmp_path / "model/config.json").read_text())["intermediate_size"]
    lacking = {name: tensor for name, tensor in tensors.items() if "layers.0" not in name}
    for changed, message in (
        (lacking, "has no model.layers.0."),
        (
            {**tensors, "model.more": tensors["lm_head.weight"].clone()},
            "has model.more, which transformers' model does not",
        ),
        ({**tensors, "lm_head.weight": tensors["lm_head.weight"][:-1].clone()}, "lm_head.weight is 49 x 128"),
    ):
        save_file(changed, tmp_path / "model/model.safetensors", {"format": "pt"})
        errors = [found for found in preflight(load(write(), model)).findings if found.severity == "error"]
        assert len(errors) == 1 and message in errors[0].message, errors


def test_a_family_that_transformers_or_the_servers_do_not_know_is_refused(write, tmp_path):
    write_init_model(InitModelConfig(), tmp_path / "model", seed=0)
    file, model = tmp_path / "model/config.json", [FSDP, "actor.init_model=null", f"actor.path={tmp_path / 'model'}"]
    made = json.loads(file.read_text())
    file.write_text(json.dumps(made | {"model_type": "granit"}))
    assert ("RUN-FSDP", "actor.path") in [found[:2] for found in said(write, *model)]
    assert "starcoder2" in causal_families() and "granit" not in causal_families()
    assert {"Starcoder2ForCausalLM", "Qwen3ForCausalLM", "Phi3ForCausalLM"} <= served_architectures()
    config = load(write(), model).config
    spec = replace(from_config(made), known_family=False, counted=Counted(1, 1, 1))
    view = RoleView(config, "actor", config.actor, "cpu", spec, description={"architectures": ["HeliumForCausalLM"]})
    (row,) = (row for row in MODEL if row.excludes.name == "this architecture")
    assert row.find_reason(view)
    assert not row.find_reason(replace(view, description={"architectures": ["GraniteForCausalLM"]}))


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}},
        {"topk_method": "group_limited_greedy"},
        {"norm_topk_prob": True},
    ],
)
def test_a_deepseek_v2_that_servers_compute_otherwise_is_refused(fields):
    config = {"model_type": "deepseek_v2", "rope_parameters": {"rope_type": "default"}, "topk_method": "greedy"}
    assert field_apart(config) is None
    assert field_apart({**config, **fields}) is not None
    assert field_apart({**config, **fields, "model_type": "deepseek_v3"}) is None


@pytest.mark.parametrize(
    "fields", [{"norm_topk_prob": False}, {"moe_intermediate_size": 64}, {"moe_intermediate_size": 128}]
)
def test_a_qwen3_vl_with_experts_that_servers_compute_otherwise_is_refused(fields):
    """transformers cannot know whether square matrices are transposed."""
    text = {"hidden_size": 128, "moe_intermediate_size": 48}
    assert field_apart({"model_type": "qwen3_vl_moe", "text_config": text}) is None
    assert field_apart({"model_type": "qwen3_vl_moe", "text_config": {**text, **fields}}) is not None


@pytest.mark.parametrize(
    ("method", "help"),
    [
        ("fp8", "run `areal-like dequantize {} DIRECTORY`, and write actor.path=DIRECTORY"),
        ("awq", "use an unquantized checkpoint of the model"),
    ],
)
@pytest.mark.parametrize("backend", [FSDP, "actor.backend=megatron:d2"])
def test_a_quantized_checkpoint_is_refused(write, tmp_path, backend, method, help):
    write_init_model(InitModelConfig(), tmp_path / "model", seed=0)
    file = tmp_path / "model/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": method}}))
    model = ["actor.init_model=null", f"actor.path={tmp_path / 'model'}"]
    found = [("RUN-MODEL-QUANTIZED", "actor.path", help.format(tmp_path / "model"))]
    assert said(write, backend, *model) == found


def test_a_window_that_gpu_servers_ignore_is_refused_beyond_it(write, tmp_path):
    save_tiny(tmp_path / "model", "mistral", sliding_window=8)
    config = load(write(), [FSDP, "actor.init_model=null", f"actor.path={tmp_path / 'model'}"]).config
    spec = load_model(str(tmp_path / "model"))

    def codes(device, window):
        view = RoleView(config, "actor", config.actor, device, replace(spec, window=window))
        return [found.code for found in preflight_model._window(view, view.model)]

    assert codes("cuda", 8) == ["RUN-WINDOW-SERVER"]
    assert codes("cpu", 8) == codes("cuda", config.longest_sequence) == []


def test_the_page_names_the_families_that_train_and_what_is_refused():
    text = (Path(__file__).parents[2] / "docs/bridges.md").read_text()
    known, _, refused = text.partition("sizes of these families:")[2].partition("(`model_type`")
    taken = set(FAMILIES) - WITHOUT_MODEL - WITHOUT_SERVER - NOT_PACKED.keys()
    assert taken == set(TRAINED["fsdp"])
    assert set(re.findall(r"`(\w+)`", known)) == taken
    assert all(f"`{family}`" in refused for family in NOT_PACKED.keys() & FAMILIES.keys())
    assert {"phimoe", "glm_moe_dsa", "mamba2"} <= NOT_PACKED.keys() <= causal_families() | FAMILIES.keys()
    for family in ("granite", "starcoder2"):
        with pytest.raises(ModelError, match="unknown model_type"):
            from_config({"model_type": family})
