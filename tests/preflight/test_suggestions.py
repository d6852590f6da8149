"""What a message suggests really works: the same checks no longer find it, and nothing new under that key."""

import re

import pytest

from areal_like.config.findings import ConfigError
from areal_like.config.keys import annotation_of
from areal_like.config.load import load
from areal_like.preflight import machine, memory, preflight

MEGATRON, SERVER = "actor.megatron.override_transformer_config", "sglang.extra_args"
SETTING = re.compile(r"\b([a-z][\w.]+=(?:\[[^\]]*\]|[^\s,;`]+?))(?=`|[,;:]?(?:\s|$))")
BIG = ["device=cuda", "cluster={n_nodes: 4, n_gpus_per_node: 8}", "scheduler.type=ray", "train_dataset.batch_size=16"]
ON_GPUS = ["device=cuda", "cluster.n_gpus_per_node=3"]
EXPERTS = [
    "actor.init_model={num_experts: 4, tie_word_embeddings: false, max_position_embeddings: 64}",
    "actor.megatron.bridge_type=megatron-bridge",
]
REWARD = "reward.model.backend"
ADAPTERS = [*EXPERTS, "actor.use_lora=true", "actor.backend=megatron:t4", "cluster.n_gpus_per_node=5"]
ROLES = ["algorithm=ppo", "cluster.n_gpus_per_node=9", "actor.backend=megatron:d4", "actor.kl_ctl=0.1"]
FULL = [f"actor.megatron.recompute_{name}" for name in ("granularity=full", "method=uniform", "num_layers=1")]

BAD = [
    ["algorithm=grop"],
    ["algorithm=ppo"],
    ["algorithm=dpo"],
    ["algorithm=dpo", "ref={}", "actor.ppo_n_minibatches=2"],
    ["actor.kl_ctl=0.1"],
    ["ref={}", "actor.kl_loss_coef=0.1", "actor.kl_estimator=k1"],
    ["algorithm=dapo", "actor.overlong_tokens=99"],
    ["actor.group_reward_above=0.5", "actor.group_reward_below=0.5"],
    ["actor.reward_norm.mean_leave1out=true"],
    ["actor.adv_norm.mean_leave1out=true"],
    ["algorithm=reinforce_pp", "actor.dynamic_sampling=true", "gconfig.n_samples=1"],
    ["seeed=1"],
    ["actor.dtype=bfloat"],
    ["scheduler.type=rya"],
    ["actor.lr=1.0"],
    ["gconfig.n_samples=1"],
    ["gconfig.top_p=0.5"],
    ["gconfig.top_k=5000"],
    ["gconfig.top_k=1"],
    ["gconfig.min_p=0.1", "gconfig.top_k=9", "sglang.deterministic=true"],
    ["rollout.max_concurrent_rollouts=1"],
    ["sglang.context_length=20"],
    ["sglang.context_length=100"],
    ["gconfig.max_new_tokens=30"],
    ["evaluator.max_new_tokens=200"],
    ["evaluator.max_new_tokens=200", "sglang.context_length=300"],
    ["evaluator.max_new_tokens=200", "sglang.context_length=60"],
    ["valid_dataset.max_prompt_length=1024"],
    ["valid_dataset.workflow=examples/workflows/retry.py:run", "episode.max_tokens=60"],
    ["gconfig.max_new_tokens=60"],
    ["actor.mb_spec.max_tokens_per_mb=39"],
    ["actor.mb_spec.share_prompts=true", "device=cuda"],
    [*EXPERTS, "actor.mb_spec.share_prompts=true", f"{MEGATRON}.moe_router_load_balancing_type=aux_loss"],
    ["train_dataset.batch_size=17"],
    ["actor.optimizer.warmup_steps=4"],
    ["algorithm=ppo", "critic.warmup_steps=4"],
    ["valid_dataset=null", "evaluator.freq_steps=1"],
    ["valid_dataset=null", "warm_start.steps=1"],
    ["actor.init_model.num_key_value_heads=3"],
    ["actor.init_model.head_dim=7"],
    ["actor.init_model.vocab_size=10"],
    ["actor.init_model={num_experts: 2, num_experts_per_tok: 3, tie_word_embeddings: false}"],
    ["actor.init_model.num_experts=4"],
    ["actor.init_model={num_experts: 4, tie_word_embeddings: false, max_position_embeddings: 64}", "actor.backend=megatron:t2"],
    ["actor.backend=null"],
    ["allocation_mode=sglang:d1|megatron:d1", "actor.backend=megatron:d1"],
    ["cluster.n_nodes=2"],
    ["sglang.attention_backend=triton"],
    ["sglang.deterministic=true"],
    ["rollout.min_servers=2"],
    ["cluster.n_gpus_per_node=4", "rollout.backend=sglang:d2", "sglang.port=65535"],
    [f"{SERVER}.schedule_polcy=lpm"],
    [f"{SERVER}.schedule_policy=lpn"],
    [f"{SERVER}.page_size=0"],
    [f"{SERVER}.disable_radix_cache=true"],
    [f"{MEGATRON}.moe_z_loss_coef=0.1"],
    [f"{MEGATRON}.tp_comm_bootstrap_backend=glo"],
    [f"{MEGATRON}.moe_aux_loss_coeff=0.1"],
    [*ON_GPUS, f"{MEGATRON}.fp8=hybrid", "actor.mb_spec.max_tokens_per_mb=40"],
    [*ON_GPUS, f"{MEGATRON}.fp8_param=true"],
    [*ON_GPUS, f"{MEGATRON}.cuda_graph_impl=local"],
    [*ON_GPUS, f"{MEGATRON}.overlap_moe_expert_parallel_comm=true"],
    [*ON_GPUS, "actor.backend=megatron:c2", f"{MEGATRON}.cp_comm_type=all_gather"],
    [*ON_GPUS, "actor.backend=megatron:c2", f"{MEGATRON}.cp_comm_type=[p2p,a2a,a2a+p2p]"],
    ["device=cuda", "cluster.n_gpus_per_node=5", "actor.backend=megatron:t2c2", f"{MEGATRON}.cp_comm_type=a2a"],
    [*ON_GPUS, f"{MEGATRON}.attention_backend=fused", "actor.env_vars.NVTE_FLASH_ATTN=1"],
    [*ON_GPUS, "actor.megatron.use_precision_aware_optimizer=true", "actor.dtype=float32"],
    [*ON_GPUS, "actor.megatron.use_precision_aware_optimizer=true", "actor.megatron.use_distributed_optimizer=false"],
    ["actor.megatron.use_precision_aware_optimizer=true"],
    [*ON_GPUS, "actor.dtype=bfloat16", "actor.megatron.exp_avg_dtype=bfloat16"],
    [*EXPERTS, "actor.megatron.moe_token_dispatcher_type=allgather"],
    [*EXPERTS, "actor.megatron.moe_token_dispatcher_type=flex"],
    [*EXPERTS, *ON_GPUS, f"{MEGATRON}.moe_enable_deepep=true"],
    ["actor.megatron.moe_token_dispatcher_type=allgather"],
    [*EXPERTS, "actor.megatron.bridge_type=mbridge", "actor.megatron.moe_grouped_gemm=false"],
    [*EXPERTS, "actor.megatron.moe_grouped_gemm=false", "actor.megatron.recompute_modules=[moe_act]"],
    [*EXPERTS, *FULL, "actor.megatron.moe_layer_recompute=true"],
    [*FULL, "actor.megatron.recompute_modules=[mlp]"],
    ["actor.megatron.recompute_granularity=selective", "actor.megatron.recompute_modules=[layernorm]"],
    ["actor.megatron.overlap_param_gather=true", "actor.megatron.overlap_grad_reduce=false"],
    ["actor.megatron.overlap_param_gather=true", "actor.megatron.use_distributed_optimizer=false"],
    ["workflow=areal_like.workflows.single_turn:SingleTurn", "episode.max_tokens=100"],
    [*ROLES, "ref.backend=megatron:d4", "critic.backend=megatron:d2"],
    [*ROLES, "ref.backend=megatron:d2", "critic.backend=megatron:d2"],
    [*ROLES, "cluster.n_gpus_per_node=5", "ref={backend: 'megatron:d4', scheduling_strategy: {type: separation}}"],
    [*ADAPTERS, "actor.target_modules=[gate_proj]"],
    [*ADAPTERS, "actor.target_modules=[q_proj]"],
    [*BIG, "rollout.backend=sglang:d1t16@0-15", "actor.backend=megatron:d16@16-31"],
    [*BIG, "allocation_mode=sglang:d1t16@0-15+megatron:d16@16-31"],
]  # fmt: skip


SHAPE = "hidden_size: 2048, num_hidden_layers: 28, num_attention_heads: 16, intermediate_size: 6144, vocab_size: 151936"
SHAPE += ", max_position_embeddings: 32768"
ALONE = "scheduling_strategy: {type: separation}"
MANY = "mb_spec: {max_tokens_per_mb: 32768}"
LARGE = ["device=cuda", "algorithm=ppo", "actor.dtype=bfloat16", "actor.backend=megatron:d1"]
LARGE += [f"actor.init_model={{{SHAPE}}}", "actor.megatron.recompute_granularity=selective"]
LONG = "gconfig.max_new_tokens=12000"  # leaves micro-batches of that many tokens
SELECTED = "recompute_granularity: selective, recompute_modules: [core_attn]"
TOO_LARGE = [
    (40, ["algorithm=grpo"]),
    (40, ["algorithm=grpo", LONG, "actor.megatron.recompute_modules=[core_attn]"]),
    (48, [f"critic={{backend: 'megatron:d1', {ALONE}, {MANY}, megatron: {{}}}}"]),
    (40, [LONG, f"critic={{backend: 'megatron:d1', {ALONE}, {MANY}, megatron: {{{SELECTED}}}}}"]),
    (64, [f"critic={{{MANY}}}"]),
    (60, [LONG, f"critic={{{MANY}, megatron: {{{SELECTED}}}}}", "actor.megatron.recompute_modules=[mlp]"]),
    (64, ["actor.kl_ctl=0.1", "ref={dtype: float32, megatron: {}}", "critic={}"]),
    (34, ["actor.backend=fsdp:d1", f"critic={{backend: 'fsdp:d1', {ALONE}, {MANY}, fsdp: {{}}}}"]),
]


def errors(file, overrides):
    """Errors and warnings of all that is checked, by key; each with its code."""
    try:
        found = preflight(load(file, overrides), dry_run=True).findings
    except ConfigError as error:
        found = error.findings
    return {(str(f.key).partition(" + ")[0], f.code): f for f in found if str(f.severity) != "note"}


def suggestions(key, finding, overrides):
    """The overrides of a finding's suggestions, each beside what it replaces."""
    for near in finding.nearest:
        if "=" not in near and annotation_of(near) is not None and near != "false":
            value = next((o.partition("=")[2] for o in overrides if o.startswith(f"{key}=")), None)
            yield [o for o in overrides if not o.startswith(f"{key}=")] + [f"{near}={value}"]
        else:
            yield [*overrides, f"{key}={near}"]
    for together in map(SETTING.findall, re.split(r"\bor\b", finding.help or "")):
        if together:
            yield [*overrides, *together]


@pytest.mark.parametrize("overrides", BAD, ids=lambda overrides: overrides[-1][:60])
def test_a_suggestion_works(write, overrides):
    try_all(write, overrides)


@pytest.mark.parametrize(("gib", "overrides"), TOO_LARGE)
def test_what_would_fit_on_a_gpu_does(write, monkeypatch, gib, overrides):
    monkeypatch.setattr(memory, "gpu_bytes", lambda: gib << 30)
    monkeypatch.setattr(machine, "gpu_count", lambda: 3)
    assert "ALLOC-MEMORY" in {code for _, code in try_all(write, [*LARGE, *overrides], elsewhere=True)}


@pytest.mark.parametrize(
    "layout",
    [
        ["allocation_mode=sglang[rollout]:d1|sglang[reward]:d1+megatron[actor]:d2"],
        ["allocation_mode=sglang[rollout]:d1+megatron[actor]:d1|sglang[reward]:d1"],
        ["allocation_mode=sglang[rollout]:d2@0-1|sglang[reward]:d1@1+megatron[actor]:d2@2-3"],
        ["allocation_mode=null", "actor.backend=megatron:d2", "rollout.backend=sglang:d1@0", f"{REWARD}=sglang:d1@0"],
    ],
)
def test_a_reward_model_has_gpus_of_its_own(write, monkeypatch, layout):
    monkeypatch.setattr(machine, "gpu_count", lambda: 5)
    where = ["actor.backend=null", "rollout.backend=null", "cluster.n_gpus_per_node=5"]
    overrides = ["reward.type=model", "reward.model.path=/nowhere", *where, *layout]
    key = REWARD if "allocation_mode=null" in layout else "allocation_mode"
    assert (key, "RUN-ROLE-REWARD-GPUS") in try_all(write, ["device=cuda", *overrides], elsewhere=True)
    assert (key, "RUN-ROLE-REWARD-GPUS") not in errors(write(), overrides)  # a slot on CPU takes what memory it needs


def try_all(write, overrides, *, elsewhere=False):
    """What is found, of which every suggestion was tried; with `elsewhere` it must lead to no other error at all."""
    found = errors(write(), overrides)
    tried = 0
    for (key, code), finding in found.items():
        if " + " in key:
            continue
        for changed in suggestions(key, finding, overrides):
            tried += 1
            after = errors(write(), changed)
            assert (key, code) not in after, (changed, str(after[key, code]))
            here = {k: f for k, f in after.items() if elsewhere or k[0] == key}
            new = [f for k, f in here.items() if k not in found and str(f.severity) == "error"]
            assert not new, (changed, list(map(str, new)))
    assert tried, list(map(str, found.values()))
    return found
