"""Measure what the engine adds to SGLang's processes: CPU microseconds per generated token, beside SGLang's own code.

    python -m benchmarks.scheduler_cost [--running 64,256,512] [--rounds 3]

Two servers on the CPU have the same model of 20,000 parameters, so a pass costs little beside SGLang's Python. One has
the engine's scheduler, the other SGLang's own (`plain_launcher.py`). A closed loop keeps a number of requests of
`TOKENS` tokens running. Both see the same load in turns while the other is stopped. CPU time hardly depends on other
work of the machine, unlike seconds.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import signal
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import aiohttp
import psutil
import typer

from allocation import ParallelSizes
from areal_like.backends.ray.lifetime import run_lifetime
from areal_like.backends.sglang import LAUNCHER, TOKEN_VARIABLE
from areal_like.backends.sglang.options import server_arguments
from areal_like.core.config.load import load
from areal_like.core.config.schema import RunConfig
from areal_like.run.model_files import model_directory
from areal_like.runtime.ports import reserve_port
from benchmarks.real_run import bare_session, only, ready
from benchmarks.report import save

CONFIG = Path("examples/math/gsm8k_grpo_cpu.yaml")
MODEL = [
    "num_hidden_layers=1",
    "hidden_size=32",
    "intermediate_size=32",
    "num_attention_heads=2",
    "head_dim=16",
    "max_position_embeddings=256",
]
LAUNCHERS = {"plain": "benchmarks.plain_launcher", "engine": LAUNCHER}
TOKENS, PROMPT = 200, 32


def main(running: Annotated[str, typer.Option()] = "64,256,512", rounds: Annotated[int, typer.Option()] = 3) -> None:
    overrides = [*(f"actor.init_model.{field}" for field in MODEL), "sglang.context_length=256"]
    run = load(CONFIG, overrides).config
    with run_lifetime(secrets.token_hex(6)) as folder:
        rows = asyncio.run(measure(run, folder, [int(each) for each in running.split(",")], rounds))
    costs: dict[str, dict[int, dict[str, float]]] = defaultdict(dict)
    for side, level in {(row["side"], row["running"]) for row in rows}:
        own = [row for row in rows if (row["side"], row["running"]) == (side, level)]
        costs[side][level] = {
            name: round(statistics.median(row[name] for row in own), 2) for name in ("scheduler_us", "http_us")
        }
    for level in sorted(costs["plain"]):
        print(level, {side: costs[side][level] for side in LAUNCHERS})
    save("scheduler_cost_cpu", {"tokens": TOKENS, "cpu_us_per_token": costs, "rows": rows})


async def measure(run: RunConfig, folder: Path, levels: list[int], rounds: int) -> list[dict]:
    """Load both servers in turns; return a row for each measurement."""
    model, token = await model_directory(run, folder), secrets.token_hex(16)
    with ExitStack() as stack:
        started = {side: stack.enter_context(server(run, model, side, token, folder)) for side in LAUNCHERS}
        urls = {side: await ready(url, token) for side, (url, _) in started.items()}
        groups = {side: process.pid for side, (_, process) in started.items()}
        rows = []
        async with bare_session(token) as session:
            for level, number in itertools.product(levels, range(rounds + 1)):
                for side, url in urls.items():
                    with only(groups, side):
                        row = await cost(session, url, groups[side], level)
                    if number:  # the first warms up
                        rows.append({"side": side, "running": level, **row})
                        print(rows[-1], flush=True)
    return rows


@contextmanager
def server(
    run: RunConfig, model: Path, side: str, token: str, folder: Path
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Yield a server's URL and process."""
    arguments = server_arguments(run, model, ParallelSizes(), "cpu")
    with reserve_port("127.0.0.1") as reserved, (folder / f"{side}.log").open("wb") as log:
        port = reserved.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, "-m", LAUNCHERS[side], *arguments, "--host", "127.0.0.1", "--port", str(port)],
            env={**os.environ, TOKEN_VARIABLE: token},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield f"http://127.0.0.1:{port}", process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


async def cost(session: aiohttp.ClientSession, url: str, group: int, level: int) -> Mapping[str, float]:
    """Return CPU microseconds per token of the scheduler and of the HTTP process, for 2 x `level` requests."""
    sampling = {"max_new_tokens": TOKENS, "ignore_eos": True}
    left = iter(range(2 * level))

    async def loop() -> None:
        for number in left:
            prompt = [5 + (number * 7 + place * 3) % 20 for place in range(PROMPT)]
            body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
            async with session.post(url + "/generate", json=body) as answer:
                answer.raise_for_status()
                await answer.read()

    before = times(group)
    await asyncio.gather(*(loop() for _ in range(level)))
    after = times(group)
    tokens = 2 * level * TOKENS
    return {name: round(1e6 * (after[name] - before[name]) / tokens, 2) for name in after}


def times(group: int) -> dict[str, float]:
    """Return the CPU seconds of a server's processes so far: its parent serves HTTP, the busiest child schedules."""

    def seconds(process: psutil.Process) -> float:
        return sum(process.cpu_times()[:2])

    parent = psutil.Process(group)
    return {
        "http_us": seconds(parent),
        "scheduler_us": max(seconds(child) for child in parent.children(recursive=True)),
    }


if __name__ == "__main__":
    typer.run(main)
