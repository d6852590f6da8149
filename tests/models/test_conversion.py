"""`areal-like convert-checkpoint`: there and back is the same, or names are said and nothing is left."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path

import pytest
import tiny_models
import torch
from conversions import command, full_disk, trained
from safetensors.torch import load_file, save_file
from trainer_jobs import Setting, initial_weights

from allocation import ParallelSizes
from areal_like.backends.megatron.bridges.support import BRIDGES, converting_bridges
from areal_like.core.checkpoint.journal import Journal, RunState
from areal_like.core.checkpoint.store import Store
from areal_like.core.config.load import dump, load
from areal_like.preflight.weights import weight_files

pytestmark = pytest.mark.covers("checkpoint conversion")

EXAMPLE = Path(__file__).parents[2] / "examples/math/gsm8k_grpo_cpu.yaml"
FAMILIES = sorted(name for name in tiny_models.FAMILIES if converting_bridges({"model_type": name}))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    @cache
    def make(name: str, dtype: torch.dtype = torch.float32) -> Path:
        path = tmp_path_factory.mktemp("hugging_face") / name
        tiny_models.write_tiny(tiny_models.VARIANTS[name], path).to(dtype).save_pretrained(path)
        (path / "tokenizer.json").write_text('{"of": "the model"}')
        return path

    return make


@pytest.fixture
def convert(ranks):
    """The command; raises AssertionError where its exit code is not `code`."""

    def run(*arguments: object, code: int = 0, job=command) -> str:
        ((exit_code, said),) = ranks.run(job, 1, *map(str, arguments))
        assert exit_code == code, said
        return said

    return run


FOREIGN = b"cos\nsystem\n(S'true'\ntR."  # a pickle that would run a command


def assert_same(one: Path, other: Path) -> None:
    """The same files with the same bytes."""
    assert {file.name for file in one.iterdir()} == {file.name for file in other.iterdir()}
    assert [file.name for file in one.iterdir() if file.read_bytes() != (other / file.name).read_bytes()] == []


def there_and_back(convert, source: Path, folder: Path, bridge: str) -> str:
    said = convert(source, folder / "megatron", "--bridge", bridge)
    convert(folder / "megatron", folder / "back", "--bridge", bridge)
    assert_same(source, folder / "back")
    assert {path.name for path in folder.iterdir()} == {"megatron", "back"}
    return said


@pytest.mark.parametrize(
    "family", ["qwen3_vl_moe", *(pytest.param(it, marks=pytest.mark.long) for it in ("qwen2_5_vl", "qwen3_5"))]
)
def test_models_with_images_are_converted_with_their_towers(convert, tiny_vlm, tmp_path, family):
    said = there_and_back(convert, tiny_vlm(family), tmp_path, "megatron-bridge")
    names = load_file(tiny_vlm(family) / "model.safetensors").keys()
    assert f"{len(names)} tensors, each mapped once by megatron-bridge" in said
    assert any(name.startswith(("visual.", "model.visual.")) for name in names)


def test_a_model_with_images_needs_megatron_bridge(convert, tiny_vlm, tmp_path):
    said = convert(tiny_vlm("qwen3_vl"), tmp_path / "new", "--bridge", "mbridge", code=2)
    assert "mbridge does not support the model family qwen3_vl; use --bridge megatron-bridge" in said


@pytest.mark.parametrize(
    ("name", "bridge"),
    [("llama-tied", "megatron-bridge"), ("qwen3_moe", "mbridge"), ("deepseek_v3", "megatron-bridge")],
)
def test_there_and_back_is_the_same(convert, tiny, tmp_path, name, bridge):
    said = there_and_back(convert, tiny(name), tmp_path, bridge)
    names = load_file(tiny(name) / "model.safetensors").keys()
    assert f"{len(names)} tensors, each mapped once by {bridge}" in said


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("bridge", BRIDGES)
@pytest.mark.parametrize("name", [*FAMILIES, "qwen2-tied", "glm4_moe-bias", "glm4_moe-shared", "llama-wide"])
def test_every_family_goes_there_and_back_or_is_refused(convert, tiny, tmp_path, name, bridge, dtype):
    family = tiny_models.VARIANTS[name].family
    if bridge in converting_bridges({"model_type": family}):
        there_and_back(convert, tiny(name, dtype), tmp_path, bridge)
    else:
        said = convert(tiny(name, dtype), tmp_path / "megatron", "--bridge", bridge, code=2)
        assert f"{bridge} does not support the model family {family}" in said
        assert list(tmp_path.iterdir()) == []


def test_data_types_and_a_copied_head_come_back(convert, tiny, tmp_path):
    """As some publish them: the router's bias in another type, a tied head beside the embedding."""
    moe = shutil.copytree(tiny("glm4_moe", torch.bfloat16), tmp_path / "moe")
    weights = load_file(moe / "model.safetensors")
    biases = {name: tensor.float() for name, tensor in weights.items() if "e_score" in name}
    assert biases
    save_file({**weights, **biases}, moe / "model.safetensors", {"format": "pt"})
    tied = shutil.copytree(tiny("llama-tied", torch.bfloat16), tmp_path / "tied")
    weights = load_file(tied / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tied / "model.safetensors", {"format": "pt"})
    for path in (moe, tied):
        (folder := tmp_path / f"of-{path.name}").mkdir()
        said = convert(path, folder / "megatron")
        convert(folder / "megatron", folder / "back")
        back, there = load_file(folder / "back/model.safetensors"), load_file(path / "model.safetensors")
        assert back.keys() == there.keys()
        assert all(torch.equal(back[n], there[n]) and back[n].dtype == there[n].dtype for n in there)
    assert "left out: lm_head.weight (it is the embedding)" in said


@pytest.mark.parametrize(
    ("name", "sizes", "role"),
    [
        ("qwen3_moe", ParallelSizes(tp=2, dp=2, ep=2, etp=2), "actor"),
        pytest.param("qwen2-tied", ParallelSizes(tp=2, pp=2, etp=2), "critic", marks=pytest.mark.long),
    ],
)
def test_what_a_layout_trained_becomes_what_it_would_save(ranks, convert, tiny, tmp_path, name, sizes, role):
    setting = Setting(tiny(name), sizes, role=role, bridge="megatron-bridge")
    ranks.run(trained, sizes.tp * sizes.pp * sizes.dp, setting, tmp_path)
    convert(tmp_path / "state", tmp_path / "converted", "--model", tiny(name))
    assert_same(tmp_path / "hf", tmp_path / "converted")


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_a_runs_policy_is_taken_out_of_its_newest_checkpoint(ranks, convert, tiny, tmp_path, backend):
    model, run = tiny("llama-tied"), tmp_path / "run"
    ranks.run(trained, 2, Setting(model, ParallelSizes(dp=2, edp=2), backend=backend), tmp_path)
    (run / "recover").mkdir(parents=True)
    keys = [f"actor.path={model}", "actor.dtype=float32", f"actor.backend={backend}:d2"]
    (run / "config.yaml").write_text(dump(load(EXAMPLE, keys).config))
    store = Store(run / "recover", Journal(run / "recover/journal.jsonl", "prompts").run, keep=2)
    for version in (1, 2):
        shutil.copytree(tmp_path / "state", (partial := store.begin(version)) / "actor")
        store.commit(partial, RunState(version=version), {})
    convert(run, tmp_path / "policy")
    assert_same(tmp_path / "hf", tmp_path / "policy")
    assert "each mapped once" in convert(run / "recover/step-1", "--audit") or backend == "fsdp"

    torn(run / "recover/step-2/actor")
    assert "step-2 is not whole: actor/__" in convert(run / "recover/step-2", tmp_path / "torn", code=2)
    older = run / "recover/step-1/actor"
    convert(older, tmp_path / "older")
    assert_same(tmp_path / "hf", tmp_path / "older")
    description = older / ".metadata"
    description.write_bytes(FOREIGN.ljust(description.stat().st_size))  # its length is known
    assert ".metadata holds os.system" in convert(older, tmp_path / "foreign", code=2)


@pytest.mark.parametrize(
    ("name", "sizes", "role", "bridge"),
    [
        ("qwen2-tied", ParallelSizes(tp=2, pp=2, etp=2), "actor", "megatron-bridge"),
        ("qwen3_moe", ParallelSizes(pp=2, dp=2, ep=2), "critic", "mbridge"),
    ],
)
def test_a_trainer_of_any_layout_starts_from_it(ranks, convert, tiny, tmp_path, name, sizes, role, bridge):
    convert(tiny(name), tmp_path / "megatron")
    alone = tmp_path / "without-weights"
    shutil.copytree(tiny(name), alone, ignore=shutil.ignore_patterns("*.safetensors"))
    setting = Setting(alone, sizes, role=role, bridge=bridge, weights=tmp_path / "megatron")
    weights = ranks.run(initial_weights, sizes.tp * sizes.pp * sizes.dp, setting)[0]
    original = load_file(tiny(name) / "model.safetensors")
    if role == "critic":
        weights.pop("score.weight")
        original.pop("lm_head.weight")
    assert weights.keys() == original.keys()
    assert all((weights[name] == original[name].numpy()).all() for name in original)


def test_a_trainer_names_the_tensors_of_another_model(ranks, convert, tiny, tmp_path):
    convert(tiny("qwen2-tied"), tmp_path / "megatron")
    setting = Setting(tiny("qwen3"), ParallelSizes(dp=2, edp=2), weights=tmp_path / "megatron")
    with pytest.raises(
        AssertionError, match=r"another model: decoder\.layers\.self_attention\.k_layernorm\.weight is not"
    ):
        ranks.run(initial_weights, 2, setting)


def test_what_cannot_be_kept_is_named_and_nothing_is_left(convert, tiny, tmp_path):
    source = shutil.copytree(tiny("qwen2"), tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    bias = weights.pop("model.layers.1.self_attn.q_proj.bias")
    extra = {**weights, "model.layers.1.mlp.extra.weight": bias.clone()}
    save_file(extra, source / "model.safetensors", {"format": "pt"})
    said = convert(source, tmp_path / "target", code=2)
    assert "without a place in the model: model.layers.1.mlp.extra.weight;" in said
    assert "in the model but not in the checkpoint: model.layers.1.self_attn.q_proj.bias" in said

    save_file({**extra, "model.layers.1.self_attn.q_proj.bias": bias}, source / "model.safetensors", {"format": "pt"})
    said = convert(source, "--audit", "--leave-out", "*.extra.*")
    assert "left out: model.layers.1.mlp.extra.weight (as asked)" in said

    wider = {**weights, "model.layers.1.self_attn.q_proj.bias": bias}
    wider = {name: tensor if "norm" in name else tensor.bfloat16() for name, tensor in wider.items()}
    save_file(wider, source / "model.safetensors", {"format": "pt"})
    said = convert(source, tmp_path / "target", code=2)
    assert "model.norm.weight would be rounded" in " ".join(said.split(";"))
    assert "write --dtype float32" in said
    convert(source, "--audit", "--dtype", "float32")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_copies_and_adapters_beside_a_model_are_left_out(convert, tiny, tmp_path):
    """Which a run does not load either; neither directory has an index."""
    source = shutil.copytree(tiny("qwen2"), tmp_path / "source")
    for name in ("consolidated", "adapter_model"):
        save_file({"layers.0.attention.wq.weight": torch.zeros(2, 2)}, source / f"{name}.safetensors")
    assert "each mapped once" in convert(source, "--audit")
    assert [file.name for file in weight_files(source, "actor.path")] == ["model.safetensors"]
    (source / "model.safetensors").rename(source / "weights.safetensors")
    assert [file.name for file in weight_files(source, "actor.path")] == ["weights.safetensors"]


@pytest.fixture
def megatron(convert, tiny, tmp_path):
    path = tmp_path / "megatron"
    convert(tiny("qwen3"), path)
    return path


def torn(path: Path) -> None:
    file = path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1000])


def another_models(path: Path) -> None:
    config = json.loads((path / "huggingface/config.json").read_text())
    other = {**config, "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    (path / "huggingface/config.json").write_text(json.dumps(other))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda path: (path / "metadata.json").unlink(),
            "is not a complete checkpoint: it has neither config.json (Hugging Face) nor metadata.json",
        ),
        (lambda path: (path / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
        (torn, "__0_0.distcp has"),
        (lambda path: (path / ".metadata").write_bytes(FOREIGN), ".metadata holds os.system"),
        (lambda path: shutil.rmtree(path / "huggingface"), "--model DIRECTORY"),
        (another_models, "decoder.layers.self_attention.linear_qkv.weight has the shape 2 x 128 x 64, not 3 x"),
    ],
    ids=["no end", "no file", "torn", "foreign pickle", "no config", "another model"],
)
def test_a_bad_megatron_checkpoint_is_told_in_one_line(convert, megatron, tmp_path, spoil, words):
    spoil(megatron)
    said = convert(megatron, tmp_path / "target", code=2)
    assert words in said
    assert said.startswith("error: ")
    assert [path.name for path in tmp_path.iterdir()] == ["megatron"]


def test_a_full_disk_and_a_target_that_is_there(convert, tiny, megatron, tmp_path):
    for source in (tiny("qwen3"), megatron):
        said = convert(source, tmp_path / "target", code=2, job=full_disk)
        assert "cannot be written" in said
    assert "already exists" in convert(tiny("qwen3"), megatron, code=2)
    assert "is not a complete checkpoint" in convert(tmp_path, tmp_path / "target", code=2)
    assert "missing directory" in convert(tiny("qwen3"), tmp_path / "no/target", code=2)
    assert [path.name for path in tmp_path.iterdir()] == ["megatron"]
