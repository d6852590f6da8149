"""Adapters before start: which layers may have one, and how much of the model they are."""

import pytest
import torch
from safetensors.torch import load_file
from test_preflight import check, errors
from test_preflight_fsdp import save_tiny

from allocation.model_spec import from_config, load_model
from areal_like.config.load import load
from areal_like.config.schema import InitModelConfig
from areal_like.demo.init_model import model_config, write_init_model
from areal_like.preflight.lora import served_parameters, trained_parameters
from areal_like.trainer.engine import LoRA
from areal_like.trainer.lora import initial_adapter

LORA = "actor.use_lora=true"
EXPERTS = ["actor.init_model.num_experts=4", "actor.init_model.tie_word_embeddings=false"]
ATTENTION = "actor.target_modules=[q_proj,k_proj,v_proj,o_proj]"


def test_a_note_says_how_much_is_trained(write, tmp_path):
    checked = check(write(), LORA, "actor.lora_rank=4")
    assert checked.ok
    note, warning = checked.findings
    assert warning.severity == "warning"
    assert "actor.init_model" in warning.key
    assert "frozen weights" in warning.message
    model, lora = tmp_path / "model", LoRA(4, 8, ("all-linear",))
    write_init_model(checked.job.config.actor.init_model, model, seed=1)
    weights = load_file(model / "model.safetensors")
    total = sum(tensor.numel() for tensor in weights.values())
    matrices = [(name, tensor.shape) for name, tensor in weights.items() if "_proj." in name]
    adapters = [initial_adapter(lora, 1, name, inputs, outputs) for name, (outputs, inputs) in matrices]
    trained = sum(adapter.a.numel() + adapter.b.numel() for adapter in adapters)
    assert note.severity == "note"
    assert note.message == (
        f"{trained:,} parameters of adapters are trained, {trained / total:.2%} of the model's {total:,}"
    )


@pytest.mark.parametrize(
    ("overrides", "key", "words", "mended"),
    [
        (["actor.target_modules=[q_porj]"], "actor.target_modules", "no linear layer q_porj", ["q_proj"]),
        (["actor.target_modules=[lm_head]"], "actor.target_modules", "no linear layer lm_head", ["all-linear"]),
        (EXPERTS, "actor.target_modules", "all-linear: adapters for experts are unsupported on Megatron", ATTENTION),
        (
            ["actor.backend=megatron:t4", "cluster.n_gpus_per_node=5"],
            "actor.target_modules",
            "splits the 2 query groups",
            "actor.target_modules=[o_proj,gate_proj,up_proj,down_proj]",
        ),
        (
            ["actor.megatron.override_transformer_config.use_transformer_engine_op_fuser=true"],
            "actor.megatron.override_transformer_config.use_transformer_engine_op_fuser",
            "ignore their adapters",
            None,
        ),
    ],
)
def test_what_cannot_have_an_adapter_is_refused_and_the_help_works(write, overrides, key, words, mended):
    (found,) = [found for found in errors(write(), LORA, *overrides) if found.code.startswith("RUN-LORA-")]
    assert found.key.startswith(key)
    assert words in found.message
    if isinstance(mended, list):
        assert set(mended) <= set(found.nearest)
        overrides, mended = overrides[:-1], f"actor.target_modules=[{mended[0]}]"
    elif mended is not None:
        assert mended in found.help
    checked = check(write(), LORA, *(overrides if mended else []), *([mended] if mended else []))
    assert checked.ok, list(map(str, checked.findings))


def test_the_layers_of_a_model_on_disk_are_those_that_may_be_named(write, tmp_path):
    model = tmp_path / "model"
    write_init_model(InitModelConfig(max_position_embeddings=64), model, seed=1)
    own = ["actor.init_model=null", f"actor.path={model}", LORA]
    checked = check(write(), *own, "actor.target_modules=[down_proj]")
    assert checked.ok
    assert [found.severity for found in checked.findings] == ["note"]
    (found,) = errors(write(), *own, "actor.target_modules=[qkv_proj]")
    assert "it has down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in found.message


@pytest.mark.parametrize(
    ("overrides", "own"),
    [
        (["ref={}"], False),
        (["ref.dtype=float32"], True),
        (["ref.update_every_steps=2"], True),
        (["ref={}", "warm_start.steps=1"], True),
    ],
)
def test_an_empty_reference_is_the_actor_without_its_adapters(write, overrides, own):
    checked = check(write(), LORA, "actor.kl_ctl=0.1", *overrides)
    assert checked.ok, list(map(str, checked.findings))
    assert ("ref" in [engine.role for engine in checked.job.plan.engines]) == own
    assert list(checked.job.config.roles) == ["actor", *(["ref"] if own else [])]


def test_an_adapter_begins_as_nothing_and_the_same_everywhere():
    lora = LoRA(rank=8, alpha=16, targets=("q_proj",))
    adapter, again = (initial_adapter(lora, 1, "model.layers.0.self_attn.q_proj", 400, 300) for _ in range(2))
    other = initial_adapter(lora, 1, "model.layers.1.self_attn.q_proj", 400, 300)
    assert torch.equal(adapter.a, again.a)
    assert not torch.equal(adapter.a, other.a)
    assert adapter.a.shape == (8, 400)
    assert adapter.a.abs().max() <= 1 / 20
    assert adapter.a.std() == pytest.approx(1 / 20 / 3**0.5, rel=0.05)
    weight = torch.randn(300, 400)
    assert torch.equal(adapter.merge(weight, lora.scale), weight)


def test_rank_and_targets_decide_what_is_trained(write):
    job = check(write(), LORA, "actor.lora_rank=2", "actor.target_modules=[q_proj,v_proj]").job
    spec_trained = 2 * 3 * (128 + 128 + 128 + 64)  # rank, layers, and both ends of each
    actor = job.config.actor
    assert trained_parameters(job.config, from_config(model_config(actor.init_model, "float32"))) == spec_trained


def test_experts_have_adapters_under_fsdp(write, tmp_path):
    checked = check(write(), LORA, *EXPERTS, "actor.backend=fsdp:d1", "actor.lora_rank=4")
    assert checked.ok, list(map(str, checked.findings))
    model, lora = tmp_path / "model", LoRA(4, 8, ("all-linear",))
    write_init_model(checked.job.config.actor.init_model, model, seed=1)
    shapes = [tensor.shape for name, tensor in load_file(model / "model.safetensors").items() if "_proj." in name]
    spec = from_config(model_config(checked.job.config.actor.init_model, "float32"))
    assert trained_parameters(checked.job.config, spec) == lora.rank * sum(map(sum, shapes))


@pytest.mark.parametrize(
    ("family", "backend"),
    [("deepseek_v3", "megatron:d1"), ("gpt_oss", "fsdp:d1"), ("qwen3_5_moe_text", "megatron:d1")],
)
def test_the_help_names_all_layers_of_attention(write, tmp_path, family, backend):
    """Of latent attention and gated delta nets too, in the place of `all-linear`."""
    names = {"deepseek_v3": "n_routed_experts", "gpt_oss": "num_local_experts"}
    experts = {names.get(family, "num_experts"): 8, "moe_intermediate_size": 16}
    save_tiny(tmp_path / "model", family, tie_word_embeddings=False, **experts)
    model = ["actor.init_model=null", f"actor.path={tmp_path / 'model'}", LORA, f"actor.backend={backend}"]

    def lora_findings(*overrides):
        checked = check(write(), *model, "actor.megatron.bridge_type=megatron-bridge", *overrides)
        return [found for found in checked.findings if found.code.startswith("RUN-LORA")]

    (found,) = lora_findings()
    assert found.code == "RUN-LORA-LAYER"
    projections = {
        "gpt_oss": "q_proj,k_proj,v_proj,o_proj",
        "deepseek_v3": "q_a_proj,q_b_proj,kv_a_proj_with_mqa,kv_b_proj,o_proj",
        "qwen3_5_moe_text": "q_proj,k_proj,v_proj,o_proj,in_proj_qkv,in_proj_z,in_proj_b,in_proj_a,out_proj",
    }
    targets = f"actor.target_modules=[{projections[family]}]"
    assert targets in found.help
    assert [found.code for found in lora_findings(targets)] == ["RUN-LORA"]


def test_a_server_has_memory_for_the_adapters_of_the_run_and_for_one_more(write):
    lora = ["actor.use_lora=true", "actor.lora_rank=32"]
    served, model = [*lora, "weight_update={adapters: true, mode: disk}"], load_model("qwen3-30b-a3b")
    for overrides, adapters in (
        (lora, 0),
        (served, 2),
        ([*served, "adapters={a: {}, b: {}}"], 3),
    ):
        config = load(write(), overrides).config
        assert served_parameters(config, model) == adapters * trained_parameters(load(write(), lora).config, model)
