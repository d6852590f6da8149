"""Trainer tokens per second: MegatronEngine.train against a bare Megatron-core loop, in one process and in turns.

    python -m benchmarks.trainer_throughput --config examples/math/gsm8k_grpo_cpu.yaml [--loss policy] [key=value ...]

Both train the same GPTModel with the same optimizer on the same micro-batches, on one rank. The bare loop is given its
micro-batches as tensors on the device and uses the model's own cross-entropy; the engine is given a Batch, packs it,
and computes log-probs, entropy, the loss and its statistics. `--loss sft` is the same mathematics as the bare loop,
`policy` is what reinforcement learning does. Shape of model, batch and micro-batches come from the configuration;
lengths are random between half and all of `max_prompt_length` and `gconfig.max_new_tokens`. Beside the two, the pass
that only computes log-probs is timed; on a GPU the peak of allocated memory is taken for each.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from allocation import ParallelSizes
from areal_like.algorithms.losses import DecoupledPPO, decoupled_ppo, sft
from areal_like.cluster.lifetime import listen
from areal_like.config.load import load
from areal_like.config.schema import RunConfig
from areal_like.trainer import packing
from areal_like.trainer.device_batch import DeviceBatch, to_device
from areal_like.trainer.engine import EngineSpec, Rendezvous
from areal_like.trainer.megatron.cpu import cuda as cpu
from areal_like.trainer.megatron.engine import MegatronEngine
from areal_like.types import Batch, LossSpec
from benchmarks.memory import made_model
from benchmarks.report import save

# isort: split
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func


class Loss(StrEnum):
    sft = "sft"
    policy = "policy"


@dataclass(frozen=True)
class Tensors:
    """A micro-batch as the bare loop takes it."""

    inputs: DeviceBatch
    packed: PackedSeqParams
    labels: torch.Tensor
    mask: torch.Tensor


def main(
    config: Annotated[Path, typer.Option()],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="key=value ...")] = None,
    loss: Loss = Loss.policy,
    steps: int = 20,
    name: Annotated[str, typer.Option(help="of the result file, after trainer_throughput_")] = "{loss}_{device}",
) -> None:
    run = load(config, overrides or []).config
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch = make_batch(run)
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(run, Path(folder), device)
    bare = BareLoop(engine, batch)
    spec = LossSpec(sft) if loss == Loss.sft else LossSpec(decoupled_ppo, DecoupledPPO(0.2, 0.2, 5.0))

    sides: dict[str, Callable[[], object]] = {
        "engine": lambda: engine.train(batch, spec),
        "bare": bare.step,
        "log_probs": lambda: engine.log_probs(batch, 1.0),
    }
    peaks = {side: peak_gib(step) for side, step in sides.items()}  # warms up, too
    times: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(steps):
        for side, step in sides.items():
            times[side].append(seconds(step))
    tokens_per_second = {side: len(batch.tokens) / statistics.median(values) for side, values in times.items()}
    print({side: round(value) for side, value in tokens_per_second.items()}, "peak GiB", peaks)
    ratio = tokens_per_second["engine"] / tokens_per_second["bare"]
    forward = tokens_per_second["log_probs"] / tokens_per_second["engine"]
    print(f"{loss}: engine / bare = {ratio:.3f}, log-probs / training = {forward:.2f}")
    figures = {
        "loss": loss,
        "model_parameters": sum(p.numel() for model in engine._models for p in model.parameters()),
        "dtype": run.actor.dtype,
        "sequences": len(batch.lengths),
        "tokens_per_step": len(batch.tokens),
        "micro_batches": len(bare.micro_batches),
        "threads": torch.get_num_threads(),
        "tokens_per_second": tokens_per_second,
        "ratio": ratio,
        "log_probs_ratio": forward,
        "peak_gib": peaks,
        "seconds_per_step": times,
    }
    save("trainer_throughput_" + name.format(loss=loss, device=device), figures)
    engine.shutdown()


def make_batch(run: RunConfig) -> Batch:
    """Random tokens and advantages; prompts are not trained on."""
    rng = np.random.default_rng(0)
    n = run.train_dataset.batch_size * run.gconfig.n_samples
    longest_prompt, longest_response = run.train_dataset.max_prompt_length, run.gconfig.max_new_tokens
    prompts = rng.integers(longest_prompt // 2, longest_prompt, n, dtype=np.int32, endpoint=True)
    responses = rng.integers(max(1, longest_response // 2), longest_response, n, dtype=np.int32, endpoint=True)
    lengths = prompts + responses
    total = int(lengths.sum())
    behaviour = rng.normal(-3, 0.1, total).astype(np.float32)
    return Batch(
        lengths=lengths,
        tokens=rng.integers(4, 30, total, dtype=np.int32),  # every tokenizer has these
        fields={
            "loss_mask": np.repeat(np.tile(np.float32([0, 1]), n), np.stack([prompts, responses], 1).ravel()),
            "advantages": np.repeat(rng.normal(size=n), lengths).astype(np.float32),
            "behaviour_logprobs": behaviour,
            "on_policy": np.ones(total, np.float32),
        },
    )


def make_engine(run: RunConfig, folder: Path, device: str) -> MegatronEngine:
    path = Path(str(run.actor.path))
    if shape := run.actor.init_model:
        path = made_model(shape.model_dump(exclude_none=True), folder / "model", device, run.actor.dtype)
    listener = listen("127.0.0.1")
    steps = run.actor.optimizer.warmup_steps + 1000  # more than are timed
    spec = EngineSpec("actor", run.actor, run.actor.optimizer, path, ParallelSizes(), device, run.seed, steps)
    return MegatronEngine(spec, Rendezvous(0, 1, "127.0.0.1", listener.getsockname()[1], listener=listener))


class BareLoop:
    """What one writes with Megatron-core alone: micro-batches, forward-backward, optimizer step."""

    def __init__(self, engine: MegatronEngine, batch: Batch) -> None:
        self._model, self._optimizer, self._scheduler = engine._wrapped[0], engine._optimizer, engine._scheduler
        schedule = packing.make_schedule(
            batch.lengths, dp=1, max_tokens=engine._spec.config.mb_spec.max_tokens_per_mb, alignment=1
        )
        self.micro_batches = [
            tensors(batch, packing.pack(batch.tokens, batch.lengths, members, schedule.alignment), engine.device)
            for members in schedule.micro_batches[0]
        ]

    def step(self) -> tuple[float, float]:
        """One optimizer step; loss per token and gradient norm, read as a training log would."""
        with cpu.cpu_as_cuda():
            self._model.zero_grad_buffer()
            self._optimizer.zero_grad()
            parts = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(self.micro_batches),
                model=self._model,
                num_microbatches=len(self.micro_batches),
                seq_length=self.micro_batches[0].labels.shape[1],
                micro_batch_size=1,
                forward_only=False,
            )
            _, grad_norm, _ = self._optimizer.step()
            self._scheduler.step(1)
            total = sum(part["loss"] for part in parts) / sum(part["tokens"] for part in parts)
            return float(total), float(grad_norm)


def forward_step(data: Iterator[Tensors], model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
    micro_batch = next(data)
    per_token = model(
        input_ids=micro_batch.inputs.tokens,
        position_ids=micro_batch.inputs.positions,
        attention_mask=None,
        labels=micro_batch.labels,
        packed_seq_params=micro_batch.packed,
    )

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        total, count = (output.float() * micro_batch.mask).sum(), micro_batch.mask.sum().int()
        return total, count, {"loss": total.detach(), "tokens": count}

    return per_token, loss


def tensors(batch: Batch, micro_batch: packing.MicroBatch, device: torch.device) -> Tensors:
    real = micro_batch.targets != packing.NO_TARGET
    labels = np.where(real, batch.tokens[micro_batch.targets], 0).astype(np.int64)
    mask = np.where(real, batch.fields["loss_mask"][micro_batch.targets], 0).astype(np.float32)
    inputs = to_device(micro_batch, batch, batch.fields["loss_mask"] > 0, device)
    longest, ends = inputs.max_seqlen, inputs.cu_seqlens
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    return Tensors(inputs, packed, *(torch.from_numpy(array)[None].to(device) for array in (labels, mask)))


def peak_gib(step: Callable[[], object]) -> float | None:
    """Most memory that torch gave out at once in the second of two steps, in GiB."""
    step()
    if not torch.cuda.is_available():
        return None
    torch.cuda.reset_peak_memory_stats()
    step()
    return round(torch.cuda.max_memory_allocated() / 2**30, 2)


def seconds(step: Callable[[], object]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    typer.run(main)
