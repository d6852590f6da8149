"""A Megatron checkpoint to start from is looked at before anything starts."""

import json
from pathlib import Path

import pytest
import torch
from test_preflight import check, errors
from torch.distributed import checkpoint

from areal_like.core.config.schema import InitModelConfig
from areal_like.demo.init_model import write_init_model

PATH = "actor.megatron.dist_checkpointing_path"


@pytest.fixture
def model(tmp_path):
    """A model directory without weights."""
    write_init_model(InitModelConfig(hidden_size=32, num_hidden_layers=2), tmp_path / "model", seed=0)
    (tmp_path / "model/model.safetensors").unlink()
    return tmp_path / "model"


def start(model: Path, path: object) -> list[str]:
    return [f"actor.path={model}", "actor.megatron.use_dist_checkpointing=true", f"{PATH}={path}"]


def write_megatron(path: Path, rows: int, width: int, layers: int) -> Path:
    """A checkpoint of these sizes, in torch's format with Megatron's names."""
    tensors = {
        "embedding.word_embeddings.weight": torch.zeros(rows, width),
        "decoder.layers.self_attention.linear_proj.weight": torch.zeros(layers, width, width),
    }
    checkpoint.save(tensors, checkpoint_id=path, no_dist=True)
    (path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    return path


def test_weights_that_lie_elsewhere_are_enough(write, model, tmp_path):
    config = json.loads((model / "config.json").read_text())
    whole = write_megatron(tmp_path / "megatron", config["vocab_size"] + 2, 32, 2)
    assert check(write(), *start(model, whole)).ok
    assert errors(write(), f"actor.path={model}")
    checked = check(write(), *start(model, whole)[::2])
    assert any(f.key.startswith(PATH) and "ignored" in f.message for f in checked.findings)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: (path / "metadata.json").unlink(), "it has no metadata.json, which is written last"),
        (lambda path: (path / "__0_0.distcp").write_bytes(b""), "__0_0.distcp has 0 bytes of"),
        (lambda path: (path / ".metadata").unlink(), "No such file"),
        (lambda path: write_megatron(path, 500, 64, 2), "its embedding is 500 x 64, the model's"),
        (lambda path: write_megatron(path, 500, 32, 3), "it has 3 layers, the model 2"),
    ],
)
def test_what_is_wrong_with_it_is_said(write, model, tmp_path, spoil, words):
    path = write_megatron(tmp_path / "megatron", 500, 32, 2)
    spoil(path)
    (problem,) = errors(write(), *start(model, path))
    assert problem.key.startswith(PATH)
    assert words in problem.message
    assert "areal-like convert-checkpoint" in problem.help


def test_a_converted_one_says_of_which_model_it_is(write, model, tmp_path):
    path = write_megatron(tmp_path / "megatron", 500, 32, 2)
    (path / "huggingface").mkdir()
    config = json.loads((model / "config.json").read_text())
    (path / "huggingface/config.json").write_text(json.dumps({**config, "num_attention_heads": 8, "head_dim": 4}))
    (problem,) = errors(write(), *start(model, path))
    assert "to another model: its heads is 8" in problem.message


def test_one_has_to_be_named_and_to_be_read(write, model):
    (problem,) = errors(write(), *start(model, "null"))
    assert "and none is set" in problem.message
    (problem,) = errors(write(), *start(model, "null"), "actor.backend=fsdp:d2")
    assert "it starts from Hugging Face weights" in problem.message


def test_a_role_starts_as_the_actor_unless_it_has_its_own(write, model, tmp_path):
    from areal_like.core.config.load import load

    def starts(*overrides: str) -> str | None:
        keys = [*start(model, tmp_path / "a"), "ref.dtype=float32", *overrides]
        megatron = load(write(), keys).config.roles["ref"].megatron
        return megatron.dist_checkpointing_path if megatron.use_dist_checkpointing else None

    other = "ref.megatron.use_dist_checkpointing=true", f"ref.megatron.dist_checkpointing_path={tmp_path / 'b'}"
    assert starts() == starts("ref.megatron.bridge_type=mbridge") == str(tmp_path / "a")
    assert starts(f"ref.path={model}") is None
    assert starts(*other) == starts(*other, f"ref.path={model}") == str(tmp_path / "b")
