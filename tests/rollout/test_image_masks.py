"""Masks of image tokens that attend to later tokens of their image, on servers with Triton attention."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import Gemma3TextConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from areal_like.rollout.sglang.patch import Launch
from areal_like.rollout.sglang.patches.image_masks import draw_masks, image_arguments

COMPARE = Path(__file__).with_name("compare_masks.py")


def test_a_gpu_server_of_a_model_that_sees_whole_images_has_masks(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3"}))
    given = ["--model-path", str(tmp_path), "--chunked-prefill-size", "64"]
    adapted = [*given, *image_arguments(Launch(given, {}, cuda=True))]
    found = dict(pairwise(adapted))  # the last of several, as in SGLang
    assert (found["--chunked-prefill-size"], found["--attention-backend"]) == ("-1", "triton")
    assert {"--enable-multimodal", "--disable-prefill-cuda-graph"} < {*adapted}
    assert "--disable-cuda-graph" not in adapted, "generated tokens need no mask"
    assert "triton" not in image_arguments(Launch([*given, "--attention-backend", "triton"], {}, cuda=True))
    assert not image_arguments(Launch(given, {}, cuda=False))


@pytest.mark.parametrize("config", [{"model_type": "qwen3_vl"}, {"model_type": "gemma3_text"}, None])
def test_servers_of_other_models_keep_their_arguments(tmp_path, config):
    if config:
        (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ["--model-path", str(tmp_path), "--chunked-prefill-size", "64"]
    assert not image_arguments(Launch(arguments, {}, cuda=True))


@pytest.mark.parametrize("prefix", [0, 1, 6, 9, 12, 29])
@pytest.mark.parametrize("window", [1, 4, 30])
def test_masks_are_those_of_transformers(window, prefix):
    length, images = 30, [(4, 8), (10, 17), (25, 26)]
    config = Gemma3TextConfig(sliding_window=window + 1, attn_implementation="eager")
    group = torch.full((1, length), -1)
    for number, (first, last) in enumerate(images):
        group[0, first : last + 1] = number
    given = {
        "position_ids": torch.arange(length)[None], "block_sequence_ids": group,
        "config": config, "inputs_embeds": torch.zeros(1, length, 8), "attention_mask": None, "past_key_values": None,
    }  # fmt: skip
    made = (make(**given)[0, 0] == 0 for make in (create_causal_mask, create_sliding_window_causal_mask))
    for ours, theirs in zip(draw_masks(length - prefix, prefix, images, window), made, strict=True):
        assert torch.equal(ours, theirs[prefix:])


@pytest.mark.long
def test_kernels_with_masks_see_whole_images():
    done = subprocess.run(
        [sys.executable, COMPARE],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["ours"]) == 4 and all(apart < 1e-5 for apart in found["ours"].values()), found
    assert found["sglang"] > 0.1, "the correction is not needed any more"
