"""What is wrong with keys comes in one report with what is wrong beyond them, and nothing that only follows from it."""

import pytest

from areal_like.config.keys import all_keys
from areal_like.config.load import load, read
from areal_like.config.schema import RunConfig
from areal_like.config.unknown import UnknownSetting
from areal_like.preflight.checks import preflight


def report(file, *overrides):
    """The keys of all errors, each with its code."""
    checked = preflight(read(file, overrides))
    assert not checked.ok
    found = [(str(f.key).partition(" (")[0], f.code) for f in checked.findings if f.severity == "error"]
    assert len(set(found)) == len(found), found
    return dict(found)


def add(file, text):
    file.write_text(file.read_text() + text)
    return file


def test_findings_of_every_kind_come_together(write):
    overrides = [
        "gconfig.n_samples=many",
        "rollout.max_head_offpolicynes=1",
        "weight_update.mode",
        "sglang.max_running_requests=${nothing}",
        "actor.backend=megatron:t3",
        "actor.path=/nowhere",
        "train_dataset.path=/none.jsonl",
        "gconfig.top_p=0.5",
        "cluster.fileroot=/dev/null/runs",
    ]
    assert report(write(), *overrides) == {
        "gconfig.n_samples": "CONFIG-VALUE",
        "rollout.max_head_offpolicynes": "CONFIG-UNKNOWN-KEY",
        "weight_update.mode": "CONFIG-OVERRIDE",
        "sglang.max_running_requests": "CONFIG-REFERENCE",
        "rollout.backend": "ALLOC-CLUSTER-SIZE",
        "actor.path": "RUN-MODEL",
        "train_dataset.path": "RUN-DATASET",
        "gconfig.top_p": "RUN-SAMPLING",
        "cluster.fileroot": "RUN-DIRECTORY",
    }


@pytest.mark.parametrize(
    "overrides",
    [
        ["actor.bakend=megatron:d2", "actor.backend=null"],
        ["actor.pth=/my/model"],  # which would unset the file's init_model
        ["actor.pth=/my/model", "actor.init_model=null"],
        ["allocation_mod=sglang:d9|megatron:d1"],
        ["train_dataset.path_=x", "train_dataset.path=/none.jsonl"],
        ["valid_datset.path=arithmetic", "valid_dataset=null", "evaluator.freq_steps=1"],
        ["batch_size=4", "train_dataset.batch_size=100"],
        ["device=tpu", "sglang.deterministic=true"],
        ["gconfig.max_new_tokens=x", "sglang.context_length=10"],
        ["sglang.mem_fraction_static=3"],
        ["trial_name=..", "experiment_name=demo"],
        ["reward=3"],
        ["actor=3"],
        ["cluster.n_gpus_per_node=few", "actor.backend=megatron:d8"],
        ["actor.megatron.recompute_granularity=ful", "actor.megatron.recompute_method=uniform"],
        ["train_dataset.max_prompt_length=x", "gconfig.max_new_tokens=4000"],
        ["actor.init_model.num_hidden_layers=x", "actor.backend=megatron:p2"],
    ],
)
def test_what_follows_from_a_refused_key_is_not_said(write, overrides):
    wrong, *_ = report(write(), *overrides)
    assert report(write(), *overrides).keys() == {wrong}
    assert wrong == overrides[0].partition("=")[0]


@pytest.mark.parametrize("key", all_keys())
def test_a_misspelt_key_is_all_that_is_wrong(write, key):
    misspelt = key[:-2] + key[-1]
    assert report(write(), f"{misspelt}=1") == {misspelt: "CONFIG-UNKNOWN-KEY"}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("reward: {workers: '${seed}'}\nseed: x\n", "seed"),
        ("reward: {workers: '${seed}'}\nseeed: 3\n", "seeed"),
        ("reward: {workers: '${evaluator.freq_steps}'}\nevaluator: {frq_steps: 3}\n", "evaluator.frq_steps"),
        ("seed: x\nreward: {workers: '${seed}'}\nweight_update: {bucket_mb: '${reward.workers}'}\n", "seed"),
    ],
)
def test_what_refers_to_a_refused_key_is_not_said(write, text, wrong):
    assert report(add(write(), text)).keys() == {wrong}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("reward: {workers: '${experiment_name}'}\n", "reward.workers"),  # a text, which is right where it stands
        ("seed: '${reward.workers}'\nreward: {workers: '${seed}'}\n", "seed"),
        ("sglang: {extra_args: {1: 2}}\n", "sglang.extra_args.1"),
        ("sglang.context_length: 1\n", "sglang.context_length"),
        ("modle: {path: x}\n", "modle"),
        ("sglang: {extra_args: {a: ['${nothing}']}}\n", "sglang.extra_args.a"),
        ("seed: '???'\n", "seed"),
        ("sglang: {extra_args: {a: '???'}}\n", "sglang.extra_args.a"),
    ],
)
def test_odd_files_end_in_findings(write, text, found):
    assert report(add(write(), text)).keys() == {found}


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["actor.bakend=megatron:d2", "rollout.backend=sglang:d9"], "rollout.backend"),
        (["actor.bakend=megatron:d2", "rollout.backend=megatron:d1"], "rollout.backend"),
        (["cluster.n_nodes=x", "actor.backend=megatron:(attn:d1t2|ffn:d1p4t1)"], "actor.backend"),
        (["gconfig.n_samples=x", "actor.backend=megatron:d9"], "rollout.backend"),
        (["actor.dtype=float16", "actor.init_model.vocab_size=3"], "actor.init_model.vocab_size"),
        (["actor.init_model.num_attention_heads=x", "actor.init_model.vocab_size=3"], "actor.init_model.vocab_size"),
        (["trial_name=..", "cluster.fileroot=/dev/null/runs"], "cluster.fileroot"),
        (["warm_start.steps=x", "valid_dataset=null", "evaluator.freq_steps=1"], "evaluator.freq_steps"),
        (["rollout.max_concurrent_rollouts=x", "gconfig.n_samples=1"], "gconfig.n_samples"),
    ],
)
def test_what_does_not_need_the_refused_key_is_checked(write, overrides, key):
    assert any(key == found for found in list(report(write(), *overrides))[1:])


def test_a_missing_key_hides_nothing_else(write):
    file = write("train_dataset: {path: /none.jsonl}\nactor: {path: /nowhere}\ngconfig: {top_p: 0.5}\n")
    assert report(file).keys() == {
        *("experiment_name", "train_dataset.path", "actor.path", "gconfig.top_p", "actor.backend", "rollout.backend")
    }


def test_a_misspelt_key_is_not_missing_as_well(write):
    file = write("experiment_nam: a\ntrain_dataset: {pth: arithmetic}\nactr: {path: /nowhere}\n")
    assert report(file).keys() == {"experiment_nam", "train_dataset.pth", "actr"}


def test_refused_settings_are_unknown_and_others_are_not(write):
    overrides = ["seed=x", "gconfig.n_sample=3", "sglang.extra_args.a=[1]", "sglang.extra_args.b=1"]
    config = read(write(), overrides).config
    for section, name in ((config, "seed"), (config.gconfig, "n_samples")):
        with pytest.raises(UnknownSetting):
            getattr(section, name)
    assert config.gconfig.max_new_tokens == 8
    assert config.sglang.extra_args == {"b": 1}
    assert config.reward == RunConfig.model_fields["reward"].default


def test_a_configuration_without_findings_is_the_one_that_load_gives(write):
    assert read(write()) == load(write())
