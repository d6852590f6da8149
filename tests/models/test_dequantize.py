"""`areal-like dequantize`: quantized checkpoints in bfloat16, as transformers dequantizes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import VARIANTS, Variant, write_tiny
from transformers import AutoModelForCausalLM, Mxfp4Config
from typer.testing import CliRunner

from areal_like.__main__ import app
from areal_like.data.model_types import register_model_types

register_model_types()
BLOCK = 16


def dequantize(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["dequantize", *map(str, arguments)])
    return result.exit_code, result.output


def rewrite(path: Path, quantization: dict, **tensors: torch.Tensor) -> None:
    """Write a checkpoint's tensors and its quantization."""
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))


def write_fp8(family: str, path: Path) -> dict[str, torch.Tensor]:
    """Write a model in FP8 as its publishers do; return the weights that it stands for."""
    write_tiny(Variant(family), path)
    stored, meant = {}, {}
    for name, tensor in load_file(path / "model.safetensors").items():
        if tensor.dim() != 2 or "embed" in name or "lm_head" in name or name.endswith("gate.weight"):
            stored[name] = meant[name] = tensor
            continue
        rows, columns = (-(-size // BLOCK) for size in tensor.shape)
        scale = torch.rand(rows, columns) + 0.5
        spread = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: tensor.shape[0], : tensor.shape[1]]
        stored[name], stored[f"{name}_scale_inv"] = (tensor / spread).to(torch.float8_e4m3fn), scale
        meant[name] = (stored[name].float() * spread).to(torch.bfloat16)
    rewrite(path, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}, **stored)
    return meant


@pytest.mark.parametrize("family", ["deepseek_v3", "minimax_m2", "qwen3"])
def test_fp8_blocks_become_their_weights(tmp_path, family):
    meant = write_fp8(family, tmp_path / "fp8")
    code, output = dequantize(tmp_path / "fp8", tmp_path / "whole")
    assert code == 0, output
    found = load_file(tmp_path / "whole/model.safetensors")
    assert found.keys() == meant.keys()
    for name, tensor in meant.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    assert "quantization_config" not in json.loads((tmp_path / "whole/config.json").read_text())
    _, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]


def test_mxfp4_experts_become_what_transformers_makes_of_them(tmp_path):
    path = tmp_path / "mxfp4"
    write_tiny(VARIANTS["gpt_oss"], path)
    stored = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = tensor.bfloat16()
            continue
        experts, inputs, outputs = tensor.shape
        stored[f"{name}_blocks"] = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        stored[f"{name}_scales"] = torch.randint(120, 126, (experts, outputs, inputs // 32), dtype=torch.uint8)
    rewrite(path, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, **stored)
    code, output = dequantize(path, tmp_path / "whole")
    assert code == 0, output
    assert output.startswith("4 mxfp4 weights in bfloat16")
    how = Mxfp4Config(dequantize=True)
    expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, quantization_config=how).state_dict()
    found, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    for name, tensor in found.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_layers_for_multi_token_prediction_are_left_out(tmp_path):
    write_fp8("deepseek_v3", tmp_path / "fp8")
    stored = load_file(tmp_path / "fp8/model.safetensors")
    config = json.loads((tmp_path / "fp8/config.json").read_text())
    (tmp_path / "fp8/config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    save_file({**stored, "model.layers.2.eh_proj.weight": torch.ones(64, 128)}, tmp_path / "fp8/model.safetensors")
    assert dequantize(tmp_path / "fp8", tmp_path / "whole")[0] == 0
    assert not [name for name in load_file(tmp_path / "whole/model.safetensors") if ".layers.2." in name]
    assert json.loads((tmp_path / "whole/config.json").read_text())["num_nextn_predict_layers"] == 0


def test_what_cannot_be_dequantized_is_one_error_and_leaves_nothing(tmp_path):
    path, target = tmp_path / "model", tmp_path / "whole"
    write_tiny(Variant("qwen3"), path)
    assert dequantize(path, target) == (
        2,
        f"error: {path} is not quantized: its config.json has no quantization_config\n",
    )
    tensors = load_file(path / "model.safetensors")
    rewrite(path, {"quant_method": "awq"}, **tensors)
    assert "only fp8 and mxfp4 can be dequantized" in dequantize(path, target)[1]
    name = "model.layers.0.self_attn.q_proj.weight"
    rewrite(path, {"quant_method": "fp8"}, **{**tensors, name: tensors[name].to(torch.float8_e4m3fn)})
    code, output = dequantize(path, target)
    assert code == 2 and f"{name} is torch.float8_e4m3fn and has no scale" in output
    scaled = {**tensors, name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1, 4)}
    rewrite(path, {"quant_method": "fp8", "weight_block_size": [16, 16]}, **scaled)
    code, output = dequantize(path, target)
    assert code == 2 and "do not fit blocks of [16, 16]" in output
    assert [file.name for file in tmp_path.iterdir()] == ["model"]
