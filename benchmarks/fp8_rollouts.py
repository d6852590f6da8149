"""Compare servers in FP8 with servers in bfloat16: tokens per second, log-probs, and weight updates, in turns.

    python -m benchmarks.fp8_rollouts --shape qwen3-8b --rounds 6

Both servers are on the first GPU and have `--in-flight` samples of forced lengths, one server after the other: the
processes of the other one are stopped. Both have room for the same number of tokens. A block counts once it has
settled. Weights are random, of one trainer process that sends them by `ipc` as a run does. After each block both get an
update.
- `ratio`: tokens per second in FP8 ÷ bfloat16, of all rounds and of each;
- `passes`: decoding passes in the server's log by the number of running requests;
- `apart`: mean distance of each server's log-probs from those of the trainer's weights in float32;
- `bytes` of an update and `pause_s`, from the servers' pause to their resumption.
With `--device cpu` both servers are the trainer's data type, which only shows that the script works.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from allocation import ParallelSizes, load_model
from areal_like.backends.ray.lifetime import run_lifetime
from areal_like.backends.sglang.options import server_arguments
from areal_like.core.rollout.pool import ServerPool
from areal_like.core.served_form import served_form
from areal_like.core.weights import SyncSpec, make_sender, make_sync, publish
from areal_like.demo.init_model import model_config
from benchmarks.real_run import only, passes_by_size
from benchmarks.report import save
from benchmarks.rollout_throughput import engine_server
from benchmarks.update_cost import COMPARED, LIMIT_S, WORK, LocalTrainer, Plan, Work, distances, run_config, shape_of

SETTINGS = {"bfloat16": [], "fp8": ["rollout.dtype=fp8", "weight_update.mode=ipc"]}
ROOM = 1.4  # tokens that a server has room for ÷ those of a mean sample, for each sample in flight


class Arm:
    """A server with its client and weights in its form."""

    def __init__(self, name: str, plan: Plan, work: Work, shape: str, folder: Path) -> None:
        self._config = run_config(shape, plan, work, overrides_of(name, work) if plan.device == "cuda" else [])
        directory = folder / name
        directory.mkdir()
        (directory / "config.json").write_text(
            json.dumps(model_config(shape_of(self._config), self._config.actor.dtype))
        )
        self._plan, self._work, self._folder, self._model = plan, work, folder / name, load_model(directory)
        self._form, self._token = served_form(self._config), secrets.token_hex(16)
        options = self._form.options(self._model, ParallelSizes()) if self._form else {"load-format": "dummy"}
        arguments = server_arguments(self._config, directory, ParallelSizes(), plan.device, form=options)
        self.server = engine_server(arguments, self._token, self._folder)
        self.rates: list[float] = []
        self.pauses: list[float] = []
        self.answers: list[Any] = []

    async def start(self, trainer: LocalTrainer) -> None:
        """Start the server and send the weights."""
        url = await self.server.start()
        convert = self._form.convert(self._model, ParallelSizes()) if self._form else None
        self.sender = make_sender("ipc", trainer, 0, "127.0.0.1", convert)  # type: ignore[arg-type]
        self.trainer = with_sender(trainer, self.sender)
        self.pool = await ServerPool([url], self._token, LIMIT_S).__aenter__()
        spec = SyncSpec(LIMIT_S, self._folder, 1, "gloo", self._plan.bucket_mb, self._plan.prefetch_mb)
        self.sync = make_sync("ipc", self.trainer, self.pool, spec)  # type: ignore[arg-type]
        await self.sync.connect()
        await self.update(0)

    async def update(self, version: int) -> None:
        """Send a version and note the pause."""
        self.trainer.version = version
        await publish(self.sync, version, LIMIT_S)
        self.pauses.append(self.pool.pause_s)

    async def generate(self, seed: int, settle: float, seconds: float) -> None:
        """Keep the samples in flight for a block, and note tokens per second after `settle` seconds, and answers."""

        async def work_on(number: int) -> None:
            for prompt, sampling in self._work.samples(1000 * seed + number):
                self.answers.append((prompt, await self.pool.sample(prompt, sampling)))

        workers = [asyncio.ensure_future(work_on(number)) for number in range(self._work.in_flight)]
        await asyncio.sleep(settle)
        before, begun = self.pool.tokens_generated, time.perf_counter()
        await asyncio.sleep(seconds)
        self.rates.append((self.pool.tokens_generated - before) / (time.perf_counter() - begun))
        for worker in workers:
            worker.cancel()
        for failed in await asyncio.gather(*workers, return_exceptions=True):
            if not isinstance(failed, asyncio.CancelledError):
                raise failed

    def figures(self) -> Mapping[str, Any]:
        """Return the figures of this server."""
        whole = [(prompt, response) for prompt, response in self.answers if len(set(response.versions)) == 1]
        apart = np.concatenate(list(distances(self.trainer.networks(), whole[:COMPARED])))
        size = sum(spec.nbytes for bucket in self.sender.layout(self._plan.bucket_mb) for spec in bucket)
        return {
            "tokens_per_second": self.rates,
            "passes": passes_by_size((self._folder / "server.log").read_text(errors="replace")),
            "apart": float(apart.mean()),
            "bytes": size,
            "pause_s": statistics.median(self.pauses),
        }


def overrides_of(name: str, work: Work) -> list[str]:
    """Return the settings of a server on a GPU that two servers and a trainer share."""
    room = int(ROOM * work.in_flight * (work.prompt_tokens + work.mean))
    return [*SETTINGS[name], "sglang.mem_fraction_static=0.8", f"sglang.extra_args.max_total_tokens={room}"]


def with_sender(trainer: LocalTrainer, sender: Any) -> LocalTrainer:
    """Return the same trainer, with the same weights, for another sender."""
    other = object.__new__(LocalTrainer)
    other.__dict__ = {**trainer.__dict__, "_sender": sender}
    return other


def main(
    shape: Annotated[str, typer.Option(help="of memory.py")] = "qwen3-8b",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda",
    rounds: int = 6,
    settle: Annotated[float, typer.Option(help="seconds of a block before it counts")] = 6.0,
    seconds: Annotated[float, typer.Option(help="of a block that count")] = 20.0,
    in_flight: int | None = None,
) -> None:
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    count, prompt, usual, most = WORK[device]
    work = Work(in_flight or count, prompt, usual, most)
    plan = Plan(device, (), 0.0, 0, 512, 4096, 0.0)
    with run_lifetime(secrets.token_hex(6)) as folder:
        figures = asyncio.run(measure(plan, work, shape, rounds, (settle, seconds), folder))
    save(f"fp8_rollouts_{device}", {"shape": shape, "in_flight": work.in_flight, **figures})


async def measure(
    plan: Plan, work: Work, shape: str, rounds: int, block: tuple[float, float], folder: Path
) -> dict[str, Any]:
    """Return the figures of both servers, which work in turns."""
    arms = {name: Arm(name, plan, work, shape, folder) for name in SETTINGS}
    config = run_config(shape, plan, work, [])
    home = "cuda:0" if plan.device == "cuda" else "cpu"
    trainer = LocalTrainer(model_config(shape_of(config), config.actor.dtype), home, "ipc")
    for arm in arms.values():
        await arm.start(trainer)
    groups = {name: arm.server._process.pid for name, arm in arms.items()}
    for number in range(rounds + 1):  # the first warms up
        for name in list(arms)[:: -1 if number % 2 else 1]:
            with only(groups, name):
                await arms[name].generate(number, *block)
                await arms[name].update(number + 1)
        print({name: round(arm.rates[-1]) for name, arm in arms.items()}, flush=True)
    found = {name: arm.figures() | {"tokens_per_second": arm.rates[1:]} for name, arm in arms.items()}
    ratios = [a / b for a, b in zip(arms["fp8"].rates[1:], arms["bfloat16"].rates[1:], strict=True)]
    return {"ratio": statistics.median(ratios), "ratio_by_round": ratios, "arms": found}


if __name__ == "__main__":
    typer.run(main)
