"""Measure trainer tokens per second with shared prompts (`mb_spec.share_prompts`) relative to without.

    python -m benchmarks.shared_prompts --config examples/math/gsm8k_grpo_qwen3_0.6b.yaml [key=value ...]
    python -m benchmarks.shared_prompts --config ... --prompt 1024 --response 256 --layout fsdp:d1

One rank and one engine train the same batch alternately with both settings. Model shape, samples per prompt and
micro-batches come from the configuration. All prompts have one length, and so have all responses. A token counts as
often as it occurs in the batch. The output includes loss and gradient norm of a step without an update; tests compare
the numbers.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import allocation
from areal_like.core.algorithms.losses import decoupled_ppo
from areal_like.core.algorithms.settings import Settings
from areal_like.core.config.load import load
from areal_like.core.config.schema import EngineConfig
from areal_like.core.trainer.engine import Rendezvous
from areal_like.core.types import Batch, LossSpec
from areal_like.runtime.ports import listen
from benchmarks.report import save
from benchmarks.trainer_throughput import DEVICE, peak_gib, seconds, spec_of, started


def main(
    config: Annotated[Path, typer.Option()],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="key=value ...")] = None,
    prompt: Annotated[int, typer.Option(help="tokens")] = 512,
    response: Annotated[int, typer.Option(help="tokens")] = 512,
    layout: Annotated[str, typer.Option(help="of one rank")] = "megatron:d1",
    steps: int = 8,
    name: Annotated[str, typer.Option(help="of the result file, after shared_prompts_")] = "{device}",
) -> None:
    run, (plan,) = load(config, overrides or []).config, allocation.compile(layout).engines
    batch = make_batch(run.train_dataset.batch_size, run.gconfig.n_samples, prompt, response)
    with tempfile.TemporaryDirectory() as folder:
        listener = listen("127.0.0.1")
        meeting = Rendezvous(0, 1, "127.0.0.1", listener.getsockname()[1], listener=listener)
        spec = spec_of(run, plan, Path(folder))
        engine = started(replace(spec, config=sharing(spec.config, True)), meeting)
        sides = {side: Side(engine, sharing(spec.config, side == "shared"), batch) for side in ("whole", "shared")}
        still = {side: it.train(learning_rate=0.0) for side, it in sides.items()}
        peaks = {side: peak_gib(it.train) for side, it in sides.items()}
        times: dict[str, dict[str, list[float]]] = {
            part: {side: [] for side in sides} for part in ("train", "log_probs")
        }
        for _ in range(steps):
            for part, of_part in times.items():
                for side, it in sides.items():
                    of_part[side].append(seconds(getattr(it, part)))
        engine.shutdown()
    rates = {
        part: {side: len(batch.tokens) / statistics.median(values) for side, values in of_part.items()}
        for part, of_part in times.items()
    }
    ratio = {part: of_part["shared"] / of_part["whole"] for part, of_part in rates.items()}
    print(f"shared / whole: {ratio}, peak GiB {peaks}")
    figures = {
        "layout": layout,
        "dtype": run.actor.dtype,
        "samples_of_a_prompt": run.gconfig.n_samples,
        "prompt_tokens": prompt,
        "response_tokens": response,
        "tokens_per_step": len(batch.tokens),
        "ratio": ratio,
        "tokens_per_second": rates,
        "peak_gib": peaks,
        "first_step": {side: {name: step[name] for name in ("loss", "grad_norm")} for side, step in still.items()},
        "seconds": times,
    }
    save("shared_prompts_" + name.format(device=DEVICE), figures)


@dataclass(frozen=True)
class Side:
    """One way to compute a batch, with an engine that both have."""

    engine: Any
    config: EngineConfig
    batch: Batch

    def train(self, learning_rate: float | None = None) -> dict[str, float]:
        self._take()
        return self.engine.train(self.batch, LossSpec(decoupled_ppo, Settings()), learning_rate=learning_rate)

    def log_probs(self) -> None:
        self._take()
        self.engine.log_probs(self.batch)

    def _take(self) -> None:
        self.engine._spec = replace(self.engine._spec, config=self.config)


def sharing(config: EngineConfig, on: bool) -> EngineConfig:
    return config.model_copy(update={"mb_spec": config.mb_spec.model_copy(update={"share_prompts": on})})


def make_batch(groups: int, samples: int, prompt: int, response: int) -> Batch:
    """Random tokens and advantages; `samples` of each of `groups` prompts."""
    rng, n = np.random.default_rng(0), groups * samples
    prompts = np.repeat(rng.integers(4, 30, (groups, prompt), dtype=np.int32), samples, 0)  # every tokenizer has these
    tokens = np.concatenate([prompts, rng.integers(4, 30, (n, response), dtype=np.int32)], 1)
    fields = {
        "loss_mask": np.tile(np.repeat(np.float32([0, 1]), [prompt, response]), n),
        "advantages": np.repeat(rng.normal(size=n), prompt + response).astype(np.float32),
        "behaviour_logprobs": rng.normal(-3, 0.1, tokens.size).astype(np.float32),
        "on_policy": np.ones(tokens.size, np.float32),
    }
    return Batch(np.full(n, prompt + response, np.int32), tokens.ravel(), fields)


if __name__ == "__main__":
    typer.run(main)
