"""Compare trainer tokens per second of an engine's `train` and a bare loop (`bare_loops.py`), in one process.

    python -m benchmarks.trainer_throughput --config examples/math/gsm8k_grpo_cpu.yaml [--loss policy] [key=value ...]
    python -m benchmarks.trainer_throughput --config ... --layout "megatron:(attn:t2c2|ffn:e4)"   # or fsdp:d1

Both train the same model with the same optimizer on the same micro-batches, with one rank per GPU. The bare loop
receives its micro-batches as tensors on the device and computes the cross-entropy of every token. The engine receives
a Batch, packs it, and computes log-probs, entropy, the loss and its statistics for trained tokens: the responses, or
with `--trained all` all tokens, so that both compute equally many logits. `--loss sft` is the bare loop's loss,
`policy` is that of reinforcement learning. Model shape, batch and micro-batches come from the configuration; tokens are
drawn from the whole vocabulary, and lengths are random between half and all of `max_prompt_length` and
`gconfig.max_new_tokens`. The pass for log-probs alone is timed too. On a GPU, the peak of allocated memory of the first
rank and the share of the GPU's peak are measured for each, and with `--profile` a step of the engine by torch's
profiler. `expert_load` is the fullest expert's tokens over the mean, by layer.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import typer
from torch import multiprocessing

import allocation
from allocation import EnginePlan
from areal_like.backends.megatron.engine import MegatronEngine
from areal_like.backends.training.rank import make_engine
from areal_like.core.algorithms.losses import decoupled_ppo, sft
from areal_like.core.algorithms.settings import Settings
from areal_like.core.config.load import load
from areal_like.core.config.schema import RunConfig
from areal_like.core.trainer.engine import EngineSpec, Rendezvous, TrainEngine
from areal_like.core.types import Batch, LossSpec
from areal_like.runtime.ports import listen
from benchmarks.bare_loops import FSDPLoop, MegatronLoop
from benchmarks.memory import made_model
from benchmarks.random_weights import random_weights, write_config
from benchmarks.report import save
from benchmarks.step_figures import FORMULA, expert_load, profile, share_of_peak

DEVICE: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"


class Loss(StrEnum):
    sft = "sft"
    policy = "policy"


class Trained(StrEnum):
    responses = "responses"
    all = "all"


def main(
    config: Annotated[Path, typer.Option()],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="key=value ...")] = None,
    loss: Loss = Loss.policy,
    layout: Annotated[str, typer.Option(help="of the trainer alone, without a pipeline")] = "megatron:d1",
    trained: Annotated[Trained, typer.Option(help="the tokens that the engine trains on")] = Trained.responses,
    steps: int = 20,
    profiled: Annotated[bool, typer.Option("--profile", help="a step of the engine, on a GPU")] = False,
    name: Annotated[str, typer.Option(help="of the result file, after trainer_throughput_")] = "{loss}_{device}",
) -> None:
    run, (plan,) = load(config, overrides or []).config, allocation.compile(layout).engines
    with tempfile.TemporaryDirectory() as folder:
        listener = listen("127.0.0.1")
        meeting = Rendezvous(0, plan.world_size, "127.0.0.1", listener.getsockname()[1])
        arguments = run, plan, loss, trained, steps, profiled, Path(folder)
        others = multiprocessing.spawn(measured_on, (meeting, *arguments), plan.world_size - 1, join=False)
        figures = measured(replace(meeting, listener=listener), *arguments)
        while not others.join():  # it returns at every rank that ends
            pass
    save("trainer_throughput_" + name.format(loss=loss, device=DEVICE), {"layout": layout, **figures})


def measured_on(place: int, meeting: Rendezvous, *arguments: Any) -> None:
    """`measured` on one of the ranks behind the first."""
    if DEVICE == "cuda":
        torch.cuda.set_device(place + 1)
    measured(replace(meeting, rank=place + 1), *arguments)


def measured(
    meeting: Rendezvous,
    run: RunConfig,
    plan: EnginePlan,
    loss: Loss,
    trained: Trained,
    steps: int,
    profiled: bool,
    folder: Path,
) -> dict[str, Any]:
    """Both loops on one rank."""
    spec_of_engine = spec_of(run, plan, folder)
    batch, engine = make_batch(run, spec_of_engine.path, trained), started(spec_of_engine, meeting)
    bare = MegatronLoop(engine, batch) if isinstance(engine, MegatronEngine) else FSDPLoop(engine, batch)
    spec = LossSpec(sft) if loss == Loss.sft else LossSpec(decoupled_ppo, Settings())
    sides: dict[str, Callable[[], object]] = {
        "engine": lambda: engine.train(batch, spec),
        "bare": bare.step,
        "log_probs": lambda: engine.log_probs(batch, 1.0),
    }
    peaks = {side: peak_gib(step) for side, step in sides.items()}  # warms up, too
    times: dict[str, list[float]] = {side: [] for side in sides}
    taken: dict[str, list[int]] = {side: [] for side in sides}
    for _ in range(steps):
        for side, step in sides.items():
            before = device_allocations()
            times[side].append(seconds(step))
            taken[side].append(device_allocations() - before)
    tokens_per_second = {side: len(batch.tokens) / statistics.median(values) for side, values in times.items()}
    ratio = tokens_per_second["engine"] / tokens_per_second["bare"]
    forward = tokens_per_second["log_probs"] / tokens_per_second["engine"]
    shape, rows = allocation.load_model(spec_of_engine.path), int(batch.fields["loss_mask"].sum())
    computed = {"engine": (3, rows), "bare": (3, len(batch.tokens)), "log_probs": (1, rows)}
    shares = {
        side: share_of_peak(
            shape, batch.lengths, rows, statistics.median(times[side]), passes=passes, gpus=plan.world_size
        )
        for side, (passes, rows) in computed.items()
    }
    of_megatron = isinstance(engine, MegatronEngine)
    load = expert_load(engine._models, sides["log_probs"]) if of_megatron and shape.experts else None
    table = profile(sides["engine"]) if profiled else None
    if meeting.rank == 0:
        print({side: round(value) for side, value in tokens_per_second.items()}, "peak GiB", peaks)
        print("share of peak", shares, "load of experts", load and max(load))
        print(f"{loss}: engine / bare = {ratio:.3f}, log-probs / training = {forward:.2f}", flush=True)
    engine.shutdown()
    return {
        "loss": loss,
        "trained": trained,
        "model_parameters": sum(p.numel() for p in bare.model.parameters()),  # this rank's, under Megatron
        "dtype": run.actor.dtype,
        "sequences": len(batch.lengths),
        "tokens_per_step": len(batch.tokens),
        "trained_tokens_per_step": int(batch.fields["loss_mask"].sum()),
        "micro_batches": len(bare.micro_batches),
        "threads": torch.get_num_threads(),
        "tokens_per_second": tokens_per_second,
        "ratio": ratio,
        "log_probs_ratio": forward,
        "peak_gib": peaks,
        "share_of_peak": {**shares, "formula": FORMULA},
        "expert_load": load,
        "profile": table,
        "seconds_per_step": times,
        "device_allocations": taken,  # where there are any, steps wait for memory
    }


def make_batch(run: RunConfig, model: Path, trained: Trained = Trained.responses) -> Batch:
    """Random tokens of the whole vocabulary, and random advantages."""
    rng = np.random.default_rng(0)
    n = run.train_dataset.batch_size * run.gconfig.n_samples
    longest_prompt, longest_response = run.train_dataset.max_prompt_length, run.gconfig.max_new_tokens
    prompts = rng.integers(longest_prompt // 2, longest_prompt, n, dtype=np.int32, endpoint=True)
    responses = rng.integers(max(1, longest_response // 2), longest_response, n, dtype=np.int32, endpoint=True)
    lengths = prompts + responses
    total = int(lengths.sum())
    behaviour = rng.normal(-3, 0.1, total).astype(np.float32)
    parts = np.float32([trained == Trained.all, 1])  # of a prompt and of a response
    return Batch(
        lengths=lengths,
        tokens=rng.integers(0, allocation.load_model(model).vocab_size, total, dtype=np.int32),
        fields={
            "loss_mask": np.repeat(np.tile(parts, n), np.stack([prompts, responses], 1).ravel()),
            "advantages": np.repeat(rng.normal(size=n), lengths).astype(np.float32),
            "behaviour_logprobs": behaviour,
            "on_policy": np.ones(total, np.float32),
        },
    )


def spec_of(run: RunConfig, plan: EnginePlan, folder: Path) -> EngineSpec:
    path = Path(str(run.actor.path))
    if (shape := run.actor.init_model) and plan.backend == "megatron":
        path = write_config(shape, folder, run.actor.dtype)
    elif shape:
        path = made_model(shape.model_dump(exclude_none=True), folder / "model", DEVICE, run.actor.dtype)
    steps = run.actor.optimizer.warmup_steps + 1000  # more than are timed
    spec = EngineSpec("actor", run.actor, run.actor.optimizer, path, plan.sizes, DEVICE, run.seed, steps)
    return replace(spec, backend=plan.backend)


def started(spec: EngineSpec, meeting: Rendezvous) -> TrainEngine:
    """An engine, with random weights where there is no checkpoint."""
    if list(spec.path.glob("*.safetensors")):
        return make_engine(spec, meeting)
    with random_weights():
        return make_engine(spec, meeting)


def peak_gib(step: Callable[[], object]) -> float | None:
    """Most memory that torch gave out at once in the second of two steps, in GiB."""
    step()
    if not torch.cuda.is_available():
        return None
    torch.cuda.reset_peak_memory_stats()
    step()
    return round(torch.cuda.max_memory_allocated() / 2**30, 2)


def device_allocations() -> int:
    """How often torch has asked the GPU for memory so far."""
    return int(torch.cuda.memory_stats()["num_device_alloc"]) if torch.cuda.is_available() else 0


def seconds(step: Callable[[], object]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    typer.run(main)
