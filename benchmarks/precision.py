r"""Distance of server and trainer log-probs of one model by data type and output head, and what each costs.

    python -m benchmarks.precision --config examples/math/gsm8k_grpo_cpu.yaml actor.init_model.vocab_size=512 \
        --prompts 8 --prompt-tokens 16 --response-tokens 48
    python -m benchmarks.precision --config examples/math/gsm8k_grpo_qwen3_0.6b.yaml

Every case starts a server, which samples responses, and a Megatron trainer of one rank, which scores them. `distance`
is the mean absolute difference of their log-probs in nats, `p99` and `largest` its tail; `from_float32` are the
distances of both from transformers in float32. The model is `actor.init_model` with random weights in bfloat16, whose
output layer is multiplied by `--peak`, so that words are about as sure as a trained model's. The servers run side by
side, so their rates are not those of a server alone.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import numpy as np
import torch
import typer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from allocation.plan import ParallelSizes
from areal_like.backends.ray.lifetime import run_lifetime
from areal_like.backends.sglang.options import server_arguments
from areal_like.backends.sglang.process import SGLangServer
from areal_like.backends.training.rank import make_engine
from areal_like.core.config.load import load
from areal_like.core.config.schema import RunConfig
from areal_like.core.rollout.server import ServerSpec
from areal_like.core.trainer.engine import EngineSpec, Rendezvous
from areal_like.core.types import Batch, Floats
from areal_like.runtime.ports import listen
from benchmarks.memory import made_model
from benchmarks.report import save

LIMIT_S = 280.0
GPU_OPTIONS = ["sglang.mem_fraction_static=0.85", "sglang.extra_args.disable_cuda_graph=true"]
CASES = {
    "bfloat16": ("bfloat16", False),
    "bfloat16, fp32_head": ("bfloat16", True),
    "float16": ("float16", False),
    "float16, fp32_head": ("float16", True),
}


@dataclass(frozen=True)
class Scored:
    """What a server sampled, its log-probs of these tokens, and tokens per second."""

    batch: Batch
    log_probs: Floats
    rate: float


def main(
    config: Annotated[Path, typer.Option()],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="key=value ...")] = None,
    prompts: int = 32,
    prompt_tokens: int = 64,
    response_tokens: int = 256,
    peak: float = 5.0,
    out: str = "precision",
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = [*(overrides or []), f"gconfig.max_new_tokens={response_tokens}", "gconfig.temperature=1.0"]
    options += [f"train_dataset.max_prompt_length={prompt_tokens}", f"device={device}"]
    if device == "cuda":
        options += [
            *GPU_OPTIONS,
            f"sglang.extra_args.max_total_tokens={prompts * (prompt_tokens + response_tokens) * 2}",
        ]
    runs = {
        name: load(config, [*options, f"actor.dtype={dtype}", f"actor.fp32_head={str(head).lower()}"]).config
        for name, (dtype, head) in CASES.items()
    }
    given = runs["bfloat16"].actor.init_model
    if given is None or given.vocab_size is None:
        raise typer.BadParameter("write actor.init_model.vocab_size: the model has random weights")
    shape = given.model_dump() | {"tie_word_embeddings": False}
    with run_lifetime(secrets.token_hex(6)) as folder:
        model = peaked(shape, folder, device, peak)
        words = np.random.default_rng(0).integers(3, shape["vocab_size"], (prompts, prompt_tokens)).tolist()
        sampled = asyncio.run(sample_all(runs, model, folder, device, words))
        cases = {name: figures(run, model, device, sampled[name]) for name, run in runs.items()}
    save(f"{out}_{device}", {"model": shape, "peak": peak, "cases": cases})


def peaked(shape: dict[str, Any], folder: Path, device: str, peak: float) -> Path:
    """A model in bfloat16 with an output layer of its own."""
    model = made_model(shape, folder / "model", device)
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"] *= peak
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    return model


async def sample_all(
    runs: dict[str, RunConfig], model: Path, folder: Path, device: str, prompts: list[list[int]]
) -> dict[str, Scored]:
    """Start all servers at once, and have one after the other sample."""
    specs = {
        name: ServerSpec(
            name=name,
            arguments=server_arguments(run, model, ParallelSizes(), device),
            log_file=folder / f"server{number}.log",
            token=secrets.token_hex(16),
            port=None,
            startup_timeout_s=LIMIT_S,
        )
        for number, (name, run) in enumerate(runs.items())
    }
    servers = {name: SGLangServer(spec, "127.0.0.1") for name, spec in specs.items()}
    begun = time.monotonic()
    try:
        urls = dict(zip(servers, await asyncio.gather(*(each.start() for each in servers.values())), strict=True))
        print(f"servers are ready after {time.monotonic() - begun:.0f} s", flush=True)
        return {
            name: await sample(url, specs[name].token, prompts, runs[name].gconfig.max_new_tokens)
            for name, url in urls.items()
        }
    except BaseException:
        shutil.copytree(folder, Path("precision_logs"), dirs_exist_ok=True, ignore=shutil.ignore_patterns("model*"))
        raise
    finally:
        for server in servers.values():
            if hasattr(server, "_process"):
                await server.end()


async def sample(url: str, token: str, prompts: list[list[int]], most: int) -> Scored:
    body = {
        "input_ids": prompts,
        "sampling_params": {"max_new_tokens": most, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
    }
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as session:
        for _ in range(2):  # the first compiles
            begun = time.monotonic()
            async with session.post(url + "/generate", json=body) as answer:
                answer.raise_for_status()
                answers = await answer.json()
            seconds = time.monotonic() - begun
    said = [[each[:2] for each in one["meta_info"]["output_token_logprobs"]] for one in answers]
    tokens = [[*prompt, *(word for _, word in one)] for prompt, one in zip(prompts, said, strict=True)]
    logs = [[0.0] * len(prompt) + [log for log, _ in one] for prompt, one in zip(prompts, said, strict=True)]
    masks = [[0] * len(prompt) + [1] * len(one) for prompt, one in zip(prompts, said, strict=True)]
    flat = np.concatenate(tokens).astype(np.int32)
    fields = {"loss_mask": np.concatenate(masks).astype(np.float32)}
    batch = Batch(np.array([len(each) for each in tokens], np.int32), flat, fields)
    return Scored(batch, np.concatenate(logs).astype(np.float32), sum(map(len, said)) / seconds)


def figures(run: RunConfig, model: Path, device: str, sampled: Scored) -> dict[str, Any]:
    """Distances of a case, and the seconds in which its trainer scores the batch."""
    trainer, seconds = score(run, model, device, sampled.batch)
    exact = exact_log_probs(model, device, sampled.batch)
    told = sampled.batch.fields["loss_mask"] > 0
    distance = np.abs(trainer - sampled.log_probs)[told]
    result = {
        "distance": float(distance.mean()),
        "p99": float(np.quantile(distance, 0.99)),
        "largest": float(distance.max()),
        "from_float32": {
            "server": float(np.abs(sampled.log_probs - exact)[told].mean()),
            "trainer": float(np.abs(trainer - exact)[told].mean()),
        },
        "server_tokens_per_second": sampled.rate,
        "trainer_seconds": seconds,
        "tokens": int(told.sum()),
        "mean_log_prob": float(sampled.log_probs[told].mean()),
    }
    print(run.actor.dtype, run.actor.fp32_head, result, flush=True)
    return result


@torch.no_grad()
def exact_log_probs(model: Path, device: str, batch: Batch) -> Floats:
    """Log-probs by transformers in float32; all sequences have one length."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device)
    tokens = torch.from_numpy(batch.tokens).long().view(len(batch.lengths), -1).to(device)
    result = torch.zeros(tokens.shape)
    for number, sequence in enumerate(tokens):
        logs = network(sequence[None]).logits[0, :-1].log_softmax(-1)
        result[number, 1:] = logs.gather(1, sequence[1:, None])[:, 0].cpu()
    return result.flatten().numpy()


def score(run: RunConfig, model: Path, device: str, batch: Batch) -> tuple[Floats, float]:
    """Log-probs of the batch by a trainer of one rank, and the seconds of the second pass."""
    sizes = ParallelSizes()
    spec = EngineSpec("ref", run.actor, None, model, sizes, device, seed=0)  # type: ignore[arg-type]
    with listen("127.0.0.1") as listener:
        engine = make_engine(spec, Rendezvous(0, 1, "127.0.0.1", listener.getsockname()[1], LIMIT_S, listener))
        try:
            for _ in range(2):
                begun = time.monotonic()
                found = engine.log_probs(batch, 1.0)
                seconds = time.monotonic() - begun
        finally:
            engine.shutdown()
    result = np.zeros(len(batch.tokens), np.float32)
    if found is not None:
        places, values = found
        result[places] = values
    return result, seconds


if __name__ == "__main__":
    typer.run(main)
