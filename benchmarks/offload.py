"""Measure how much memory each part of a trainer releases, how long that takes, and the effect on a step's peak.

python -m benchmarks.offload [--shape 0.6b] [--out FILE]     one GPU; --device cpu --shape tiny tests the benchmark

Prints one line of JSON. `left` is torch's memory on the GPU with everything offloaded. `driver` is the GPU's free
memory with everything loaded and with everything offloaded. `same` is true if the weights did not change. Pairs of
figures for a step are without and with optimizer_offload.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.memory import CASES, SHAPES, Rank, made_model

GIB = 1 << 30


def main(
    shape: Annotated[str, typer.Option(help="a case of benchmarks/memory.py of one rank")] = "0.6b",
    device: Annotated[str, typer.Option()] = "cuda",
    out: Annotated[Path | None, typer.Option()] = None,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        apart = measured(shape, device, Path(folder))
        whole = measured(shape, device, Path(folder), "actor.megatron.optimizer_offload=true")
    both = {name: [apart.pop(name), whole[name]] for name in ("step_peak_gib", "step_seconds", "step_loss")}
    result = {"shape": shape, "same": len(set(apart.pop("digests"))) == 1, **both, **apart}
    print(json.dumps(result), flush=True)
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")


def measured(shape: str, device: str, folder: Path, *overrides: str) -> dict[str, Any]:
    """Two steps; then, without `overrides`, each part goes and comes back, and everything does."""
    import torch

    from areal_like.core.algorithms.losses import sft
    from areal_like.core.config.load import load
    from areal_like.core.trainer.engine import PARTS, EngineSpec
    from areal_like.core.types import LossSpec
    from benchmarks.memory import EXAMPLE

    case = CASES[shape]
    rank = Rank(case, device, folder, Path(tempfile.mkdtemp(dir=folder)), 0)
    settings = ["actor.init_model=null", "actor.path=model", f"actor.mb_spec.max_tokens_per_mb={case.tokens}"]
    actor = load(EXAMPLE, [f"device={device}", *settings, *overrides]).config.actor
    model = made_model(SHAPES[case.shape], folder / case.shape, device)
    engine = rank.make(EngineSpec("actor", actor, actor.optimizer, model, rank.sizes, device, 1, 1000), rank.meet())
    batch = rank.batch()

    def digest() -> float:
        """One number for all weights, of exact integers."""
        return float(sum(weight.view(torch.int16).long().abs().sum().item() for _, weight in engine.weights()))

    def step() -> dict[str, float]:
        started = time.perf_counter()
        loss = engine.train(batch, LossSpec(sft))["loss"]
        _synchronize(device)
        return {"step_seconds": round(time.perf_counter() - started, 3), "step_loss": round(loss, 5)}

    step()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    figures: dict[str, Any] = step()
    figures["step_peak_gib"] = _gib(torch.cuda.max_memory_allocated()) if device == "cuda" else 0.0
    figures["digests"] = [digest()]
    if not overrides:
        there = _allocated(device)
        figures["with_everything_gib"] = _gib(there)
        figures["parts"] = {part: _there_and_back(engine, [part], device) for part in PARTS}
        free = _free(device)
        figures["all"] = _there_and_back(engine, PARTS, device)
        engine.offload()
        figures["left_gib"], figures["driver_free_gib"] = _gib(_allocated(device)), [_gib(free), _gib(_free(device))]
        engine.onload()
        figures["digests"].append(digest())
        assert abs(_allocated(device) - there) < there // 100 + (64 << 20)
    engine.shutdown()
    return figures


def _there_and_back(engine: Any, parts: Any, device: str) -> dict[str, float]:
    def timed(call: Callable[[Any], None]) -> float:
        _synchronize(device)
        started = time.perf_counter()
        call(parts)
        _synchronize(device)
        return round(time.perf_counter() - started, 3)

    before = _allocated(device)
    first = timed(engine.offload)
    freed = _gib(before - _allocated(device))
    seconds = {"freed_gib": freed, "first_out_s": first, "back_s": timed(engine.onload), "out_s": timed(engine.offload)}
    engine.onload(parts)
    return seconds


def _allocated(device: str) -> int:
    import torch

    return torch.cuda.memory_allocated() if device == "cuda" else 0


def _free(device: str) -> int:
    import torch

    return torch.cuda.mem_get_info()[0] if device == "cuda" else 0


def _synchronize(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def _gib(n: int) -> float:
    return round(n / GIB, 3)


if __name__ == "__main__":
    typer.run(main)
