"""Compare tokens per second of the OpenAI-compatible path and the built-in single turn, on one SGLang server.

    python -m benchmarks.agent_path --config examples/math/gsm8k_grpo_cpu.yaml [key=value ...]

Both generate one training step of the same conversations with `gconfig.n_samples` responses each, all at once.
Responses end only at `gconfig.max_new_tokens`; no reward is computed. The agent is `workflow` with one completion.
CPU seconds per request of this process, which is the run's controller, are measured too: they depend less on other
load.
"""

from __future__ import annotations

import asyncio
import secrets
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import torch
import typer

from areal_like.backends.ray.lifetime import run_lifetime
from areal_like.capabilities.agents.make import Workflows
from areal_like.core.config.load import load
from areal_like.core.config.schema import RunConfig
from areal_like.core.gc_tuning import gc_tuned
from areal_like.core.rollout.pool import Sampling, ServerPool
from areal_like.core.rollout.single_turn import SingleTurn
from areal_like.core.types import Prompt, Reward, Workflow
from areal_like.data.tokenizer import Tokenizer
from areal_like.demo import arithmetic
from benchmarks.report import save
from benchmarks.rollout_throughput import LIMIT_S, bare_session, set_version, start_server


async def agent(row: Any, client: Any) -> float:
    await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": row["question"]}])
    return 0.0


async def no_reward(prompt: Prompt, responses: Sequence[Any]) -> list[Reward]:
    return [Reward(0.0)] * len(responses)


def main(
    config: Annotated[Path, typer.Option()],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="key=value ...")] = None,
    rounds: int = 10,
) -> None:
    run = load(config, [*(overrides or []), f"workflow={__file__}:agent"]).config
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with run_lifetime(secrets.token_hex(6)) as folder:
        rates, processor_s = asyncio.run(measure(run, folder, device, rounds))
    requests = run.train_dataset.batch_size * run.gconfig.n_samples
    tokens_per_second = {name: statistics.harmonic_mean(values) for name, values in rates.items()}
    ratios = [one / other for one, other in zip(rates["agent"], rates["single_turn"], strict=True)]
    figures = {
        "model": run.actor.init_model.model_dump() if run.actor.init_model else run.actor.path,
        "groups": run.train_dataset.batch_size,
        "samples_per_group": run.gconfig.n_samples,
        "response_tokens": run.gconfig.max_new_tokens,
        "tokens_per_second": tokens_per_second,
        "ratio": tokens_per_second["agent"] / tokens_per_second["single_turn"],
        "median_ratio_of_rounds": statistics.median(ratios),
        "controller_cpu_ms_per_request": {
            name: statistics.median(values) / requests * 1e3 for name, values in processor_s.items()
        },
        "rounds": rates,
    }
    print(
        f"agent / single turn = {figures['ratio']:.3f}, controller: {figures['controller_cpu_ms_per_request']} ms/request"
    )
    save(f"agent_path_{device}", figures)


type Rounds = dict[str, list[float]]


async def measure(run: RunConfig, folder: Path, device: str, rounds: int) -> tuple[Rounds, Rounds]:
    """Tokens per second of each side and round, and processor seconds of this process."""
    model, url, token = await start_server(run, folder, device)
    tokenizer = Tokenizer.load(str(model))
    rows = arithmetic.generate(run.train_dataset.batch_size, 5, run.seed, "train")
    prompts = [
        Prompt(i, tokenizer.encode_chat([{"role": "user", "content": row["question"]}]), row=row)
        for i, row in enumerate(rows)
    ]
    sampling = Sampling(run.gconfig.max_new_tokens, run.gconfig.temperature)
    rates: Rounds = {"single_turn": [], "agent": []}
    processor_s: Rounds = {"single_turn": [], "agent": []}
    async with (
        gc_tuned(),
        ServerPool([url], token, LIMIT_S, prefill_once=run.rollout.prefill_once) as pool,
        Workflows(run, pool, no_reward, tokenizer, print) as workflows,
        aiohttp.ClientSession(**bare_session(token)) as session,
    ):
        await set_version(pool, model)
        sides: dict[str, Workflow] = {
            "single_turn": SingleTurn(pool, no_reward, sampling, run.gconfig.n_samples),
            "agent": workflows.train(sampling, run.gconfig.n_samples),
        }
        for number in range(-1, rounds):  # the first one warms up
            for name in sorted(sides, reverse=number % 2 == 0):
                async with session.post(url + "/flush_cache") as flushed:  # none finds another's prefixes
                    flushed.raise_for_status()
                before = time.process_time()
                rate = await tokens_per_second_of(sides[name], prompts)
                if number >= 0:
                    rates[name].append(rate)
                    processor_s[name].append(time.process_time() - before)
            print({name: [round(value) for value in values[-1:]] for name, values in rates.items()}, flush=True)
    return rates, processor_s


async def tokens_per_second_of(workflow: Workflow, prompts: Sequence[Prompt]) -> float:
    start = time.perf_counter()
    groups = await asyncio.gather(*(workflow(prompt, prompt.sample_id) for prompt in prompts))
    generated = sum(int(item.generated.sum()) for group in groups for item in group)
    return generated / (time.perf_counter() - start)


if __name__ == "__main__":
    typer.run(main)
