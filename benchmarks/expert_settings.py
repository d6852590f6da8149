"""Compare settings of a trainer of experts, or of a small dense one, on one GPU, interleaved in one process.

    python -m benchmarks.expert_settings --config ... [--rounds 3] [--arms NAME,...] [--profile NAME,...] [key=value]

All arms train the same engine on the same batch at a learning rate of 0, so loss and gradient norm must be equal. An
arm sets tokens of a micro-batch, recomputation and kernels in the engine's modules, which the bare loop of
`trainer_throughput` shares. An arm that does not fit in memory, or whose kernels fail, is recorded with its message.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import torch
import typer

import allocation
from areal_like.backends.megatron.engine import MegatronEngine
from areal_like.backends.megatron.grouped_experts import group_products
from areal_like.core.algorithms.losses import decoupled_ppo
from areal_like.core.algorithms.settings import Settings
from areal_like.core.config.load import load
from areal_like.core.trainer.engine import Rendezvous
from areal_like.core.types import Batch, LossSpec
from areal_like.runtime.ports import listen
from benchmarks.bare_loops import MegatronLoop
from benchmarks.report import save
from benchmarks.step_figures import FORMULA, expert_load, profile, share_of_peak
from benchmarks.trainer_throughput import DEVICE, device_allocations, make_batch, seconds, spec_of, started

# isort: split
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.utils import get_model_config

_CUTLASS = "NVTE_USE_CUTLASS_GROUPED_GEMM"


@dataclass(frozen=True)
class Arm:
    """Settings of an arm. `fused` adds products of gradients in the kernel that computes them."""

    tokens: int
    recompute: Literal["", "experts", "full"] = ""
    grouped: bool = False
    fused: bool = False
    router: bool = False
    cutlass: bool = False


ARMS = {
    "before": Arm(8192),
    "before 16k": Arm(16384, "experts"),
    "grouped": Arm(8192, grouped=True),
    "grouped 16k": Arm(16384, "experts", grouped=True),
    "all 16k": Arm(16384, "experts", grouped=True, fused=True),
    "all 32k": Arm(32768, "experts", grouped=True, fused=True),
    "all 32k full": Arm(32768, "full", grouped=True, fused=True),
    "fused gradients": Arm(8192, fused=True),
    "fused router": Arm(8192, router=True),
    "cutlass": Arm(8192, cutlass=True),
    "all 16k router": Arm(16384, "experts", grouped=True, fused=True, router=True),
    "dense 16k": Arm(16384),
    "dense 16k fused": Arm(16384, fused=True),
    "dense 32k": Arm(32768),
    "dense 64k": Arm(65536),
    "dense 64k fused": Arm(65536, fused=True),
}


def main(
    config: Annotated[Path, typer.Option()],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="key=value ...")] = None,
    rounds: int = 3,
    arms: Annotated[str, typer.Option(help="names, separated by commas")] = ",".join(list(ARMS)[:8]),
    profiled: Annotated[str, typer.Option("--profile", help="arms to profile")] = "",
    bare: Annotated[str, typer.Option(help="arms whose bare loop is timed")] = "",
    name: str = "expert_settings_{device}",
) -> None:
    run, (plan,) = load(config, overrides or []).config, allocation.compile("megatron:d1").engines
    with tempfile.TemporaryDirectory() as folder:
        listener = listen("127.0.0.1")
        meeting = Rendezvous(0, 1, "127.0.0.1", listener.getsockname()[1], listener=listener)
        spec = spec_of(run, plan, Path(folder))
        batch, engine = make_batch(run, spec.path), started(spec, meeting)
        bench = Bench(engine, batch, allocation.load_model(spec.path))
        figures = bench.measured([one for one in arms.split(",") if one], rounds, bare.split(","), profiled.split(","))
    save(name.format(device=DEVICE), figures)
    sys.stdout.flush()
    os._exit(0)  # an arm that failed may have left a graph that holds the engine


class Bench:
    """An engine, its batch, and the figures of its arms."""

    def __init__(self, engine: MegatronEngine, batch: Batch, shape: allocation.ModelSpec) -> None:
        self.engine, self.batch, self.shape = engine, batch, shape
        self.spec = LossSpec(decoupled_ppo, Settings())
        self.rows = int(batch.fields["loss_mask"].sum())

    def measured(self, names: list[str], rounds: int, bare: list[str], profiled: list[str]) -> dict[str, Any]:
        """Figures of all arms; an arm that fails is left out of further rounds."""
        found: dict[str, dict[str, Any]] = {
            name: {**vars(ARMS[name]), "seconds": [], "log_probs": []} for name in names
        }
        for name in names:
            self.guarded(found[name], name, lambda one: one.update(self.first()))
        for _ in range(rounds):
            for name in names:
                self.guarded(found[name], name, self.timed)
        for name in names:
            if name in bare:
                self.guarded(found[name], name, lambda one: one.update(bare_seconds=self.bare(rounds)))
            if name in profiled:
                self.guarded(found[name], name, lambda one: one.update(profile=profile(self.train)))
        for one in found.values():
            self.finish(one)
        load: dict[str, Any] = {}
        if self.shape.experts:
            self.guarded(
                load, names[0], lambda one: one.update(by_layer=expert_load(self.engine._models, self.log_probs))
            )
        return {
            "model_parameters": sum(p.numel() for model in self.engine._models for p in model.parameters()),
            "tokens_per_step": len(self.batch.tokens),
            "trained_tokens_per_step": self.rows,
            "formula": FORMULA,
            "expert_load": load,
            "arms": found,
        }

    def guarded(self, one: dict[str, Any], name: str, call: Callable[[dict[str, Any]], object]) -> None:
        """Call with an arm's settings; keep the message of a failure."""
        if "failed" in one:
            return
        try:
            self.apply(ARMS[name])
            call(one)
        except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            one["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        print(name, {key: value for key, value in one.items() if key not in (*vars(ARMS[name]), "profile")}, flush=True)

    def apply(self, arm: Arm) -> None:
        engine = self.engine
        config = engine._spec.config
        packed = config.mb_spec.model_copy(update={"max_tokens_per_mb": arm.tokens})
        engine._spec = replace(engine._spec, config=config.model_copy(update={"mb_spec": packed}))
        os.environ[_CUTLASS] = str(int(arm.cutlass))
        for model in engine._models:
            settings = get_model_config(model)
            settings.moe_router_fusion = arm.router
            full = arm.recompute == "full"
            settings.recompute_granularity = "full" if full else None
            settings.recompute_method, settings.recompute_num_layers = ("uniform", 1) if full else (None, None)
            for part in model.modules():
                if isinstance(part, MoELayer):
                    part.moe_layer_recompute = arm.recompute == "experts"
                if hasattr(part, "fuse_wgrad_accumulation"):
                    part.fuse_wgrad_accumulation = arm.fused
                if hasattr(part, "num_gemms"):
                    vars(part).pop("forward", None)
        if arm.grouped and not group_products(engine._models, sends_early=False):
            raise ValueError("no layer supports grouped products")

    def train(self) -> Mapping[str, float]:
        return self.engine.train(self.batch, self.spec, learning_rate=0.0)

    def log_probs(self) -> object:
        return self.engine.log_probs(self.batch, 1.0)

    def first(self) -> dict[str, Any]:
        """Warm up; loss, gradient norm and peak of a second step."""
        self.train()
        self.log_probs()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        step = self.train()
        peak = round(torch.cuda.max_memory_allocated() / 2**30, 2) if torch.cuda.is_available() else None
        count = len(self.engine._micro_batches(self.batch, self.batch.fields["loss_mask"] > 0))
        return {"loss": step["loss"], "grad_norm": step["grad_norm"], "peak_gib": peak, "micro_batches": count}

    def timed(self, one: dict[str, Any]) -> None:
        before = device_allocations()
        one["seconds"].append(round(seconds(self.train), 4))
        one["log_probs"].append(round(seconds(self.log_probs), 4))
        one["device_allocations"] = device_allocations() - before  # where there are any, steps wait for memory

    def bare(self, rounds: int) -> list[float]:
        loop = MegatronLoop(self.engine, self.batch)
        loop._scheduler = SimpleNamespace(step=lambda _: None)
        for group in loop._optimizer.param_groups:
            group["lr"] = 0.0
        loop.step()
        return [round(seconds(loop.step), 4) for _ in range(rounds)]

    def finish(self, one: dict[str, Any]) -> None:
        """Add tokens per second and shares of the peak."""
        for kind, passes, rows in (
            ("seconds", 3, self.rows),
            ("log_probs", 1, self.rows),
            ("bare_seconds", 3, len(self.batch.tokens)),
        ):
            if times := one.get(kind):
                median = statistics.median(times)
                share = share_of_peak(self.shape, self.batch.lengths, rows, median, passes=passes, gpus=1)
                one[f"{kind}_figures"] = {
                    "tokens_per_second": round(len(self.batch.tokens) / median),
                    "share_of_peak": share,
                }


if __name__ == "__main__":
    typer.run(main)
