"""What the FSDP trainer cannot do is said before start."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from allocation.families import FAMILIES, TRAINED
from allocation.model_spec import ModelError, from_config, load_model
from areal_like.config.load import load
from areal_like.config.schema import InitModelConfig
from areal_like.demo.init_model import write_init_model
from areal_like.preflight import model, preflight
from areal_like.preflight.view import RoleView
from areal_like.trainer.fsdp.support import NOT_PACKED, WITHOUT_MODEL, WITHOUT_SERVER

FSDP = "actor.backend=fsdp:d2"


def said(write, *overrides):
    return [(f.code, f.key.split(" ")[0], f.help) for f in preflight(load(write(), overrides)).findings]


@pytest.mark.parametrize("layout", ["fsdp:d2", "fsdp:d1c2"])
def test_it_may_start(write, layout):
    assert said(write, f"actor.backend={layout}") == []


@pytest.mark.parametrize(("layout", "n_gpus", "instead"), [("fsdp:d1t2", 2, "fsdp:d2"), ("fsdp:t2c2", 4, "fsdp:d2c2")])
def test_it_has_no_tensor_parallelism(write, layout, n_gpus, instead):
    gpus = f"cluster.n_gpus_per_node={n_gpus + 1}"
    ((code, key, help),) = said(write, f"actor.backend={layout}", gpus)
    assert (code, key) == ("RUN-ROLE-FSDP-TENSOR", "actor.backend")
    assert help.startswith(f"write {instead},")
    assert said(write, f"actor.backend={instead}", gpus) == []


def test_heads_that_ranks_cannot_share_are_refused_with_layouts_that_will_do(write):
    def findings(layout):
        return preflight(load(write(), [f"actor.backend={layout}", "cluster.n_gpus_per_node=5"])).findings

    (found,) = [f for f in findings("fsdp:c3") if f.severity == "error"]
    assert (found.code, found.key.split(" ")[0]) == ("ALLOC-SEQUENCE-HEADS", "actor.backend")
    assert found.nearest
    for layout in found.nearest:
        assert "error" not in {str(f.severity) for f in findings(layout)}


@pytest.mark.parametrize("attention", [{"attn_logit_softcapping": 50.0}, {"layer_types": ["chunked_attention"] * 3}])
def test_sequences_of_attention_that_ranks_cannot_share_are_refused(write, tmp_path, attention):
    write_init_model(InitModelConfig(), tmp_path / "model", seed=0)
    file = tmp_path / "model/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | attention))
    model = ["actor.init_model=null", f"actor.path={tmp_path / 'model'}"]
    assert said(write, "actor.backend=fsdp:d1c2", *model) == [
        ("RUN-FSDP-CONTEXT", "actor.path", "write fsdp:d2 as its layout")
    ]
    assert said(write, "actor.backend=fsdp:d2", *model) == []


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("layout", ["fsdp:d2", "fsdp:d1c2"])
def test_rope_that_depends_on_the_longest_sequence_of_a_pack_is_refused(write, tmp_path, kind, layout):
    write_init_model(InitModelConfig(), tmp_path / "model", seed=0)
    file, rope = tmp_path / "model/config.json", {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    for each in (rope, {"full_attention": {"rope_type": "default"}, "sliding_attention": rope}):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_parameters": each}))
        model = ["actor.init_model=null", f"actor.path={tmp_path / 'model'}"]
        assert ("RUN-FSDP-ROPE", "actor.path") in [
            found[:2] for found in said(write, f"actor.backend={layout}", *model)
        ]


def test_float32_is_refused_on_gpus(write):
    on_gpus = [FSDP, "device=cuda", "cluster.n_gpus_per_node=3"]
    found = [found for found in said(write, *on_gpus) if found[1] == "actor.dtype"]
    assert found == [("RUN-FSDP-DTYPE", "actor.dtype", "write actor.dtype=bfloat16")]
    assert "actor.dtype" not in [key for _, key, _ in said(write, *on_gpus, "actor.dtype=bfloat16")]


@pytest.mark.parametrize("layout", ["fsdp:d2", "fsdp:d1c2"])
def test_capped_attention_shares_no_prompts(write, tmp_path, layout):
    write_init_model(InitModelConfig(), tmp_path / "model", seed=0)
    file = tmp_path / "model/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"attn_logit_softcapping": 50.0}))
    capped = ["actor.init_model=null", f"actor.path={tmp_path / 'model'}", f"actor.backend={layout}"]
    found = said(write, *capped, "actor.mb_spec.share_prompts=true")
    assert (
        "RUN-SHARED-PROMPTS-FSDP",
        "actor.mb_spec.share_prompts",
        "write actor.mb_spec.share_prompts=false",
    ) in found
    assert "RUN-SHARED-PROMPTS-FSDP" not in [code for code, *_ in said(write, *capped)]


def test_it_takes_experts(write):
    assert said(write, FSDP, "actor.init_model.num_experts=4", "actor.init_model.tie_word_embeddings=false") == []


def test_a_family_whose_sequences_see_each_other_in_a_pack_is_refused(write, tmp_path):
    linear = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "linear_num_value_heads": 4}
    save_tiny(tmp_path / "model", "qwen3_next", **linear, linear_num_key_heads=2, shared_expert_intermediate_size=32)
    model = ["actor.init_model=null", f"actor.path={tmp_path / 'model'}"]
    assert ("RUN-FSDP-PACKING", "actor.path") in [found[:2] for found in said(write, FSDP, *model)]


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


@pytest.mark.parametrize(("family", "codes"), [("smollm3", []), ("seed_oss", []), ("olmo3", ["RUN-FSDP-SERVER"])])
def test_further_dense_families_may_start_if_the_servers_can(write, tmp_path, family, codes):
    save_tiny(tmp_path / "model", family)
    model = ["actor.init_model=null", f"actor.path={tmp_path / 'model'}"]
    assert [code for code, *_ in said(write, FSDP, *model)] == codes


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3_text"])
def test_an_output_layer_that_servers_would_not_load_is_refused(write, tmp_path, family):
    model = [FSDP, "actor.init_model=null", f"actor.path={tmp_path / 'model'}"]
    save_tiny(tmp_path / "model", family, tie_word_embeddings=True)
    assert "RUN-FSDP-UNTIED" not in [code for code, *_ in said(write, *model)]
    save_tiny(tmp_path / "model", family, tie_word_embeddings=False)
    assert ("RUN-FSDP-UNTIED", "actor.path") in [found[:2] for found in said(write, *model)]


def test_an_unknown_dense_family_may_start_if_its_weights_are_those_that_are_counted(write, tmp_path):
    model = ["actor.init_model=null", f"actor.path={tmp_path / 'model'}"]
    save_tiny(tmp_path / "model", "granite")
    assert [code for code, *_ in said(write, FSDP, *model)] == ["ALLOC-FAMILY"]
    save_tiny(tmp_path / "model", "starcoder2")  # its feed-forward part has no gate
    checked = preflight(load(write(), [FSDP, *model]))
    assert not checked.ok
    assert any("parameters; a dense model of its sizes has" in f.message for f in checked.findings)
    file = tmp_path / "model/config.json"
    save_tiny(tmp_path / "model", "granite")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "granit"}))
    assert ("RUN-FSDP-FAMILY", "actor.path") in [found[:2] for found in said(write, FSDP, *model)]


def test_a_quantized_checkpoint_is_refused(write, tmp_path):
    write_init_model(InitModelConfig(), tmp_path / "model", seed=0)
    file = tmp_path / "model/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))
    model = ["actor.init_model=null", f"actor.path={tmp_path / 'model'}"]
    assert said(write, FSDP, *model) == [("RUN-FSDP-QUANTIZED", "actor.path", "dequantize the checkpoint")]


def test_a_window_that_gpu_servers_ignore_is_refused_beyond_it(write, tmp_path):
    save_tiny(tmp_path / "model", "mistral", sliding_window=8)
    config = load(write(), [FSDP, "actor.init_model=null", f"actor.path={tmp_path / 'model'}"]).config
    spec = load_model(str(tmp_path / "model"))

    def codes(device, window):
        view = RoleView(config, "actor", config.actor, device, replace(spec, window=window))
        return [found.code for found in model._window(view, view.model)]

    assert codes("cuda", 8) == ["RUN-WINDOW-SERVER"]
    assert codes("cpu", 8) == codes("cuda", config.longest_sequence) == []


def test_the_page_names_the_families_that_train_and_what_is_refused():
    text = (Path(__file__).parents[2] / "docs/bridges.md").read_text()
    known, _, refused = text.partition("sizes of these families:")[2].partition("(`model_type`")
    taken = set(FAMILIES) - WITHOUT_MODEL - WITHOUT_SERVER - NOT_PACKED.keys()
    assert taken == set(TRAINED["fsdp"])
    assert set(re.findall(r"`(\w+)`", known)) == taken
    assert all(f"`{family}`" in refused for family in NOT_PACKED)
    assert "`granite` is accepted and `starcoder2` is rejected" in refused
    for family in ("granite", "starcoder2"):
        with pytest.raises(ModelError, match="unknown model_type"):
            from_config({"model_type": family})
