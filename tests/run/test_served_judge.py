"""A run whose judge is a language model on a server that the run starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from running import run
from safetensors.numpy import load_file, save_file

from areal_like.core.config.schema import ChatJudgeConfig, InitModelConfig
from areal_like.core.types import Prompt
from areal_like.demo.init_model import write_init_model
from areal_like.rewards.judge_texts import fill, read_score

TEMPLATE = "{question} {response}"
KEYS = {"score_pattern": r"(\d)", "score_max": 9.0, "max_tokens": 2}
SMALL = (
    *("total_train_steps=2", "warm_start=null", "valid_dataset=null", "evaluator.freq_steps=null"),
    *("saver.freq_steps=null", "cluster.n_gpus_per_node=4"),
)


def write_judge(directory: Path) -> None:
    """Write a model with random weights that answers in digits, which depend on the whole message."""
    shape = InitModelConfig(tokenizer="bytes", hidden_size=64, tie_word_embeddings=False, max_position_embeddings=512)
    write_init_model(shape, directory, seed=0)
    (directory / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    vocabulary = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
    digits = [vocabulary[str(digit)] for digit in range(10)]
    weights = load_file(directory / "model.safetensors")
    for name, weight in weights.items():
        if "layers" in name and weight.ndim == 2:
            weight *= 5
    head = weights["lm_head.weight"]
    others = [number for number in range(len(head)) if number not in digits]
    head[others] = 0  # of ten random logits the largest is above 0
    save_file(weights, directory / "model.safetensors", {"format": "pt"})


def answers(directory: Path, texts: list[str]) -> dict[str, str]:
    """What transformers generates for each text, greedily."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    found = {}
    for text in texts:
        tokens = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        made = model.generate(tokens, max_new_tokens=KEYS["max_tokens"], do_sample=False)
        found[text] = tokenizer.decode(made[0, tokens.shape[1] :], skip_special_tokens=True)
    return found


@pytest.mark.long
def test_the_run_serves_its_judge(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    write_judge(tmp_path / "judge")
    keys = [f"reward.judge.{name}={value}" for name, value in KEYS.items()]
    where = [f"reward.judge.path={tmp_path / 'judge'}", "reward.judge.backend=sglang:d1"]
    overrides = ["reward.type=judge", *where, *keys, f'reward.judge.prompt="{TEMPLATE}"']
    with run(tmp_path, *overrides, *SMALL) as started:
        assert started.end() == 0, started.output + started.errors
        assert started.remains() == []
    lines = (started.directory / "samples/step-000002.jsonl").read_text().splitlines()
    samples = [sample for sample in map(json.loads, lines) if sample["reward"] is not None][:100]
    config = ChatJudgeConfig(path="judge", **KEYS)
    given = {}
    for sample in samples:
        text = sample["prompt"].strip()
        prompt = Prompt(0, [1], messages=lambda text=text: [{"role": "user", "content": text}])
        response = sample["response"].removesuffix("<eos>")
        if "<" not in response:  # of other special tokens the judge reads nothing
            given[fill(TEMPLATE, prompt, response)] = sample["reward"]
    expected = {text: read_score(config, answer) for text, answer in answers(tmp_path / "judge", [*given]).items()}
    assert len(given) > 5 and len(set(given.values())) > 1
    assert given == pytest.approx(expected)
