"""One rank of the Megatron trainer: each is given the same batch and finds its own share (`trainer/packing.py`)."""

import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from areal_like.algorithms.losses import LossInputs
from areal_like.trainer import packing
from areal_like.trainer.device_batch import DeviceBatch, DeviceBatches
from areal_like.trainer.engine import EngineSpec, NonFiniteError, Rendezvous
from areal_like.trainer.hf_checkpoint import write_checkpoint
from areal_like.trainer.megatron.cpu import cuda as cpu
from areal_like.trainer.megatron.options import transformer_options
from areal_like.trainer.process import prepare_process
from areal_like.types import Batch, Floats, LossSpec

cpu.install()  # before anything imports megatron.core
# isort: split

from megatron.core import parallel_state  # noqa: E402

from areal_like.trainer.logprobs import log_probs_and_entropy  # noqa: E402
from areal_like.trainer.megatron import optimizer, parallel  # noqa: E402
from areal_like.trainer.megatron.bridges import ModelSource, make_bridge  # noqa: E402
from areal_like.trainer.megatron.checkpoint import load_checkpoint, save_checkpoint  # noqa: E402
from areal_like.trainer.megatron.forward import forward_backward  # noqa: E402
from areal_like.trainer.megatron.statistics import means  # noqa: E402


class MegatronEngine:
    """A TrainEngine in one layout of Megatron-core."""

    def __init__(self, spec: EngineSpec, rendezvous: Rendezvous) -> None:
        actor, sizes = spec.actor, spec.sizes
        self._spec = spec
        self.device = prepare_process(spec, rendezvous.address)
        options = transformer_options(actor, device=spec.device, pipelined=sizes.pp > 1, interleaved=sizes.vpp > 1)
        source = ModelSource(spec.path, getattr(torch, actor.dtype), sizes, options)
        steps = optimizer.schedule_steps(actor, spec.total_steps)
        with cpu.cpu_as_cuda():
            parallel.initialize(rendezvous, sizes, self.device, spec.seed)
            self._bridge = make_bridge(actor.megatron.bridge_type, source)
            self._vocab_size = source.config.for_bridge.vocab_size
            self._models = self._bridge.build()
            self._bridge.load(self._models)
            overlap = spec.device == "cuda" and sizes.dp * sizes.cp > 1
            self._wrapped = optimizer.wrap_models(self._models, actor, overlap=overlap)
            self._optimizer = optimizer.make_optimizer(self._wrapped, actor)
            self._scheduler = optimizer.make_schedule(self._optimizer, actor, steps)
        self._skipped = 0  # steps in a row

    def log_probs(self, batch: Batch, temperature: float = 1.0) -> tuple[NDArray[np.int64], Floats] | None:
        micro_batches = self._micro_batches(batch, np.ones(len(batch.tokens), bool))

        def read(micro_batch: DeviceBatch, logits: torch.Tensor) -> torch.Tensor:
            return self._log_probs_at(micro_batch, logits, temperature)[0]

        with cpu.cpu_as_cuda():
            values = forward_backward(self._wrapped, micro_batches, read, forward_only=True)
            if not parallel.is_data_source():
                return None
        return micro_batches.targets, torch.cat(values).cpu().numpy()

    def train(
        self, batch: Batch, loss: LossSpec, temperature: float = 1.0, learning_rate: float | None = None
    ) -> dict[str, float]:
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
            update = self._step(learning_rate)
            return {**means(parts, self.device), **update}

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        weights = iter(self._bridge.export(self._models))
        while True:
            with cpu.cpu_as_cuda(), torch.no_grad():  # not open while the caller works
                item = next(weights, None)
            if item is None:
                return
            yield item
            del item  # a gathered weight lives on the device until the next one is made

    def save_hf(self, path: Path) -> None:
        spec, weights = self._spec, self.weights()
        if dist.get_rank() == 0:
            dtype = spec.actor.dtype
            write_checkpoint(path, weights, spec.path, dtype, tokenizer=spec.tokenizer, scratch=spec.scratch)
        for _ in weights:  # the other ranks take part
            pass
        dist.barrier()

    def save(self, path: Path) -> None:
        with cpu.cpu_as_cuda():
            save_checkpoint(path, self._wrapped, self._optimizer, self._scheduler)

    def load(self, path: Path) -> None:
        with cpu.cpu_as_cuda():
            load_checkpoint(path, self._wrapped, self._optimizer, self._scheduler)

    def shutdown(self) -> None:
        vars(self).clear()  # process groups end with all that holds them
        parallel.shutdown()

    def _micro_batches(self, batch: Batch, wanted: NDArray[np.bool]) -> DeviceBatches:
        """This rank's share."""
        sizes = self._spec.sizes
        schedule = packing.make_schedule(
            batch.lengths,
            dp=sizes.dp,
            max_tokens=self._spec.actor.mb_spec.max_tokens_per_mb,
            alignment=packing.sequence_alignment(sizes.tp, sizes.cp),
            multiple=sizes.pp if sizes.vpp > 1 else 1,
        )
        cp_rank = parallel_state.get_context_parallel_rank()
        share = schedule.micro_batches[parallel_state.get_data_parallel_rank()]

        @cache
        def pack(i: int) -> packing.MicroBatch:
            return packing.pack(batch.tokens, batch.lengths, share[i], schedule.alignment, cp=sizes.cp, cp_rank=cp_rank)

        return DeviceBatches(len(share), pack, batch, wanted, self.device)

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

    def _step(self, learning_rate: float | None) -> dict[str, float]:
        """The update, and what is known of it; every rank sees the same numbers and decides alike."""
        if learning_rate is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
        lr = float(self._optimizer.param_groups[0]["lr"])
        grad_norm = optimizer.step_if_finite(self._optimizer)
        finite = math.isfinite(grad_norm)
        self._scheduler.step(1 if finite and learning_rate is None else 0)
        self._skipped = 0 if finite else self._skipped + 1
        if self._skipped > (limit := self._spec.actor.optimizer.max_skipped_steps):
            raise NonFiniteError(
                f"the gradient norm is {grad_norm}; more than {limit} steps in a row were skipped "
                "(actor.optimizer.max_skipped_steps)"
            )
        return {"grad_norm": grad_norm, "lr": lr, "skipped": float(not finite)}
