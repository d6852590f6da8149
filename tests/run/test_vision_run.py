"""The example of a model that sees images: its rows and reward, and a short run of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from running import run
from vision_models import write_vlm

from areal_like.core.config.load import load
from areal_like.core.user_code import load_object
from areal_like.data.images import decode
from areal_like.preflight import preflight
from areal_like.preflight.data import image_share

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples/vision/count_cpu.yaml"
PICTURES = ROOT / "examples/vision/pictures.py"

pytestmark = pytest.mark.covers("images in data, agents, servers")


def test_the_answer_of_each_picture_is_its_number_of_bright_fields(tmp_path: Path) -> None:
    checked = preflight(load(FILE, [f"cluster.fileroot={tmp_path}"]))
    assert checked.job is not None, list(map(str, checked.findings))
    prompts, tokenizer = checked.job.train_prompts, checked.job.tokenizer
    field, reward = load_object(f"{PICTURES}:FIELD"), load_object(f"{PICTURES}:reward")
    for prompt in prompts[:64]:
        (image,) = prompt.images
        bright = np.asarray(decode(image))[field // 2 :: field, field // 2 :: field].mean(-1) > 128
        assert str(bright.sum()) == prompt.answer
        assert list(prompt.tokens).count(tokenizer.encode_text("<|image_pad|>")[0]) == bright.size
    assert {prompt.answer for prompt in prompts} == {"0", "1", "2", "3", "4"}
    assert image_share(prompts, tokenizer) == pytest.approx(4 / len(prompts[0].tokens))
    assert [reward(text, {"answer": "3"}) for text in ("3", " 3\n", "33", "")] == [1, 1, 0, 0]
    seen = {prompt.images for prompt in prompts}
    assert seen.isdisjoint(prompt.images for prompt in checked.job.valid_prompts)


MEGATRON = ("actor.backend=megatron:d1t2", "actor.megatron.bridge_type=megatron-bridge", "cluster.n_gpus_per_node=3")


def run_shortly(folder: Path, *settings: str) -> list[float]:
    """Run three steps; return the distances of the log-probs of trainer and servers."""
    short = ("total_train_steps=3", "warm_start.steps=4", "warm_start.target_reward=1")
    with run(folder, *short, *settings, config=FILE) as started:
        assert started.end() == 0, started.errors
        assert started.steps() == [1, 2, 3]
        assert started.remains() == []
    steps = [json.loads(line) for line in (started.directory / "metrics.jsonl").read_text().splitlines()]
    return [step["rollout/logprob_diff_probe"] for step in steps if "rollout/logprob_diff_probe" in step]


@pytest.mark.long
@pytest.mark.parametrize("trainer", [(), MEGATRON], ids=["fsdp", "megatron"])
def test_a_short_run_imitates_answers_and_has_the_log_probs_of_the_servers(tmp_path: Path, trainer) -> None:
    differences = run_shortly(tmp_path, *trainer)
    assert differences and max(differences) < 1e-5, differences


@pytest.mark.long
def test_a_short_run_of_a_gemma3_has_the_log_probs_of_the_servers(tmp_path: Path) -> None:
    write_vlm("gemma3", tmp_path / "model")
    differences = run_shortly(tmp_path, f"actor.path={tmp_path / 'model'}", "actor.init_model=null")
    assert differences and max(differences) < 1e-5, differences
