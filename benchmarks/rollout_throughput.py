"""Compare rollout tokens per second of the engine with SGLang's own server under a bare HTTP client, alternately.

    python -m benchmarks.rollout_throughput --config examples/math/gsm8k_grpo_cpu.yaml [key=value ...]

The engine's server has the engine's client and the bare one (`engine`, `bare`). SGLang's own server, at its best
settings, has the bare client (`unpatched`), or it prefills prompts first (`unpatched_prefill_first`). All send
the same requests with log-probs: all groups of a training step at once, `gconfig.n_samples` samples each. The processes
of the idle server are stopped. `ratio` is relative to the faster way to use SGLang's own server. Model shape, prompt
length and response length come from the configuration. Prompts are random tokens, and responses end only at
`gconfig.max_new_tokens`.
"""

from __future__ import annotations

import asyncio
import secrets
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import aiohttp
import numpy as np
import torch
import typer

from allocation import ParallelSizes
from areal_like.cluster.lifetime import run_lifetime
from areal_like.config.load import load
from areal_like.config.schema import RunConfig
from areal_like.rollout.http import Deadline
from areal_like.rollout.pool import Sampling, ServerPool
from areal_like.rollout.server import ServerSpec
from areal_like.rollout.sglang.options import server_arguments
from areal_like.rollout.sglang.process import SGLangServer
from areal_like.run.model_files import model_directory
from benchmarks.real_run import only, ready, unpatched
from benchmarks.report import save

LIMIT_S = 600.0
VERSION = 0


def main(
    config: Annotated[Path, typer.Option()],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="key=value ...")] = None,
    rounds: int = 10,
) -> None:
    run = load(config, overrides or []).config
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with run_lifetime(secrets.token_hex(6)) as folder:
        rates = asyncio.run(measure(run, folder, device, rounds))
    # all tokens over all seconds: rounds on a GPU fall into fast and slow ones, between which a median jumps
    tokens_per_second = {name: statistics.harmonic_mean(values) for name, values in rates.items()}
    yardstick = max((name for name in rates if name.startswith("unpatched")), key=lambda name: tokens_per_second[name])
    ratio = tokens_per_second["engine"] / tokens_per_second[yardstick]
    print(f"engine / {yardstick} = {ratio:.3f}")
    figures = {
        "dtype": run.actor.dtype,
        "model": run.actor.init_model.model_dump() if run.actor.init_model else run.actor.path,
        "groups": run.train_dataset.batch_size,
        "samples_per_group": run.gconfig.n_samples,
        "prompt_tokens": run.train_dataset.max_prompt_length,
        "response_tokens": run.gconfig.max_new_tokens,
        "tokens_per_second": tokens_per_second,
        "yardstick": yardstick,
        "ratio": ratio,
        "rounds": rates,
    }
    save(f"rollout_throughput_{device}", figures)


async def measure(run: RunConfig, folder: Path, device: str, rounds: int) -> dict[str, list[float]]:
    """Tokens per second of each side and round."""
    model, token = await model_directory(run, folder), secrets.token_hex(16)
    arguments = server_arguments(run, model, ParallelSizes(), device)
    rng = np.random.default_rng(0)
    prompts = rng.integers(4, 30, (run.train_dataset.batch_size, run.train_dataset.max_prompt_length)).tolist()
    own = engine_server(arguments, token, folder)
    with unpatched(arguments, token, folder / "unpatched.log", device) as (plain, process):
        plain, url = await asyncio.gather(ready(plain, token), own.start())
        groups = {"own": own._process.pid, "plain": process.pid}
        async with (
            ServerPool([url], token, LIMIT_S, prefill_once=run.rollout.prefill_once) as pool,
            aiohttp.ClientSession(**bare_session(token)) as session,
        ):
            await set_version(pool, model)
            http = partial(through_http, session, run=run, prompts=prompts)
            sides: dict[str, tuple[str, str, Callable[[], Awaitable[int]]]] = {
                "engine": ("own", url, lambda: through_pool(pool, run, prompts)),
                "bare": ("own", url, partial(http, url, prefill_first=False)),
                "unpatched": ("plain", plain, partial(http, plain, prefill_first=False)),
                "unpatched_prefill_first": ("plain", plain, partial(http, plain, prefill_first=True)),
            }
            rates: dict[str, list[float]] = {name: [] for name in sides}
            for number in range(rounds + 1):
                for name, (server, address, generate) in sides.items():
                    with only(groups, server):
                        async with session.post(address + "/flush_cache") as flushed:  # none finds another's prefixes
                            flushed.raise_for_status()
                        found = await rate(generate)
                    if number:  # the first round warms up
                        rates[name].append(found)
                if number:
                    print({name: round(values[-1]) for name, values in rates.items()}, flush=True)
    return rates


async def start_server(run: RunConfig, folder: Path, device: str) -> tuple[Path, str, str]:
    """The run's model, and a server of it: its address and token."""
    model, token = await model_directory(run, folder), secrets.token_hex(16)
    server = engine_server(server_arguments(run, model, ParallelSizes(), device), token, folder)
    return model, await server.start(), token


def engine_server(arguments: Sequence[str], token: str, folder: Path) -> SGLangServer:
    """Return the engine's server, which is not started."""
    return SGLangServer(
        ServerSpec("server", tuple(arguments), folder / "server.log", token, None, LIMIT_S), "127.0.0.1"
    )


def bare_session(token: str) -> dict:
    return {
        "headers": {"Authorization": f"Bearer {token}"},
        "connector": aiohttp.TCPConnector(limit=0),
        "timeout": aiohttp.ClientTimeout(total=LIMIT_S),
    }


async def set_version(pool: ServerPool, model: Path) -> None:
    """As a run's first weight update over disk does."""
    async with pool.interrupt(VERSION, Deadline(LIMIT_S)):
        await pool.servers[0].load(str(model), VERSION, LIMIT_S)


async def through_pool(pool: ServerPool, run: RunConfig, prompts: Sequence[list[int]]) -> int:
    """Response tokens of one step."""
    sampling = Sampling(run.gconfig.max_new_tokens, run.gconfig.temperature, run.gconfig.top_p)
    groups = await asyncio.gather(*(pool.generate([prompt] * run.gconfig.n_samples, sampling) for prompt in prompts))
    return sum(len(response.tokens) for group in groups for response in group)


async def through_http(
    session: aiohttp.ClientSession, url: str, *, run: RunConfig, prompts: Sequence[list[int]], prefill_first: bool
) -> int:
    """The same requests with nothing around them."""
    sampling = {
        "max_new_tokens": run.gconfig.max_new_tokens,
        "temperature": run.gconfig.temperature,
        "top_p": run.gconfig.top_p,
        "stop_token_ids": [],
    }

    async def post(body: dict) -> list[dict]:
        async with session.post(url + "/generate", json=body) as answer:
            answer.raise_for_status()
            return await answer.json()

    async def group(prompt: list[int]) -> int:
        n = run.gconfig.n_samples
        if prefill_first:
            await post({"input_ids": [prompt], "sampling_params": {"max_new_tokens": 0}})
        outputs = await post({"input_ids": [prompt] * n, "sampling_params": [sampling] * n, "return_logprob": True})
        return sum(len(output["meta_info"]["output_token_logprobs"]) for output in outputs)

    return sum(await asyncio.gather(*map(group, prompts)))


async def rate(generate: Callable[[], Awaitable[int]]) -> float:
    start = time.perf_counter()
    return await generate() / (time.perf_counter() - start)


if __name__ == "__main__":
    typer.run(main)
