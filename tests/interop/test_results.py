"""The command says when its result trains alike: scripts with branches, layouts, and what a run's checks refuse."""

import meanings
import pytest
import yaml
from test_migrate import AREAL, RUNS, SLIME, TRINITY, VERL
from typer.testing import CliRunner

from areal_like.__main__ import app
from areal_like.interop.checks import find_refusals
from areal_like.interop.migrate import migrate


def migrated(script, *options):
    """The result of the command for the text of a file."""
    return CliRunner().invoke(app, ["migrate", str(script), *options])


def test_the_command_ends_with_0_only_for_a_run_that_trains_alike(tmp_path):
    script = tmp_path / "run.sh"
    complete = VERL.replace(" my.own=1", "").replace("$HOME/data/train", "/data/gsm8k/train")
    script.write_text(complete)
    result = migrated(script)
    assert result.exit_code == 0 and result.stdout.startswith("experiment_name:"), result.stderr
    assert result.stderr.startswith("Converted:") and "data.train_batch_size" not in result.stderr
    assert "data.train_batch_size: now train_dataset.batch_size" in migrated(script, "--verbose").stderr
    script.write_text(VERL.replace("$HOME/data/train", "/data/gsm8k/train"))
    result = migrated(script)
    assert result.exit_code == 1 and result.stdout.startswith("experiment_name:")
    assert result.stderr.startswith("Not ready to run: 1 changes training") and "my.own: " in result.stderr
    accepted = migrated(script, "--accept")
    assert (accepted.exit_code, accepted.stdout) == (0, result.stdout)
    script.write_text(complete.replace("/data/gsm8k/train", "$DATA/gsm8k/train"))
    assert migrated(script, "--accept").exit_code == 1, "a value is ???"
    script.write_text(complete.replace("rollout.n=5", "rollout.n=1"))
    refused = migrated(script, "--accept")
    assert refused.exit_code == 1 and "RUN-BATCH-GROUP" in refused.stderr
    script.write_text("nothing")
    assert migrated(script, "--accept").exit_code == 1
    assert migrated(tmp_path / "none").exit_code == 2
    assert migrated(script, "--system", "x").exit_code == 2


@pytest.mark.parametrize("system", meanings.SYSTEMS)
def test_no_file_that_is_written_is_refused_in_silence(system):
    """What a run's checks refuse, beside the model, the data and the machine, is among the notes."""
    text = RUNS[system][0] if system in RUNS else meanings.SYSTEMS[system][0]
    done = migrate(text, system)
    assert find_refusals(done.yaml) == {}, done.yaml


BRANCHED = """
DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
GPUS=${GPUS:-}
N=8
if [ "$DEVICE" = npu ]; then N=16; fi
COMMON=(
  data.train_files=/data/gsm8k/train.parquet actor_rollout_ref.model.path=/models/qwen algorithm.adv_estimator=grpo
  data.train_batch_size=$(((64 + 32) * 2)) actor_rollout_ref.actor.ppo_mini_batch_size=${GPUS:-96}
)
case "$DEVICE" in
  gpu) EXTRA=(actor_rollout_ref.rollout.n=4) ;;
  *) EXTRA=(actor_rollout_ref.rollout.n=16) ;;
esac
python3 -m verl.trainer.main_ppo "${COMMON[@]}" "${EXTRA[@]}" actor_rollout_ref.actor.strategy=fsdp \\
  actor_rollout_ref.rollout.name=sglang trainer.nnodes=1 trainer.n_gpus_per_node=$N trainer.experiment_name=x_$(date +%s) "$@"
"""


def test_a_script_means_the_branch_that_it_takes():
    done = migrate(BRANCHED)
    assert done.ready, done.report()
    made = yaml.safe_load(done.yaml)
    assert (made["cluster"]["n_gpus_per_node"], made["gconfig"]["n_samples"]) == (8, 4)
    assert (made["train_dataset"]["batch_size"], made["actor"]["ppo_n_minibatches"]) == (192, 2)
    assert made["experiment_name"] == "from-verl"


def test_a_value_of_a_branch_that_only_the_machine_knows_is_refused_by_name():
    unsure = BRANCHED.replace('if [ "$DEVICE" = npu ]', "if [ -e /dev/davinci0 ]")
    done = migrate(unsure)
    assert not done.ready and "[ -e /dev/davinci0 ]" in done.missing["cluster.n_gpus_per_node"]
    several = migrate(f"{BRANCHED}python3 -m verl.trainer.main_ppo data.train_batch_size=8\n")
    assert "several trainings" in several.problems[0] and not several.ready


ASYNC = """python3 -m verl.experimental.fully_async_policy.fully_async_main data.train_files=/data/gsm8k/train.parquet \\
  data.val_files=/data/gsm8k/test.parquet actor_rollout_ref.model.path=/models/qwen algorithm.adv_estimator=grpo \\
  data.train_batch_size=0 data.gen_batch_size=1 actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.name=sglang \\
  actor_rollout_ref.actor.strategy=fsdp actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.hybrid_engine=False \\
  trainer.nnodes=1 trainer.n_gpus_per_node=6 rollout.nnodes=1 rollout.n_gpus_per_node=2 rollout.total_rollout_steps=51200 \\
  async_training.staleness_threshold=0.5 async_training.trigger_parameter_sync_step=4 async_training.require_batches=2 \\
  async_training.partial_rollout=True rollout.test_freq=20
"""


def test_verls_asynchronous_trainer_has_the_batches_between_two_weight_updates():
    done = migrate(ASYNC)
    assert done.ready and not find_refusals(done.yaml), done.report()
    made = yaml.safe_load(done.yaml)
    assert (made["train_dataset"]["batch_size"], made["actor"]["ppo_n_minibatches"]) == (256, 8)
    assert made["rollout"]["max_head_offpolicyness"] == 1 and made["weight_update"]["requests"] == "recompute"
    assert made["total_train_steps"] == 200 and made["evaluator"]["freq_steps"] == 20
    assert made["actor"]["use_decoupled_loss"] is False
    assert made["cluster"] == {"n_nodes": 1, "n_gpus_per_node": 8}
    synchronous = yaml.safe_load(migrate(ASYNC.replace("threshold=0.5", "threshold=0")).yaml)
    assert synchronous["rollout"]["max_head_offpolicyness"] == 0 and "weight_update" not in synchronous


def test_layouts_without_a_key_for_their_sharing_or_their_trainer():
    awex = AREAL.replace("eps_clip: 0.4", "weight_update_mode: awex").replace(
        "n_gpus_per_node: 8", "n_gpus_per_node: 4"
    )
    shared = yaml.safe_load(migrate(f"enable_offload: true{awex}").yaml)
    assert (
        shared["allocation_mode"] == "sglang:d4|fsdp:d4".replace("fsdp", "megatron")
        and shared["cluster"]["n_nodes"] == 1
    )
    assert shared["rollout"]["sharing"] == "alternate"
    alone = TRINITY.partition("trainer:")[0] + "trainer: {ulysses_sequence_parallel_size: 2}\n"
    assert yaml.safe_load(migrate(alone).yaml)["allocation_mode"] == "sglang:d2+fsdp:d3c2"
    folded = SLIME.replace(
        "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 2 --expert-model-parallel-size 2"
    )
    assert "sharing" not in yaml.safe_load(migrate(folded).yaml)["rollout"]


def test_frequencies_in_epochs_become_steps_or_are_left_to_the_user():
    own = "\nvalid_dataset: {path: openai/gsm8k}\nevaluator: {freq_epochs: 1}\nsaver: {freq_epochs: 2}\n"
    made = yaml.safe_load(migrate(AREAL + own).yaml)
    assert (made["evaluator"]["freq_steps"], made["saver"]["freq_steps"]) == (29, 58)
    unknown = migrate((AREAL + own).replace("openai/gsm8k", "/data/rows.jsonl"))
    assert {"evaluator.freq_steps", "saver.freq_steps"} <= set(unknown.missing)


def test_an_estimator_that_a_run_refuses_is_named():
    reinforce = (
        AREAL.replace("eps_clip: 0.4", "kl_ctl: 0.001\n  kl_estimator: k2") + "\nref: {backend: '${actor.backend}'}\n"
    )
    done = migrate(reinforce)
    assert "actor.kl_estimator" in done.changes and not find_refusals(done.yaml)


def test_sets_of_slime_are_pairs_of_name_and_path():
    script = SLIME.rstrip() + " --eval-prompt-data aime /data/aime.jsonl@[0:8] math /data/math.jsonl --eval-top-p 0.9\n"
    made = yaml.safe_load(migrate(script).yaml)
    assert made["valid_dataset"]["path"] == "/data/aime.jsonl@[0:8]"
    assert made["evaluator"]["datasets"]["math"]["path"] == "/data/math.jsonl"
    assert "valid_dataset.path" in migrate(SLIME.rstrip() + " --eval-prompt-data aime\n").missing
    elsewhere = migrate(f"{SLIME.rstrip()} --eval-prompt-data aime $FOLDER/aime.jsonl\n")
    assert "$FOLDER" in elsewhere.missing["valid_dataset.path"] and not elsewhere.changes
    assert yaml.safe_load(elsewhere.yaml)["valid_dataset"]["path"] == "???"
