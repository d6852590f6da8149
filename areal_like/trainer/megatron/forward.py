"""Packed micro-batches through Megatron's forward-backward schedules: one rank, a pipeline, a virtual pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from areal_like.trainer.packing import MicroBatch

TokenLoss = Callable[[MicroBatch, Tensor], tuple[Tensor, Tensor, Any]]
"""From a micro-batch and its logits `[t, vocabulary / tp]` to the summed loss, the number of loss tokens, statistics."""


def forward_backward(models: Sequence[torch.nn.Module], micro_batches: Sequence[MicroBatch], loss: TokenLoss) -> list:
    """Runs all micro-batches forward and backward; the statistics of each, on the last pipeline stage, else []."""

    def scalar_loss(micro_batch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, Any]:
        return loss(micro_batch, output[0])

    return _run(models, micro_batches, scalar_loss, forward_only=False)


@torch.no_grad()
def forward(
    models: Sequence[torch.nn.Module], micro_batches: Sequence[MicroBatch], read: Callable[[MicroBatch, Tensor], Any]
) -> list:
    """Runs all micro-batches forward; what `read` makes of each one's logits, on the last pipeline stage, else []."""

    def output_only(micro_batch: MicroBatch, output: Tensor, non_loss_data: bool) -> Any:
        return read(micro_batch, output[0])

    return _run(models, micro_batches, output_only, forward_only=True, collect_non_loss_data=True)


def _run(
    models: Sequence[torch.nn.Module], micro_batches: Sequence[MicroBatch], loss_func: Callable, **kwargs: Any
) -> list:
    iterators = [iter(micro_batches) for _ in models]
    return get_forward_backward_func()(
        forward_step_func=partial(_forward_step, loss_func),
        data_iterator=iterators if len(models) > 1 else iterators[0],
        model=list(models) if len(models) > 1 else models[0],
        num_microbatches=len(micro_batches),
        seq_length=int(micro_batches[0].cu_seqlens[-1]),  # unused: shapes travel with the activations
        micro_batch_size=1,
        **kwargs,
    )


def _forward_step(loss_func: Callable, data_iterator: Any, model: torch.nn.Module) -> tuple[Tensor, Callable]:
    micro_batch: MicroBatch = next(data_iterator)
    device = next(model.parameters()).device
    cu_seqlens = torch.from_numpy(micro_batch.cu_seqlens).to(device, non_blocking=True)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=micro_batch.max_seqlen,
        max_seqlen_kv=micro_batch.max_seqlen,
    )
    options = {"fp32_output": False} if model.config.bf16 else {}  # float32 logits would double the largest tensor
    output = model(
        input_ids=torch.from_numpy(micro_batch.tokens)[None].to(device, non_blocking=True),
        position_ids=torch.from_numpy(micro_batch.positions)[None].to(device, non_blocking=True),
        attention_mask=None,
        packed_seq_params=packed,
        **options,
    )
    return output, partial(loss_func, micro_batch)
