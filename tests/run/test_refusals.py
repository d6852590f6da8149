"""What cannot work is refused with exit code 2 and one clear error, before anything starts or is written."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import published
import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from areal_like import cli
from areal_like.core.config.load import load
from areal_like.core.config.schema import InitModelConfig
from areal_like.demo.init_model import write_init_model

EXAMPLES = Path(__file__).parents[2] / "examples/math"
CONFIG = EXAMPLES / "gsm8k_grpo_cpu.yaml"
STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.system"}

_events: list[str] | None = None


def _audit(event: str, _: object) -> None:
    if _events is not None and event in STARTS:
        _events.append(event)


sys.addaudithook(_audit)


@pytest.fixture(autouse=True)
def nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs in an empty directory, starts no process, writes no file."""
    global _events
    monkeypatch.chdir(tmp_path)
    _events = []
    children = psutil.Process().children()
    yield
    started, _events = _events, None
    assert started == []
    assert psutil.Process().children() == children
    assert not (tmp_path / "runs").exists()


def call(*arguments: str, config: Path = CONFIG) -> Result:
    return CliRunner().invoke(cli.app, ["--config", str(config), *arguments])


def refusal(*arguments: str, config: Path = CONFIG) -> str:
    """The one error of a command line that is refused."""
    result = call(*arguments, config=config)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("error[") == 1, result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["actor.backend=sglang:d2"], "actor.backend", "sglang cannot be the actor: it is a server"),
        (["rollout.backend=megatron:d1"], "rollout.backend", "megatron cannot be the rollout: it is a trainer"),
        (["actor.backend=megatron:d4"], "actor.backend", "the cluster has 3"),
        (["actor.backend=megatron:d2x2"], "actor.backend", "x"),
        (["actor.path=empty"], "actor.path", "no config.json"),
        (["train_dataset.path=none.jsonl"], "train_dataset.path", "does not exist"),
        (["train_dataset.path=torn.jsonl"], "train_dataset.path", "torn.jsonl"),
        (["train_dataset.path=folder.jsonl"], "train_dataset.path", "folder.jsonl is a folder without JSONL"),
        (["train_dataset.path=broken.jsonl"], "train_dataset.path", "broken.jsonl cannot be read"),
        (["cluster.fileroot=file.txt/runs"], "cluster.fileroot", "is not a directory"),
        (["actor.megatron.bridge_type=mbrigde"], "actor.megatron.bridge_type", "mbridge"),
        (["rollout.max_head_offpolicynes=1"], "rollout.max_head_offpolicynes", "rollout.max_head_offpolicyness"),
        (["gconfig.n_samples=many"], "gconfig.n_samples", "a whole number"),
        (["gconfig.n_samples"], "gconfig.n_samples", "not an override"),
    ],
)
def test_a_wrong_setting(tmp_path: Path, overrides: list[str], key: str, words: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("")
    (tmp_path / "torn.jsonl").write_text('{"question": "1', encoding="utf-8")
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "broken.jsonl").symlink_to("/proc/self/mem")  # opens, but its first byte is not mapped
    message = refusal(*overrides)
    assert f"{key} (command line)" in message
    assert words in message


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tokenizer.json", '{"model": {"typ', "does not describe a tokenizer: EOF"),
        ("tokenizer.json", "{}", "does not describe a tokenizer"),
        ("tokenizer.json", '{"model": {"type": "WordLevel", "vocab": [1]}}', "does not describe a tokenizer"),
        (
            "tokenizer.json",
            '{"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "c": 2}, "unk_token": "u"}}',
            "cannot be tokenised",
        ),
        ("chat_template.jinja", "{% if %}", "not Jinja"),
        ("chat_template.jinja", "{{ raise_exception('no') }}", "rejects the conversation: no"),
        ("chat_template.jinja", "{{ messages + 1 }}", "rejects the conversation"),
    ],
)
def test_a_tokenizer_that_cannot_be_used(tmp_path: Path, file: str, content: str, words: str) -> None:
    write_init_model(InitModelConfig(num_hidden_layers=1), tmp_path / "model", seed=0)
    (tmp_path / "model" / file).write_text(content)
    message = refusal("actor.path=model")
    assert "actor.path (command line)" in message
    assert words in message


def test_a_layout_that_the_heads_cannot_hold() -> None:
    message = refusal("actor.backend=megatron:t8", "cluster.n_gpus_per_node=9")
    assert "actor.backend (command line)" in message
    assert "8" in message and "4" in message


def test_a_busy_port() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        port = busy.getsockname()[1]
        message = refusal(f"sglang.port={port}")
    assert f"sglang.port (command line): port {port} cannot be used here" in message


def test_another_run_s_directory(tmp_path: Path) -> None:
    directory = tmp_path / "mine/gsm8k-grpo-cpu/first"
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text("precious")
    message = refusal("cluster.fileroot=mine", "trial_name=first", "recover.mode=off")
    assert f"trial_name (command line): {directory} holds the results of another run" in message
    assert [path.name for path in directory.iterdir()] == ["config.yaml"]
    assert (directory / "config.yaml").read_text() == "precious"


def test_no_such_file() -> None:
    assert "none.yaml cannot be read" in refusal(config=Path("none.yaml"))


KEYS_AND_TYPES = {
    "actor.bckend=megatron:d2": "actor.backend",  # the nearest right spelling
    "gconfig.n_samples=0": "greater than or equal to 1",
    "device=tpu": "'auto', 'cpu' or 'cuda'",
}
WHAT_THEY_MEAN = {
    "rollout.backend=sglang:d9": "the cluster has 3",
    "train_dataset.path=none.jsonl": "none.jsonl does not exist",
    "actor.path=/nowhere": "no config.json",
    "sglang.extra_args.no_such_option=1": "no option no_such_option",
}


@pytest.mark.parametrize("wrong", [KEYS_AND_TYPES, WHAT_THEY_MEAN], ids=["first round", "second round"])
def test_everything_that_is_wrong_is_told_at_once(wrong: dict[str, str]) -> None:
    result = call(*wrong)
    assert result.exit_code == 2
    assert result.stderr.count("error[") == len(wrong), result.stderr
    for override, words in wrong.items():
        assert result.stderr.count(f"in {override.partition('=')[0]} (command line)") == 1
        assert words in result.stderr


def test_a_dry_run_prints_its_verdict_first_and_the_configuration_on_request() -> None:
    overrides = ["trial_name=first", "actor.backend=megatron:t2", "total_train_steps=7"]
    result = call("--dry-run", *overrides)
    assert result.exit_code == 0, result.output
    verdict, plan = result.stdout.split("\n", 1)
    assert verdict == "All checks passed."
    assert "sglang[rollout]:d1+megatron[actor]:t2 on cpu, 7 steps" in plan and "experiment_name" not in plan
    shown = call("--dry-run", "--show-config", *overrides).stdout
    assert shown.startswith(result.stdout.rstrip())
    printed = shown[shown.index("experiment_name:") :]
    assert yaml.safe_load(printed) == load(CONFIG, overrides).config.model_dump()


def test_areal_s_published_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a checkpoint with the model's proportions but not its size, a data set and a cluster that are there."""
    there = {"nodes": [{"CPU": 8.0, "GPU": 8.0}] * 4, "free": {}}
    monkeypatch.setattr("areal_like.backends.ray.resources._ask", lambda address: there)
    shape = InitModelConfig(
        tokenizer="bytes",
        num_hidden_layers=4,
        num_key_value_heads=4,
        num_experts=8,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
    )
    write_init_model(shape, tmp_path / "Qwen/Qwen3-30B-A3B", seed=0)
    for split in ("train", "test"):
        rows = [{"question": "1 + 1?", "answer": "#### 2"}] * 256
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = ("train_dataset.path=train.jsonl", "valid_dataset.path=test.jsonl")
    result = call(*published.OVERRIDES, *data, "--dry-run", "--show-config", config=EXAMPLES / "gsm8k_grpo_moe.yaml")
    assert result.exit_code == 0, result.output
    assert "sglang[rollout]:d4t4+megatron[actor]:(attn:d1p4t2c2|ffn:d1p4t1e4) on cuda" in result.stdout
    assert "use_deterministic_algorithms: true" in result.stdout
