"""One rank of the Megatron trainer.

Every rank is given the same global batch and finds its own share (`trainer/packing.py`). All methods are collective:
every rank of the engine calls them in the same order, with the same arguments.
"""

from __future__ import annotations

import logging
import math
import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from areal_like.algorithms.losses import LossInputs
from areal_like.trainer import packing
from areal_like.trainer.device_batch import DeviceBatch, DeviceBatches
from areal_like.trainer.environment import apply_environment, rank_environment
from areal_like.trainer.hf_checkpoint import write_checkpoint
from areal_like.trainer.megatron.cpu import cuda as cpu
from areal_like.trainer.megatron.options import transformer_options
from areal_like.trainer.rendezvous import Rendezvous
from areal_like.types import Batch, Floats, LossSpec

cpu.install()  # before anything imports megatron.core
# isort: split

from megatron.core import parallel_state  # noqa: E402

from areal_like.trainer.logprobs import log_probs_and_entropy  # noqa: E402
from areal_like.trainer.megatron import optimizer, parallel  # noqa: E402
from areal_like.trainer.megatron.bridges import ModelSource, make_bridge  # noqa: E402
from areal_like.trainer.megatron.checkpoint import load_checkpoint, save_checkpoint  # noqa: E402
from areal_like.trainer.megatron.forward import forward, forward_backward  # noqa: E402
from areal_like.trainer.megatron.statistics import means  # noqa: E402

if TYPE_CHECKING:
    from allocation import ParallelSizes
    from areal_like.config.schema import ActorConfig


class NonFiniteError(ArithmeticError):
    """Loss or gradient norm was inf or nan in too many steps in a row; the weights are those of the last good one."""


class MegatronEngine:
    """Log-probs, optimizer steps, weights and checkpoints of one model in one layout."""

    def __init__(
        self,
        actor: ActorConfig,
        path: str | Path,
        sizes: ParallelSizes,
        rendezvous: Rendezvous,
        *,
        device: str,
        seed: int,
        total_steps: int | None = None,
        tokenizer: Path | None = None,
        scratch: Path | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        """Joins the other ranks, builds this rank's part of the model at `path` (Hugging Face form) and loads it.

        `device` is "cpu" or "cuda" (the current one); `total_steps` is the number of optimizer steps that the
        learning-rate schedule spans; `tokenizer` and `scratch` are `write_checkpoint`'s; `listener` is the socket at
        the rendezvous, rank 0's alone (`cluster.lifetime.listen`).
        """
        self.actor, self.sizes, self.path = actor, sizes, Path(path)
        self._tokenizer, self._scratch = tokenizer, scratch
        self.device = _prepare_process(device, actor, sizes, rendezvous.address)
        options = transformer_options(actor, device=device, pipelined=sizes.pp > 1, interleaved=sizes.vpp > 1)
        source = ModelSource(self.path, getattr(torch, actor.dtype), sizes, options)
        steps = optimizer.schedule_steps(actor.optimizer, total_steps)
        sharded = actor.megatron.use_distributed_optimizer
        with cpu.cpu_as_cuda():
            parallel.initialize(rendezvous, sizes, self.device, seed, listener)
            self._bridge = make_bridge(actor.megatron.bridge_type, source)
            self._vocab_size = source.config.for_bridge.vocab_size
            self._models = self._bridge.build()
            self._bridge.load(self._models)
            self._wrapped = optimizer.wrap_models(
                self._models,
                dtype=source.dtype,
                distributed_optimizer=sharded,
                overlap=device == "cuda" and sizes.dp * sizes.cp > 1,
            )
            self._optimizer = optimizer.make_optimizer(
                self._wrapped, actor.optimizer, dtype=source.dtype, distributed_optimizer=sharded
            )
            self._scheduler = optimizer.make_schedule(self._optimizer, actor.optimizer, steps)
        self._skipped = 0  # steps in a row

    def log_probs(self, batch: Batch, temperature: float = 1.0) -> tuple[NDArray[np.int64], Floats] | None:
        """log p(token | tokens before it in its sequence) of every token but each sequence's first.

        Returns places in `batch.tokens` and the values there, of this rank's share, on the last pipeline stage's
        first tensor-parallel ranks, and None elsewhere. Together the results cover the batch.
        """

        micro_batches = self._micro_batches(batch, np.ones(len(batch.tokens), bool))

        def read(micro_batch: DeviceBatch, logits: torch.Tensor) -> torch.Tensor:
            return self._log_probs_at(micro_batch, logits, temperature)[0]

        with cpu.cpu_as_cuda():
            values = forward(self._wrapped, micro_batches, read)
            if not parallel.is_data_source():
                return None
        return micro_batches.targets, torch.cat(values).cpu().numpy()

    def train(
        self, batch: Batch, loss: LossSpec, *, temperature: float = 1.0, learning_rate: float | None = None
    ) -> dict[str, float]:
        """One optimizer step on the whole batch, the loss averaged over its tokens with `loss_mask` 1 (`loss_weights`).

        Returns `loss`, `grad_norm`, `lr`, `loss_tokens`, `skipped` and the mean of each statistic of the loss, the same
        on every rank. `learning_rate` replaces the schedule's for this step, which then does not count in the schedule.
        A step whose loss or gradient norm is inf or nan is skipped: `skipped` is 1, weights, optimizer and schedule
        stay as they are. Raises ValueError when no token is trained on, and NonFiniteError when more than
        `actor.optimizer.max_skipped_steps` in a row are skipped.
        """
        trained = batch.fields["loss_mask"] > 0
        trained[np.cumsum(batch.lengths) - batch.lengths] = False  # nothing predicts a sequence's first token
        if not trained.any():
            raise ValueError("no token of the batch is trained on: loss_mask is 0 wherever a token can be predicted")
        micro_batches = self._micro_batches(batch, trained)

        def token_loss(micro_batch: DeviceBatch, logits: torch.Tensor) -> tuple:
            log_probs, entropy = self._log_probs_at(micro_batch, logits, temperature)
            inputs = LossInputs(log_probs, entropy, micro_batch.fields, micro_batch.sequences)
            per_token, stats = loss.function(inputs, loss.parameters)
            weights = micro_batch.fields.get("loss_weights")
            total, count = (per_token if weights is None else per_token * weights).sum(), micro_batch.count
            sums = {"loss": total.detach(), **{name: value.detach().sum() for name, value in stats.items()}}
            return total, count, {"loss_tokens": count, **sums}

        with cpu.cpu_as_cuda():
            for model in self._wrapped:
                model.zero_grad_buffer()
            self._optimizer.zero_grad()
            parts = forward_backward(self._wrapped, micro_batches, token_loss)
            result = means(parts, self.device)  # reading a number waits for the device: all work is launched by now
            return {**result, **self._step(result["loss"], learning_rate)}

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights under their Hugging Face names, one after another; rank 0's count.

        Tensors may share the model's memory: use each before the next training step.
        """
        return iter(self._exported())

    def save_hf(self, path: str | Path) -> None:
        """Writes a Hugging Face checkpoint that transformers loads; it appears when it is complete."""
        if dist.get_rank() == 0:
            write_checkpoint(
                Path(path),
                self._exported(),
                self.path,
                self.actor.dtype,
                tokenizer=self._tokenizer,
                scratch=self._scratch,
            )
        else:
            for _ in self._exported():
                pass
        dist.barrier()

    def save(self, path: str | Path) -> None:
        """Writes model, optimizer and schedule to the directory `path`; any layout can load it."""
        with cpu.cpu_as_cuda():
            save_checkpoint(Path(path), self._wrapped, self._optimizer, self._scheduler)

    def load(self, path: str | Path) -> None:
        """Continues from what `save` wrote. Raises FileNotFoundError when nothing is there."""
        with cpu.cpu_as_cuda():
            load_checkpoint(Path(path), self._wrapped, self._optimizer, self._scheduler)

    def shutdown(self) -> None:
        """Leaves the other ranks, and is of no use from then on."""
        vars(self).clear()
        parallel.shutdown()

    def _micro_batches(self, batch: Batch, wanted: NDArray[np.bool]) -> DeviceBatches:
        """This rank's share."""
        sizes = self.sizes
        schedule = packing.make_schedule(
            batch.lengths,
            dp=sizes.dp,
            max_tokens=self.actor.mb_spec.max_tokens_per_mb,
            alignment=packing.sequence_alignment(sizes.tp, sizes.cp),
            multiple=sizes.pp if sizes.vpp > 1 else 1,
        )
        cp_rank = parallel_state.get_context_parallel_rank()
        packs = [
            packing.pack(batch.tokens, batch.lengths, members, schedule.alignment, cp=sizes.cp, cp_rank=cp_rank)
            for members in schedule.micro_batches[parallel_state.get_data_parallel_rank()]
        ]
        return DeviceBatches(packs, batch, wanted, self.device)

    def _log_probs_at(
        self, micro_batch: DeviceBatch, logits: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return log_probs_and_entropy(
            logits,
            micro_batch.rows,
            micro_batch.labels,
            temperature=temperature,
            vocab_size=self._vocab_size,
            group=parallel_state.get_tensor_model_parallel_group(),
        )

    def _step(self, loss: float, learning_rate: float | None) -> dict[str, float]:
        """The update, and what is known of it; every rank sees the same numbers and decides alike."""
        if learning_rate is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
        lr = float(self._optimizer.param_groups[0]["lr"])
        grad_norm = optimizer.step_if_finite(self._optimizer) if math.isfinite(loss) else math.nan
        finite = math.isfinite(grad_norm)
        self._scheduler.step(1 if finite and learning_rate is None else 0)
        self._skipped = 0 if finite else self._skipped + 1
        if self._skipped > (limit := self.actor.optimizer.max_skipped_steps):
            what, value = ("gradient norm", grad_norm) if math.isfinite(loss) else ("loss", loss)
            raise NonFiniteError(
                f"the {what} is {value}; more than {limit} steps in a row were skipped (actor.optimizer.max_skipped_steps)"
            )
        return {"grad_norm": grad_norm, "lr": lr, "skipped": float(not finite)}

    def _exported(self) -> Iterable[tuple[str, torch.Tensor]]:
        weights = iter(self._bridge.export(self._models))
        while True:
            with cpu.cpu_as_cuda(), torch.no_grad():  # not open while the caller works
                item = next(weights, None)
            if item is None:
                return
            yield item
            del item  # a gathered weight lives on the device until the next one is made


def _prepare_process(device: str, actor: ActorConfig, sizes: ParallelSizes, master_address: str) -> torch.device:
    """Sets environment, threads and determinism; returns this process's device. Raises ValueError where it lacks it."""
    if (device == "cuda") != torch.cuda.is_available():
        raise ValueError(
            "the trainer is to run on cuda, but this process sees no GPU"
            if device == "cuda"
            else "the trainer is to run on the CPU; hide this host's GPUs from it (CUDA_VISIBLE_DEVICES='')"
        )
    deterministic = actor.megatron.use_deterministic_algorithms
    variables = rank_environment(device=device, deterministic=deterministic, model_parallel=sizes.tp * sizes.cp > 1)
    apply_environment(variables, master_address)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    torch.use_deterministic_algorithms(deterministic)
    if (logger := logging.getLogger("megatron")).level == logging.NOTSET:
        logger.setLevel(logging.ERROR)  # it warns about its own defaults, at every start and from every rank
    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
