"""Configurations of other systems become runs' YAML, and their keys are explained where they stand in a run's own."""

import json

import pytest
import yaml

from allocation.convert.settings import Reading
from areal_like.core.config.findings import ConfigError
from areal_like.core.config.keys import all_keys, annotation_of
from areal_like.core.config.load import load
from areal_like.core.config.schema import InitModelConfig
from areal_like.core.config.validate import unknown_key
from areal_like.demo.init_model import write_init_model
from areal_like.interop.keys import TABLES, known_elsewhere
from areal_like.interop.migrate import migrate
from areal_like.interop.rules.translation import Translation
from areal_like.preflight import preflight

VERL = """
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=$HOME/data/train.parquet \\
    data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=1024 \\
    actor_rollout_ref.model.path=Qwen/Qwen3-8B actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.strategy=megatron \\
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.n=5 \\
    actor_rollout_ref.actor.megatron.param_offload=True trainer.n_gpus_per_node=8 trainer.nnodes=1 \\
    trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15 my.own=1
"""
SIIRL = """
export ACTOR_TP=4
export MODEL=/models/qwen3-8b
COMMAND=(
python3 -m siirl.client.main_dag data.train_batch_size=128 data.train_files=/data/train.parquet \\
    data.max_prompt_length=2048 data.max_response_length=4096 actor_rollout_ref.model.path=\\$MODEL \\
    actor_rollout_ref.actor.strategy=megatron actor_rollout_ref.actor.megatron.tensor_model_parallel_size=\\$ACTOR_TP \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 actor_rollout_ref.rollout.n=8 \\
    trainer.n_gpus_per_node=8 trainer.nnodes=1
)
eval "${COMMAND[@]}" "$@"
"""
TRINITY = """
project: demo
name: countdown
model: {model_path: /models/qwen, max_response_tokens: 1024, max_prompt_tokens: 256}
cluster: {node_num: 1, gpu_per_node: 8}
algorithm: {algorithm_type: grpo, repeat_times: 8}
buffer:
  total_epochs: 2
  batch_size: 96
  explorer_input:
    taskset: {path: /data/countdown, split: train}
explorer:
  rollout_model: {engine_num: 2, tensor_parallel_size: 1}
synchronizer: {sync_method: nccl, sync_interval: 1}
trainer:
  trainer_config:
    actor_rollout_ref:
      actor: {strategy: megatron, megatron: {tensor_model_parallel_size: 2}}
"""
ROLL = """
exp_name: qwen3-rlvr
seed: 42
pretrain: Qwen/Qwen3-8B
num_gpus_per_node: 8
rollout_batch_size: 64
prompt_length: 1024
response_length: 2048
num_return_sequences_in_group: 8
max_steps: 500
async_generation_ratio: 1
actor_train:
  training_args: {learning_rate: 1.0e-6, gradient_accumulation_steps: 8}
  data_args: {file_name: data/math.jsonl, prompt: problem}
  strategy_args:
    strategy_name: megatron_train
    strategy_config: {tensor_model_parallel_size: 2, use_distributed_optimizer: true, recompute_granularity: full}
  device_mapping: list(range(0,4))
actor_infer:
  strategy_args: {strategy_name: vllm, strategy_config: {gpu_memory_utilization: 0.8}}
  generating_args: {temperature: 0.99}
  num_gpus_per_worker: 1
  device_mapping: list(range(4,8))
"""
SLIME = """
ray job submit -- python3 train_async.py --actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4 \\
  --rollout-num-gpus-per-engine 2 --hf-checkpoint /models/qwen3-4b --prompt-data /data/dapo.jsonl --input-key prompt \\
  --label-key label --num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8 --lr 1e-6 \\
  --rollout-max-response-len 8192 --rollout-temperature 0.8 --tensor-model-parallel-size 2 --sequence-parallel
"""
AREAL = """
experiment_name: gsm8k-grpo
trial_name: trial0
seed: 1
total_train_epochs: 10
async_training: true
cluster: {n_nodes: 1, n_gpus_per_node: 8, fileroot: /tmp/areal, name_resolve: {type: nfs}}
rollout: {backend: "sglang:d4p1t1", max_head_offpolicyness: 2, consumer_batch_size: 256}
gconfig: {n_samples: 4, min_new_tokens: 0, max_new_tokens: 1024, greedy: false, temperature: 1.0}
actor:
  backend: "megatron:d4p1t1"
  path: Qwen/Qwen2.5-1.5B-Instruct
  gradient_checkpointing: true
  mb_spec: {max_tokens_per_mb: 10240}
  optimizer: {type: adam, lr: 1.7e-5, weight_decay: 0.017, warmup_steps_proportion: 0.001}
  eps_clip: 0.4
train_dataset: {batch_size: 256, shuffle: true, path: openai/gsm8k, type: rl, max_length: 1024}
"""
RUNS = {
    "verl": (VERL.replace("$HOME", "/home/me"), "sglang:d4t2|megatron:d4t2"),
    "siirl": (SIIRL, "sglang:d2t4|megatron:d2t4"),
    "trinity": (TRINITY, "sglang:d2+megatron:d3t2"),
    "roll": (ROLL, "megatron:d2t2+sglang:d4"),
    "slime": (SLIME, "sglang:d2t2+megatron:d2t2"),
    "areal": (AREAL, "sglang:d4+megatron:d4"),
}


TWICE = {  # on two nodes
    "verl": (("trainer.nnodes=1", "trainer.nnodes=2"),),
    "siirl": (("trainer.nnodes=1", "trainer.nnodes=2"),),
    "trinity": (("node_num: 1", "node_num: 2"), ("engine_num: 2", "engine_num: 10")),
    "roll": (("range(0,4)", "range(0,8)"), ("range(4,8)", "range(8,16)")),
    "slime": (("per-node 4", "per-node 8"), ("--rollout-num-gpus 4", "--rollout-num-gpus 8")),
    "areal": (("n_nodes: 1", "n_nodes: 2"), ("sglang:d4p1t1", "sglang:d8"), ("megatron:d4p1t1", "megatron:d8")),
}
OWN_SERVERS = " actor_rollout_ref.rollout.nnodes=1 actor_rollout_ref.rollout.n_gpus_per_node=8\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    shape = InitModelConfig(
        tokenizer="bytes", num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=16384
    )
    directory = tmp_path_factory.mktemp("models") / "model"
    write_init_model(shape, directory, seed=0)
    return directory


@pytest.fixture(autouse=True)
def cluster(monkeypatch):
    """What an existing Ray cluster answers when it is asked what it has."""
    answer = {"nodes": [{"CPU": 64.0}] * 2, "free": {}}
    monkeypatch.setattr("areal_like.backends.ray.resources._ask", lambda address: answer)


def checked(done, folder, model, **row):
    """What the checks make of it on CPU, with a model and a row of data that are here."""
    file, rows = folder / "run.yaml", folder / "rows.jsonl"
    file.write_text(done.yaml)
    user = [f"{key}=null" for key in done.missing if key in ("reward.function", "workflow")]
    config = load(file, user).config
    fields = {config.train_dataset.prompt_field: "1 + 2", config.train_dataset.answer_field: "3"}
    rows.write_text(f"{json.dumps(row or fields)}\n" * 1024)
    here = {"device": "cpu", "actor.path": model, "train_dataset.path": rows, "cluster.fileroot": folder / "runs"}
    here |= {"rollout.sharing": "resident"}
    here |= {"valid_dataset.path": rows} if config.valid_dataset else {}
    found = preflight(load(file, [*user, *(f"{key}={value}" for key, value in here.items())]), dry_run=True)
    assert found.ok, "\n".join(map(str, found.findings))
    return config


@pytest.mark.parametrize("system", RUNS)
def test_what_is_written_is_a_run(system, tmp_path, model):
    text, layout = RUNS[system]
    done = migrate(text)
    assert (done.system, done.problems) == (system, [])
    config = checked(done, tmp_path, model)
    assert config.allocation_mode == layout
    assert config.total_train_epochs >= (config.total_train_steps or 0)  # where steps are given, they decide
    assert config.actor.path and config.gconfig.n_samples > 1 and config.train_dataset.path
    assert config.scheduler.type == "local"
    assert done.renamed and done.unneeded and "renamed:" in done.report()


@pytest.mark.parametrize("system", TWICE)
def test_a_run_on_several_nodes_joins_the_cluster_that_is_there(system, tmp_path, model):
    text = RUNS[system][0]
    for one, two in TWICE[system]:
        assert one in text
        text = text.replace(one, two)
    done = migrate(text)
    assert done.problems == []
    config = checked(done, tmp_path, model)
    assert (config.cluster.n_nodes, config.scheduler.type) == (2, "ray")
    assert "ray" in done.renamed["scheduler.type"]


def test_servers_with_nodes_of_their_own_count(tmp_path, model):
    done = migrate(RUNS["verl"][0].rstrip() + OWN_SERVERS)
    config = checked(done, tmp_path, model)
    assert (config.allocation_mode, config.cluster.n_nodes) == ("sglang:d4t2+megatron:d4t2", 2)


def test_every_key_has_one_line_in_one_of_three_classes():
    done = migrate(RUNS["verl"][0])
    assert "'1': unknown key" in done.changes["my.own"].replace("1:", "'1':", 1)
    assert done.renamed["actor_rollout_ref.actor.megatron.param_offload"] == "now actor.megatron.param_offload"
    assert done.renamed["actor_rollout_ref.actor.ppo_mini_batch_size"] == "now actor.ppo_n_minibatches"
    assert "SGLang" in done.renamed["layout"]
    classes = (done.changes, done.missing, done.renamed, done.unneeded)
    assert len({key for notes in classes for key in notes}) == sum(map(len, classes))
    lines = done.report().splitlines()
    assert len(lines) == 1 + sum(map(len, classes)) + sum(map(bool, classes))
    assert not done.same and "ppo_n_minibatches: 4" in done.yaml


ULYSSES = "strategy=fsdp actor_rollout_ref.actor.ulysses_sequence_parallel_size=4"
RECOMPUTED = " actor_rollout_ref.model.enable_gradient_checkpointing=True"


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        (RUNS["verl"][0].replace("strategy=megatron", ULYSSES + RECOMPUTED), "sglang:d4t2|fsdp:d2c4"),
        (AREAL.replace("megatron:d4p1t1", "fsdp:d1c4"), "sglang:d4+fsdp:d1c4"),
    ],
    ids=["verl", "areal"],
)
def test_sequence_parallelism_under_fsdp_is_in_the_layout_and_recomputation_is_fsdps(text, layout):
    done = migrate(text)
    assert done.problems == []
    made = yaml.safe_load(done.yaml)
    assert made["allocation_mode"] == layout
    assert made["actor"]["fsdp"] == {"gradient_checkpointing": True}
    assert "recompute_granularity" not in made["actor"].get("megatron", {})


@pytest.mark.parametrize(
    ("own", "wanted"),
    [
        ("data.filter_overlong_prompts=True", "drop"),
        ("data.filter_overlong_prompts=True data.truncation=left", "drop"),  # nothing is left to be cut
        ("data.filter_overlong_prompts=False data.truncation=left", "truncate"),
        ("data.truncation=error data.filter_overlong_prompts=False", "refuse"),
        ("data.truncation=right", "refuse"),
        ("", "refuse"),
    ],
)
def test_long_prompts_are_left_out_or_cut_as_they_were(own, wanted, tmp_path, model):
    done = migrate(f"{RUNS['verl'][0].rstrip()} {own}\n")
    assert checked(done, tmp_path, model).train_dataset.overlong_prompts == wanted
    assert ("data.truncation" in done.changes) == ("right" in own)


def test_rows_are_read_as_they_are_and_held_out_ones_likewise(tmp_path, model):
    text = RUNS["verl"][0].replace("max_prompt_length=512", "max_prompt_length=2048 data.filter_overlong_prompts=True")
    done = migrate(f"{text.rstrip()} data.val_files=/data/test.parquet\n")
    row = {"data_source": "mine", "prompt": "1" * 1500, "reward_model": {"style": "rule", "ground_truth": "1"}}
    held_out = checked(done, tmp_path, model, **row).valid_dataset
    assert (held_out.max_prompt_length, held_out.overlong_prompts) == (2048, "drop")
    own = yaml.safe_load(migrate(f"{text.rstrip()} data.prompt_key=messages\n").yaml)["train_dataset"]
    assert own["prompt_field"] == "messages"


def test_a_critic_may_have_a_model_of_its_own():
    own = " algorithm.adv_estimator=gae critic.model.path=/models/critic\n"
    assert yaml.safe_load(migrate(RUNS["verl"][0].rstrip() + own).yaml)["critic"]["path"] == "/models/critic"
    text = TRINITY.replace("model: {", "model: {critic_model_path: /models/critic, ").replace(": grpo", ": ppo")
    assert yaml.safe_load(migrate(text).yaml)["critic"]["path"] == "/models/critic"


def test_what_the_shell_alone_knows_is_asked_for(tmp_path):
    done = migrate(VERL.replace("$HOME", "$DATA"))
    assert "$DATA" in done.missing["train_dataset.path"] and done.problems == []
    file = tmp_path / "run.yaml"
    file.write_text(done.yaml)
    with pytest.raises(ConfigError) as refused:
        load(file)
    (path,) = [found for found in refused.value.findings if found.key == "train_dataset.path"]
    assert "must be set" in path.message and "write train_dataset.path=" in path.help


@pytest.mark.parametrize("home", ["$HOME", "${HOME}"])
def test_a_path_below_home_is_one_here(home):
    done = migrate(VERL.replace("$HOME", home))
    assert done.problems == []
    assert yaml.safe_load(done.yaml)["train_dataset"]["path"] == "~/data/train.parquet"


def test_an_argument_of_the_script_has_its_default_and_null_is_nothing(tmp_path, model):
    settings = "actor_rollout_ref.rollout.name=$ENGINE"
    text = "ENGINE=${1:-vllm}\nVPP=null\n" + RUNS["verl"][0].replace("actor_rollout_ref.rollout.name=vllm", settings)
    vpp = "actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=$VPP"
    done = migrate(f"{text.rstrip()} {vpp}\n")
    assert done.problems == []
    assert checked(done, tmp_path, model).allocation_mode == "sglang:d4t2|megatron:d4t2"


def test_a_context_without_room_for_what_sglang_keeps_is_left_to_the_run(tmp_path, model):
    done = migrate(f"{RUNS['verl'][0].rstrip()} actor_rollout_ref.rollout.max_model_len=1536\n")
    assert checked(done, tmp_path, model).sglang.context_length is None
    assert "1536" in done.unneeded["sglang.context_length"]


@pytest.mark.parametrize(("each", "cp", "all_of_them"), [(6000, 2, 12000), (12000, 1, 12000), (2048, 2, 9216)])
def test_tokens_of_a_gpu_become_those_of_its_group_and_hold_the_longest_sequence(
    each, cp, all_of_them, tmp_path, model
):
    text = SLIME.replace("--tensor-model-parallel-size 2", f"--context-parallel-size {cp} --max-tokens-per-gpu {each}")
    done = migrate(text)
    assert checked(done, tmp_path, model).actor.mb_spec.max_tokens_per_mb == all_of_them  # of 1024 + 8192
    assert ("actor.mb_spec.max_tokens_per_mb" in done.renamed) == (all_of_them != each)


def test_estimators_and_ways_to_go_on_have_our_names():
    own = "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.1"
    done = migrate(
        f"{VERL.rstrip()} {own} actor_rollout_ref.actor.kl_loss_type=low_var_kl trainer.resume_mode=disable\n"
    )
    made = yaml.safe_load(done.yaml)
    assert (made["actor"]["kl_estimator"], made["recover"]["mode"]) == ("k3", "off")


def test_a_divergence_brings_its_reference(tmp_path, model):
    own = "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001\n"
    done = migrate(f"{RUNS['verl'][0].rstrip()} {own}")
    assert checked(done, tmp_path, model).ref is not None


def test_an_algorithm_that_is_not_here_is_left_to_the_user(tmp_path, model):
    text = RUNS["verl"][0]
    done = migrate(text.replace("adv_estimator=grpo", "adv_estimator=remax"))
    assert "remax" in done.changes["algorithm.adv_estimator"] and "algorithm: ???" in done.yaml
    done = migrate(text.replace("adv_estimator=grpo", "adv_estimator=reinforce_plus_plus_baseline"))
    config = checked(done, tmp_path, model)
    assert (config.algorithm, config.actor.reward_norm.mean_level) == ("reinforce_pp", "group")


def test_several_files_of_prompts_are_left_to_the_user_and_of_evaluation_become_sets():
    text = VERL.replace("$HOME/data/train.parquet", "\"['/data/a.parquet','/data/b.parquet']\"")
    done = migrate(f"{text.rstrip()} data.val_files=\"['/data/c.parquet','/data/d.parquet']\"\n")
    made = yaml.safe_load(done.yaml)
    assert made["train_dataset"]["path"] == "???" and "/data/b.parquet" in done.missing["train_dataset.path"]
    assert made["valid_dataset"]["path"] == "/data/c.parquet"
    assert made["evaluator"]["datasets"]["d_2"]["path"] == "/data/d.parquet"


@pytest.mark.parametrize("text", ["", "hello", "a: 1", "actor_rollout_ref: [", "!!python/object/apply:os.system [ls]"])
def test_what_is_no_configuration_is_refused(text):
    assert migrate(text).problems


def test_code_in_a_configuration_is_text():
    done = migrate(ROLL.replace("list(range(0,4))", "__import__('os').abort()"))
    assert "allocation_mode" in done.missing and "allocation_mode: ???" in done.yaml


def test_keys_of_others_are_explained():
    assert "the layout defines it" in unknown_key("actor.tensor_model_parallel_size").help
    assert "train_dataset.batch_size" in unknown_key("data.train_batch_size").help
    assert unknown_key("gconfig.n_sample").nearest == ("gconfig.n_samples",)
    assert known_elsewhere("no.such.thing") is None


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("actor.optimizer.learning_rate", "actor.optimizer.lr"),
        ("actor.learning_rate", "actor.optimizer.lr"),
        ("critic.learning_rate", "critic.optimizer.lr"),
        ("learning_rate", "actor.optimizer.lr"),
        ("batch_size", "train_dataset.batch_size"),
        ("actor.batch_size", "train_dataset.batch_size"),
        ("rollout.batch_size", "train_dataset.batch_size"),
        ("train_batch_size", "train_dataset.batch_size"),
        ("actor.mini_batch_size", "actor.ppo_n_minibatches"),
        ("rollout.temperature", "gconfig.temperature"),
        ("rollout.response_length", "gconfig.max_new_tokens"),
        ("max_response_length", "gconfig.max_new_tokens"),
        ("num_generations", "gconfig.n_samples"),
        ("actor.n_samples_per_prompt", "gconfig.n_samples"),
        ("actor.max_grad_norm", "actor.optimizer.gradient_clipping"),
        ("actor.clip_ratio_high", "actor.eps_clip_higher"),
        ("rollout.gpu_memory_utilization", "sglang.mem_fraction_static"),
        ("trainer.test_interval", None),
        ("actor.staleness_threshold", "rollout.max_head_offpolicyness"),
        ("num_train_epochs", "total_train_epochs"),
    ],
)
def test_suggestions_follow_the_meaning_of_other_systems_names(key, ours):
    found = unknown_key(key)
    assert (found.nearest[:1] == (ours,) or f"write {ours} " in str(found.help)) == (ours is not None), found


def test_every_entry_says_one_thing():
    for table in TABLES.values():
        assert all(sum(map(bool, (e.ours, e.unneeded, e.changes, e.together))) == 1 for e in table.values())


def test_what_other_systems_keys_are_called_here_exists():
    """A new name of the schema has to be one in the tables too, or the key is said to be lost."""
    named = {entry.ours for table in TABLES.values() for entry in table.values() if entry.ours}
    keys = set(all_keys())
    assert len(named) > 50
    named |= {key for table in TABLES.values() for e in table.values() for key in (e.together or "").split(" and ")}
    named -= {"", "files beside this one"}
    unknown = [key for key in sorted(named - keys) if not any(own.startswith(f"{key}.") for own in keys)]
    assert [key for key in unknown if annotation_of(key) is None and key.rpartition(".")[0] not in keys] == []
    done = migrate(AREAL + "\nactor: {megatron: {moe_router_dtype: fp32}}\n")
    assert yaml.safe_load(done.yaml)["actor"]["megatron"]["override_transformer_config"] == {"moe_router_dtype": "fp32"}


def test_lists_and_mappings_stay_whole():
    """Not their first item, nor their last value."""
    text = ROLL + "\nsystem_envs: {NCCL_DEBUG: INFO, NVTE_FUSED_ATTN: 1}\n"
    script = SLIME.rstrip() + " --recompute-granularity selective --recompute-modules core_attn \\\n mlp\n"
    done = migrate(text)
    assert yaml.safe_load(done.yaml)["actor"]["env_vars"] == {"NCCL_DEBUG": "INFO", "NVTE_FUSED_ATTN": "1"}
    assert yaml.safe_load(migrate(script).yaml)["actor"]["megatron"]["recompute_modules"] == ["core_attn", "mlp"]


@pytest.mark.parametrize(("switched", "wanted"), [("True", {"offload": False}), ("False", None)])
def test_a_reference_is_there_where_something_asks_for_it(switched, wanted):
    own = f"actor_rollout_ref.actor.use_kl_loss={switched} actor_rollout_ref.actor.kl_loss_coef=0.001"
    done = migrate(f"{VERL.rstrip()} {own} actor_rollout_ref.ref.fsdp_config.param_offload=False\n")
    made = yaml.safe_load(done.yaml)
    assert made.get("ref") == wanted
    assert bool(made["actor"].get("kl_loss_coef")) == (wanted is not None)


ROLE = """
NAME:
  backend: ${actor.backend}
  path: ${actor.path}
  dtype: bfloat16
  optimizer: ${actor.optimizer}
  scheduling_strategy: {type: colocation, target: actor}
"""


def test_areals_reference_and_critic_are_those_that_it_would_start(tmp_path, model):
    """Its files have a `ref` whether or not kl_ctl is 0; a critic is what makes it PPO."""
    ref, critic = ROLE.replace("NAME", "ref"), ROLE.replace("NAME", "critic")
    done = migrate(AREAL.replace("eps_clip: 0.4", "kl_ctl: 0.0") + ref)
    config = checked(done, tmp_path, model)
    assert (config.ref, config.critic, config.algorithm) == (None, None, "grpo")
    assert "the algorithm uses no reference" in done.unneeded["ref.path"]
    done = migrate(
        AREAL.replace("eps_clip: 0.4", "kl_ctl: 0.1") + ref.replace("  optimizer: ${actor.optimizer}\n", "") + critic
    )
    assert done.problems == []
    here = done.yaml.replace("path: Qwen/Qwen2.5-1.5B-Instruct", f"path: {model}")
    config = checked(Translation("areal", yaml=here), tmp_path, model)
    assert config.algorithm == "ppo" and config.ref.path == config.critic.path == config.actor.path
    assert (config.ref.backend, config.critic.backend, config.critic.optimizer) == (None, None, None)
    assert "the actor's" in done.unneeded["critic.optimizer"]


def test_a_role_with_a_layout_of_its_own_is_left_to_the_user():
    done = migrate(AREAL.replace("eps_clip: 0.4", "kl_ctl: 0.1") + "\nref: {backend: 'megatron:d2t2'}\n")
    why = done.missing["allocation_mode"]
    assert "ref.backend" in why and "megatron:d2t2" in why and "actor.backend=megatron:d4" in why


def test_what_only_areal_can_read_is_told_or_translated(tmp_path, model):
    lora = "use_lora: true\n  target_modules: [linear_qkv, linear_fc2]\n  eps_clip"
    own = "\nworkflow: areal.workflow.openai.math_agent.MathAgent\nrecover: {mode: on, freq_secs: 60}\n"
    done = migrate(AREAL.replace("eps_clip", lora) + own)
    config = checked(done, tmp_path, model)
    assert config.actor.target_modules == ["q_proj", "k_proj", "v_proj", "down_proj"]
    assert "MathAgent" in done.missing["workflow"] and "workflow: ???" in done.yaml
    assert config.recover.mode == "auto"
    made = migrate(AREAL.replace("megatron:d4p1t1", "megatron:d4").replace('backend: "sglang:d4p1t1", ', ""))
    assert "no servers" in made.missing["allocation_mode"]


def test_a_script_is_split_into_words_as_a_shell_does():
    script = "# it's a comment\nN=8\npython3 -m verl a.b=$((N * 2)) 'c.d=[1, 2]' e.f=\"x y\" \\\n g.h=${N}  # more\n"
    read = Reading.of_config(script)
    assert [read.value(key) for key in ("a.b", "c.d", "e.f", "g.h")] == ["16", "[1, 2]", "x y", "8"]
    options = Reading.of_command(
        "ARGS=(\n --colocate\n --kwargs '{\"a\":1}'\n)\nrun ${ARGS[@]} --lr=1e-6 --flag ${MORE[@]}\n"
    )
    assert [options.value(key) for key in ("colocate", "kwargs", "lr", "flag")] == ["true", '{"a":1}', "1e-6", "true"]
    assert [part.text for part in options.unread] == ["${MORE[@]}"]
    broken = Reading.of_command("echo 'open\n--lr 1e-6 \\\n --tis-clip 2\n")
    assert not broken.settings and [found.code for found in broken.findings] == ["CONVERT-TEXT"]
    assert Reading.of_config("a.b=$((1 / 0)) c.d=1\n").value("a.b") == "$((1 / 0))"


def test_words_behind_an_option_are_none_of_its_values():
    text = "vllm serve --tensor-parallel-size 4 mymodel"
    assert Reading.of_command(text).value("tensor-parallel-size") == "4"


def test_an_option_of_megatron_is_told_where_it_goes():
    found = unknown_key("actor.megatron.moe_router_dtype")
    assert "write actor.megatron.override_transformer_config.moe_router_dtype instead" in str(found)
    done = migrate(AREAL.replace("actor:", "actor:\n  megatron: {moe_router_dtype: fp64}"))
    assert yaml.safe_load(done.yaml)["actor"]["megatron"]["override_transformer_config"] == {"moe_router_dtype": "fp64"}


def test_no_entry_repeats_what_is_said_elsewhere():
    for table in TABLES.values():
        for key, entry in table.items():
            sections = [key[:place] for place, character in enumerate(key) if character == "."]
            nearest = next((section for section in reversed(sections) if section in table), None)
            assert nearest is None or table[nearest] != entry, key


@pytest.mark.parametrize("value", ["2", "no"])
@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("multimodal-keys", "train_dataset.image_field"),
        ("apply-chat-template-kwargs", "train_dataset.chat_template_kwargs"),
    ],
)
def test_an_option_that_is_not_a_mapping_in_json_is_left_to_the_user(key, ours, value):
    assert ours in migrate(f"{SLIME.rstrip()} --{key} {value}", "slime").missing
