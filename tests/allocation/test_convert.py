"""Other systems' settings: published examples in, what an allocation says out, and nothing lost in silence."""

import argparse
import re
import shlex
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import allocation
from allocation.convert import SYSTEMS, read, write
from allocation.convert.roll import read_devices, show_devices

VERL_30B = """
python3 -m verl.trainer.main_ppo model_engine=megatron \\
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 \\
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 \\
    actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=2 \\
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=2 \\
    actor_rollout_ref.actor.megatron.context_parallel_size=1 \\
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \\
    actor_rollout_ref.ref.megatron.tensor_model_parallel_size=4 \\
    actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=2 \\
    trainer.logger='["console","wandb"]' \\
    trainer.n_gpus_per_node=8 \\
    trainer.nnodes=2
"""
SIIRL_235B = """
    actor_rollout_ref.actor.strategy=megatron
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=4
    actor_rollout_ref.actor.megatron.context_parallel_size=1
    actor_rollout_ref.rollout.tensor_model_parallel_size=4
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2
    actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=2
    actor_rollout_ref.ref.megatron.expert_model_parallel_size=4
    trainer.n_gpus_per_node=8
    trainer.nnodes=4
"""
ROLL_30B = """
actor_train:
  training_args: {learning_rate: 1.0e-6, gradient_accumulation_steps: 32}
  strategy_args:
    strategy_name: megatron_train
    strategy_config:
      tensor_model_parallel_size: 2
      pipeline_model_parallel_size: 2
      virtual_pipeline_model_parallel_size: 8
      expert_model_parallel_size: 4
      context_parallel_size: 1
      moe_token_dispatcher_type: "alltoall"
  device_mapping: list(range(0,32))
actor_infer:
  strategy_args:
    strategy_name: sglang
    strategy_config: {mem_fraction_static: 0.7}
  num_gpus_per_worker: 2
  device_mapping: list(range(0,24))
reference:
  strategy_args:
    strategy_name: megatron_infer
    strategy_config:
      tensor_model_parallel_size: 1
      pipeline_model_parallel_size: 1
      expert_model_parallel_size: 4
  device_mapping: list(range(0,32))
"""
ROLL_8B = """
actor_train:
  strategy_args:
    strategy_name: megatron_train
    strategy_config:
      tensor_model_parallel_size: 2
      pipeline_model_parallel_size: 2
      virtual_pipeline_model_parallel_size: 1
  device_mapping: [0, 1, 2, 3]
actor_infer:
  strategy_args:
    strategy_name: sglang
  num_gpus_per_worker: 1
  device_mapping: [4]
reference:
  strategy_args:
    strategy_name: megatron_infer
  device_mapping: [5]
rewards:
  llm_judge:
    device_mapping: [6, 7]
"""
TRINITY_COUNTDOWN = """
cluster:
  node_num: 1
  gpu_per_node: 8
explorer:
  rollout_model:
    engine_num: 2
    tensor_parallel_size: 1
trainer:
  trainer_config:
    actor_rollout_ref:
      actor:
        strategy: megatron
        megatron: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 1, expert_model_parallel_size: 1}
        use_dynamic_bsz: true
      ref:
        megatron: {tensor_model_parallel_size: 2}
        log_prob_use_dynamic_bsz: ${trainer.trainer_config.actor_rollout_ref.actor.use_dynamic_bsz}
    critic:
      strategy: megatron
      megatron: {tensor_model_parallel_size: 2}
"""
AREAL_FIELDS = """
rollout:
  backend: "sglang:d4t2"
actor:
  backend: "fsdp:d8"
critic:
  backend: "${actor.backend}"
ref:
  backend: "${actor.backend}"
  scheduling_strategy: {type: colocation, target: actor}
"""

# As in siiRL's published script for Qwen3-8B: exports, defaults of the environment, and escaped references.
SIIRL_8B = r"""
# export ACTOR_REF_TP=2
export ROLLOUT_TP=4
export ACTOR_REF_TP=4
export ACTOR_REF_PP=2
export N_GPUS_PER_NODE=${N_GPUS_PER_NODE:-8}
export NNODES=${PET_NNODES:-1}
export TRAIN_BATCH_SIZE=$(($TRAIN_BATCH_SIZE_PER_NODE * $NNODES))
TRAINING_CMD=(
    python3 -m siirl.client.main_dag
    data.train_batch_size=\$TRAIN_BATCH_SIZE
    actor_rollout_ref.actor.strategy=megatron
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=\$ACTOR_REF_TP
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=\$ACTOR_REF_PP
    actor_rollout_ref.rollout.tensor_model_parallel_size=\$ROLLOUT_TP
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.ref.megatron.tensor_model_parallel_size=\$ACTOR_REF_TP
    actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=\$ACTOR_REF_PP
    trainer.n_gpus_per_node=\$N_GPUS_PER_NODE
    trainer.nnodes=\$NNODES
)
eval "${TRAINING_CMD[@]}" "$@"
"""
# As in Trinity-RFT's guide to Megatron: only the part below `trainer.trainer_config`, with dots for what is left out.
TRINITY_GUIDE = """
actor_rollout_ref:
  ...
  actor:
    strategy: megatron  # Kept for backward compatibility
    megatron: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 1, expert_model_parallel_size: 1}
  ...
  ref:
    megatron: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 1, expert_model_parallel_size: 1}
  ...

critic:
  strategy: megatron
  megatron: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 1, expert_model_parallel_size: 1}
  ...
"""
# As in AReaL's PPO example: sizes of 1 written out, critic and reference on the actor's GPUs.
AREAL_PPO = """
rollout: {backend: "sglang:d4p1t1"}
actor: {backend: "fsdp:d4p1t1"}
critic:
  backend: ${actor.backend}
  scheduling_strategy: {type: colocation, target: actor}
ref:
  backend: ${actor.backend}
  scheduling_strategy:
    type: colocation
    target: actor
"""

# system, its settings, the allocation
PUBLISHED = [
    ("megatron", "torchrun --nproc-per-node 8 --nnodes=2 pretrain_gpt.py --tensor-model-parallel-size 2 "
     "--pipeline-model-parallel-size 4 --context-parallel-size 2 --expert-model-parallel-size 4 "
     "--expert-tensor-parallel-size 1 --sequence-parallel", "megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)"),
    ("megatron", "torchrun --nproc_per_node 8 --nnodes 128 \\\n  --tensor-model-parallel-size 2 \\\n"
     "  --pipeline-model-parallel-size 16 # stages\n  --expert-model-parallel-size 64\n  --expert-tensor-parallel-size 1\n"
     "  --num-layers 64 --num-layers-per-virtual-pipeline-stage 2", "megatron:(attn:d32p16t2v2|ffn:d1p16t1e64)"),
    ("sglang", "python -m sglang.launch_server --model-path Qwen/Qwen3-8B --tp 4 --dp-size 2", "sglang:d2t4"),
    ("sglang", "python -m sglang.launch_server --tp-size 16 --nnodes 2 --node-rank 0\n"
     "python -m sglang.launch_server --tp-size 16 --nnodes 2 --node-rank 1", "sglang:d1t16@0-15"),
    ("areal", "sglang.d4p1t1+d2p2t1", "sglang:d4+megatron:d2p2"),
    ("areal", "sglang.d4p1m1+d2p2m1", "sglang:d4+megatron:d2p2"),
    ("areal", "sglang.d8p1t1+d8p1t1", "sglang:d8+fsdp:d8"),
    ("areal", "sglang.d4p1t2+eval", "sglang:d4t2"),
    ("areal", "sglang:d4t4 + megatron:d2p2t4e4", "sglang:d4t4+megatron:d2p2t4e4"),
    ("areal-legacy", "allocation_mode=sglang[r]:d2+fsdp[a]:d4|fsdp[c]:d4", "sglang[r]:d2+fsdp[a]:d4|fsdp[c]:d4"),
    ("areal", AREAL_FIELDS, "sglang[rollout]:d4t2+fsdp[actor]:d8|fsdp[ref]:d8+fsdp[critic]:d8"),
    ("areal", AREAL_PPO, "sglang[rollout]:d4+fsdp[actor]:d4|fsdp[critic]:d4|fsdp[ref]:d4"),
    ("areal", "actor.backend=megatron:attn:d1p4t2c2|ffn:d1p4t1e4", "megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)"),
    ("areal", "sglang:d4p1t1+megatron:attn:d1p4t2c2|ffn:d1p4t1e4", "sglang:d4+megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)"),
    ("areal", 'rollout.backend=sglang:d4t4 actor.backend="megatron:(attn:d4p2t2c2|ffn:d2p2t4e2)"',
     "sglang:d4t4+megatron:(attn:d4p2t2c2|ffn:d2p2t4e2)"),
    ("verl", VERL_30B, "vllm[rollout]:d4t4|megatron[actor]:(attn:d2p2t4v2|ffn:d1p2t4e2)"
     "|megatron[ref]:(attn:d2p2t4v2|ffn:d1p2t4e2)"),
    ("roll", ROLL_30B, "sglang[rollout]:d12t2@0-23|megatron[actor]:(attn:d8p2t2v8|ffn:d2p2t2e4)@0-31"
     "|megatron[ref]:(attn:d32|ffn:d8t1e4)@0-31"),
    ("roll", ROLL_8B, "megatron[actor]:d1p2t2+sglang[rollout]:d1+megatron[ref]:d1"),
    ("siirl", SIIRL_235B, "vllm[rollout]:d8t4|megatron[actor]:(attn:d8p2t2|ffn:d4p2t1e4)"
     "|megatron[ref]:(attn:d8p2t2|ffn:d4p2t1e4)"),
    ("siirl", SIIRL_8B, "vllm[rollout]:d2t4|megatron[actor]:d1p2t4|megatron[ref]:d1p2t4"),
    ("trinity", TRINITY_GUIDE, "megatron[actor]:d1t2|megatron[critic]:d1t2|megatron[ref]:d1t2"),
    ("trinity", TRINITY_COUNTDOWN, "vllm[rollout]:d2+megatron[actor]:d3t2|megatron[critic]:d3t2|megatron[ref]:d3t2"),
]  # fmt: skip


def errors(findings):
    return [str(finding) for finding in findings if finding.severity == "error"]


def codes(findings):
    return {finding.code for finding in findings}


def shape(plan):
    """What a conversion must keep: sizes, backends and GPUs of every role."""
    return {engine.role: (engine.backend, engine.sizes, engine.devices) for engine in plan.engines}


@pytest.mark.parametrize(("system", "text", "expected"), PUBLISHED)
def test_published_settings_are_read(system, text, expected):
    got, findings = read(system, text)
    assert not errors(findings)
    assert got == expected


@pytest.mark.parametrize("expected", [expected for _, _, expected in PUBLISHED])
def test_what_is_read_is_valid(expected):
    assert allocation.check(expected).ok


@pytest.mark.parametrize(
    ("text", "allocation_"),
    [
        ("TP=4\nmegatron --tensor-model-parallel-size $TP --nproc-per-node 8", "megatron:d2t4"),
        ("TP=${TP:-2}\nmegatron --tensor-model-parallel-size $TP --nproc-per-node 8", "megatron:d4t2"),
        (
            'NNODES=${SLURM_NNODES:-"2"}\nmegatron --tensor-model-parallel-size 2 --nnodes $NNODES --nproc_per_node 8',
            "megatron:d8t2",
        ),
        (
            "ARGS=(--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2)\ntorchrun --nproc-per-node 8 ${ARGS[@]}",
            "megatron:d2p2t2",
        ),
        (
            "ARGS='--tensor-model-parallel-size 2 --context-parallel-size 2'\ntorchrun --nproc-per-node 8 $ARGS",
            "megatron:d2t2c2",
        ),
        ("TP=$(id)\nmegatron --tensor-model-parallel-size $TP --nproc-per-node 8", ""),
        ("A=$B\nB=$A\nmegatron --tensor-model-parallel-size $A --nproc-per-node 8", ""),
    ],
)
def test_variables_are_filled_in_and_never_evaluated(text, allocation_):
    assert read("megatron", text)[0] == allocation_


@pytest.mark.parametrize(("system", "text", "expected"), PUBLISHED)
def test_published_settings_survive_the_way_back(system, text, expected):
    plan = allocation.compile(expected)
    written, _ = write(system, plan)
    again, findings = read(system, written)
    assert not errors(findings)
    assert shape(allocation.compile(again)) == shape(plan)


CONVERTED = [
    "sglang:d4t4+megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)",
    "sglang[rollout]:d4t2+megatron[actor]:(attn:d2t2c2|ffn:e4)|megatron[critic]:d2t4",
    "megatron:(attn:d4p2t2c2|ffn:d2p2t4e2)",
    "sglang:d2+fsdp:d4",
    "sglang:d8|megatron:d4p2v2",
    "megatron:d2p2@4-7",
    "vllm:d2t2p2+fsdp:d2c2",
    "sglang:d1t4e4+megatron:d4t2e8",
    "sglang:d2t4",
    "megatron:d6+sglang:d2",
    "sglang:d1t4+megatron:d3",
    "megatron:d12",
]


@pytest.mark.parametrize("text", CONVERTED)
@pytest.mark.parametrize("system", SYSTEMS)
def test_what_is_lost_is_said(system, text):
    """No finding means that reading back gives the same plan; a finding that it does not."""
    plan = allocation.compile(text)
    written, findings = write(system, plan)
    if not written:
        assert codes(findings) == {"CONVERT-UNWRITABLE"}
        return
    again, problems = read(system, written)
    assert not errors(problems)
    back = shape(allocation.compile(again, cluster=plan.cluster))
    same = {role: value[:2] for role, value in back.items()} == {r: v[:2] for r, v in shape(plan).items()}
    assert same == (not codes(findings) - {"CONVERT-LOSES-GPUS"})


def lost(system, text, **options):
    written, findings = write(system, allocation.compile(text, **options))
    return written, {finding.code: finding for finding in findings}


def test_etp_is_always_written():
    for system in ("megatron", "verl", "siirl", "trinity", "roll"):
        written, _ = lost(system, "megatron:d4t2e8")
        assert any(
            line.strip(" \\").replace("-", "_").lstrip("_").replace("=", " ").replace(":", "").endswith(
                "expert_tensor_parallel_size 1"
            )
            for line in written.splitlines()
        ), system  # fmt: skip


def test_etp_left_out_means_what_it_means_there():
    keys = "tensor_model_parallel_size=2 {0}expert_model_parallel_size=4 trainer.n_gpus_per_node=8".format
    text = "actor_rollout_ref.actor.megatron." + keys("actor_rollout_ref.actor.megatron.")
    assert read("verl", text)[0] == "megatron:(attn:d4t2|ffn:d1t2e4)"
    assert read("siirl", text)[0] == "megatron:(attn:d4t2|ffn:d2t1e4)"
    options = "--nproc-per-node 8 --tensor-model-parallel-size 2 --expert-model-parallel-size 4"
    assert read("megatron", options)[0] == "megatron:(attn:d4t2|ffn:d1t2e4)"


def test_findings_name_what_is_lost():
    _, found = lost("megatron", "sglang:d4+megatron:d4")
    assert "`sglang:d4`" in found["CONVERT-LOSES-ENGINE"].message
    _, found = lost("trinity", "sglang:d4+megatron:d4")
    assert "vllm" in found["CONVERT-LOSES-BACKEND"].message
    _, found = lost("areal-legacy", "megatron:d2p2v3")
    assert "virtual pipeline stages 3" in found["CONVERT-LOSES-SIZE"].message
    assert found["CONVERT-LOSES-SIZE"].span == (0, 15)
    _, found = lost("siirl", "sglang:d4+megatron:d4")
    assert set(found) == {"CONVERT-LOSES-GPUS"}
    _, found = lost("verl", "sglang:d4+megatron:d4")
    assert not found


def test_nodes_that_give_different_numbers_of_gpus():
    written, found = lost("megatron", "megatron:d12", cluster=allocation.Cluster(2, 8))
    assert "--nnodes 2 --nproc-per-node 6" in written
    assert set(found) == {"CONVERT-LOSES-GPUS"}


def test_rank_order():
    plan = allocation.compile("megatron:d2p2", order="tp-cp-ep-pp-dp")
    written, findings = write("megatron", plan)
    assert "--use-tp-pp-dp-mapping" in written and not findings
    assert codes(read("megatron", written)[1]) == {"CONVERT-LOSES-SETTING"}
    assert codes(write("verl", plan)[1]) == {"CONVERT-LOSES-ORDER"}


def test_servers_say_where_they_run():
    written, findings = write("sglang", allocation.compile("sglang:d4t4", cluster=allocation.Cluster(2, 8)))
    assert written.splitlines()[1:3] == [
        "python -m sglang.launch_server --tp-size 4 --base-gpu-id 4",
        "python -m sglang.launch_server --tp-size 4",
    ]
    assert not findings
    assert read("sglang", "sglang --tp-size 2 --base-gpu-id 4")[0] == "sglang:d1t2@4-5"
    assert codes(read("sglang", "sglang --tp-size 2\nsglang --tp-size 4")[1]) == {"CONVERT-SERVERS"}
    text, findings = read("sglang", "sglang serve --tp-size 8 --dp-size 8 --enable-dp-attention")
    assert text == "sglang:d1t8" and codes(findings) == {"CONVERT-LOSES-SETTING"}


# system, text, code, what the message or help says
WRONG = [
    ("megatron", "hello", "CONVERT-NOTHING", "contains no engine of Megatron-LM"),
    ("megatron", "--tensor-model-parallel-size two --nproc-per-node 8", "CONVERT-VALUE", "`two` is not a positive"),
    ("megatron", "--tensor-model-parallel-size 0 --nproc-per-node 8", "CONVERT-VALUE", "`0` is not a positive"),
    ("megatron", "--tensor-model-parallel-size $TP --nproc-per-node 8", "CONVERT-VARIABLE", "`$TP`"),
    ("megatron", "--tensor-model-parallel-size 3 --nproc-per-node 8", "CONVERT-WORLD", "8 GPUs are not a multiple of the 3"),
    ("verl", "a: [", "CONVERT-TEXT", "not YAML"),
    ("verl", "just words", "CONVERT-TEXT", "neither YAML"),
    ("verl", "a: 1", "CONVERT-NOTHING", "contains no engine of verl"),
    ("verl", "a: " + "1" * 300_000, "CONVERT-TEXT", "300003 characters"),
    ("verl", "a: " + "[" * 3000 + "]" * 3000, "CONVERT-TEXT", "nested"),
    ("verl", "actor_rollout_ref.actor.strategy=megatorn trainer.n_gpus_per_node=8", "CONVERT-BACKEND", "`megatorn`"),
    ("verl", "actor_rollout_ref.actor.strategy=fsdp trainer.n_gpus_per_node=\\$N", "CONVERT-VARIABLE", "$N"),
    ("siirl", "actor_rollout_ref.actor.strategy=fsdp trainer.n_gpus_per_node=-1", "CONVERT-VALUE", "`-1`"),
    ("roll", "actor_train: {device_mapping: '[0]'}", "CONVERT-MISSING", "strategy_name"),
    ("roll", "actor_train: {device_mapping: '[0]', strategy_args: {strategy_name: deepspeed_train}}", "CONVERT-BACKEND",
     "`deepspeed_train`"),
    ("trinity", "cluster: {node_num: 1, gpu_per_node: 2}\nexplorer: {rollout_model: {engine_num: 4}}\ntrainer:\n"
     "  trainer_config: {actor_rollout_ref: {actor: {strategy: megatron}}}", "CONVERT-WORLD", "`actor`"),
    ("areal", "actor.backend=megatron:d2d4", None, ""),
    ("areal", "sglang.d4+nonsense", "ALLOC-SYNTAX", ""),
    ("areal", "sglang.d4+" * 100_000, "ALLOC-TOO-LONG", ""),
]  # fmt: skip


@pytest.mark.parametrize(("system", "text", "code", "words"), WRONG)
def test_wrong_settings_are_explained(system, text, code, words):
    got, findings = read(system, text)
    if code is None:  # what the language itself checks is left to it
        assert not allocation.check(got).ok
        return
    assert got == ""
    finding = next(f for f in findings if f.code == code)
    assert words in finding.message
    assert len(str(finding)) < 1000


def test_a_finding_shows_the_line_and_its_key():
    _, findings = read("trinity", TRINITY_COUNTDOWN.replace("engine_num: 2", "engine_num: many"))
    assert str(findings[0]) == (
        "error[CONVERT-VALUE] in explorer.rollout_model.engine_num: `many` is not a positive integer\n"
        "        engine_num: many\n"
        "                    ^^^^\n"
        "  help: write the number itself"
    )


def test_settings_that_an_allocation_lacks_are_named():
    _, findings = read("roll", ROLL_8B)
    assert [f.source.key for f in findings] == ["rewards.llm_judge.device_mapping"]
    text, findings = read("verl", f"{VERL_30B.rstrip()} actor_rollout_ref.rollout.data_parallel_size=2")
    assert text and codes(findings) == {"CONVERT-LOSES-SETTING"}
    text, findings = read("megatron", "--tensor-model-parallel-size 2 --expert-model-parallel-size 3")
    assert text == "megatron:(attn:d3t2|ffn:d1t2e3)" and codes(findings) == {"CONVERT-GPUS"}
    text, findings = read("areal", "actor.backend=archon:d2p2")
    assert text == "megatron:d2p2" and codes(findings) == {"CONVERT-READ-AS"}


def test_auxiliary_models_take_gpus():
    extra = "  auxiliary_models:\n    - {engine_num: 1, tensor_parallel_size: 2}\n"
    text, findings = read("trinity", TRINITY_COUNTDOWN.replace("trainer:\n", extra + "trainer:\n", 1))
    assert text.startswith("vllm[rollout]:d2+megatron[actor]:d2t2")
    assert codes(findings) == {"CONVERT-LOSES-SETTING"}


def test_unknown_system():
    with pytest.raises(KeyError):
        read("nemo", "")


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("list(range(0,16))", [*range(16)]),
        ("[0, 1, 2]", [0, 1, 2]),
        (" list( range( 2 ) ) + [7,5]+range(8,12,2)", [0, 1, 7, 5, 8, 10]),
        ("range(4)", [0, 1, 2, 3]),
    ],
)
def test_device_mapping(text, ids):
    gpus = read_devices(text)
    assert [gpu for run in gpus for gpu in run] == ids
    assert read_devices(show_devices(gpus)) == gpus


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "list(range(0,0))", "__import__('os').system('true')", "list(range(0,8)) or 1", "[0,1", "list(range(4)",
        "range(4))", "[x for x in range(3)]", "list(range(0,2*4))", "[0,0]", "[0,1]+[1,2]", "[-1]", "range(0,8,0)",
        "range(0,999999999999)", "list(range(0,8))[::2]", "[0,1],", "[0 1]", "+[0]", "[0]+", "9" * 5000, "[1,,2]",
    ],
)  # fmt: skip
def test_device_mapping_is_not_evaluated(text):
    with pytest.raises(ValueError, match=r"\w"):
        read_devices(text)
    quoted = text.replace("'", "''")
    got, findings = read("roll", f"actor_train: {{strategy_args: {{strategy_name: vllm}}, device_mapping: '{quoted}'}}")
    assert got == "" and codes(findings) in ({"CONVERT-DEVICES"}, {"CONVERT-NOTHING"})


pieces = st.sampled_from(
    ["actor_train", ":", "\n", "  ", "device_mapping", "list(range(0,8))", "[", "]", "&a", "*a", "<<", "{", "}", "--tp-size",
     "4", "=", "$", "${a}", "trainer.nnodes", "actor_rollout_ref.actor.strategy", "megatron", "sglang.d4", "+", "|", "(",
     "backend", "actor", ".", "\\", "#", "'", '"', ",", "- ", "\t", "\0"]
)  # fmt: skip


@settings(max_examples=100)
@given(st.sampled_from(SYSTEMS), st.lists(pieces, max_size=30).map("".join) | st.text(max_size=60))
def test_any_text_gets_an_answer(system, text):
    got, findings = read(system, text)
    assert bool(got) != bool(errors(findings))


@pytest.mark.parametrize(
    "text",
    [
        "a: &a {}\n" + "".join(f"{c}: &{c} [{','.join([f'*{p}'] * 9)}]\n" for p, c in zip("abcdefghi", "bcdefghij", strict=True)),
        "a: &a [*a]",
        "\n" * 200_000,
        "a=${b}\nb=${a}${a}\ntrainer.nnodes=${a}\nactor_rollout_ref.actor.strategy=fsdp",
        " " * 199_000 + "=",
        "(" * 190_000,
    ],
    ids=["aliases", "cycle", "lines", "references", "blanks", "parentheses"],
)  # fmt: skip
@pytest.mark.parametrize("system", ["verl", "areal", "megatron", "roll"])
def test_hostile_text_costs_little(system, text):
    start = time.process_time()
    read(system, text)
    assert time.process_time() - start < 3


def test_megatrons_own_parser_takes_what_is_written():
    arguments = pytest.importorskip("megatron.training.arguments")
    parser = argparse.ArgumentParser(allow_abbrev=False)
    arguments.add_megatron_arguments(parser)
    text = "megatron:(attn:d2p4t2c2v3|ffn:d2p4t1e4)"
    written, _ = write("megatron", allocation.compile(text))
    got = parser.parse_args(shlex.split(written.partition("pretrain_gpt.py")[2].replace("\\\n", " ")))
    assert (got.tensor_model_parallel_size, got.pipeline_model_parallel_size, got.context_parallel_size) == (2, 4, 2)
    assert (got.expert_model_parallel_size, got.expert_tensor_parallel_size) == (4, 1)
    assert got.num_virtual_stages_per_pipeline_rank == 3 and got.sequence_parallel


def test_every_rule_of_conversions_is_tested_here():
    registered = {code for code in allocation.RULES if code.startswith("CONVERT-")}
    assert registered == set(re.findall(r"CONVERT-[A-Z-]*[A-Z]\b", Path(__file__).read_text()))


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("fsdp:d4s2", "ALLOC-LETTER"),
        ("sglang.d4t2s2+d8", "ALLOC-LETTER"),
        ("rollout.backend=sglang:d2s2", "ALLOC-LETTER"),
        ("fsdp:d4t1t2", "ALLOC-LETTER-TWICE"),
        ("sglang.d4m2t2+d4", "ALLOC-LETTER-TWICE"),
        ("sglang:d4+sglang:d4", "ALLOC-NAME-NEEDED"),
        ("sglang:d4+fsdp:megatron:d4", "ALLOC-SYNTAX"),
        ("sglang.vllm.d4+d2", "ALLOC-SYNTAX"),
    ],
)
def test_words_that_areals_strings_cannot_have_are_refused(text, code):
    written, findings = read("areal", text)
    assert not written and code in {finding.code for finding in findings}


parts = st.lists(st.tuples(st.sampled_from("dptcesm"), st.integers(1, 4)), min_size=1, max_size=5)


@given(st.sampled_from(["megatron.", "sglang.", "fsdp:", "megatron:", "vllm:", ""]), parts)
def test_no_size_of_an_older_string_is_dropped(backend, sizes):
    text = backend + "".join(f"{letter}{n}" for letter, n in sizes)
    written, findings = read("areal", text)
    if not written:
        assert any(finding.severity == "error" for finding in findings)
        return
    assert {letter for letter, _ in sizes} <= {*"dptcem"} and len(dict(sizes)) == len(sizes)
    dims = dict(re.findall(r"([a-z])(\d+)", written.partition(":")[2]))
    said = {"t" if letter == "m" else letter: str(n) for letter, n in sizes}
    assert {letter: n for letter, n in dims.items() if n != "1"} == {k: n for k, n in said.items() if n != "1"}
