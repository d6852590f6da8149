"""Training loops with only Megatron-core or torch's FSDP2: micro-batches, forward, backward, optimizer step.

Both use the model, optimizer and schedule of an engine, and its micro-batches as tensors that are already on the
device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from areal_like.backends.fsdp import attention
from areal_like.backends.fsdp.engine import FSDPEngine
from areal_like.backends.megatron.cpu import cuda as cpu
from areal_like.backends.megatron.engine import MegatronEngine
from areal_like.core.trainer.device_batch import DeviceBatch
from areal_like.core.types import Batch

# isort: split
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func


@dataclass(frozen=True)
class Tensors:
    """A micro-batch; `labels` and `mask` are `[1, tokens]`."""

    inputs: DeviceBatch
    labels: torch.Tensor
    mask: torch.Tensor


def on_device(engine: MegatronEngine | FSDPEngine, batch: Batch) -> list[Tensors]:
    """This rank's micro-batches, packed as the engine does."""
    micro_batches, made = engine._micro_batches(batch, batch.fields["loss_mask"] > 0), []
    for i, inputs in enumerate(micro_batches):
        pack = micro_batches.pack(i)
        labels, mask = np.zeros(len(pack.tokens), np.int64), np.zeros(len(pack.tokens), np.float32)
        labels[pack.rows], mask[pack.rows] = batch.tokens[pack.targets], batch.fields["loss_mask"][pack.targets]
        made.append(Tensors(inputs, *(torch.from_numpy(array)[None].to(engine.device) for array in (labels, mask))))
    return made


class MegatronLoop:
    """Of a model that is one pipeline stage; the loss is the model's own cross-entropy."""

    def __init__(self, engine: MegatronEngine, batch: Batch) -> None:
        self.model, self._optimizer, self._scheduler = engine._wrapped[0], engine._optimizer, engine._scheduler
        self.micro_batches = on_device(engine, batch)

    def step(self) -> tuple[float, float]:
        """One optimizer step; loss per token and gradient norm, read as a training log would."""
        with cpu.cpu_as_cuda():
            self.model.zero_grad_buffer()
            self._optimizer.zero_grad()
            parts = get_forward_backward_func()(
                forward_step_func=_forward_step,
                data_iterator=iter(self.micro_batches),
                model=self.model,
                num_microbatches=len(self.micro_batches),
                seq_length=self.micro_batches[0].labels.shape[1],
                micro_batch_size=1,
                forward_only=False,
            )
            _, grad_norm, _ = self._optimizer.step()
            self._scheduler.step(1)
            total = sum(part["loss"] for part in parts) / sum(part["tokens"] for part in parts)
            return float(total), float(grad_norm)


def _forward_step(data: Iterator[Tensors], model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
    micro_batch = next(data)
    ends, longest = micro_batch.inputs.cu_seqlens, micro_batch.inputs.max_seqlen
    per_token = model(
        input_ids=micro_batch.inputs.tokens,
        position_ids=micro_batch.inputs.positions,
        attention_mask=None,
        labels=micro_batch.labels,
        packed_seq_params=PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
        ),
    )

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        total, count = (output.float() * micro_batch.mask).sum(), micro_batch.mask.sum().int()
        return total, count, {"loss": total.detach(), "tokens": count}

    return per_token, loss


class FSDPLoop:
    """Of a model of transformers that `fully_shard` has sharded; the loss is torch's cross-entropy in float32."""

    def __init__(self, engine: FSDPEngine, batch: Batch) -> None:
        self.model, self._optimizer, self._schedule = engine._model, engine._optimizer, engine._schedule
        self._group, self._clip = engine._group, engine._spec.optimizer.gradient_clipping
        self.micro_batches = on_device(engine, batch)
        self._tokens = int(batch.fields["loss_mask"].sum())

    def step(self) -> tuple[float, float]:
        """As MegatronLoop's."""
        losses = []
        for micro_batch in self.micro_batches:
            inputs = micro_batch.inputs
            logits = self.model(
                input_ids=inputs.tokens,
                position_ids=inputs.positions,
                use_cache=False,
                **attention.arguments(inputs, self._group),
            ).logits[0]
            per_token = F.cross_entropy(logits.float(), micro_batch.labels[0], reduction="none")
            loss = (per_token * micro_batch.mask[0]).sum() / self._tokens
            (loss * dist.get_world_size()).backward()  # FSDP averages gradients over ranks
            losses.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip).full_tensor()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._schedule.step()
        return float(sum(losses)), float(norm)
