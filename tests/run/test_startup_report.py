"""What a run says first: layout, parameters, environment and micro-batches of each role."""

from __future__ import annotations

from dataclasses import replace

from running import CONFIG

import allocation
from areal_like.core.config.load import load
from areal_like.preflight import preflight
from areal_like.run.startup_report import _parameters, describe_graphs, startup_report


def lines(*overrides: str, device: str = "cpu") -> list[str]:
    job = preflight(load(CONFIG, list(overrides)), dry_run=True).job
    assert job is not None
    return list(startup_report(replace(job, device=device)))  # type: ignore[arg-type]


def test_each_role_has_its_layout_its_parameters_and_its_environment() -> None:
    said = lines("ref.backend=megatron:t2", "critic.backend=megatron:p2", "actor.init_model.num_hidden_layers=4")
    roles = {line.partition(":")[0]: line for line in said if not line.startswith(" ")}
    assert "DP 2, TP 1, PP 1, CP 1, experts EP 1, ETP 1 on 2 ranks" in roles["actor"]
    assert "DP 1, TP 2, PP 1, CP 1, experts EP 1, ETP 1 on 2 ranks" in roles["ref"]
    assert "at most" in roles["critic"] and " PP 2," in roles["critic"]
    whole = roles["actor"].partition("; ")[2].partition(" of ")
    assert whole[0] == whole[2].partition(" parameters")[0]  # nothing is split
    assert float(roles["ref"].partition("; ")[2].split()[0]) < float(whole[0].split()[0])
    assert roles["rollout"].startswith("rollout: sglang, 1 server of TP 1")
    assert all("OMP_NUM_THREADS=1" in line for line in said if "environment" in line)


def test_the_micro_batches_follow_from_batch_and_layout() -> None:
    said = lines(
        *(
            "actor.backend=megatron:d2",
            "train_dataset.batch_size=8",
            "gconfig.n_samples=4",
            "actor.ppo_n_minibatches=2",
        ),
        *("train_dataset.max_prompt_length=40", "valid_dataset.max_prompt_length=40", "gconfig.max_new_tokens=24"),
        *("actor.mb_spec.max_tokens_per_mb=128", "ref.mb_spec.max_tokens_per_mb=256"),
    )
    actor, ref = (line for line in said if "micro-batches" in line)
    assert "32 sequences of at most 64 tokens, in 2 optimizer steps of 16" in actor
    assert "packs its 8 into 1 to 4 micro-batches of at most 128 tokens" in actor
    assert "packs its 16 into 1 to 4 micro-batches of at most 256 tokens" in ref
    assert "optimizer" not in ref


def test_graphs_of_servers_are_reported_with_the_reason_for_their_size() -> None:
    keys = ["train_dataset.batch_size=32", "rollout.max_head_offpolicyness=2", "rollout.backend=sglang:d2"]
    keys += ["cluster.n_gpus_per_node=4"]
    job = preflight(load(CONFIG, keys), dry_run=True).job
    assert job is not None
    assert describe_graphs(job) == ""  # on a CPU

    def graphs(*overrides: str) -> str:
        return describe_graphs(replace(job, config=load(CONFIG, [*keys, *overrides]).config, device="cuda"))

    assert "up to 384 requests a server" in graphs() and "96 groups of 8" in graphs()
    many = graphs("gconfig.n_samples=64")
    assert "up to 1,536 requests a server" in many and "3,072" in many
    for key, captured in (
        ("sglang.max_running_requests=24", "up to 24 requests"),
        ("sglang.extra_args.disable_cuda_graph=true", "none"),
        ("sglang.extra_args.cuda_graph_max_bs_decode=7", "the sizes of"),
    ):
        assert captured in graphs(key) and key.partition("=")[0] in graphs(key)


def test_offloaded_state_and_a_gpus_variables_are_reported() -> None:
    said = lines(
        "actor.megatron.optimizer_offload=true", "actor.env_vars.NCCL_DEBUG=WARN", "ref.offload=true", device="cuda"
    )
    resting = [line.partition(": ")[2] for line in said if line.startswith("  offloaded to host memory")]
    assert resting == ["optimizer", "params"]
    variables, _ = (line for line in said if "environment" in line)
    assert "NVTE_TORCH_COMPILE=0" in variables and "NCCL_DEBUG=WARN" in variables


def test_fsdp_has_no_grid_of_experts() -> None:
    (actor, *_) = lines("actor.backend=fsdp:d2")
    assert actor.startswith("actor: fsdp, DP 2, TP 1, PP 1, CP 1 on 2 ranks; ")
    assert "EP" not in actor


def test_a_trained_layer_for_prediction_is_among_the_parameters() -> None:
    model, plan = allocation.load_model("deepseek-v3"), allocation.compile("megatron:d1").engines[0]
    assert _parameters(model, plan, {}, predicts=False) == "; 671 B of 671 B parameters on each"
    assert _parameters(model, plan, {}, predicts=True) == "; 683 B of 683 B parameters on each"
