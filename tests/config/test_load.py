import re
from pathlib import Path

import pytest
import yaml

from areal_like.core.config.findings import ConfigError
from areal_like.core.config.keys import all_keys
from areal_like.core.config.load import dump, load

NAME = "letters, digits, `_`, `.` and `-` only, and begin with neither `.` nor `-`"
EXAMPLE = Path(__file__).parents[2] / "examples/math/gsm8k_grpo_cpu.yaml"
FOLDED = "megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)"


def findings(file, *overrides):
    with pytest.raises(ConfigError) as caught:
        load(file, overrides)
    return caught.value.findings


def test_values_come_from_file_then_command_line(write):
    config = load(write(), ["gconfig.n_samples=4", "actor.optimizer.lr=3e-5", "valid_dataset=null"]).config
    assert config.train_dataset.batch_size == 4
    assert config.gconfig.n_samples == 4
    assert config.actor.optimizer.lr == 3e-5
    assert config.valid_dataset is None


@pytest.mark.parametrize("value", [FOLDED, "megatron:attn:d1p4t2c2/ffn:d1p4t1e4", "megatron:d2 @ 0-1", "megatron:d*"])
@pytest.mark.parametrize("quotes", ["{}", "'{}'", '"{}"'])
def test_an_allocation_survives_the_command_line(write, value, quotes):
    assert load(write(), ["actor.backend=" + quotes.format(value)]).config.actor.backend == value


def test_an_allocation_needs_no_quotes_in_yaml(write):
    file = write()
    file.write_text(file.read_text().replace("megatron:d2", FOLDED))
    assert load(file).config.actor.backend == FOLDED


@pytest.mark.parametrize("name", ["2024_08", "1e3", "true", "007", "1:30", "no"])
def test_a_text_stays_as_it_was_typed(write, name):
    overrides = [f"experiment_name={name}"] if ":" not in name else [f"tokenizer_path={name}"]
    config = load(write(), overrides).config
    assert name in (config.experiment_name, config.tokenizer_path)


def test_null_unsets_a_text_that_may_be_unset(write):
    assert load(write(), ["tokenizer_path=x", "tokenizer_path=null"]).config.tokenizer_path is None


def test_references_are_resolved(write):
    file = write()
    file.write_text(file.read_text() + "seed: ${gconfig.n_samples}\n")
    assert load(file, ["gconfig.n_samples=5", "reward.workers=${seed}"]).config.reward.workers == 5


def test_sections_are_made_where_there_were_none(write):
    config = load(
        write(), ["warm_start.steps=3", "sglang.extra_args.schedule_policy=lpm", "sglang.extra_args.x=2"]
    ).config
    assert config.warm_start.steps == 3
    assert config.sglang.extra_args == {"schedule_policy": "lpm", "x": 2}


def test_a_section_that_is_overridden_is_the_command_lines(write):
    loaded = load(write(), ["gconfig={n_samples: 4}"])
    assert loaded.origins.place_of("gconfig.max_new_tokens") == "command line"
    assert loaded.config.gconfig.max_new_tokens == 512


def test_what_must_be_there_says_how(write):
    found = {f.where: f.help for f in findings(write("seed: 1"), "=5", "train_dataset={batch_size: 2}")}
    assert found["=5 (command line)"] == "write key=value"
    assert found["actor (default)"] == "write `actor:` and its keys in the file"
    assert found["train_dataset.path (command line)"] == "write train_dataset.path=... or set it in the file"


def test_everything_wrong_is_reported_together(write):
    file = write("""
        experiment_name: 12
        train_dataset:
          path: arithmetic
          batch_sise: 3
        actor:
          path: m
          dtype: bfloat
          optimizer: {lr: fast, weight_decay: -1}
        reward: 3
    """)
    found = {f.where: f for f in findings(file, "scheduler.type=rya", "actor.lr=3", "seed=x", "batch_size", "+seed=3")}
    file = str(file)
    assert {key.replace(file, "run.yaml") for key in found} == {
        "experiment_name (run.yaml:2)",
        "train_dataset.batch_sise (run.yaml:5)",
        "actor.dtype (run.yaml:8)",
        "actor.optimizer.lr (run.yaml:9)",
        "actor.optimizer.weight_decay (run.yaml:9)",
        "reward (run.yaml:10)",
        "scheduler.type (command line)",
        "actor.lr (command line)",
        "seed (command line)",
        "batch_size (command line)",
        "+seed (command line)",
    }
    assert found[f"train_dataset.batch_sise ({file}:5)"].nearest == ("train_dataset.batch_size",)
    assert found[f"actor.dtype ({file}:8)"].nearest == ("bfloat16",)
    assert found["scheduler.type (command line)"].nearest == ("ray",)
    assert "'local' or 'ray'" in found["scheduler.type (command line)"].message
    assert found["actor.lr (command line)"].nearest == ("actor.optimizer.lr",)
    assert found["+seed (command line)"].nearest == ("seed",)
    assert found[f"experiment_name ({file}:2)"].help == 'write it in quotes: "12"'


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=1.5", "1.5 should be a whole number"),
        ("seed=true", "True should be a whole number"),
        ("seed=", "None should be a whole number"),
        ("seed=4294967296", "4294967296 should be less than 4294967296"),
        ("actor.init_model.num_hidden_layers=10001", "10001 should be less than or equal to 10000"),
        ("total_train_steps=None", "'None' should be a whole number or null"),
        ("gconfig.temperature=0", "0 should be greater than or equal to 0.000001"),
        ("evaluator.temperature=1e-7", "1e-07 should be 0, which is greedy, or at least 1e-06"),
        ("actor.timeout_s=.inf", "inf should be a finite number"),
        ("gconfig.temperature=.nan", "nan should be a finite number"),
        ("train_dataset.shuffle=1", "1 should be true or false"),
        ("sglang.extra_args.x=[1]", "[1] should be true or false or a whole number or a number or text"),
        ("sglang.extra_args={", "{ is not a YAML value: while parsing a flow node"),
        ("experiment_name=a/b", f"'a/b' should be {NAME}"),
        ("experiment_name=..", f"'..' should be {NAME}"),
        ("trial_name=..", f"'..' should be {NAME}"),
        ("trial_name=.", f"'.' should be {NAME}"),
        ("trial_name=.weights", f"'.weights' should be {NAME}"),
        ("train_dataset=null", "None should be a section of keys"),
    ],
)
def test_a_wrong_value_is_explained(write, override, message):
    (finding,) = findings(write(), override)
    assert finding.message == message
    assert finding.where == f"{override.split('=')[0]} (command line)"


def test_a_missing_key_is_named(write):
    (finding,) = findings(write("experiment_name: a\ntrain_dataset: {path: arithmetic}\n"))
    assert finding.where == "actor (default)"
    assert finding.code == "CONFIG-MISSING"


@pytest.mark.parametrize(
    ("text", "code", "place"),
    [
        ("seed: [1\n", "CONFIG-FILE", ":2"),
        ("seed: 1\nseed: 2\n", "CONFIG-FILE", ":2"),
        ("- 1\n", "CONFIG-FILE", ""),
        ("a: {b: 1\n\n\n", "CONFIG-FILE", ":4"),
    ],
)
def test_broken_yaml_is_located(write, text, code, place):
    file = write(text)
    (finding,) = findings(file)
    assert (finding.code, finding.key) == (code, f"{file}{place}")


def test_a_file_that_is_not_there_is_named(tmp_path):
    (finding,) = findings(tmp_path / "none.yaml")
    assert "none.yaml" in finding.message


def test_a_section_that_is_referred_to_has_the_keys_of_where_it_stands(write):
    found = findings(write(), "valid_dataset=${train_dataset}")
    assert {finding.key for finding in found} == {"valid_dataset.batch_size"}
    assert {finding.source.places for finding in found} == {("command line",)}
    assert load(write(), ["evaluator.datasets.other=${valid_dataset}"]).config.evaluator.datasets["other"]


@pytest.mark.parametrize("reference", ["${nothing}", "${seed}", "${no:1}", "${seed"])
def test_a_reference_that_leads_nowhere_is_named(write, reference):
    (finding,) = findings(write(), f"seed={reference}")
    assert finding.where == "seed (command line)"


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("reward: {workers: '${seed}'}\nseed: x\n", "seed"),
        ("reward: {workers: '${seed}'}\nseeed: 3\n", "seeed"),
        ("reward: {workers: '${evaluator.freq_steps}'}\nevaluator: {frq_steps: 3}\n", "evaluator.frq_steps"),
        ("seed: x\nreward: {workers: '${seed}'}\nweight_update: {bucket_mb: '${reward.workers}'}\n", "seed"),
        ("reward: {workers: '${experiment_name}'}\n", "reward.workers"),  # a text, which is right where it stands
        ("sglang: {extra_args: {1: [2]}}\n", "sglang.extra_args.1"),
        ("sglang.context_length: 1\n", "sglang.context_length"),
        ("modle: {path: x}\n", "modle"),
        ("sglang: {extra_args: {a: ['${nothing}']}}\n", "sglang.extra_args.a"),
        ("seed: '???'\n", "seed"),
        ("sglang: {extra_args: {a: '???'}}\n", "sglang.extra_args.a"),
    ],
)
def test_the_cause_is_said_and_not_what_follows_from_it(write, text, wrong):
    file = write()
    file.write_text(file.read_text() + text)
    (finding,) = findings(file)
    assert finding.key == wrong


def test_keys_that_refer_to_each_other_are_named(write):
    file = write()
    file.write_text(file.read_text() + "seed: '${reward.workers}'\nreward: {workers: '${seed}'}\n")
    assert {f.code for f in findings(file)} == {"CONFIG-REFERENCE"}


def test_a_misspelt_key_is_not_missing_as_well(write):
    file = write("experiment_nam: a\ntrain_dataset: {pth: arithmetic}\nactr: {path: /nowhere}\n")
    keys = {f.key for f in findings(file)}
    assert keys == {"experiment_nam", "train_dataset.pth", "actr"}


@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=[pytest.mark.long] if place % 4 else []) for place, key in enumerate(all_keys())]
)
def test_a_misspelt_key_is_all_that_is_wrong(write, key):
    misspelt = key[:-2] + key[-1]
    (finding,) = findings(write(), f"{misspelt}=1")
    assert (finding.where, finding.code) == (f"{misspelt} (command line)", "CONFIG-UNKNOWN-KEY")


@pytest.mark.parametrize("name", ["n" * 256, "é" * 128])
@pytest.mark.parametrize("key", ["trial_name", "experiment_name", "cluster.fileroot", "train_dataset.path"])
def test_a_name_that_no_file_system_takes_is_refused(write, key, name):
    (finding,) = findings(write(), f"{key}={name}")
    assert "255" in finding.message
    assert load(write(), [f"{key}={name[:127]}"])


def test_files_go_where_every_process_finds_them(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory = load(write(), ["cluster.fileroot=runs"]).config.run_dir
    monkeypatch.chdir("/")
    assert directory == tmp_path / "runs/demo/first"


@pytest.mark.parametrize(
    ("overrides", "unset"),
    [
        (["actor.path=m"], "init_model"),
        (["actor.path=m", "actor.init_model.hidden_size=64"], None),
        (["actor.path=null"], None),
    ],
)
def test_the_command_line_decides_between_alternatives(write, overrides, unset):
    actor = load(write(), overrides).config.actor
    assert (actor.init_model is None) == (unset == "init_model")


def test_allocation_mode_and_backends_are_alternatives(write):
    config = load(write(), ["allocation_mode=sglang:d1|megatron:d1"]).config
    assert config.actor.backend is None
    assert config.rollout.backend is None
    file = write()
    file.write_text(file.read_text() + "allocation_mode: sglang:d1|megatron:d1\n")
    assert load(file, ["actor.backend=megatron:d1"]).config.allocation_mode is None


def test_a_key_that_was_replaced_names_the_one_that_has_its_place(write):
    with pytest.raises(ConfigError) as raised:
        load(write(), ["rollout.partial_rollout=false"])
    (found,) = raised.value.findings
    assert found.message == "this key was replaced by weight_update.requests"
    assert "write weight_update.requests=drain for false" in found.help
    assert load(write(), ["weight_update.requests=drain"]).config.weight_update.requests == "drain"


def test_without_a_trial_name_the_time_is_taken(write):
    assert re.fullmatch(r"\d{8}-\d{6}", load(write(), ["trial_name="]).config.trial_name)


def test_the_resolved_configuration_loads_as_itself(write, tmp_path):
    config = load(write(), [f"actor.backend={FOLDED}", "warm_start.steps=3", "sglang.extra_args.x=1.5"]).config
    file = tmp_path / "resolved.yaml"
    file.write_text(dump(config))
    assert load(file).config == config


@pytest.mark.parametrize("name", ["1e5", "12e03", "1.e3", "1_0e5", "007", "2024-01-01", "1.5", "no", "null", "0x1F"])
def test_a_name_that_looks_like_a_number_loads_as_itself(write, tmp_path, name):
    config = load(write(), [f"experiment_name={name}", f"trial_name={name}"]).config
    file = tmp_path / "resolved.yaml"
    file.write_text(dump(config))
    assert load(file).config == config
    assert yaml.safe_load(file.read_text()) == config.model_dump()


def test_sections_by_name_take_overrides_and_know_their_keys(write):
    parts = ("reward.parts.right.type=gsm8k", "reward.parts.short.function=a.py:b", "reward.parts.short.weight=0.5")
    short = load(write(), parts).config.reward.parts["short"]
    assert (short.function, short.weight) == ("a.py:b", 0.5)
    with pytest.raises(ConfigError) as refused:
        load(write(), ["reward.parts.short.wieght=0.5", "evaluator.datasets.aime={path: a.jsonl, n_sample: 4}"])
    nearest = [found.nearest for found in refused.value.findings]
    assert nearest == [("reward.parts.short.weight",), ("evaluator.datasets.aime.n_samples",)]


@pytest.mark.parametrize("place", ["file", "command line"])
def test_the_old_name_of_a_key_works_with_a_warning_that_names_the_new_one(place, tmp_path):
    file = tmp_path / "run.yaml"
    old = EXAMPLE.read_text()
    file.write_text(old.replace("requests: drain", "requests: drain, ahead_mb: 77") if place == "file" else old)
    loaded = load(file, ["weight_update.ahead_mb=77"] if place == "command line" else [])
    assert loaded.config.weight_update.prefetch_mb == 77
    (warning,) = loaded.warnings
    assert (warning.code, warning.severity, warning.key) == ("CONFIG-RENAMED", "warning", "weight_update.prefetch_mb")


@pytest.mark.parametrize("key", ["rollout.client_processes", "rollout.max_servers"])
def test_a_removed_key_is_an_error_that_says_why(key):
    with pytest.raises(ConfigError) as error:
        load(EXAMPLE, [f"{key}=1"])
    (found,) = error.value.findings
    assert (found.code, found.key) == ("CONFIG-REMOVED-KEY", key)


def test_the_old_and_the_new_name_of_a_key_are_not_taken_together():
    with pytest.raises(ConfigError, match="is set too"):
        load(EXAMPLE, ["weight_update.ahead_mb=77", "weight_update.prefetch_mb=77"])
