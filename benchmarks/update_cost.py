"""What new weights cost a server that generates: throughput with an update every few seconds ÷ without, by contract.

    python -m benchmarks.update_cost --device cpu
    python -m benchmarks.update_cost --device cuda --out update_cost.json

One server and one `ServerPool`, a fixed number of samples whose lengths are drawn from a log-normal distribution (cut
at `--longest`; lengths are forced, so random weights will do), all sent at once. Each round generates them without
updates, and then with an update every `--interval` seconds under each value of `weight_update.requests`. The weights
are sent as a run does it, from this process, over `--mode`. The pause is the time from the first server's pause to the
last one's continuation, as requests see it. With two GPUs the weights come from the second one over nccl, unless
`--mode ipc` lends them on the server's own.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import typer
from safetensors import safe_open

from allocation import ParallelSizes
from areal_like.cluster.lifetime import run_lifetime
from areal_like.config.load import load
from areal_like.config.schema import RunConfig
from areal_like.demo.init_model import write_init_model
from areal_like.rollout.pool import Sampling, ServerPool
from areal_like.rollout.sglang.options import server_arguments
from areal_like.rollout.sglang.process import ServerSpec, SGLangServer
from areal_like.weights.sync import SyncSpec, WeightSync, make_sender, make_sync, publish
from benchmarks.report import ROOT, circumstances

LIMIT_S = 400.0
CONTRACTS = ("in_place", "recompute", "drain")
WORK = {  # samples, tokens of a prompt, mean and greatest length of a response
    "cpu": (96, 24, 120, 400),
    "cuda": (1280, 128, 512, 2048),
}


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    out: Annotated[Path, typer.Option(help="where the figures go")] = Path("update_cost.json"),
    mode: Annotated[str, typer.Option(help="weight_update.mode")] = "collective",
    interval: Annotated[float, typer.Option(help="seconds from update to update")] = 5.0,
    rounds: int = 2,
    contracts: Annotated[str, typer.Option(help="values of weight_update.requests, by comma")] = ",".join(CONTRACTS),
    samples: int | None = None,
    mean: int | None = None,
    longest: int | None = None,
    config: Path | None = None,
) -> None:
    prompt, work = WORK[device][1], WORK[device]
    work = (samples or work[0], mean or work[2], longest or work[3])
    example = "gsm8k_grpo_cpu.yaml" if device == "cpu" else "gsm8k_grpo_qwen3_0.6b.yaml"
    run = load(
        config or ROOT / "examples/math" / example,
        [
            f"train_dataset.max_prompt_length={prompt}",
            f"gconfig.max_new_tokens={work[2]}",
            *([f"actor.init_model.max_position_embeddings={prompt + work[2] + 8}"] if device == "cpu" else []),
            *(["sglang.mem_fraction_static=0.7"] if device == "cuda" else []),
        ],
    ).config
    with run_lifetime(secrets.token_hex(6)) as folder:
        asyncio.run(measure(run, folder, device, mode, interval, rounds, work, contracts.split(","), out))
    print(f"written: {out}")


async def measure(
    run: RunConfig,
    folder: Path,
    device: str,
    mode: str,
    interval: float,
    rounds: int,
    work: tuple[int, int, int],
    contracts: Sequence[str],
    out: Path,
) -> None:
    """Writes the figures after every round."""
    model, token = folder / "model", secrets.token_hex(16)
    assert run.actor.init_model
    write_init_model(run.actor.init_model, model, seed=run.seed, dtype=run.actor.dtype)
    arguments = server_arguments(run, model, ParallelSizes(), device)
    begun = time.monotonic()
    url = await SGLangServer(
        ServerSpec("server", arguments, folder / "server.log", token, None, LIMIT_S), "127.0.0.1"
    ).start()
    print(f"server ready after {time.monotonic() - begun:.0f} s", flush=True)
    apart = device == "cuda" and mode != "ipc" and torch.cuda.device_count() > 1  # nccl wants a GPU for each end
    trainer = LocalTrainer(model, "cuda:1" if apart else device, mode)
    bench = Bench(run, folder, url, token, trainer, mode, "nccl" if apart else "gloo", interval, *work)
    await bench.once(None)  # warm up
    results: dict[str, list[Round]] = {name: [] for name in ("none", *contracts)}
    for number in range(rounds):
        for name, values in results.items():
            values.append(await bench.once(None if name == "none" else name))
            print(f"round {number} {name:<10}{values[-1]}", flush=True)
        figures = {
            "model": run.actor.init_model.model_dump(),
            "dtype": run.actor.dtype,
            "mode": mode,
            "backend": bench.backend,
            "interval_s": interval,
            "samples": work[0],
            "response_tokens": {"distribution": "log-normal, sigma 0.8, cut", "mean": work[1], "longest": work[2]},
            "ratio": {name: ratio(results[name], results["none"]) for name in contracts},
            "pause_s": {name: summary([s for r in results[name] for s in r.pauses]) for name in contracts},
            "update_s": {name: summary([s for r in results[name] for s in r.updates]) for name in contracts},
            "trainer_s_per_update": bench.trainer.seconds_per_update(),
            "rounds": {name: [value.__dict__ for value in values] for name, values in results.items()},
        }
        out.write_text(json.dumps({**circumstances(), **figures}, indent=1) + "\n")


@dataclass
class Round:
    tokens: int
    seconds: float
    updates: list[float] = field(default_factory=list)  # seconds of each, from the trainer's start to acknowledged
    pauses: list[float] = field(default_factory=list)
    mixed_share: float = 0.0  # of the responses, those with tokens of several versions

    def __str__(self) -> str:
        pause = f"{1000 * statistics.median(self.pauses):.0f} ms" if self.pauses else "-"
        return f"{self.tokens / self.seconds:8.0f} tokens/s, {len(self.updates)} updates, median pause {pause}"


def ratio(with_updates: list[Round], without: list[Round]) -> float:
    rates = [sum(r.tokens for r in rounds) / sum(r.seconds for r in rounds) for rounds in (with_updates, without)]
    return rates[0] / rates[1]


def summary(seconds: list[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    return {"median": statistics.median(seconds), "max": max(seconds), "n": len(seconds)}


@dataclass
class Bench:
    run: RunConfig
    folder: Path
    url: str
    token: str
    trainer: LocalTrainer
    mode: str
    backend: Literal["gloo", "nccl"]
    interval: float
    samples: int
    mean: int
    longest: int
    version: int = -1

    async def once(self, requests: Any) -> Round:
        """The same work, without updates where `requests` is None."""
        options = {} if requests is None else {"requests": requests}
        async with ServerPool([self.url], self.token, LIMIT_S, **options) as pool:
            spec = SyncSpec(LIMIT_S, self.folder, 1, self.backend, bucket_mb=512)
            sync = make_sync(self.mode, self.trainer, pool, spec)
            await sync.connect()
            result = Round(0, 0.0)
            await self._update(sync, pool)
            start = time.perf_counter()
            asking = asyncio.gather(*(pool.sample(*work) for work in self._work()))
            if requests is None:
                responses = await asking
            else:
                responses = await self._with_updates(asking, sync, pool, result)
            result.seconds = time.perf_counter() - start
            if self.mode == "collective":
                await sync._disconnect()
            result.tokens = sum(len(response.tokens) for response in responses)
            result.mixed_share = float(np.mean([len(set(response.versions)) > 1 for response in responses]))
            return result

    async def _with_updates(self, asking: Any, sync: WeightSync, pool: ServerPool, result: Round) -> Any:
        while True:
            with suppress(TimeoutError):
                return await asyncio.wait_for(asyncio.shield(asking), self.interval)
            result.updates.append(await self._update(sync, pool))
            result.pauses.append(pool.pause_s)

    async def _update(self, sync: WeightSync, pool: ServerPool) -> float:
        start, self.version = time.perf_counter(), self.version + 1
        await publish(sync, self.version, LIMIT_S)
        return time.perf_counter() - start

    def _work(self) -> Iterator[tuple[list[int], Sampling]]:
        rng = np.random.default_rng(0)
        sigma = 0.8
        lengths = rng.lognormal(np.log(self.mean) - sigma**2 / 2, sigma, self.samples).clip(1, self.longest)
        for length in lengths.astype(int).tolist():
            yield (
                rng.integers(4, 30, self.run.train_dataset.max_prompt_length).tolist(),
                Sampling(length, ignore_eos=True),
            )


class LocalTrainer:
    """A trainer of one rank in this process: the weights of a Hugging Face directory, on the device."""

    def __init__(self, model: Path, device: str, mode: str) -> None:
        with safe_open(model / "model.safetensors", "pt", device=device) as file:
            self._weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        self._model = model
        self._sender = make_sender(mode, self, 0, "127.0.0.1")
        self._seconds: dict[str, float] = {}
        self._updates = 0

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._weights.items()

    def seconds_per_update(self) -> dict[str, float]:
        return {step: seconds / self._updates for step, seconds in self._seconds.items()}

    async def transfer(self, step: str, *arguments: Any, timeout_s: float) -> Any:
        start = time.perf_counter()
        result = await asyncio.to_thread(getattr(self._sender, step), *arguments)
        self._took("first prepare" if (step, *arguments) == ("prepare", 0) else step, start)
        self._updates += (step, *arguments) == ("prepare", 0)
        return result

    async def transfers(self, step: str, *arguments: Any, timeout_s: float) -> list[Any]:
        return [await self.transfer(step, *arguments, timeout_s=timeout_s)]

    async def save_hf(self, path: Path, *, phase: str, timeout_s: float) -> None:
        start = time.perf_counter()
        await asyncio.to_thread(shutil.copytree, self._model, path, copy_function=os.link)
        self._took("save", start)
        self._updates += 1

    def _took(self, step: str, start: float) -> None:
        if step in ("first prepare", "prepare", "send", "lend", "save"):
            self._seconds[step] = self._seconds.get(step, 0.0) + time.perf_counter() - start


if __name__ == "__main__":
    typer.run(main)
