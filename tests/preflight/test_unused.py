"""Keys that are set and do nothing for the run that sets them."""

import re
from pathlib import Path

import pytest

from areal_like.core.config.keys import entries_of, section_of
from areal_like.core.config.load import dump, load
from areal_like.core.config.schema import Ignored, RunConfig
from areal_like.preflight import preflight
from areal_like.preflight.layout import find_plan
from areal_like.preflight.model import find_model
from areal_like.preflight.policies import check_unused
from areal_like.preflight.roles import check_roles
from areal_like.preflight.view import view_roles

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(set(FOLDER.rglob("*.yaml")) - set((FOLDER / "clusters").iterdir()))
FILE = ["train_dataset.path=data.jsonl", "valid_dataset.path=data.parquet"]
HUB = ["train_dataset.path=openai/gsm8k", "valid_dataset.path=openai/gsm8k"]
SET = "evaluator.datasets.a.path=a.jsonl"
ON_GPUS = ["device=cuda"]
EXPERTS_OF_A_BRIDGE = [
    "actor.init_model={num_experts: 4, tie_word_embeddings: false, max_position_embeddings: 64}",
    "actor.megatron.bridge_type=megatron-bridge",
]
MIXED = [
    "allocation_mode=sglang[rollout]:d1+megatron[actor]:d1+fsdp[critic]:d1",
    *("actor.backend=null", "rollout.backend=null", "algorithm=ppo", "critic={}"),
]
EXPERTS = ["actor.init_model.num_experts=4", "actor.init_model.tie_word_embeddings=false"]


def unused(file, *overrides, device="cpu"):
    """The keys that do nothing, of those on the command line."""
    loaded = load(file, overrides)
    keys = (f.key for f in check_unused(loaded.config, device, find_plan(loaded.config, None)[0]))
    return [key for key in keys if loaded.origins.place_of(key) == "command line"]


@pytest.mark.parametrize(
    ("without", "setting", "with_"),
    [
        (FILE, "train_dataset.split=test", HUB),
        (["rollout.drift_probe_tokens=0"], "rollout.drift_patience=5", ["rollout.drift_probe_tokens=64"]),
        *(
            ([f"{eta}=0"], f"weight_update.requests={way}", [f"{eta}=1"])
            for eta in ["rollout.max_head_offpolicyness"]
            for way in ("recompute", "drain")
        ),
        (FILE, "valid_dataset.split=train", ["valid_dataset.path=arithmetic"]),
        (FILE, "train_dataset.name=main", HUB),
        ([], "valid_dataset.name=main", HUB),
        (FILE, "train_dataset.arithmetic.size=5", []),
        (HUB, "valid_dataset.arithmetic.seed=3", []),
        *(
            ([], f"{role}.megatron.dist_checkpointing_path=/x", [f"{role}.megatron.use_dist_checkpointing=true"])
            for role in ("actor", "ref", "critic")
        ),
        ([SET], "evaluator.datasets.a.split=train", ["evaluator.datasets.a.path=openai/gsm8k"]),
        ([SET], "evaluator.datasets.a.name=main", ["evaluator.datasets.a.path=openai/gsm8k"]),
        (
            ["train_dataset.mixture.a.path=x.jsonl"],
            "train_dataset.mixture.a.arithmetic.size=3",
            ["train_dataset.mixture.a.path=arithmetic"],
        ),
        (["reward.parts.a.type=gsm8k"], "reward.type=model", []),
        (["reward.function=my.py:score"], "reward.type=model", []),
        (["stats_logger.console=false"], "stats_logger.console_samples=3", []),
        ([], "scheduler.address=10.0.0.1:6379", ["scheduler.type=ray"]),
        ([], "actor.optimizer.min_lr_ratio=0.1", ["actor.optimizer.lr_scheduler_type=cosine"]),
        ([], "actor.eps_clip=0.1", ["actor.ppo_n_minibatches=2"]),
        ([], "actor.eps_clip_higher=0.3", ["actor.ppo_n_minibatches=2"]),
        (["actor.backend=fsdp:d2"], "actor.megatron.bridge_type=megatron-bridge", []),
        ([], "actor.fsdp.gradient_checkpointing=true", ["actor.backend=fsdp:d2"]),
        (MIXED, "actor.fsdp.gradient_checkpointing=true", ["actor.backend=fsdp:d2"]),
        (["actor.backend=fsdp:d2"], "actor.megatron.overlap_grad_reduce=true", MIXED),
        (MIXED, "critic.megatron.overlap_grad_reduce=true", ["critic.backend=megatron:d1"]),
        (["actor.backend=fsdp:d2"], "critic.megatron.overlap_grad_reduce=true", []),
        (["critic={}"], "critic.fsdp.gradient_checkpointing=true", ["critic.backend=fsdp:d2"]),
        (["actor.backend=fsdp:d2"], "actor.fsdp.offload_params=true", []),
        ([], "actor.c_clip=3.0", ["actor.use_decoupled_loss=false"]),
        (["algorithm=cispo"], "actor.c_clip=3.0", ["actor.ppo_n_minibatches=2"]),
        ([], "actor.lora_rank=4", ["actor.use_lora=true"]),
        ([], "saver.merge_lora=true", ["actor.use_lora=true"]),
        (["actor.use_decoupled_loss=false"], "actor.behave_imp_weight_cap=2.0", ["actor.use_decoupled_loss=true"]),
        (["algorithm=cispo"], "actor.behave_imp_weight_mode=token_mask", ["algorithm=gspo"]),
        (["actor.behave_imp_weight_mode=disabled"], "actor.behave_imp_weight_cap=2.0", []),
        (["actor.behave_imp_weight_mode=disabled"], "actor.behave_imp_weight_floor=0.5", []),
        (["algorithm=cispo"], "actor.behave_imp_weight_veto=0.5", ["algorithm=gspo"]),
        ([], "actor.kl_estimator=k2", ["actor.kl_ctl=0.1"]),
        ([], "actor.gae_lambda=0.9", ["algorithm=ppo"]),
        ([], "actor.overlong_tokens=3", ["algorithm=dapo"]),
        ([], "actor.max_dropped_groups=3", ["actor.dynamic_sampling=true"]),
        (["actor.entropy_coeff=0.1"], "actor.skip_zero_advantages=true", ["actor.entropy_coeff=0.0"]),
        ([], "actor.dpo_beta=0.5", ["algorithm=dpo"]),
        (["reward.type=model"], "reward.timeout_s=20", ["reward.type=gsm8k"]),
        (["algorithm=dpo"], "actor.kl_ctl=0.5", ["algorithm=rloo"]),
        ([], "rollout.max_restarts=7", ["cluster.n_gpus_per_node=4", "rollout.backend=sglang:d2"]),
        (["weight_update.mode=disk"], "weight_update.bucket_mb=4", []),
        (["weight_update.mode=ipc"], "weight_update.bucket_mb=4", ["weight_update.prefetch_mb=2"]),
        (["weight_update.mode=disk"], "weight_update.prefetch_mb=4", []),
        ([], "actor.init_model.num_experts_per_tok=3", EXPERTS),
        ([], "actor.init_model.moe_intermediate_size=64", EXPERTS),
        (EXPERTS, "actor.init_model.intermediate_size=64", []),
        ([], "episode.max_turns=3", ["workflow=my_workflow.py:run"]),
        ([], "episode.tool_call_parser=qwen25", ["workflow=my_workflow.py:run"]),
        (["valid_dataset=null"], "evaluator.temperature=0.5", []),
        ([], "evaluator.top_p=0.5", ["evaluator.temperature=0.5"]),
        ([], "evaluator.top_k=5", ["evaluator.temperature=0.5"]),
        ([SET], "evaluator.datasets.a.top_k=5", [SET, "evaluator.datasets.a.temperature=0.5"]),
        (
            ["evaluator.temperature=0.5", SET, "evaluator.datasets.a.temperature=0"],
            "evaluator.datasets.a.top_p=0.5",
            [SET, "evaluator.temperature=1"],
        ),
        (["evaluator={at_start: false, at_end: false}"], "evaluator.temperature=0.5", ["evaluator.freq_steps=2"]),
    ],
)
def test_a_key_that_does_nothing_is_named(write, without, setting, with_):
    key = setting.partition("=")[0]
    assert unused(write(), *without, setting) == [key]
    assert "offload" in key or not unused(write(), *with_, setting)


@pytest.mark.parametrize("backend", ["megatron:d2", "fsdp:d2"])
@pytest.mark.parametrize("setting", ["fsdp.gradient_checkpointing=true", "megatron.recompute_granularity=full"])
def test_a_reference_has_nothing_to_recompute(write, backend, setting):
    keys = unused(write(), "ref={}", f"ref.backend={backend}", f"ref.{setting}")
    assert set(keys) == {f"ref.{setting.partition('=')[0]}"}


def test_the_cache_of_a_server_on_cpu_is_no_share_of_a_gpu(write):
    assert unused(write(), "sglang.mem_fraction_static=0.5") == ["sglang.mem_fraction_static"]
    assert not unused(write(), "sglang.mem_fraction_static=0.5", device="cuda")


@pytest.mark.parametrize("role", ["actor", "ref"])
def test_the_gpus_of_a_rank_are_those_of_its_place_in_the_layout(write, role):
    variables = f"{role}.env_vars={{CUDA_VISIBLE_DEVICES: 0, NCCL_DEBUG: INFO}}"
    loaded = load(write(), [*ON_GPUS, "cluster.n_gpus_per_node=3", variables])
    said = [f for f in check_unused(loaded.config, "cuda", find_plan(loaded.config, None)[0]) if "env_vars" in f.key]
    assert [f.key for f in said] == [f"{role}.env_vars.CUDA_VISIBLE_DEVICES"]
    assert "`@`" in said[0].help


def test_a_run_with_such_keys_starts(write):
    checked = preflight(load(write(), ["actor.optimizer.min_lr_ratio=0.5"]))
    assert checked.ok
    (finding,) = checked.findings
    assert (finding.severity, finding.message) == ("warning", "ignored: `lr_scheduler_type` is `constant`")


def test_conditions_are_reasons_in_the_middle_of_a_sentence():
    whys = [
        mark.why for section in sections(RunConfig) for field in section.model_fields.values() for mark in marks(field)
    ]
    assert len(whys) > 60
    assert [why for why in whys if not re.fullmatch(r"[^A-Z].*[^.]", why)] == []


def marks(field):
    """The conditions under which a field is ignored."""
    return [mark for mark in field.metadata if isinstance(mark, Ignored)]


def sections(section):
    """A section and all below it."""
    yield section
    for field in section.model_fields.values():
        inner = section_of(field.annotation) or entries_of(field.annotation)
        if inner is not None:
            yield from sections(inner)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_every_key_of_an_example_does_something(file):
    loaded = load(file)
    assert not list(check_unused(loaded.config, loaded.config.device, find_plan(loaded.config, None)[0]))


def test_a_resolved_configuration_may_be_run_again(write, tmp_path):
    resolved = tmp_path / "config.yaml"
    resolved.write_text(dump(load(write(), FILE).config.model_copy(update={"valid_dataset": None})))
    keys = {f.key for f in check_unused(load(resolved).config, "cpu", None)}
    assert keys == {"train_dataset.arithmetic.size"}  # which MINIMAL sets; not what has its default


@pytest.mark.parametrize(
    ("setting", "without"),
    [
        ("moe_layer_recompute=true", EXPERTS_OF_A_BRIDGE),
        ("moe_grouped_gemm=false", EXPERTS_OF_A_BRIDGE),
        ("recompute_modules=[mlp]", ["actor.megatron.recompute_granularity=selective"]),
        ("overlap_grad_reduce=true", ["actor.backend=megatron:d2"]),
        ("overlap_param_gather=true", ["actor.backend=megatron:d2"]),
        ("param_offload=true", [*ON_GPUS]),
        ("optimizer_offload=true", [*ON_GPUS]),
    ],
)
def test_a_setting_that_does_nothing_is_named(write, setting, without):
    name, _, _ = setting.partition("=")
    one = ["actor.backend=megatron:d1", f"actor.megatron.{setting}", "cluster.n_gpus_per_node=2"]
    found = preflight(load(write(), one)).findings
    assert [(f.code, f.key) for f in found] == [("RUN-UNUSED", f"actor.megatron.{name}")]
    found = preflight(load(write(), [*one, "cluster.n_gpus_per_node=3", *without]), dry_run=True).findings
    assert f"actor.megatron.{name}" not in [f.key for f in found]


@pytest.mark.parametrize(
    ("modules", "model", "named"),
    [
        ("core_attn, moe, shared_experts", [], "moe and shared_experts"),
        ("mlp", [], None),
        ("mlp, moe", EXPERTS_OF_A_BRIDGE, "mlp"),
        ("shared_experts, moe_act", EXPERTS_OF_A_BRIDGE, "shared_experts"),
    ],
)
def test_modules_that_no_layer_has_are_not_recomputed(write, modules, model, named):
    chosen = ["actor.megatron.recompute_granularity=selective", f"actor.megatron.recompute_modules=[{modules}]"]
    config = load(write(), [*ON_GPUS, *chosen, *model]).config
    findings = check_roles([*view_roles(config, {"actor": find_model(config)[0]}, device="cuda")])
    said = [f.help for f in findings if f.key == "actor.megatron.recompute_modules"]
    assert said == ([f"leave out {named}"] if named else [])


@pytest.mark.parametrize(
    ("name", "setting", "without"),
    [
        ("cp_comm_type", "cp_comm_type=a2a", ["actor.backend=megatron:c2"]),
        (
            "moe_z_loss_coeff",
            "moe_z_loss_coeff=0.1",
            EXPERTS_OF_A_BRIDGE,
        ),
    ],
)
def test_an_override_that_does_nothing_is_named(write, name, setting, without):
    key = f"actor.megatron.override_transformer_config.{name}"
    override = f"actor.megatron.override_transformer_config.{setting}"
    keys = [f.key for f in preflight(load(write(), [override])).findings]
    assert keys == [key]
    assert key not in [f.key for f in preflight(load(write(), [override, *without])).findings]


def test_what_offload_covers_does_nothing_beside_it(write):
    settings = ["actor.megatron.param_offload=true", "ref.megatron.param_offload=true", "ref.offload=false"]
    assert unused(write(), *settings, device="cuda") == []
    assert unused(write(), *settings, "actor.offload=true", device="cuda") == ["actor.megatron.param_offload"]
