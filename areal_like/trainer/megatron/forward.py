"""Packed micro-batches through Megatron's forward-backward schedules: one rank, a pipeline, a virtual pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from areal_like.trainer.device_batch import DeviceBatch, DeviceBatches

TokenLoss = Callable[[DeviceBatch, Tensor], tuple[Tensor, Tensor, Any]]
"""From a micro-batch and its logits `[t, vocabulary / tp]` to summed loss, number of loss tokens and statistics."""


def forward_backward(models: Sequence[torch.nn.Module], micro_batches: DeviceBatches, loss: TokenLoss) -> list:
    """Runs all micro-batches forward and backward; the statistics of each, on the last pipeline stage, else []."""

    def scalar_loss(micro_batch: DeviceBatch, output: Tensor) -> tuple[Tensor, Tensor, Any]:
        return loss(micro_batch, output[0])

    return _run(models, micro_batches, scalar_loss, forward_only=False)


@torch.no_grad()
def forward(
    models: Sequence[torch.nn.Module], micro_batches: DeviceBatches, read: Callable[[DeviceBatch, Tensor], Any]
) -> list:
    """Runs all micro-batches forward; what `read` makes of each one's logits, on the last pipeline stage, else []."""

    def output_only(micro_batch: DeviceBatch, output: Tensor, non_loss_data: bool) -> Any:
        return read(micro_batch, output[0])

    return _run(models, micro_batches, output_only, forward_only=True, collect_non_loss_data=True)


def _run(models: Sequence[torch.nn.Module], micro_batches: DeviceBatches, loss_func: Callable, **kwargs: Any) -> list:
    iterators = [iter(micro_batches) for _ in models]
    return get_forward_backward_func()(
        forward_step_func=partial(_forward_step, loss_func),
        data_iterator=iterators if len(models) > 1 else iterators[0],
        model=list(models) if len(models) > 1 else models[0],
        num_microbatches=len(micro_batches),
        seq_length=len(micro_batches.packs[0].tokens),  # unused: shapes travel with the activations
        micro_batch_size=1,
        **kwargs,
    )


def _forward_step(loss_func: Callable, data_iterator: Any, model: torch.nn.Module) -> tuple[Tensor, Callable]:
    micro_batch: DeviceBatch = next(data_iterator)
    options = {"fp32_output": False} if model.config.bf16 else {}  # float32 logits would double the largest tensor
    output = model(
        input_ids=micro_batch.tokens,
        position_ids=micro_batch.positions,
        attention_mask=None,
        packed_seq_params=_packed(micro_batch),
        **options,
    )
    return output, partial(loss_func, micro_batch)


def _packed(micro_batch: DeviceBatch) -> PackedSeqParams:
    cu_seqlens, longest = micro_batch.cu_seqlens, micro_batch.max_seqlen
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
