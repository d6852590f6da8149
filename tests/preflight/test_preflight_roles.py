"""The reference and the critic before start: where they run, and what is wrong under their own keys."""

import pytest
from test_preflight import check, errors

from areal_like.core.config.load import load
from areal_like.core.config.schema import InitModelConfig
from areal_like.demo.init_model import write_init_model

SEPARATE = "ref.scheduling_strategy.type=separation"


def devices(plan, role):
    return [device.gpu for device in plan.engine(role).devices]


def test_a_role_without_a_layout_has_the_actors_on_its_gpus(write):
    file = write()
    file.write_text(file.read_text() + "ref: {}\ncritic: {}\n")
    checked = check(file, "algorithm=ppo", "actor.kl_ctl=0.1")
    assert not checked.findings
    plan = checked.job.plan
    assert plan.engine("ref").sizes == plan.engine("critic").sizes == plan.engine("actor").sizes
    assert devices(plan, "ref") == devices(plan, "critic") == devices(plan, "actor")
    assert plan.n_gpus == 3
    assert "ref megatron[ref]:d2" in str(checked.job)


@pytest.mark.parametrize(
    ("overrides", "ref", "n_gpus"),
    [
        (["ref.backend=megatron:t2"], [1, 2], 3),
        (["ref.backend=megatron:p1", "ref.scheduling_strategy.target=rollout"], [0], 3),
        (["ref.backend=megatron:t2", SEPARATE, "cluster.n_gpus_per_node=5"], [3, 4], 5),
        (["ref.backend=megatron:t2@1-2", "actor.backend=megatron:d2@1-2", "rollout.backend=sglang:d1@0"], [1, 2], 3),
        (
            ["ref.dtype=float32", "allocation_mode=sglang[rollout]:d1+megatron[actor]:d2|megatron[ref]:t2"],
            [1, 2],
            3,
        ),
        (["ref.dtype=float32", "allocation_mode=sglang:d1+megatron:d2"], [1, 2], 3),
    ],
)
def test_a_role_runs_where_its_layout_says(write, overrides, ref, n_gpus):
    checked = check(write(), *overrides)
    assert checked.ok, list(map(str, checked.findings))
    assert devices(checked.job.plan, "ref") == ref
    assert checked.job.plan.n_gpus == n_gpus


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["ref.backend=megatron:t2", SEPARATE], "rollout.backend (FILE:17) + actor.backend", "has 3"),
        (["ref.backend=megatron:d1"], "rollout.backend (FILE:17) + actor.backend", "equally many GPUs"),
        (["critic.backend=sglang:d2"], "critic.backend", "the critic needs a trainer"),
        (["ref.backend=megatron:d2e2"], "ref.backend", "no experts"),
        (["ref.mb_spec.max_tokens_per_mb=39"], "ref.mb_spec.max_tokens_per_mb", "is 39"),
        (["critic.path=/nowhere"], "critic.path", "no config.json"),
        (["ref.path=DIRECTORY"], "ref.path", "embedding has 20 rows"),
        (["critic.optimizer.warmup_steps=4"], "critic.optimizer.warmup_steps", "4 optimizer steps"),
        (["critic.warmup_steps=4"], "critic.warmup_steps", "the actor would not be trained"),
        (
            ["critic.warmup_steps=2", "actor.optimizer.warmup_steps=2"],
            "actor.optimizer.warmup_steps",
            "2 optimizer steps",
        ),
        (
            [
                *("actor.init_model.num_experts=4", "actor.init_model.num_attention_heads=4"),
                *("actor.init_model.tie_word_embeddings=false", "ref.backend=megatron:t2"),
            ],
            "actor.megatron.bridge_type",
            "cannot export experts",
        ),
        (
            ["ref.megatron.override_transformer_config.fp8=hybrid"],
            "ref.megatron.override_transformer_config.fp8",
            "GPU",
        ),
        (["critic.megatron.recompute_granularity=full"], "critic.megatron.recompute_granularity", "recompute_method"),
        (
            ["critic.dtype=bfloat16", "critic.megatron.use_distributed_optimizer=false", "recover.mode=auto"],
            "critic.megatron.use_distributed_optimizer",
            "the critic's float32 value head",
        ),
        (
            ["critic.dtype=bfloat16", "critic.megatron.main_grads_dtype=bfloat16"],
            "critic.megatron.main_grads_dtype",
            "the critic's float32 value head",
        ),
        (
            ["ref.dtype=float32", "allocation_mode=sglang:d1+megatron:d1", "ref.backend=megatron:d1"],
            "ref.backend",
            "already",
        ),
        (
            [
                "ref.mb_spec.max_tokens_per_mb=39",
                "allocation_mode=sglang[rollout]:d1+megatron[actor]:d2|megatron[ref]:t2",
            ],
            "ref.mb_spec.max_tokens_per_mb",
            "is 39",
        ),
    ],
)
def test_what_is_wrong_is_found_under_the_roles_key(write, tmp_path, overrides, key, words):
    file = write()
    if "ref.path=DIRECTORY" in overrides:
        write_init_model(InitModelConfig(tokenizer="arithmetic", vocab_size=20), tmp_path / "small", seed=0)
    found = errors(file, *(text.replace("DIRECTORY", str(tmp_path / "small")) for text in overrides))
    key = key.replace("FILE", str(file))
    assert any(f.where.startswith(f"{key} (") and words in f.message for f in found), list(map(str, found))


@pytest.mark.parametrize(
    ("overrides", "right"),
    [
        (["ref.backend=megatron:t2", SEPARATE], "ref.scheduling_strategy.type=colocation"),
        (["ref.backend=megatron:d1", "cluster.n_gpus_per_node=4"], "ref.scheduling_strategy.type=separation"),
    ],
)
def test_the_strategy_that_would_do_is_named(write, overrides, right):
    (found,) = errors(write(), *overrides)
    assert found.help.endswith(f"write {right}")
    assert check(write(), *overrides, right).ok


def test_a_critic_has_no_float32_logits(write):
    loaded = load(write(), ["algorithm=ppo", "actor.fp32_head=true", "critic={}", "actor.kl_ctl=0.1", "ref={}"])
    assert {role: it.fp32_head for role, it in loaded.config.roles.items()} == {
        "actor": True,
        "ref": True,
        "critic": False,
    }


def test_a_cluster_too_small_for_layouts_in_fields_of_roles_is_not_mended_with_a_bar(write):
    """`|` joins engines in `allocation_mode` alone; a role's field has one engine."""
    wide = ["rollout.backend=sglang:d6", "actor.backend=megatron:d2"]
    (found,) = errors(write(), *wide, "cluster.n_gpus_per_node=3")
    assert found.code == "ALLOC-CLUSTER-SIZE"
    assert found.help == "make the layouts smaller, or raise cluster.n_gpus_per_node"
    assert check(write(), *wide, "cluster.n_gpus_per_node=8").ok
    whole = ["allocation_mode=sglang:d6+megatron:d2", "rollout.backend=null", "actor.backend=null"]
    (found,) = errors(write(), *whole, "cluster.n_gpus_per_node=3")
    assert "`|`" in found.help


def test_the_actors_keys_are_named_where_a_role_has_them_from_the_actor(write):
    found = errors(write(), "actor.mb_spec.max_tokens_per_mb=39", "ref.dtype=float32")
    assert [f.key for f in found] == ["actor.mb_spec.max_tokens_per_mb"]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["ref.ema_decay=0.5"], "ref.ema_decay"),
        (["ref.megatron.recompute_granularity=selective"], "ref.megatron.recompute_granularity"),
        (["ref.megatron.use_distributed_optimizer=false"], "ref.megatron.use_distributed_optimizer"),
        (["ref.megatron.overlap_param_gather=true"], "ref.megatron.overlap_param_gather"),
        (["ref.offload=true"], "ref.offload"),
        (["critic.megatron.optimizer_offload=true"], "critic.megatron.optimizer_offload"),
        ([SEPARATE], "ref.scheduling_strategy.type"),
        (["critic.optimizer.min_lr_ratio=0.5"], "critic.optimizer.min_lr_ratio"),
    ],
)
def test_a_roles_key_that_does_nothing_is_said(write, overrides, key):
    asks = "algorithm=ppo" if key.startswith("critic") else "actor.kl_ctl=0.1"
    checked = check(write(), asks, *overrides)
    assert checked.ok
    assert [(f.code, f.key) for f in checked.findings] == [("RUN-UNUSED", key)]


def test_a_critic_has_the_actors_minibatches_and_a_reference_has_none(write):
    """A minibatch of the critic has too few sequences for its ranks; the reference computes all sequences at once."""
    separate = ["cluster.n_gpus_per_node=11", "actor.ppo_n_minibatches=4"]
    wide = ["backend=megatron:d8", "scheduling_strategy.type=separation"]
    (found,) = errors(write(), "algorithm=ppo", *separate, *(f"critic.{text}" for text in wide))
    assert (found.code, found.key) == ("ALLOC-BATCH-DP", "critic.backend")
    assert check(write(), "actor.kl_ctl=0.1", *separate, *(f"ref.{text}" for text in wide)).ok
