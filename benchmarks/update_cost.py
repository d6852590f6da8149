"""Measure the cost of weight updates for a busy server: throughput with an update every few seconds ÷ without.

    python -m benchmarks.update_cost --device cpu
    python -m benchmarks.update_cost --device cuda --shapes qwen3-0.6b,qwen3-4b --modes collective,ipc --rounds 6,1

There is one server for each of `--shapes` (of `memory.py`; on the first GPU, the second, ...). It always has
`--in-flight` samples, with forced lengths from a log-normal distribution cut at `--longest`, so random weights
suffice. Blocks without updates alternate with blocks in which an update starts `--interval` seconds after the last
one, one block for each of `--contracts` (values of `weight_update.requests`). The order is reversed from round to
round, because machines drift.
- `ratio`: tokens per second with updates ÷ without, of all rounds and of each;
- `pause_s`: from the servers' pause to their resumption, as requests see it; `inside_s`: without these two calls;
- `idle`: the same for updates without requests, and `share_of_link`: bytes of the weights ÷ seconds inside ÷ bytes per
  second of a copy between the same devices, measured in the same run;
- `apart`: mean distance of the servers' log-probs from those that transformers recomputes in float32 with the version
  of each token, for responses of one version and of several. Versions differ by one percent (normal).
This process sends the weights in the same way as a run. With `collective` they come from another GPU over NCCL, if
there is one; with `ipc` the server's own GPU exports them as IPC handles.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from allocation import ParallelSizes
from areal_like.backends.ray.lifetime import run_lifetime
from areal_like.backends.sglang.options import server_arguments
from areal_like.backends.sglang.process import SGLangServer
from areal_like.core.config.load import load
from areal_like.core.config.schema import InitModelConfig, RunConfig
from areal_like.core.rollout.pool import Response, Sampling, ServerPool
from areal_like.core.rollout.server import ServerSpec
from areal_like.core.weights import SyncSpec, make_sender, make_sync, publish
from areal_like.demo.init_model import _tensor_shapes, model_config
from benchmarks.memory import SHAPES
from benchmarks.report import ROOT, circumstances

LIMIT_S = 400.0
WORK = {
    "cpu": (48, 24, 120, 400),
    "cuda": (256, 128, 512, 2048),
}  # samples, tokens of a prompt, responses' mean, longest
SIGMA, STD, STEP = 0.8, 0.05, 0.01  # of lengths, of weights, and of their change from version to version
IDLE = 5  # updates of a server without requests
COMPARED = 16  # responses of each contract and kind, by transformers
MIB = 1 << 20


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    out: Annotated[Path, typer.Option(help="where the figures go")] = Path("update_cost.json"),
    shapes: Annotated[str | None, typer.Option(help="of memory.py, by comma")] = None,
    modes: Annotated[str, typer.Option(help="some of collective,ipc")] = "collective",
    contracts: Annotated[str, typer.Option(help="some of in_place,recompute,drain")] = "in_place",
    rounds: Annotated[
        str, typer.Option(help="of each shape and mode, by comma; the last counts for further ones")
    ] = "4",
    interval: Annotated[float, typer.Option(help="seconds from an update's end to the next")] = 5.0,
    updates: Annotated[int, typer.Option(help="of a block")] = 3,
    in_flight: int | None = None,
    mean: int | None = None,
    longest: int | None = None,
    bucket_mb: int = 512,
    prefetch_mb: int = 4096,
    limit_s: Annotated[float, typer.Option(help="begins no block after so many seconds")] = 3600.0,
) -> None:
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")  # as a trainer's ranks have it, and servers
    count, prompt, usual, most = WORK[device]
    work = Work(in_flight or count, prompt, mean or usual, longest or most)
    plan = Plan(device, contracts.split(","), interval, updates, bucket_mb, prefetch_mb, time.monotonic() + limit_s)
    names = (shapes or ("tiny" if device == "cpu" else "qwen3-0.6b")).split(",")
    with run_lifetime(secrets.token_hex(6)) as folder:
        asyncio.run(
            measure(plan, work, names, modes.split(","), [int(part) for part in rounds.split(",")], folder, out)
        )
    print(f"written: {out}")


@dataclass(frozen=True)
class Work:
    in_flight: int
    prompt_tokens: int
    mean: int
    longest: int

    def samples(self, seed: int) -> Iterator[tuple[list[int], Sampling]]:
        rng = np.random.default_rng(seed)
        while True:
            length = int(np.clip(rng.lognormal(np.log(self.mean) - SIGMA**2 / 2, SIGMA), 1, self.longest))
            yield rng.integers(4, 30, self.prompt_tokens).tolist(), Sampling(length, ignore_eos=True)


@dataclass(frozen=True)
class Plan:
    device: str
    contracts: Sequence[str]
    interval: float
    updates: int
    bucket_mb: int
    prefetch_mb: int
    end: float


async def measure(
    plan: Plan, work: Work, shapes: list[str], modes: list[str], rounds: list[int], folder: Path, out: Path
) -> None:
    """Start all servers at once, and measure one after the other; writes the figures after each."""
    token, begun = secrets.token_hex(16), time.monotonic()
    configs = [run_config(shape, plan, work) for shape in shapes]
    starting = [start(config, folder / f"{number}", home(number, plan), token) for number, config in enumerate(configs)]
    urls = await asyncio.gather(*starting)
    print(f"servers ready after {time.monotonic() - begun:.0f} s", flush=True)
    results = []
    for number, (config, shape, url) in enumerate(zip(configs, shapes, urls, strict=True)):
        for mode in modes:
            bench = Bench(plan, work, config, url, token, mode, home(number, plan), folder)
            async for figures in bench.figures(rounds[min(len(results), len(rounds) - 1)]):
                report = {**circumstances(), "work": asdict(work), "interval_s": plan.interval}
                cases = [*results, {"shape": shape, "mode": mode, **figures}]
                out.write_text(json.dumps({**report, "cases": cases}, indent=1) + "\n")
            results = cases


def home(number: int, plan: Plan) -> str:
    """The device of a server."""
    return f"cuda:{number % torch.cuda.device_count()}" if plan.device == "cuda" else "cpu"


def run_config(shape: str, plan: Plan, work: Work, more: Sequence[str] = ()) -> RunConfig:
    example = "gsm8k_grpo_cpu.yaml" if plan.device == "cpu" else "gsm8k_grpo_qwen3_0.6b.yaml"
    overrides = [
        *(f"actor.init_model.{key}={str(value).lower()}" for key, value in SHAPES[shape].items()),
        f"train_dataset.max_prompt_length={work.prompt_tokens}",
        f"gconfig.max_new_tokens={work.longest}",
        f"actor.init_model.max_position_embeddings={work.prompt_tokens + work.longest + 8}",
        *(["sglang.mem_fraction_static=0.3"] if plan.device == "cuda" else []),
        *([f"sglang.extra_args.cuda_graph_max_bs_decode={work.in_flight}"] if plan.device == "cuda" else []),
        *more,
    ]
    return load(ROOT / "examples/math" / example, overrides).config


async def start(config: RunConfig, folder: Path, home: str, token: str) -> str:
    """A server without weights, which the first update brings; returns its URL."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model_config(shape_of(config), config.actor.dtype)))
    device, _, number = home.partition(":")
    arguments = (*server_arguments(config, folder, ParallelSizes(), device), "--load-format", "dummy")
    arguments += ("--base-gpu-id", number) if number else ()
    spec = ServerSpec("server", arguments, folder / "server.log", token, None, LIMIT_S)
    return await SGLangServer(spec, "127.0.0.1").start()


def shape_of(config: RunConfig) -> InitModelConfig:
    assert config.actor.init_model
    return config.actor.init_model


@dataclass
class Block:
    tokens: int = 0
    seconds: float = 0.0
    updates: list[float] = field(default_factory=list)  # seconds of each, from the trainer's start to acknowledged
    exports: list[float] = field(default_factory=list)  # of it, the trainer's, all buckets
    pauses: list[float] = field(default_factory=list)
    insides: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Bench:
    """One server's model, over one transport."""

    def __init__(
        self, plan: Plan, work: Work, config: RunConfig, url: str, token: str, mode: str, home: str, folder: Path
    ) -> None:
        self._home, self._plan, self._work, self._config, self._folder = home, plan, work, config, folder
        self._url, self._token, self._mode = url, token, mode
        others = [f"cuda:{number}" for number in range(torch.cuda.device_count()) if f"cuda:{number}" != home]
        self._device = others[0] if mode != "ipc" and home != "cpu" and others else home
        self._backend: Any = "gloo" if self._device == home else "nccl"  # which wants a GPU for each end
        self._trainer = LocalTrainer(model_config(shape_of(config), config.actor.dtype), self._device, mode)
        self._inside, self._contract = 0.0, ""
        self._answers: dict[str, list[tuple[list[int], Response]]] = {}

    async def figures(self, rounds: int) -> AsyncIterator[dict[str, Any]]:
        async with ServerPool([self._url], self._token, LIMIT_S) as pool:
            spec = SyncSpec(LIMIT_S, self._folder, 1, self._backend, self._plan.bucket_mb, self._plan.prefetch_mb)
            self._pool, self._sync = pool, make_sync(self._mode, self._trainer, pool, spec)
            pool.checking = self._timed
            await self._sync.connect()
            idle = Block()
            for _ in range(IDLE + 2):
                await self._update(idle)
            link = bandwidth(self._device, self._home)
            size = sum(tensor.nbytes for _, tensor in self._trainer.weights())
            inside = statistics.median(idle.insides[2:])
            figures: dict[str, Any] = {
                "bytes": size,
                "backend": self._mode if self._mode == "ipc" else self._backend,
                "link_bytes_per_s": link,
                "share_of_link": size / inside / link,
                "idle": parts([idle], skip=2),
            }
            print(self._config.actor.init_model, self._mode, json.dumps(figures), flush=True)
            yield figures
            workers = [asyncio.ensure_future(self._work_on(number)) for number in range(self._work.in_flight)]
            blocks: dict[str, list[Block]] = {name: [] for name in ("none", *self._plan.contracts)}
            await self._block("none", Block())  # until lengths are mixed
            for number in range(rounds):
                for name in list(blocks)[:: -1 if number % 2 else 1]:
                    if time.monotonic() < self._plan.end:
                        blocks[name].append(await self._block(name, Block()))
                        print(f"round {number} {name:<10}{blocks[name][-1].rate:8.0f} tokens/s", flush=True)
                    for worker in (worker for worker in workers if worker.done()):
                        worker.result()  # which raises: they work until they are cancelled
                yield figures | summary(blocks)
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            if rounds and not shape_of(self._config).num_experts:  # transformers keeps experts under other names
                apart = {name: self._apart(self._answers.get(name, [])) for name in blocks}
                yield figures | summary(blocks) | {"apart": apart}
            if self._mode == "collective":
                await self._sync._disconnect(_limit())

    async def _work_on(self, number: int) -> None:
        for prompt, sampling in self._work.samples(number):
            contract = self._contract
            response = await self._pool.sample(prompt, sampling)
            if contract == self._contract:
                self._answers.setdefault(contract, []).append((prompt, response))

    async def _block(self, contract: str, block: Block) -> Block:
        if contract != "none":
            self._pool._requests = contract  # type: ignore[assignment]
            await self._update(Block())  # what the kind of the block before has left behind is not this one's
        await asyncio.sleep(self._plan.interval)
        self._contract = contract
        tokens, begun = self._pool.tokens_generated, time.perf_counter()
        for _ in range(self._plan.updates):
            if contract != "none":
                await self._update(block)
            await asyncio.sleep(self._plan.interval)
        block.tokens, block.seconds = self._pool.tokens_generated - tokens, time.perf_counter() - begun
        self._contract = ""
        return block

    async def _update(self, block: Block) -> None:
        version, begun = self._pool.version + 1, time.perf_counter()
        self._trainer.version = version
        await publish(self._sync, version, LIMIT_S)
        block.updates.append(time.perf_counter() - begun)
        block.exports.append(self._trainer.export_s)
        block.pauses.append(self._pool.pause_s)
        block.insides.append(self._inside)

    @asynccontextmanager
    async def _timed(self, *_: Any) -> AsyncIterator[None]:
        begun = time.perf_counter()
        yield
        self._inside = time.perf_counter() - begun

    def _apart(self, answers: list[tuple[list[int], Response]]) -> dict[str, float | None]:
        """Mean distance of log-probs to a fresh computation; None where there was no such response."""
        kinds = {
            "one_version": [answer for answer in answers if len(set(answer[1].versions)) == 1],
            "several_versions": [answer for answer in answers if len(set(answer[1].versions)) > 1],
        }
        chosen = [answer for of_kind in kinds.values() for answer in of_kind[:COMPARED]]
        apart = distances(self._trainer.networks(), chosen)
        return {
            kind: float(np.mean(np.concatenate([next(apart) for _ in of_kind[:COMPARED]]))) if of_kind else None
            for kind, of_kind in kinds.items()
        }


def _limit() -> Any:
    from areal_like.core.rollout.http import Deadline

    return Deadline(LIMIT_S)


def summary(blocks: dict[str, list[Block]]) -> dict[str, Any]:
    def rate(of: list[Block]) -> float:
        return sum(block.tokens for block in of) / sum(block.seconds for block in of)

    done = {name: of for name, of in blocks.items() if of}
    rates = {name: rate(of) for name, of in done.items()}
    return {
        "tokens_per_s": rates,
        "ratio": {name: rates[name] / rates["none"] for name in rates if name != "none" and "none" in rates},
        "ratio_by_round": {
            name: [block.rate / none.rate for block, none in zip(of, done.get("none", []), strict=False)]
            for name, of in done.items()
            if name != "none"
        },
        "parts": {name: parts(of) for name, of in done.items() if name != "none"},
        "blocks": {name: [asdict(block) for block in of] for name, of in done.items()},
    }


def parts(blocks: list[Block], skip: int = 0) -> dict[str, dict[str, float]]:
    values = {part: [s for block in blocks for s in getattr(block, f"{part}s")[skip:]] for part in
              ("update", "export", "pause", "inside")}  # fmt: skip
    return {
        f"{part}_s": {"median": statistics.median(s), "max": max(s), "n": len(s)} for part, s in values.items() if s
    }


def bandwidth(source: str, target: str) -> float:
    """Bytes a second that a copy from one device to another, or within one, moves; the best of ten."""
    there = torch.ones(512 * MIB if target != "cpu" else 64 * MIB, dtype=torch.uint8, device=source)
    here, best = torch.empty_like(there, device=target), 0.0
    for _ in range(10):
        wait(source, target)
        begun = time.perf_counter()
        here.copy_(there)
        wait(source, target)
        best = max(best, len(there) / (time.perf_counter() - begun))
    return best


def wait(*devices: str) -> None:
    for device in devices:
        if device != "cpu":
            torch.cuda.synchronize(device)


@torch.inference_mode()
def distances(networks: Iterator[Any], answers: list[tuple[list[int], Response]]) -> Iterator[Any]:
    """Return the distance of each answer's log-probs from recomputed ones of the same versions, `[tokens]`."""
    expected = [np.zeros(len(response.tokens), np.float32) for _, response in answers]
    for parity, network in enumerate(networks):
        for place, (prompt, response) in enumerate(answers):
            tokens = torch.tensor([*prompt, *response.tokens.tolist()], device=network.device)
            logits = network(tokens[None, :-1]).logits[0, len(prompt) - 1 :]
            logprobs = logits.log_softmax(-1).gather(1, tokens[len(prompt) :, None])[:, 0].cpu().numpy()
            expected[place] = np.where(response.versions % 2 == parity, logprobs, expected[place])
    return iter([np.abs(it - response.logprobs) for it, (_, response) in zip(expected, answers, strict=True)])


class LocalTrainer:
    """A trainer of one rank in this process, with two sets of random weights: of even versions and of odd ones."""

    def __init__(self, config: dict[str, Any], device: str, mode: str) -> None:
        self._config, self._device, self.version, self.export_s = config, device, 0, 0.0
        dtype, rng = getattr(torch, config["torch_dtype"]), torch.Generator(device).manual_seed(0)

        def normal(size: tuple[int, ...], std: float) -> torch.Tensor:
            return torch.randn(size, dtype=dtype, device=device, generator=rng) * std

        even = {
            name: torch.ones(size, dtype=dtype, device=device) if name.endswith("norm.weight") else normal(size, STD)
            for name, size in _tensor_shapes(config)
        }
        odd = {
            name: value if name.endswith("norm.weight") else value + normal(tuple(value.shape), STD * STEP)
            for name, value in even.items()
        }
        self._weights = (even, odd)
        self._sender = make_sender(mode, self, 0, "127.0.0.1")

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._weights[self.version % 2].items()

    async def transfer(self, step: str, *arguments: Any, timeout_s: float) -> Any:
        begun = time.perf_counter()
        result = await asyncio.to_thread(getattr(self._sender, step), *arguments)
        if step in ("prepare", "export"):
            self.export_s = (self.export_s if arguments[0] else 0.0) + time.perf_counter() - begun
        return result

    async def transfers(self, step: str, *arguments: Any, timeout_s: float) -> list[Any]:
        return [await self.transfer(step, *arguments, timeout_s=timeout_s)]

    def networks(self) -> Iterator[Any]:
        """Of even and of odd versions, in float32, one after the other."""
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.device(self._device):
            network = AutoModelForCausalLM.from_config(AutoConfig.for_model(**self._config), dtype=torch.float32)
        for weights in self._weights:
            network.load_state_dict(weights, strict=False)
            yield network.eval()


if __name__ == "__main__":
    typer.run(main)
