"""Overrides of TransformerConfig that Megatron-core refuses are refused before start."""

from dataclasses import replace
from types import SimpleNamespace

from test_preflight import check, errors

from allocation.model_spec import load_model
from areal_like.config.load import load
from areal_like.preflight import overrides
from areal_like.preflight.view import RoleView

in_a_process = overrides._answer

OVERRIDES = "actor.megatron.override_transformer_config"


def test_what_megatron_refuses_is_refused_before_start(write, monkeypatch):
    monkeypatch.setattr(overrides, "_answer", in_a_process)
    right, wrong = f"{OVERRIDES}.attention_softmax_in_fp32=true", f"{OVERRIDES}.fp8_output_proj=true"
    (found,) = errors(write(), right, wrong)
    assert found.where == f"{OVERRIDES}.fp8_output_proj (command line)"
    assert "Megatron-core rejects the overrides: fp8_output_proj must be used together with fp8 mode" in found.message
    assert found.help == "leave out fp8_output_proj"
    assert not check(write(), right).findings


def test_what_cannot_be_tried_is_a_warning(write, monkeypatch):
    monkeypatch.setattr(overrides, "_answer", in_a_process)
    monkeypatch.setattr("sys.executable", "/bin/false")
    checked = check(write(), f"{OVERRIDES}.attention_softmax_in_fp32=false")
    assert checked.ok
    assert "could not be checked" in checked.findings[0].message


def test_a_fused_rotary_embedding_beside_latent_attention_is_refused(write):
    key = f"{OVERRIDES}.apply_rope_fusion"
    config = load(write(), [f"{key}=true"]).config
    layout = SimpleNamespace(backend="megatron")
    view = RoleView(config, "actor", config.actor, "cuda", load_model("DeepSeek-V3"), layout)
    (found,) = overrides.try_overrides([view])
    assert (found.code, found.key) == ("RUN-BRIDGE", key)
    assert found.help == "leave out apply_rope_fusion"
    without = load(write(), []).config
    assert list(overrides.try_overrides([replace(view, run=without, engine=without.actor)])) == []
