"""Packed micro-batches through Megatron's forward-backward schedules: one rank, a pipeline, a virtual pipeline."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from areal_like.trainer.device_batch import DeviceBatch, DeviceBatches

_READ_AT_ONCE = 4096  # rows: enough for a product at full speed


def forward_backward(
    models: Sequence[torch.nn.Module],
    micro_batches: DeviceBatches,
    function: Callable[[DeviceBatch, Tensor], Any],
    *,
    forward_only: bool = False,
) -> list:
    """Runs all micro-batches forward and backward; gives a list on the last pipeline stage, [] elsewhere.

    `function` makes of a micro-batch and the logits `[n, vocabulary / tp]` at its n `rows` the summed loss, the number
    of loss tokens and statistics, which are listed. With `forward_only` it makes a value of each row, from some rows at
    a time, and the micro-batch's values `[n]` are listed: logits are never kept whole.
    """
    iterators = [iter(micro_batches) for _ in models]
    with torch.set_grad_enabled(not forward_only):
        return get_forward_backward_func()(
            forward_step_func=partial(_read_step if forward_only else _loss_step, function),
            data_iterator=iterators if len(models) > 1 else iterators[0],
            model=list(models) if len(models) > 1 else models[0],
            num_microbatches=len(micro_batches),
            seq_length=len(micro_batches.pack(0).tokens),  # unused: shapes travel with the activations
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )


def _loss_step(function: Callable, data_iterator: Any, model: torch.nn.Module) -> tuple[Tensor, Callable]:
    micro_batch: DeviceBatch = next(data_iterator)
    output = _output(model, micro_batch, lambda logits_at: logits_at(micro_batch.rows))
    return output, partial(function, micro_batch)


def _read_step(function: Callable, data_iterator: Any, model: torch.nn.Module) -> tuple[Tensor, Callable]:
    micro_batch: DeviceBatch = next(data_iterator)

    def values(logits_at: Callable[[Tensor], Tensor]) -> Tensor:
        slices = zip(micro_batch.rows.split(_READ_AT_ONCE), micro_batch.labels.split(_READ_AT_ONCE), strict=True)
        parts = (replace(micro_batch, rows=rows, labels=labels) for rows, labels in slices)
        return torch.cat([function(part, logits_at(part.rows)) for part in parts])

    return _output(model, micro_batch, values), lambda output, non_loss_data: output


def _output(model: torch.nn.Module, micro_batch: DeviceBatch, head: Callable) -> Tensor:
    """What `head` makes of a function from rows to their logits `[rows, vocabulary / tp]`, on the last stage."""
    options = {"fp32_output": False} if model.config.bf16 else {}  # float32 logits would double the largest tensor
    ends, longest = micro_batch.cu_seqlens, micro_batch.max_seqlen
    output: Tensor = model(
        input_ids=micro_batch.tokens,
        position_ids=micro_batch.positions,
        attention_mask=None,
        packed_seq_params=PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
        ),
        output_processor=_with_logits,
        output_processor_context=head,
        **options,
    )
    return output


def _with_logits(
    *,
    hidden_states: Tensor,
    output_layer: torch.nn.Module,
    output_weight: Tensor | None,
    context: Callable[[Callable[[Tensor], Tensor]], Tensor],
    config: Any,
    scale_logits: Callable[[Tensor], Tensor],
    **_: Any,
) -> Tensor:
    """Megatron's hook behind the last layer: has no logits made but at the rows that are asked for.

    Sequence-parallel ranks have different numbers of them, so their hidden states are gathered here, not in the layer.
    """
    if config.sequence_parallel:
        hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)

    def logits_at(rows: Tensor) -> Tensor:
        logits, _ = output_layer(hidden_states.index_select(0, rows), weight=output_weight)
        return scale_logits(logits).squeeze(1)

    output_layer.sequence_parallel = False
    output = context(logits_at)
    output_layer.sequence_parallel = config.sequence_parallel
    return output
