"""A setting of another system means here what it means there: the resolved values, not the words, are compared."""

import re
import shlex

import meanings
import pytest
import yaml

from areal_like.core.algorithms.settings import KEYS, PRESETS, settings_of
from areal_like.core.config.load import load
from areal_like.interop.completion import fill_placeholders
from areal_like.interop.keys import DEFAULTS, TABLES, entry
from areal_like.interop.migrate import migrate

SFT_IN_ROLL = """
pretrain: /models/qwen
sequence_length: 2048
prompt_key: instruction
query_key: input
response_key: output
sft_train:
  training_args: {per_device_train_batch_size: 2, gradient_accumulation_steps: 16, learning_rate: 5.0e-6}
  data_args: {file_name: data/rows.json}
  strategy_args:
    strategy_name: megatron_train
    strategy_config: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2}
  device_mapping: list(range(0,8))
"""
SFT_IN_VERL = """torchrun --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer data.train_files=rows.parquet
data.prompt_key=extra_info data.response_key=extra_info data.prompt_dict_keys=['question']
+data.response_dict_keys=['answer'] model.partial_pretrain=/models/qwen model.lora_rank=32
""".replace("\n", " \\\n  ")
SHORT = {"A.": "actor_rollout_ref.actor.", "R.": "actor_rollout_ref.rollout.", "M.": "actor_rollout_ref.model."}
ROWS = [
    (system, *map(str.strip, line.split("->")))
    for system, (_, table) in meanings.SYSTEMS.items()
    for line in table.strip().splitlines()
    if line
]


def with_settings(system, settings):
    """The base configuration of a system with settings, in the system's own form."""
    base = meanings.SYSTEMS[system][0].strip()
    if system == "slime":
        return f"{base} {settings}\n".replace("\n--", " --")
    if system in ("verl", "siirl"):
        own = " ".join(re.sub(r"^[ARM]\.", lambda m: SHORT[m[0]], part) for part in settings.split())
        return f"{' '.join(base.split())} {own}\n"
    tree = yaml.safe_load(base)
    for part in re.findall(r"\S+?=(?:\{.*?\}+(?=\s|$)|\[.*?\](?=\s|$)|\S+)", settings):
        key, _, value = part.partition("=")
        *path, last = key.split(".")
        node = tree
        for name in path:
            node = node.setdefault(name, {})
        node[last] = yaml.safe_load(value)
    return yaml.safe_dump(tree)


def resolved(config, key):
    """The value that a run takes for a key: of what an algorithm decides, with its preset."""
    value, names = config, key.split(".")
    if names[0] == "actor" and names[1] in KEYS:
        value, names = settings_of(PRESETS[config.algorithm], config.actor), names[1:]
    for name in names:
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    return value


@pytest.mark.parametrize(
    ("system", "settings", "wanted"),
    [
        pytest.param(*row, id=f"{row[0]}: {row[1]} -> {row[2]}", marks=[pytest.mark.long] if place % 4 else [])
        for place, row in enumerate(ROWS)
    ],
)
def test_a_setting_has_the_value_that_it_has_there(system, settings, wanted):
    done = migrate(with_settings(system, settings), system)
    assert done.problems == []
    if wanted == "!":
        assert done.changes
        load(yaml.safe_load(fill_placeholders(done.yaml)))  # the YAML is there all the same
        return
    key, _, value = wanted.partition(" = ")
    config = load(yaml.safe_load(fill_placeholders(done.yaml))).config
    assert resolved(config, key) == yaml.safe_load(re.sub(r"^(\d+)e", r"\1.0e", value) if value != "None" else "null")
    assert done.changes == {}, done.report()


def test_the_tables_have_forty_settings_of_each_system():
    for system in meanings.SYSTEMS:
        assert sum(row[0] == system for row in ROWS) >= 40
    assert shlex.split(meanings.SLIME_BASE)


@pytest.mark.parametrize("system", TABLES)
def test_every_default_of_another_system_is_a_key_of_its_table(system):
    ours_too = {"areal"}  # whose keys are ours where they are called alike
    assert [key for key in DEFAULTS[system] if entry(system, key) is None and system not in ours_too] == []


def test_supported_training_on_a_dataset_is_not_called_missing():
    """Supervised, preference and distillation training exist; only their other settings are left to the user."""
    slime = with_settings("slime", "--loss-type sft_loss --calculate-per-token-loss")
    texts = [slime, SFT_IN_ROLL, SFT_IN_VERL, with_settings("roll", "beta=0.1")]
    for text, name in zip(texts, ("sft", "sft", "sft", "dpo"), strict=True):
        done = migrate(text)
        assert done.same, done.report()
        written = yaml.safe_load(done.yaml)
        assert (written["algorithm"], written["workflow"]) == (name, "???")
        assert f"examples/offline/{'answers' if name == 'sft' else 'preferences'}.py:run" in done.report()
        load(yaml.safe_load(fill_placeholders(done.yaml)))


def test_trinitys_sapo_keeps_its_settings_and_names_its_other_gradient():
    """It multiplies log-probs by the gate and does not differentiate it."""
    own = "algorithm={algorithm_type: sapo, policy_loss_fn_args: {tau_pos: 1.0, tau_neg: 1.2}}"
    done = migrate(with_settings("trinity", own), "trinity")
    actor = yaml.safe_load(done.yaml)["actor"]
    assert yaml.safe_load(done.yaml)["algorithm"] == "sapo" and list(done.changes) == ["algorithm.algorithm_type"]
    assert (actor["sapo_tau_neg"], actor["loss_agg_mode"], actor["reward_norm"]["std_level"]) == (
        1.2,
        "token_mean",
        "group",
    )
    load(yaml.safe_load(fill_placeholders(done.yaml)))


def test_a_run_that_only_evaluates_by_generation_gets_no_gpus_for_servers():
    """Other systems start no servers for it; here servers share the trainer's GPUs."""
    slime = with_settings(
        "slime", "--loss-type sft_loss --tensor-model-parallel-size 2 --actor-num-gpus-per-node 4 --rollout-num-gpus 4"
    )
    areal = "actor.backend=fsdp:d8 train_dataset.type=sft actor.path=/m train_dataset.path=/d cluster.n_gpus_per_node=8"
    for text, system, layout in (
        (slime, "slime", "sglang:d2t2|megatron:d2t2"),
        (SFT_IN_ROLL, "roll", "sglang:d4t2|megatron:d2p2t2"),
        (areal, "areal", "sglang:d8|fsdp:d8"),
    ):
        done = migrate(text, system)
        written = yaml.safe_load(done.yaml)
        assert written["allocation_mode"] == layout, done.report()
        assert written["rollout"]["sharing"] == "alternate"
        assert written.get("cluster", {}).get("n_nodes", 1) == 1
        load(yaml.safe_load(fill_placeholders(done.yaml)))


def test_the_batch_of_a_pipeline_without_generation_is_counted_by_device():
    written = yaml.safe_load(migrate(SFT_IN_ROLL).yaml)
    assert written["train_dataset"]["batch_size"] == 2 * 16 * 8 // (2 * 2)
    assert written["train_dataset"]["path"] == "???"  # two fields form the prompt


def test_supervised_training_of_verl_has_the_settings_of_its_own_trainer():
    written = yaml.safe_load(migrate(SFT_IN_VERL).yaml)
    assert written["train_dataset"] | {"path": "", "overlong_prompts": ""} == {
        "path": "",
        "overlong_prompts": "",
        "prompt_field": "extra_info.question",
        "answer_field": "extra_info.answer",
        "batch_size": 256,
    }
    assert written["actor"]["optimizer"]["beta2"] == 0.95
    assert written["actor"]["lora_rank"] == 32


SFT_OF_MESSAGES = """torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer data.train_files=rows.parquet
data.messages_key=messages data.ignore_input_ids_mismatch=True model.path=/models/qwen engine=megatron optim=megatron
optim.lr=1e-5 optim.min_lr=1e-6 optim.lr_warmup_steps=10 optim.lr_warmup_init=0 optim.lr_decay_style=cosine
""".replace("\n", " \\\n  ")


def test_verls_trainer_on_messages_has_its_own_defaults_and_the_settings_of_its_optimizer():
    done = migrate(SFT_OF_MESSAGES)
    assert done.same, done.report()
    written = yaml.safe_load(done.yaml)
    assert written["train_dataset"]["prompt_field"] == "messages" and "answer_field" not in written["train_dataset"]
    assert written["train_dataset"]["last_assistant"] == "drop" and written["workflow"] == "???"
    optimizer = written["actor"]["optimizer"]
    assert (optimizer["min_lr_ratio"], optimizer["warmup_steps"]) == (pytest.approx(0.1), 10)
    assert optimizer["lr_scheduler_type"] == "cosine" and optimizer.get("warmup_steps_proportion", 0.0) == 0.0
    least = migrate("torchrun -m verl.trainer.sft_trainer \\\n  data.train_files=rows.parquet model.path=/m\n")
    optimizer = yaml.safe_load(least.yaml)["actor"]["optimizer"]
    assert (optimizer["beta2"], optimizer["lr_scheduler_type"]) == (0.999, "constant")
    named = migrate(f"{SFT_OF_MESSAGES} model.mtp.enable=True optim.lr_wsd_decay_steps=5")
    assert set(named.changes) == {"model.mtp.enable", "optim.lr_wsd_decay_steps"}
    load(yaml.safe_load(fill_placeholders(done.yaml)))


def test_settings_that_only_the_shell_puts_into_the_command_are_not_lost_in_silence():
    base = with_settings("verl", "")
    script = f'CONFIG="\n  actor_rollout_ref.actor.policy_loss.loss_mode=$mode \\\n"\n{base.strip()} $CONFIG\n'
    done = migrate(script, "verl")
    assert "$mode" in done.changes["actor_rollout_ref.actor.policy_loss.loss_mode"]
    (problem,) = migrate(f"{base.strip()} $CONFIG\n", "verl").problems
    assert "$CONFIG" in problem


@pytest.mark.parametrize(
    ("system", "settings", "key"),
    [
        ("verl", "R.val_kwargs.top_p=0.7 R.top_p=0.9", "actor_rollout_ref.rollout.top_p"),
        ("slime", "--eval-top-p 0.7 --rollout-top-p 0.9", "rollout-top-p"),
    ],
)
def test_the_limit_of_sampled_ids_is_noted_on_the_key_of_training(system, settings, key):
    assert list(migrate(with_settings(system, settings), system).changes) == [key]


@pytest.mark.parametrize(
    ("settings", "key", "note"),
    [
        ("rollout_rs=token", "rollout_rs", "token rejection without weights"),
        ("rollout_is=token C.rollout_rs=token", "rollout_rs", "token weights with token rejection"),
        ("rollout_is=other", "rollout_is", "other weights: "),
    ],
)
def test_a_correction_that_is_not_here_is_described_as_it_is(settings, key, note):
    there = "algorithm.rollout_correction."
    done = migrate(with_settings("verl", f"C.{settings}".replace("C.", there)), "verl")
    assert list(done.changes) == [f"{there}{key}"]
    assert done.changes[f"{there}{key}"].startswith(note)


@pytest.mark.parametrize(("gone", "is_known"), [("actor_train", False), ("actor_infer", True)])
def test_optimizer_steps_of_roll_are_known_with_the_trainers_devices_alone(gone, is_known):
    """Without a trainer its ranks are unknown, which is not one rank; servers are not needed to count them."""
    text = with_settings("roll", f"{gone}.device_mapping=null")
    assert ("actor.ppo_n_minibatches" not in migrate(text, "roll").missing) == is_known
