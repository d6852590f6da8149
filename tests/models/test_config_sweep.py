"""Every field of a family's Hugging Face config, altered alone: log-probs stay Hugging Face's, or it is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from altered_configs import altered
from test_override_sweep import LENGTHS, N_PARTS, PARTS, log_probs_and_step
from tiny_models import VARIANTS, Variant, hugging_face_log_probs, write_tiny
from tolerance import magnitude_of, rounding
from trainer_jobs import Setting, make_batch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from allocation.model_spec import FAMILIES
from areal_like.backends.fsdp.support import WITHOUT_MODEL, WITHOUT_SERVER
from areal_like.backends.megatron.bridges import proven

REFUSED = WITHOUT_MODEL | WITHOUT_SERVER
DENSE = [family for family, shape in FAMILIES.items() if not shape.experts and family not in REFUSED]
BASES = ("qwen3_moe-raw", "qwen2_moe-normalised", "glm4_moe-many-groups")  # where others' fields mean something else


def differing(
    ranks, checks, folder: Path, variant: Variant, backend: str, bridge: str, part: slice = slice(None)
) -> dict[str, str]:
    """The altered fields that are let through and do not start, or compute another model, and what they do."""
    found, tried = {}, 0
    for name, value in [("nothing", None), *list(altered(variant))[part]]:
        fields = {**variant.fields, **({} if name == "nothing" else {name: value})}
        model = folder / "model"
        shutil.rmtree(model, ignore_errors=True)
        try:
            network = write_tiny(Variant(variant.family, fields), model)
            expected = hugging_face_log_probs(network, make_batch(lengths=LENGTHS))
        except Exception:  # noqa: BLE001  # transformers refuses it in many ways
            assert name != "nothing"
            continue
        if refused := checks.errors(model, f"actor.backend={backend}:d1", f"actor.megatron.bridge_type={bridge}"):
            assert name != "nothing", refused
            continue
        (outcome,) = ranks.run(log_probs_and_step, 1, Setting(model, bridge=bridge, backend=backend))
        tried += 1
        if isinstance(outcome, str):
            found[f"{name}={json.dumps(value)}"] = outcome
        elif not np.allclose(outcome[0][1], expected[outcome[0][0]], rtol=0, atol=rounding(magnitude_of(expected))):
            found[f"{name}={json.dumps(value)}"] = f"differs by {np.abs(outcome[0][1] - expected[outcome[0][0]]).max()}"
    assert tried > 10 // (part.step or 1)
    return found


def trained(names: Any) -> list[tuple[str, str]]:
    return [(name, bridge) for name in names for bridge in VARIANTS[name].bridges]


@pytest.mark.parametrize("part", PARTS)
def test_a_field_of_the_family_with_most_fields(ranks, checks, tmp_path, part):
    variant = VARIANTS["glm4_moe-many-groups"]
    assert differing(ranks, checks, tmp_path, variant, "megatron", "mbridge", slice(part, None, N_PARTS)) == {}


@pytest.mark.long
@pytest.mark.parametrize(("name", "bridge"), trained([*proven.FAMILIES, *BASES]))
def test_a_field_under_megatron(ranks, checks, tmp_path, name, bridge):
    assert differing(ranks, checks, tmp_path, VARIANTS[name], "megatron", bridge) == {}


@pytest.mark.long
@pytest.mark.parametrize("name", [*DENSE, "gemma3_text-window"])
def test_a_field_under_fsdp(ranks, checks, tmp_path, name):
    assert differing(ranks, checks, tmp_path, VARIANTS[name], "fsdp", "mbridge") == {}


def test_a_family_has_a_model_of_transformers_or_is_refused_under_fsdp():
    ours = {"kimi_k2"}  # registered by data/model_types.py
    assert FAMILIES.keys() - MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - ours == WITHOUT_MODEL


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"text_config": {}, "architectures": ["Gemma3ForConditionalGeneration"]}, "no test shows"),
        ({"model_type": "qwen2_5_vl_text"}, "family qwen2_5_vl_text"),
        ({"model_type": "mimo"}, "family mimo"),
        ({"use_bidirectional_attention": True}, "later ones"),
    ],
)
def test_what_transformers_has_no_language_model_of_is_refused_under_fsdp(checks, tmp_path, fields, words):
    write_tiny(Variant("gemma3_text"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    whole = {**config, **fields, **({"text_config": config} if "text_config" in fields else {})}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    found = checks.errors(tmp_path, "actor.backend=fsdp:d1")
    assert any(words in error for error in found), found


@pytest.mark.parametrize(
    ("name", "bridge", "refused"),
    [
        ("qwen3_moe", "megatron-bridge", False),
        ("qwen3_moe", "mbridge", True),
        ("glm4_moe", "megatron-bridge", True),
        ("olmoe", "megatron-bridge", True),
        ("mixtral", "mbridge", True),
    ],
)
def test_experts_one_by_one_are_for_the_bridge_that_names_them(ranks, checks, tmp_path, name, bridge, refused):
    write_tiny(VARIANTS[name], tmp_path)
    apart = ["actor.megatron.moe_grouped_gemm=false", f"actor.megatron.bridge_type={bridge}"]
    errors = checks.errors(tmp_path, *apart)
    assert [error.split(":")[0] for error in errors] == [
        "RUN-MEGATRON-EXPERT-NAMES actor.megatron.moe_grouped_gemm"
    ] * refused
    setting = Setting(tmp_path, bridge=bridge, megatron={"moe_grouped_gemm": False})
    (outcome,) = ranks.run(log_probs_and_step, 1, setting)
    assert isinstance(outcome, str) == refused
