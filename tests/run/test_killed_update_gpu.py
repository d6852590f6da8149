"""A trainer rank that is killed while it broadcasts weights over nccl; needs four GPUs."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from running import ROOT, run

from benchmarks.made_weights import environment

pytestmark = [pytest.mark.gpu, pytest.mark.covers("updates: collective")]

STEPS, VERSION = 8, 3
SENDER = {"areal_like.backends.transports.collective.rank": "test_killed_update_gpu:die_in_an_update"}
SMALL = (
    *("allocation_mode=sglang:d2+megatron:d2", "cluster.n_gpus_per_node=4", f"total_train_steps={STEPS}"),
    *(
        "warm_start=null",
        "evaluator.freq_steps=null",
        "evaluator.at_start=false",
        "evaluator.at_end=false",
        "train_dataset.batch_size=16",
        "gconfig.n_samples=4",
    ),
    *("weight_update={mode: collective, bucket_mb: 8, prefetch_mb: 16, timeout_s: 60}", "rollout.prefill_once=false"),
    *("rollout.startup_timeout_s=400", "sglang.mem_fraction_static=0.5"),
    "sglang.extra_args={disable_prefill_cuda_graph: true, max_total_tokens: 100000}",
)


def die_in_an_update(module: ModuleType) -> None:
    """Kill one rank once, after the first buckets of an update: rank 0 as it sends, another one as it gathers."""
    sender, rank, died = module.CollectiveSender, int(os.environ["KILLED_RANK"]), Path(os.environ["DIED"])
    prepare, send, state = sender.prepare, sender.send, {"updates": 0, "sent": 0}

    def die(self: Any) -> None:
        if self._rank == rank and state["updates"] > VERSION and state["sent"] and not died.exists():
            died.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    def prepare_or_die(self: Any, begin: int, *arguments: Any) -> Any:
        if begin == 0:
            state.update(updates=state["updates"] + 1, sent=0)
        elif rank:
            die(self)
        return prepare(self, begin, *arguments)

    def send_or_die(self: Any) -> Any:
        die(self)
        state["sent"] += 1
        return send(self)

    sender.prepare, sender.send = prepare_or_die, send_or_die


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("resumes", [True, False])
def test_a_run_that_loses_a_rank_in_an_update_goes_on_or_ends(tmp_path: Path, rank: int, resumes: bool) -> None:
    died = tmp_path / "died"
    kept = ("recover.mode=auto", "recover.freq_steps=1") if resumes else ("recover.mode=off",)
    env = environment(SENDER) | {"KILLED_RANK": str(rank), "DIED": str(died)}
    env["PYTHONPATH"] = f"{env['PYTHONPATH']}:{Path(__file__).parent}:{ROOT / 'tests'}"
    with run(tmp_path, *SMALL, *kept, config=ROOT / "examples/math/gsm8k_grpo.yaml", env=env) as started:
        code = started.end(400)
        print(f"rank {rank}, resumes {resumes}: exit {code}, {time.time() - float(died.read_text()):.0f} s after")
        assert died.exists()
        assert code == (0 if resumes else 1), started.output + started.errors
        assert f"actor rank {rank}" in started.output + started.errors
        assert started.remains() == []
