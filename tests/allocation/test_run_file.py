"""A run's YAML as the compiler reads it: its keys, lines, references and overrides."""

import json
from pathlib import Path

import pytest

import allocation
from allocation.run_file import RunFileError, read_run_file

EXAMPLES = sorted(Path(__file__).parents[2].glob("examples/math/*.yaml"))
RUN = """\
cluster: {n_nodes: 2, n_gpus_per_node: 8}
train_dataset: {batch_size: 64, max_prompt_length: 512}
gconfig: {n_samples: 4, max_new_tokens: 512}
actor:
  backend: megatron:d4t2
  path: qwen3-0.6b
  ppo_n_minibatches: ${rollout.minibatches}
  megatron: {recompute_granularity: full, override_transformer_config: {moe_enable_deepep: true}}
rollout:
  minibatches: 2
  backend: sglang:d8
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return path


def found(run):
    result = allocation.check(**run.arguments) if "spec" in run.arguments else None
    return [str(run.locate(f)).splitlines()[0] for f in (*run.findings, *(result.findings if result else ()))]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_valid(example):
    run = read_run_file(example)
    assert run.findings == ()
    assert allocation.check(**run.arguments).ok


def test_what_a_file_says(file):
    run = read_run_file(file)
    assert run.arguments == {
        "spec": {"rollout": "sglang:d8", "actor": "megatron:d4t2"},
        "model": "qwen3-0.6b",
        "cluster": allocation.Cluster(2, 8),
        "batch": allocation.BatchSpec(64, 4, n_minibatches=2, max_length=1024),
        "megatron": allocation.MegatronSettings(recompute_granularity="full", moe_enable_deepep=True),
    }
    assert run.findings == ()


MADE = """\
cluster: {n_nodes: 1, n_gpus_per_node: 8}
gconfig: {heads: 6}
actor:
  backend: megatron:d2
  init_model: {num_attention_heads: "${gconfig.heads}", num_key_value_heads: 6, hidden_size: 96}
"""


@pytest.fixture
def made(tmp_path):
    path = tmp_path / "made.yaml"
    path.write_text(MADE)
    return path


def test_a_model_that_the_run_makes(made):
    model = read_run_file(made).arguments["model"]
    assert (model.name, model.family, model.heads, model.hidden_size) == ("actor.init_model", "qwen3", 6, 96)
    assert (model.layers, model.ffn, model.vocab_size) == (3, 384, 0)
    (line,) = found(read_run_file(made, ["actor.backend=megatron:d2t4"]))[:1]
    assert line == "error[ALLOC-HEADS] in actor.backend (command line): 6 attention heads cannot be split by `t4`"
    assert any("ALLOC-EP-DENSE" in line for line in found(read_run_file(made, ["actor.backend=megatron:d4e2"])))
    experts = ["actor.backend=megatron:d4e2", "actor.init_model.num_experts=4"]
    assert not any("error" in line for line in found(read_run_file(made, experts)))
    vocabulary = ["actor.backend=megatron:d2t2", "actor.init_model.vocab_size=259"]
    assert any("ALLOC-VOCAB-PADDING" in line for line in found(read_run_file(made, vocabulary)))


def test_a_section_that_is_a_reference(made):
    made.write_text(MADE.replace("init_model: {", "init_model: ${shape}\nshape: {"))
    assert read_run_file(made).arguments["model"].heads == 6


def test_wrong_figures_of_the_model_are_named(made):
    run = read_run_file(made, ["actor.init_model.hidden_size=0", "actor.init_model.num_experts=few"])
    assert "model" not in run.arguments
    lines = found(run)
    assert any("hidden_size (command line): 0 should be at least 1" in line for line in lines), lines
    assert any("num_experts (command line): 'few' should be a whole number" in line for line in lines), lines
    (line,) = [x for x in found(read_run_file(made, ["actor.init_model=tiny"])) if "ALLOC-RUN-VALUE" in x]
    assert line.endswith("'tiny' should be a section of keys")


def test_the_model_is_a_path_or_made(made, tmp_path):
    assert read_run_file(made, ["actor.path=qwen3-0.6b"]).arguments["model"] == "qwen3-0.6b"
    assert "model" not in read_run_file(made, ["actor.init_model=null"]).arguments
    assert read_run_file(made, ["actor.path=null"]).arguments["model"].name == "actor.init_model"
    made.write_text(MADE + "  path: qwen3-0.6b\n")
    (line,) = [line for line in found(read_run_file(made)) if "ALLOC-RUN-VALUE" in line]
    assert line.endswith(f"actor.path ({made}:6): the model is also given by actor.init_model; keep one of the two")
    assert read_run_file(made, ["actor.init_model.hidden_size=64"]).arguments["model"].hidden_size == 64


def test_a_models_directory(file, tmp_path):
    config = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 128, "vocab_size": 100}))
    lines = found(read_run_file(file, [f"actor.path={tmp_path}", "actor.backend=megatron:d2t2p2"]))
    assert any("ALLOC-LAYERS" in line for line in lines), lines


def test_findings_name_key_and_line(file):
    file.write_text(RUN.replace("d4t2", "d4t2p3").replace("sglang:d8", "sglang:d2t3"))
    lines = found(read_run_file(file))
    assert any(line.startswith(f"error[ALLOC-LAYERS] in actor.backend ({file}:5):") for line in lines), lines
    assert any(f" in rollout.backend ({file}:11):" in line for line in lines), lines


def test_overrides_win_and_say_so(file):
    run = read_run_file(file, ["actor.backend=megatron:d3t3", "cluster.n_nodes=4"])
    assert run.arguments["cluster"] == allocation.Cluster(4, 8)
    assert any(" in actor.backend (command line): " in line for line in found(run))


def test_the_command_lines_layout_unsets_the_files(file):
    run = read_run_file(file, ["allocation_mode=sglang:d8|megatron:d8"])
    assert (run.arguments["spec"], run.arguments["key"]) == ("sglang:d8|megatron:d8", "allocation_mode")
    assert run.findings == ()
    file.write_text("allocation_mode: sglang:d8|megatron:d8\nactor: {}\n")
    run = read_run_file(file, ["actor.backend=megatron:d4", "rollout.backend=sglang:d4"])
    assert run.arguments["spec"] == {"rollout": "sglang:d4", "actor": "megatron:d4"}


def test_layout_given_twice_or_never(file):
    file.write_text("allocation_mode: megatron:d8\nactor: {backend: megatron:d4}\n")
    (finding,) = read_run_file(file).findings
    assert str(finding) == (
        "error[ALLOC-RUN-LAYOUT] in allocation_mode: the layout is also given by actor.backend\n"
        "  help: keep one of the two"
    )
    file.write_text("seed: 1\n")
    (finding,) = read_run_file(file).findings
    assert (finding.code, finding.message) == ("ALLOC-RUN-LAYOUT", "the file gives no layout")


def test_wrong_values_come_all_at_once(file):
    overrides = ["cluster.n_nodes=0", "gconfig.n_samples=four", "train_dataset.batch_size=${train_dataset.size}"]
    lines = found(read_run_file(file, overrides))
    assert "error[ALLOC-RUN-VALUE] in cluster.n_nodes (command line): 0 should be at least 1" in lines
    assert "error[ALLOC-RUN-VALUE] in gconfig.n_samples (command line): 'four' should be a whole number" in lines
    assert any("`${train_dataset.size}` refers to no key of this file" in line for line in lines)


def test_a_reference_to_itself_ends(file):
    (line,) = [x for x in found(read_run_file(file, ["actor.path=${actor.path}"])) if "actor.path" in x]
    assert line.startswith("error[ALLOC-")


def test_an_override_that_changes_nothing_is_noted(file):
    (finding,) = read_run_file(file, ["actor.backnd=megatron:d8"]).findings
    assert (finding.severity, finding.help) == ("note", "did you mean `actor.backend`?")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1", "run.yaml:1: not YAML"),
        ("- 1", "not a mapping"),
        ("", "not a mapping"),
        (b"\xff\xfe\x00", "cannot be read"),
        ("[" * 5000, "nested too deeply"),
    ],
)
def test_no_run(tmp_path, text, words):
    path = tmp_path / "run.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(RunFileError, match=words):
        read_run_file(path)


def test_unreadable_words(file):
    with pytest.raises(RunFileError, match="cannot be read"):
        read_run_file(file.with_name("none.yaml"))
    with pytest.raises(RunFileError, match="write key=value"):
        read_run_file(file, ["d4"])
    with pytest.raises(RunFileError, match="no YAML value"):
        read_run_file(file, ["cluster.n_nodes=["])
