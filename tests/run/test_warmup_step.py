"""Which roles run a warm-up step, and with which batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from running import CONFIG

from areal_like.core.config.load import load
from areal_like.core.trainer.packing import make_schedule
from areal_like.job import Job
from areal_like.preflight import preflight
from areal_like.run.warmup import warmup_batch, warmup_roles

APART = ("actor.backend=megatron:d2", "rollout.backend=sglang:d1", "cluster.n_gpus_per_node=8")


def job_of(*overrides: str, device: str = "cuda") -> Job:
    job = preflight(load(CONFIG, [*APART, "device=cpu", *overrides]), dry_run=True).job
    assert job is not None
    return replace(job, device=device)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("overrides", "device", "roles"),
    [
        ((), "cuda", ["actor"]),
        (("ref={}", "ref.backend=megatron:t2"), "cuda", ["actor", "ref"]),
        ((), "cpu", []),
        (("rollout.backend=null", "actor.backend=null", "allocation_mode=sglang:d2|megatron:d2"), "cuda", []),
    ],
    ids=["apart", "with a reference", "CPU", "shared with servers"],
)
def test_which_roles_run_a_warmup_step(overrides: tuple[str, ...], device: str, roles: list[str]) -> None:
    assert warmup_roles(job_of(*overrides, device=device)) == roles


def test_fp8_would_remember_it() -> None:
    job = job_of()
    job.config.actor.megatron.override_transformer_config["fp8"] = "hybrid"
    assert warmup_roles(job) == []


@pytest.mark.parametrize("limit", [64, 16384])
def test_its_micro_batches_are_as_large_as_a_step_s_and_no_larger(limit: int) -> None:
    job = job_of(f"actor.mb_spec.max_tokens_per_mb={limit}")
    batch, longest = warmup_batch(job, "actor"), job.config.longest_sequence
    samples = job.config.train_dataset.batch_size * job.config.gconfig.n_samples // job.config.actor.ppo_n_minibatches
    assert set(batch.lengths.tolist()) == {longest}
    assert len(batch.lengths) == min(samples, 2 * (limit // longest))
    assert len(batch.tokens) == batch.lengths.sum() == batch.fields["loss_mask"].sum()
    assert batch.tokens[: len(job.train_prompts[0].tokens)].tolist() == list(job.train_prompts[0].tokens)
    schedule = make_schedule(batch.lengths, dp=2, max_tokens=limit, alignment=1)
    assert [len(rank) for rank in schedule] == [1, 1]
