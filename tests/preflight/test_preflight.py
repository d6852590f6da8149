import json
import re
import socket
from unittest import mock

import pytest

from areal_like.config.load import load
from areal_like.config.schema import InitModelConfig
from areal_like.demo.init_model import write_init_model
from areal_like.preflight import machine as module
from areal_like.preflight import preflight
from areal_like.preflight.machine import CONFIG_FILE

HELD_OUT = "evaluator.datasets.long"
FOLDED = "megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)"


def check(file, *overrides):
    return preflight(load(file, overrides))


def errors(file, *overrides):
    checked = check(file, *overrides)
    assert not checked.ok
    return [finding for finding in checked.findings if finding.severity == "error"]


def test_further_tokens_end_a_response(write):
    plain = check(write()).job.tokenizer.eos_token_ids
    assert check(write(), "gconfig.stop_token_ids=[3,4]").job.tokenizer.eos_token_ids == (*plain, 3, 4)
    (finding,) = errors(write(), "gconfig.stop_token_ids=[3,999999]")
    assert (finding.code, finding.key) == ("RUN-STOP-TOKEN", "gconfig.stop_token_ids")


def test_a_run_that_may_start_has_all_its_parts(write, tmp_path):
    checked = check(write())
    assert checked.ok
    assert not checked.findings
    assert checked.job.device == "cpu"
    assert checked.job.plan.engine("actor").world_size == 2
    assert [len(checked.job.train_prompts), len(checked.job.valid_prompts)] == [16, 4]
    assert checked.job.steps == 4
    assert checked.job.tokenizer.decode(checked.job.train_prompts[0].tokens).endswith("now?")
    assert list(tmp_path.iterdir()) == [tmp_path / "run.yaml"]  # nothing was written


def test_held_out_sets_keep_their_names_and_prompts(write):
    def data(size):
        return f"{{path: arithmetic, max_prompt_length: 32, arithmetic: {{size: {size}}}}}"

    checked = check(write(), f"evaluator.datasets={{aime.2024: {data(3)}, math.2024: {data(2)}}}")
    assert checked.ok, list(map(str, checked.findings))
    sizes = {name: len(prompts) for name, prompts in checked.job.evaluated.items()}
    assert sizes == {"valid_dataset": 4, "aime.2024": 3, "math.2024": 2}
    assert sizes.keys() == checked.job.config.evaluations.keys()


def test_a_held_out_set_does_not_replace_another(write):
    held_out = "evaluator.datasets={valid_dataset: {path: arithmetic, max_prompt_length: 32, arithmetic: {size: 3}}}"
    (finding,) = errors(write(), held_out)
    assert finding.where == "evaluator.datasets.valid_dataset (command line)"
    assert check(write(), held_out, "valid_dataset=null").ok


def test_a_wrong_layout_shows_the_compilers_finding_with_its_place(write):
    file = write()
    file.write_text(file.read_text().replace("megatron:d2", "megatron:(attn:d1t2|ffn:d1p4t1e2)"))
    (finding,) = [f for f in errors(file) if f.code == "ALLOC-FOLD-PIPELINE"]
    assert finding.where == f"actor.backend ({file}:14)"
    assert finding.source.text == "megatron:(attn:d1t2|ffn:d1p4t1e2)"
    assert finding.span is not None


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["actor.backend=sglang:d1"], "actor.backend", "sglang cannot be the actor"),
        (["rollout.backend=megatron:d1"], "rollout.backend", "megatron cannot be the rollout"),
        (["actor.backend=fsdp:d1p2"], "actor.backend", "no pipeline parallelism"),
        (["rollout.backend=vllm:d1"], "rollout.backend", "vllm is known to the compiler only"),
        (["rollout.backend=sglang:p2", "cluster.n_gpus_per_node=4"], "rollout.backend", "all pipeline stages"),
        (["actor.backend=null"], "actor.backend", "no layout is given"),
        (["allocation_mode=sglang:d1"], "allocation_mode", "no trainer for the actor"),
        (
            ["allocation_mode=sglang:d1+megatron:d1", "actor.backend=megatron:d1"],
            "actor.backend",
            "already sets the layout",
        ),
        (
            ["allocation_mode=sglang[rollout]:d1|megatron[actor]:d1|megatron[critic]:d1"],
            "allocation_mode",
            "has no critic",
        ),
        (["actor.backend=megatron:d4"], "rollout.backend", "the cluster has 3"),
        (["actor.backend=megatron:t3"], "actor.backend", "4"),
        (["cluster.n_nodes=2"], "cluster.n_nodes", "has one node, not 2"),
        (["actor.path=/nowhere"], "actor.path", "no config.json"),
        (["tokenizer_path=/nowhere"], "tokenizer_path", "/nowhere"),
        (["actor.init_model=null"], "actor.path", "neither of actor.path and actor.init_model"),
        (["actor.init_model.vocab_size=10"], "actor.init_model.vocab_size", "10 rows"),
        (["actor.init_model.num_key_value_heads=3"], "actor.init_model.num_key_value_heads", "4 query heads"),
        (
            ["actor.init_model.num_experts=2", "actor.init_model.num_experts_per_tok=3"],
            "actor.init_model.num_experts_per_tok",
            "3",
        ),
        (["train_dataset.path=/none.jsonl"], "train_dataset.path", "/none.jsonl does not exist"),
        (["valid_dataset.split=dev"], "valid_dataset.split", "no split dev"),
        (["train_dataset.max_prompt_length=5"], "train_dataset.max_prompt_length", "row 1 has"),
        (["train_dataset.batch_size=17"], "train_dataset.batch_size", "16 prompts do not fill"),
        (["actor.ppo_n_minibatches=3"], "actor.ppo_n_minibatches", "3 mini-batches"),
        (["gconfig.n_samples=1"], "gconfig.n_samples", "compares the samples of a prompt"),
        (["gconfig.top_p=0.9"], "gconfig.top_k", "at most 1024, and gconfig.top_k sets no limit"),
        (["gconfig.min_p=0.1"], "gconfig.top_k", "gconfig.min_p=0.1"),
        (["gconfig.top_k=1025"], "gconfig.top_k", "allows 1025"),
        (["gconfig.top_k=1"], "gconfig.top_k", "nothing is learned"),
        (["rollout.max_concurrent_rollouts=1"], "rollout.max_concurrent_rollouts", "group of 2"),
        (["gconfig.max_new_tokens=60"], "gconfig.max_new_tokens", "64"),
        (["sglang.context_length=40"], "sglang.context_length", "40 tokens"),
        (["sglang.context_length=100"], "sglang.context_length", "64 positions"),
        (
            ["evaluator.max_new_tokens=200"],
            "evaluator.max_new_tokens",
            "of 240 tokens exceeds the model's 64 positions",
        ),
        (["valid_dataset.max_prompt_length=1024"], "valid_dataset.max_prompt_length", "of 1040 tokens exceeds"),
        ([f"{HELD_OUT}.max_new_tokens=40"], f"{HELD_OUT}.max_new_tokens", "of 80 tokens exceeds"),
        ([f"{HELD_OUT}.max_prompt_length=50"], f"{HELD_OUT}.max_prompt_length", "of 66 tokens exceeds"),
        (
            ["valid_dataset.workflow=my_workflow.py:run", "episode.max_tokens=60"],
            "episode.max_tokens",
            "of 68 tokens exceeds",
        ),
        (
            ["sglang.context_length=240", "evaluator.max_new_tokens=200"],
            "sglang.context_length",
            "of 240 tokens exceeds",
        ),
        (
            ["sglang.context_length=240", "evaluator.max_new_tokens=200"],
            "evaluator.max_new_tokens",
            "of 240 tokens exceeds",
        ),
        (["actor.mb_spec.max_tokens_per_mb=39"], "actor.mb_spec.max_tokens_per_mb", "40"),
        (["actor.megatron.recompute_granularity=full"], "actor.megatron.recompute_granularity", "recompute_method"),
        (
            ["actor.megatron.override_transformer_config.moe_z_loss_coef=1"],
            "actor.megatron.override_transformer_config.moe_z_loss_coef",
            "has no field moe_z_loss_coef",
        ),
        (
            ["actor.megatron.override_transformer_config.num_layers_in_first_pipeline_stage=x"],
            "actor.megatron.override_transformer_config.num_layers_in_first_pipeline_stage",
            "'x' should be a whole number or null",
        ),
        (
            ["actor.megatron.override_transformer_config.fp8=hybrid"],
            "actor.megatron.override_transformer_config.fp8",
            "GPU",
        ),
        (
            ["device=cuda", "actor.megatron.override_transformer_config.cuda_graph_impl=local"],
            "actor.megatron.override_transformer_config.cuda_graph_impl",
            "packed micro-batches have different shapes",
        ),
        (["sglang.attention_backend=triton"], "sglang.attention_backend", "on CPU"),
        (["sglang.deterministic=true"], "sglang.deterministic", "on CPU"),
        (
            ["device=cuda", "sglang.deterministic=true", "sglang.attention_backend=flex_attention"],
            "sglang.attention_backend",
            "not deterministic",
        ),
        (["sglang.extra_args.port=3000"], "sglang.extra_args.port", "by the run itself"),
        (["valid_dataset=null", "evaluator.freq_steps=1"], "evaluator.freq_steps", "evaluation prompts"),
        (["valid_dataset=null", "warm_start.steps=1"], "warm_start", "evaluation prompts"),
        (["actor.optimizer.warmup_steps=4"], "actor.optimizer.warmup_steps", "4 optimizer steps"),
        (["cluster.fileroot=FILE/below"], "cluster.fileroot", "not a directory"),
        (["cluster.fileroot=/proc/runs"], "cluster.fileroot", "/proc"),
        (
            ["actor.init_model.num_experts=4"],
            "actor.init_model.tie_word_embeddings",
            "a qwen3_moe with tie_word_embeddings = true",
        ),
        (
            ["actor.init_model.num_experts=4", "actor.backend=megatron:t2"],
            "actor.megatron.bridge_type",
            "cannot export experts",
        ),
    ],
)
def test_what_is_wrong_is_found_under_its_key(write, overrides, key, words):
    file = write()
    if HELD_OUT in key:
        overrides = ["evaluator={datasets: {long: {path: arithmetic, max_prompt_length: 32}}}", *overrides]
    found = errors(file, *(text.replace("FILE", str(file)) for text in overrides))
    assert any(f.where.startswith(f"{key} (") and words in f.message for f in found), list(map(str, found))


def test_the_first_finding_does_not_hide_the_rest(write):
    overrides = [
        "actor.backend=megatron:t3",
        "actor.path=/nowhere",
        "train_dataset.path=/none.jsonl",
        "gconfig.n_samples=1",
    ]
    codes = {finding.code for finding in errors(write(), *overrides)}
    assert {"ALLOC-CLUSTER-SIZE", "RUN-MODEL-CONFIG", "RUN-DATASET-FILE", "RUN-BATCH-GROUP"} <= codes


def test_another_runs_directory_is_left_alone(write, tmp_path):
    directory = tmp_path / "runs/demo/first"
    directory.mkdir(parents=True)
    assert check(write()).ok
    (directory / "notes.txt").write_text("mine")
    (finding,) = errors(write())
    assert (finding.code, "was not created by a run" in finding.message) == ("RUN-DIRECTORY", True)
    (directory / CONFIG_FILE).write_text("")
    (finding,) = errors(write())
    assert "another run" in finding.message
    assert (directory / "notes.txt").read_text() == "mine"


def test_a_busy_port_is_found(write):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        (finding,) = errors(write(), f"sglang.port={port}")
    assert finding.where == "sglang.port (command line)"
    assert str(port) in finding.message


@pytest.mark.parametrize("type", ["local", "ray"])
def test_every_server_has_a_port_that_there_is(write, type):
    two = [f"scheduler.type={type}", "rollout.backend=sglang:d2", "cluster.n_gpus_per_node=4"]
    (finding,) = errors(write(), *two, "sglang.port=65535")
    assert finding.key == "sglang.port" and "port 65536 cannot be used: the largest is 65535" in finding.message
    assert check(write(), *two, "sglang.port=65534").ok


@pytest.mark.parametrize(
    ("missing", "overrides", "key"),
    [
        ("sglang", [], "rollout.backend"),
        ("mbridge", [], "actor.megatron.bridge_type"),
        ("megatron.bridge", ["actor.megatron.bridge_type=megatron-bridge"], "actor.megatron.bridge_type"),
    ],
)
def test_a_missing_package_is_named(write, missing, overrides, key):
    with mock.patch.object(module, "_is_installed", lambda name: name != missing):
        (finding,) = errors(write(), *overrides)
    assert finding.where.startswith(f"{key} (")
    assert finding.code == "RUN-PACKAGE"


def test_a_package_that_is_not_chosen_is_not_needed(write):
    with mock.patch.object(module, "_is_installed", lambda name: name != "megatron.bridge"):
        assert check(write()).ok


def test_a_model_directory_is_read(write, tmp_path):
    write_init_model(InitModelConfig(num_attention_heads=3, num_key_value_heads=3), tmp_path / "model", seed=0)
    checked = check(write(), f"actor.path={tmp_path / 'model'}")
    assert checked.ok
    assert len(checked.job.train_prompts) == 16
    found = errors(write(), f"actor.path={tmp_path / 'model'}", "actor.backend=megatron:t2")
    assert any("3" in f.message and f.where == "actor.backend (command line)" for f in found)


def test_a_model_directory_needs_its_weights(write, tmp_path):
    directory = tmp_path / "model"
    write_init_model(InitModelConfig(num_hidden_layers=1), directory, seed=0)
    (directory / "model.safetensors").rename(directory / "model-1-of-2.safetensors")
    index = directory / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}')
    (finding,) = errors(write(), f"actor.path={directory}")
    assert (finding.where, "lacks model-2-of-2.safetensors" in finding.message) == ("actor.path (command line)", True)
    for torn in ("{", "[]", '{"weight_map": 1}'):
        index.write_text(torn)
        (finding,) = errors(write(), f"actor.path={directory}")
        assert "index.json cannot be read" in finding.message
    index.unlink()
    (directory / "model-1-of-2.safetensors").unlink()
    (finding,) = errors(write(), f"actor.path={directory}")
    assert "no weights" in finding.message


@pytest.mark.parametrize("backend", ["megatron:d2", "fsdp:d2"])
def test_a_model_names_its_architecture(write, tmp_path, backend):
    write_init_model(InitModelConfig(num_hidden_layers=1), tmp_path, seed=0)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": None}))
    (finding,) = errors(write(), f"actor.path={tmp_path}", f"actor.backend={backend}")
    assert "no architectures" in finding.message
    (suggested,) = re.findall(r"add (.*) to it", finding.help)
    (tmp_path / "config.json").write_text(json.dumps({**config, **json.loads(f"{{{suggested}}}")}))
    assert check(write(), f"actor.path={tmp_path}", f"actor.backend={backend}").ok


@pytest.mark.parametrize("model", ["actor.path=SMALL", "actor.init_model.vocab_size=50"])
def test_a_tokenizer_with_more_entries_than_the_model_has_rows_is_refused(write, tmp_path, model):
    write_init_model(InitModelConfig(num_hidden_layers=1), tmp_path / "small", seed=0)
    write_init_model(InitModelConfig(num_hidden_layers=1, tokenizer="bytes"), tmp_path / "large", seed=0)
    overrides = [model.replace("SMALL", str(tmp_path / "small")), f"tokenizer_path={tmp_path / 'large'}"]
    (finding,) = errors(write(), *overrides, "train_dataset.max_prompt_length=400", "valid_dataset=null")[:1]
    assert finding.where == "tokenizer_path (command line)"
    assert "259 entries; the model's embedding has 50 rows" in finding.message


@pytest.mark.parametrize("address", ["foo", ":6379", "10.0.0.1:x", "10.0.0.1:70000", "ray://10.0.0.1:6379"])
def test_an_address_that_is_none_is_refused(write, address):
    (finding,) = errors(write(), "scheduler.type=ray", f"scheduler.address={address}")
    assert finding.where == "scheduler.address (command line)"
    assert "is not `auto` or HOST:PORT" in finding.message


def test_an_existing_cluster_has_to_answer(write):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"scheduler.address=127.0.0.1:{listener.getsockname()[1]}"
        (finding,) = errors(write(), "scheduler.type=ray", address)
        assert "nothing answers" in finding.message
        assert "ray start --head" in finding.help
        listener.listen()
        assert check(write(), "scheduler.type=ray", address).ok
        assert check(write(), "scheduler.address=foo").ok  # a private cluster has no address


def test_auto_needs_a_cluster(write, existing):
    existing["problem"] = "no Ray cluster runs on this host"
    (finding,) = errors(write(), "scheduler.type=ray")
    assert (finding.where, finding.message) == ("scheduler.address (default)", existing["problem"])
    checked = preflight(load(write(), ["scheduler.type=ray"]), dry_run=True)
    assert checked.ok
    assert [(f.severity, f.message) for f in checked.findings] == [("warning", finding.message)]


def test_the_cluster_that_ray_address_names_has_to_answer(write, monkeypatch):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        (finding,) = errors(write(), "scheduler.type=ray")
        assert f"nothing answers at {address} (`auto`, from RAY_ADDRESS)" in finding.message
        listener.listen()
        assert check(write(), "scheduler.type=ray").ok


def test_the_cluster_that_was_started_last_has_to_answer(write, existing, tmp_path):
    """Ray asks a cluster that was killed for minutes."""
    last = tmp_path / "ray/ray_current_cluster"
    last.parent.mkdir()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        last.write_text(address := f"127.0.0.1:{listener.getsockname()[1]}")
        (finding,) = errors(write(), "scheduler.type=ray")
        assert f"nothing answers at {address} (`auto`, from {last})" in finding.message
        listener.listen()
        assert check(write(), "scheduler.type=ray").ok


@pytest.mark.parametrize("dry_run", [False, True])
def test_an_existing_cluster_has_to_hold_the_plan(write, monkeypatch, existing, dry_run):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    existing["nodes"] = [{"CPU": 2.0}]
    (finding,) = preflight(load(write(), ["scheduler.type=ray"]), dry_run=dry_run).findings
    assert finding.severity == "error" and finding.where.startswith("cluster.n_nodes (")
    assert "asks for 1 node with 3 CPU\n  the cluster has 1 node with 2 CPU" in finding.message


def test_auto_is_no_answer_on_a_host_without_gpus_of_a_cluster_that_has_some(write, existing):
    with mock.patch.object(module, "gpu_count", return_value=0):
        (finding,) = errors(write(), "scheduler.type=ray", "device=auto")
        assert (finding.key, finding.help) == ("device", "write device=cuda, or device=cpu")
        assert "this host has no GPU" in finding.message
        assert check(write(), "scheduler.type=ray", "device=cpu").ok
        existing["nodes"] = [{"CPU": 64.0}]
        assert check(write(), "scheduler.type=ray", "device=auto").ok


@pytest.mark.parametrize("address", ["ray://10.0.0.1:10001", "local"])
def test_a_ray_address_that_is_none_is_refused(write, monkeypatch, address):
    monkeypatch.setenv("RAY_ADDRESS", address)
    (finding,) = errors(write(), "scheduler.type=ray")
    assert address in finding.message
    assert "HOST:PORT" in finding.message


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 4),
        ("", 0),
        ("-1", 0),
        ("0,1", 2),
        ("0,-1,1", 1),
        ("1,,2", 1),
        ("GPU-5f3a, MIG-07", 2),
        ("0,1,2,3,4,5", 4),
    ],
)
def test_gpus_are_counted_as_cuda_counts_them(monkeypatch, visible, count):
    monkeypatch.setattr(module.Path, "glob", lambda *_: [None] * 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert module.gpu_count() == count


def test_a_warm_start_needs_examples_that_fit(write, tmp_path):
    data = tmp_path / "long.jsonl"
    data.write_text('{"question": "1?", "answer": "1"}\n{"question": "1?", "answer": "' + "1" * 60 + '"}\n')
    paths = [f"train_dataset.path={data}", "train_dataset.batch_size=2", f"valid_dataset.path={data}"]
    settings = [*paths, "actor.init_model.tokenizer=bytes", "actor.mb_spec.max_tokens_per_mb=63"]
    assert check(write(), *settings, "warm_start.steps=1").ok
    settings += ["valid_dataset.max_samples=1", "actor.backend=megatron:t2"]  # padded to even lengths
    assert check(write(), *settings).ok
    (finding,) = errors(write(), *settings, "warm_start.steps=1")
    assert finding.where == "actor.mb_spec.max_tokens_per_mb (command line)"
    assert "train_dataset, row 2 has 64 tokens with its answer; a micro-batch holds 63" in finding.message


def test_a_warm_start_needs_answers_that_the_tokenizer_takes(write, tmp_path):
    words = tmp_path / "words"
    write_init_model(InitModelConfig(num_hidden_layers=1), words, seed=0)
    tokenizer = json.loads((words / "tokenizer.json").read_text())
    vocabulary = {word: index for index, word in enumerate(("<eos>", "1", "+", "=", "?"))}
    tokenizer["model"] = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<nothing>"}
    tokenizer |= {"pre_tokenizer": {"type": "WhitespaceSplit"}, "added_tokens": []}
    (words / "tokenizer.json").write_text(json.dumps(tokenizer))
    data = tmp_path / "sums.jsonl"
    data.write_text('{"question": "1 + 1 = ?", "answer": "two #### 2"}\n')
    paths = [f"tokenizer_path={words}", f"train_dataset.path={data}", f"valid_dataset.path={data}"]
    settings = [*paths, "train_dataset.batch_size=1"]
    checked = check(write(), *settings)
    assert checked.ok, list(map(str, checked.findings))
    assert {f.where for f in errors(write(), *settings, "warm_start.steps=1")} == {
        "train_dataset.path (command line)",
        "valid_dataset.path (command line)",
    }


def test_without_a_gpu_auto_means_cpu_and_cuda_is_refused(write):
    with mock.patch.object(module, "gpu_count", return_value=0):
        assert check(write(), "device=auto").job.device == "cpu"
        found = errors(write(), "device=cuda", "actor.dtype=bfloat16")
    assert [f.code for f in found] == ["RUN-MACHINE"]


def test_with_gpus_auto_means_cuda(write):
    with mock.patch.object(module, "gpu_count", return_value=2):
        with mock.patch.object(module, "_is_installed", return_value=True):
            (finding,) = errors(write(), "device=auto")
        assert "needs 3 GPUs; this host has 2" in finding.message


@pytest.mark.parametrize(("present", "ok"), [(4, False), (7, False), (8, True)])
def test_gpus_that_are_named_have_to_be_there(write, present, ok):
    named = ["rollout.backend=sglang:d1@6", "actor.backend=megatron:d1@7", "cluster.n_gpus_per_node=8"]
    with mock.patch.multiple(module, gpu_count=lambda: present, _is_installed=lambda _: True):
        checked = preflight(load(write(), [*named, "device=cuda", "actor.dtype=bfloat16"]), dry_run=True)
        found = [f for f in checked.findings if f.severity != "note"]
        assert [f.code for f in found] == ([] if ok else ["RUN-MACHINE"]), list(map(str, found))
        if not ok:
            assert f"needs 8 GPUs, by the numbers after `@`; this host has {present}" in found[0].message
            lower = [
                "rollout.backend=sglang:d1@0",
                "actor.backend=megatron:d1@1",
                "device=cuda",
                "actor.dtype=bfloat16",
            ]
            assert check(write(), *lower).ok


def test_transformer_engine_is_needed_where_there_are_gpus(write):
    with (
        mock.patch.object(module, "gpu_count", return_value=3),
        mock.patch.object(module, "_is_installed", lambda name: name != "transformer_engine"),
    ):
        (finding,) = errors(write(), "device=cuda")
        assert finding.message == "the package transformer-engine is not installed"
        assert check(write(), "device=cpu").ok


def test_an_option_that_does_nothing_is_a_warning(write):
    checked = check(write(), "sglang.mem_fraction_static=0.5")
    assert checked.ok
    assert [(f.severity, f.where) for f in checked.findings] == [
        ("warning", "sglang.mem_fraction_static (command line)")
    ]


def test_a_warm_start_needs_answers_in_known_words(write, tmp_path):
    data = tmp_path / "words.jsonl"
    data.write_text('{"question": "Tom has 3 apples.", "answer": "Zebras! #### 3"}\n')
    settings = [f"train_dataset.path={data}", "train_dataset.batch_size=1", "actor.init_model.tokenizer=arithmetic"]
    assert check(write(), *settings).ok
    (finding,) = errors(write(), *settings, "warm_start.steps=1")
    assert finding.where == "train_dataset.path (command line)"
    assert "row 1 has words in its answer that the tokenizer does not know" in finding.message


def test_held_out_prompts_reach_the_trainer_in_a_warm_start_alone(write):
    longer = ["valid_dataset.max_prompt_length=100", "actor.mb_spec.max_tokens_per_mb=64"]
    longer.append("actor.init_model.max_position_embeddings=128")
    assert check(write(), *longer).ok
    finding, *_ = errors(write(), *longer, "warm_start.steps=1")
    assert (finding.code, finding.key) == ("ALLOC-PACKED-LENGTH", "actor.mb_spec.max_tokens_per_mb")


NODES = ["device=cuda", "cluster={n_nodes: 4, n_gpus_per_node: 8}", "scheduler.type=ray", "train_dataset.batch_size=16"]
JUDGE = ["reward.type=model", "reward.model.path=/nowhere"]


def test_a_server_over_two_nodes_is_refused_with_one_that_fits(write):
    model = ["actor.init_model.num_attention_heads=16", "actor.init_model.num_key_value_heads=16"]
    layout = ["actor.backend=megatron:d16@16-31", "rollout.backend=sglang:d1t16@0-15"]
    (finding,) = [f for f in errors(write(), *NODES, *model, *layout) if f.code == "RUN-ROLE-BACKEND"]
    assert "span nodes" in finding.message
    assert finding.nearest[0].startswith("sglang:d") and finding.nearest[0].endswith("@0-15")


def test_layers_that_do_not_divide_are_told_the_keys_that_split_them(write):
    """Those of the role: the reference has a section of its own."""
    uneven = ["actor.init_model.num_hidden_layers=7", "actor.backend=megatron:d1p2", "ref={megatron: {}}"]
    for more, owner in ([], "actor"), (["actor.backend=megatron:d2", "ref.backend=megatron:d1p2"], "ref"):
        overrides = [*NODES, "cluster.n_nodes=1", *uneven, *more]
        found = [f for f in errors(write(), *overrides) if f.code == "ALLOC-LAYERS" and f.key == f"{owner}.backend"]
        words = found[0].help.removeprefix("write ").partition(":")[0].split()
        assert words == [f"{owner}.megatron.override_transformer_config.num_layers_in_first_pipeline_stage=4"]
        after = check(write(), *overrides, *words).findings
        assert not [f for f in after if f.code == "ALLOC-LAYERS" and f.key == f"{owner}.backend"]


@pytest.mark.parametrize(
    ("key", "layout", "nearest"),
    [
        (
            "reward.model.backend",
            [
                "actor.backend=megatron:d8@0-7",
                "rollout.backend=sglang:d8@8-15",
                "reward.model.backend=sglang:d1t16@16-31",
            ],
            "sglang:d2t8@16-31",
        ),
        (
            "allocation_mode",
            ["allocation_mode=sglang[rollout]:d8@0-7+megatron[actor]:d8@8-15+sglang[reward]:d1t16@16-31"],
            "sglang[rollout]:d8@0-7+megatron[actor]:d8@8-15+sglang[reward]:d2t8@16-31",
        ),
    ],
)
def test_of_a_reward_model_s_server_over_two_nodes_its_own_key_is_named(write, key, layout, nearest):
    (finding,) = [f for f in errors(write(), *NODES, *JUDGE, *layout) if f.code == "RUN-ROLE-BACKEND"]
    assert finding.key == key
    assert "span nodes" in finding.message
    assert finding.nearest == (nearest,)
