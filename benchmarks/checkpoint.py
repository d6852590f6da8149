"""Measure how long a checkpoint blocks training relative to its write, with both trainers on one rank.

    python -m benchmarks.checkpoint --config examples/math/gsm8k_grpo_cpu.yaml [--rounds 5] [key=value ...]

`save` returns when the state is in host memory. Training then continues until everything is on disk and `finish_save`
is called. Model and optimizer come from the configuration; one training step creates the optimizer state.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from allocation import ParallelSizes
from areal_like.backends.training.rank import make_engine
from areal_like.core.algorithms.losses import sft
from areal_like.core.config.load import load
from areal_like.core.trainer.engine import EngineSpec, Rendezvous, TrainEngine
from areal_like.core.types import LossSpec
from areal_like.demo.init_model import write_init_model
from areal_like.runtime.ports import listen
from benchmarks.report import save
from benchmarks.trainer_throughput import make_batch


def main(
    config: Annotated[Path, typer.Option()],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="key=value ...")] = None,
    rounds: int = 5,
    backends: str = "megatron,fsdp",
) -> None:
    run = load(config, overrides or []).config
    device = "cuda" if torch.cuda.is_available() else "cpu"
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_init_model(run.actor.init_model, model, seed=run.seed, dtype=run.actor.dtype)
        spec = EngineSpec("actor", run.actor, run.actor.optimizer, model, ParallelSizes(), device, run.seed, 1000)
        for backend in backends.split(","):
            listener = listen("127.0.0.1")
            there = Rendezvous(0, 1, "127.0.0.1", listener.getsockname()[1], listener=listener)
            engine = make_engine(replace(spec, backend=backend), there)
            engine.train(make_batch(run, model), LossSpec(sft))
            figures[backend] = measured(engine, Path(folder) / "checkpoint", rounds)
            engine.shutdown()
            print(backend, figures[backend], flush=True)
    save(f"checkpoint_{device}", {"model": run.actor.init_model.model_dump(), "backends": figures})


def measured(engine: TrainEngine, path: Path, rounds: int) -> dict[str, Any]:
    """Seconds of each round; the first one is not counted."""
    still, whole, size = [], [], 0
    for _ in range(rounds + 1):
        start = time.perf_counter()
        engine.save(path)
        copied = time.perf_counter()
        while not engine.is_saved():
            time.sleep(0.001)
        written = time.perf_counter()
        engine.finish_save()
        still.append(copied - start + time.perf_counter() - written)
        whole.append(time.perf_counter() - start)
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        shutil.rmtree(path)
    share = statistics.median(one / other for one, other in zip(still[1:], whole[1:], strict=True))
    return {"gib": size / 2**30, "share": share, "stands_still_s": still[1:], "write_s": whole[1:]}


if __name__ == "__main__":
    typer.run(main)
