"""Distance of log-probs between server and trainer with and without router replay, and what the replay costs.

    python -m benchmarks.router_replay [key=value ...] [--expert-scale 4 --out router_replay_scaled]

One server at a time and one Megatron rank take turns on one GPU, with a random model of 64 experts in bfloat16 (on a
CPU: a tiny one in float32). A server that records routes and one that does not generate the same groups one
after the other with flushed caches; the trainer scores the responses with and without their routes, and trains on
them. A short form of the figures is printed as JSON.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import numpy as np
import torch
import typer
from safetensors.torch import load_file, save_file

from allocation import ParallelSizes
from areal_like.backends.ray.lifetime import run_lifetime
from areal_like.backends.sglang.options import server_arguments
from areal_like.backends.sglang.process import SGLangServer
from areal_like.backends.training.rank import make_engine
from areal_like.capabilities.router_replay.columns import ROUTES, RouteShape
from areal_like.core.algorithms.batch import batch_of
from areal_like.core.algorithms.losses import sft
from areal_like.core.config.load import load
from areal_like.core.config.schema import RunConfig
from areal_like.core.rollout.joining import as_response, join_parts
from areal_like.core.rollout.pool import Response, Sampling, ServerPool
from areal_like.core.rollout.server import ServerSpec
from areal_like.core.trainer.engine import EngineSpec, Rendezvous, TrainEngine
from areal_like.core.types import Batch, LossSpec, Prompt, Reward
from areal_like.runtime.ports import listen
from benchmarks.memory import made_model
from benchmarks.report import ROOT, save
from benchmarks.rollout_throughput import LIMIT_S, bare_session, set_version

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
ROUNDS, STEPS = 4, 6
SHAPE = {
    "hidden_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32768,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
}
TINY = {**SHAPE, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
TINY |= {"vocab_size": 512, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ON_GPU = (
    *("actor.dtype=bfloat16", "train_dataset.batch_size=32", "gconfig.n_samples=8", "gconfig.max_new_tokens=512"),
    *("train_dataset.max_prompt_length=256", "actor.mb_spec.max_tokens_per_mb=16384", "sglang.context_length=1024"),
    *("sglang.mem_fraction_static=0.35", "sglang.attention_backend=triton", "actor.megatron.moe_grouped_gemm=true"),
    *("sglang.extra_args={disable_prefill_cuda_graph: true}",),
)
ON_CPU = ("gconfig.n_samples=2", "gconfig.max_new_tokens=16", "sglang.context_length=128")


def main(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="key=value ...")] = None,
    expert_scale: float = 1.0,
    out: str = "router_replay",
) -> None:
    config = ROOT / "examples/math/gsm8k_grpo_cpu.yaml"
    run = load(config, [*(ON_GPU if CUDA else ON_CPU), *(overrides or [])]).config
    shape = SHAPE if CUDA else TINY
    layers = shape["num_hidden_layers"]
    routes = RouteShape(layers, tuple(range(layers)), shape["num_experts_per_tok"], shape["num_experts"])
    with run_lifetime(secrets.token_hex(6)) as folder:
        model = made_model(shape, folder / "model", DEVICE, run.actor.dtype)
        scale_experts(model, expert_scale)
        off = asyncio.run(served(run, model, folder, None))[0]
        on, prompts, responses = asyncio.run(served(run, model, folder, routes))
        batch = joined_batch(prompts, responses)
        trained = train(run, model, batch)
    figures = {
        "model": shape,
        "expert_scale": expert_scale,
        "dtype": run.actor.dtype,
        "tokens": len(batch.tokens),
        "route_bytes_per_token": routes.row_bytes,
        "rollout_tokens_per_second": {"on": on, "off": off},
        "rollout_cost": 1 - statistics.median(on) / statistics.median(off),
        **trained,
    }
    print(json.dumps({name: value for name, value in figures.items() if name != "model"}))
    save(f"{out}_{DEVICE}", figures)


def scale_experts(model: Path, factor: float) -> None:
    """Multiply the experts' output layers: random ones hardly change what a layer gives on."""
    if factor == 1:
        return
    for file in model.glob("*.safetensors"):
        weights = load_file(file)
        for name in weights:
            if ".experts." in name and name.endswith("down_proj.weight"):
                weights[name] *= factor
        save_file(weights, file, {"format": "pt"})


async def served(
    run: RunConfig, model: Path, folder: Path, routes: RouteShape | None
) -> tuple[list[float], list[list[int]], list[Response]]:
    """Tokens per second of each round on a server of its own, and the last round's responses with their prompts."""
    name, token = f"server-{'on' if routes else 'off'}", secrets.token_hex(16)
    arguments = server_arguments(run, model, ParallelSizes(), DEVICE, columns=[ROUTES] if routes else ())
    server = SGLangServer(ServerSpec(name, arguments, folder / f"{name}.log", token, None, LIMIT_S), "127.0.0.1")
    url, rng = await server.start(), np.random.default_rng(0)
    sampling = Sampling(run.gconfig.max_new_tokens, 1.0, ignore_eos=True, columns={ROUTES: routes} if routes else {})
    prompts = rng.integers(4, 500, (run.train_dataset.batch_size, run.train_dataset.max_prompt_length)).tolist()
    rates: list[float] = []
    try:
        async with ServerPool([url], token, LIMIT_S) as pool, aiohttp.ClientSession(**bare_session(token)) as session:
            await set_version(pool, model)
            for _ in range(1 + ROUNDS):
                async with session.post(url + "/flush_cache") as flushed:
                    flushed.raise_for_status()
                start = time.perf_counter()
                n = run.gconfig.n_samples
                groups = await asyncio.gather(*(pool.generate([prompt] * n, sampling) for prompt in prompts))
                made = sum(len(response.tokens) for group in groups for response in group)
                rates.append(made / (time.perf_counter() - start))
    finally:
        await server.end()
    whose = [prompt for prompt, group in zip(prompts, groups, strict=True) for _ in group]
    return rates[1:], whose, [response for group in groups for response in group]


def joined_batch(prompts: Sequence[list[int]], responses: Sequence[Response]) -> Batch:
    parts = zip(prompts, responses, strict=True)
    items = [join_parts(Prompt(0, prompt), 0, [as_response(prompt), made], Reward(1.0)) for prompt, made in parts]
    return batch_of(items, 0)


def train(run: RunConfig, model: Path, batch: Batch) -> dict[str, Any]:
    """Distances to the servers' log-probs, in nats, and tokens per second of the trainer with and without routes."""
    listener = listen("127.0.0.1")
    spec = EngineSpec("actor", run.actor, run.actor.optimizer, model, ParallelSizes(), DEVICE, run.seed, 1000)
    engine = make_engine(spec, Rendezvous(0, 1, *listener.getsockname(), listener=listener))
    sides = {"on": batch, "off": batch.with_field(ROUTES, None)}
    try:
        found = {side: distance(engine, each) for side, each in sides.items()}
        times: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(1 + STEPS):
            for side, each in sides.items():
                seconds = timed(engine, each)
                if number:
                    times[side].append(len(batch.tokens) / seconds)
    finally:
        engine.shutdown()
    rates = {side: statistics.median(each) for side, each in times.items()}
    return {
        "logprob_distance": found,
        "times_smaller": found["off"]["mean"] / found["on"]["mean"],
        "trainer_tokens_per_second": times,
        "trainer_cost": 1 - rates["on"] / rates["off"],
    }


def distance(engine: TrainEngine, batch: Batch) -> dict[str, float]:
    """Mean, 99th percentile and maximum of the distances of log-probs."""
    scored = engine.log_probs(batch, 1.0)
    assert scored is not None  # of one rank
    places, values = scored
    apart = np.abs(values - batch.fields["behaviour_logprobs"][places])
    return {"mean": float(apart.mean()), "p99": float(np.quantile(apart, 0.99)), "max": float(apart.max())}


def timed(engine: TrainEngine, batch: Batch) -> float:
    if CUDA:
        torch.cuda.synchronize()
    start = time.perf_counter()
    engine.train(batch, LossSpec(sft), 1.0, 1e-9)
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    typer.run(main)
